"""Where local state lives, and who holds its locks."""

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys

import pytest

from kueue import places
from kueue.errors import ConfigError, KueueError, StorageError
from kueue.runner.kernel import is_locked
from tests.support.small_disk import fill, small_disk

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:2 - autofs /etc/auto.home rw
31 30 0:41 / /home rw shared:3 - nfs4 fileserver:/home rw
32 22 0:42 / /data\\040of\\040all rw - fuse.sshfs me@host:/data rw
33 22 0:43 / /scratch rw shared:9 master:2 - xfs /dev/sdb1 rw
34 22 0:44 / /ntfs rw - fuseblk /dev/sdc1 rw
35 22 0:45 / /homework rw - btrfs /dev/sdd1 rw
"""


@pytest.fixture
def mounts(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    return str(table)


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/lib", "ext4", False),
        ("/", "ext4", False),
        ("/home/ann/.local/state", "nfs4", True),
        ("/home", "nfs4", True),
        ("/homework/x", "btrfs", False),
        ("/data of all/x", "fuse.sshfs", True),
        ("/scratch/kueue", "xfs", False),
        ("/ntfs/x", "fuseblk", False),
    ],
)
def test_the_mount_table_says_which_file_system_holds_a_path(mounts, path, kind, network):
    assert places.file_system(path, mounts) == kind
    assert places.is_network(path, mounts) is network


def test_without_a_mount_table_nothing_is_taken_for_a_network_file_system(tmp_path):
    assert not places.is_network(str(tmp_path), str(tmp_path / "none"))


def test_the_variable_wins_over_the_setting_and_the_setting_over_the_default(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "xdg")}
    assert places.find("", environ).root == str(tmp_path / "xdg/kueue")
    assert places.find(str(tmp_path / "set"), environ).root == str(tmp_path / "set")
    environ["KUEUE_STATE_DIR"] = str(tmp_path / "variable")
    assert places.find(str(tmp_path / "set"), environ).root == str(tmp_path / "variable")


def test_a_relative_xdg_path_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places.find("", {"XDG_STATE_HOME": "relative"}).root == str(tmp_path / ".local/state/kueue")


def test_a_home_on_the_network_is_left_for_a_directory_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "is_network", lambda path: path.startswith(str(tmp_path)))
    found = places.find("", {"XDG_STATE_HOME": str(tmp_path)})
    assert found.root == f"/var/tmp/kueue-{os.getuid()}"
    assert not found.is_network
    with contextlib.suppress(OSError):  # it may be in use by a real kueue of this user
        os.rmdir(found.root)


def test_a_network_directory_named_explicitly_is_taken_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "is_network", lambda path: True)
    found = places.find("", {"KUEUE_STATE_DIR": str(tmp_path / "s")})
    assert found.is_network
    assert str(tmp_path / "s") in found.remark


def test_all_directories_are_made_private_even_under_a_loose_umask(tmp_path):
    before = os.umask(0)
    try:
        found = places.find("", {"KUEUE_STATE_DIR": str(tmp_path / "deep/state")})
        made = [f"{tmp_path}/deep", found.root, found.server, found.cache, found.worker("ralab04")]
    finally:
        os.umask(before)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in made] == [0o700] * 5


def test_a_directory_the_user_named_keeps_its_mode_and_what_is_in_it_is_private(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    found = places.find(str(tmp_path / "mine"), {})
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755
    assert stat.S_IMODE(os.stat(found.cache).st_mode) == 0o700
    (tmp_path / "mine").chmod(0o1777)
    with pytest.raises(KueueError, match="Others can write"):
        places.find(str(tmp_path / "mine"), {})


def test_a_directory_of_ours_that_others_may_read_is_closed(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    places.own_directory(str(tmp_path / "open"))
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_a_directory_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(KueueError, match="belongs to another user"):
        places.own_directory(str(tmp_path / "theirs"))
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(KueueError, match="link of another user"):
        places.own_directory(str(tmp_path / "link"))


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KueueError, match="is not a directory"):
        places.own_directory(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"KUEUE_STATE_DIR = .*/file/x cannot be used"):
        places.find("", {"KUEUE_STATE_DIR": str(tmp_path / "file/x")})


def test_a_directory_that_the_kernel_lets_nobody_make_is_one_sentence():
    with pytest.raises(ConfigError, match="KUEUE_STATE_DIR = /proc/none/below cannot be used"):
        places.find("", {"KUEUE_STATE_DIR": "/proc/none/below"})


@pytest.mark.parametrize(
    ("name", "file"),
    [("ralab04", "ralab04"), ("a/b", "a%2Fb"), ("..", "%2E."), (".x", "%2Ex"), ("ü", "%C3%BC"), ("a%2Fb", "a%252Fb")],
)
def test_a_worker_name_becomes_one_file_name(name, file):
    assert places.file_name(name) == file


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_name_that_fits_no_file_is_refused(name):
    with pytest.raises(ConfigError):
        places.file_name(name)


def test_a_lock_is_held_by_one_and_names_its_holder(tmp_path):
    path = str(tmp_path / "lock")
    assert not places.is_locked(path)
    with places.lock_exclusive(path, "The server"):
        assert places.is_locked(path)
        assert places.holder(path) == os.getpid()
        with pytest.raises(KueueError, match=rf"The server is running already \(pid {os.getpid()}\)"):
            places.lock_exclusive(path, "The server")
        assert places.is_locked(path), "the look and the second try must not have broken the lock"
    assert not places.is_locked(path)
    assert places.holder(path) is None
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_stale_pid_in_the_file_decides_nothing(tmp_path):
    path = tmp_path / "lock"
    path.write_text(f"{os.getpid()} 1\n")
    assert places.holder(str(path)) is None
    with places.lock_exclusive(str(path)):
        path.write_text(f"{os.getpid()} 1\n")
        assert places.is_locked(str(path))
        assert places.holder(str(path)) is None, "the start time is not ours"


def test_a_file_that_was_removed_before_it_was_locked_is_not_the_lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    real, removed = fcntl.fcntl, []

    def late(descriptor, command, *more):
        if not removed:
            removed.append(path.stat().st_ino)
            path.unlink()
        return real(descriptor, command, *more)

    monkeypatch.setattr(places.fcntl, "fcntl", late)
    with places.lock_exclusive(str(path)) as lock:
        assert removed
        assert lock.is_in_place()
        assert places.is_locked(str(path))


def test_a_lock_knows_whether_its_file_is_in_place(tmp_path):
    path = tmp_path / "sub" / "lock"
    path.parent.mkdir()
    with places.lock_exclusive(str(path)) as lock:
        assert lock.is_in_place() is True
        path.unlink()
        assert lock.is_in_place() is None
        path.touch()
        assert lock.is_in_place() is False
        path.unlink()
        path.parent.rmdir()
        path.parent.touch()
        assert lock.is_in_place() is None


def bind(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.close()


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, bind, lambda path: os.symlink(path, path), lambda path: os.symlink("gone", path)]
)
def test_what_no_lock_can_be_is_held_by_nobody_and_nobody_waits_for_it(tmp_path, make):
    path = tmp_path / "lock"
    make(path)
    assert not places.is_locked(str(path))
    assert places.holder(str(path)) is None
    assert not is_locked(str(path)) or path.is_symlink() or path.is_socket()  # what a runner cannot open may be held


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_lock_that_may_not_be_read_is_an_error_with_its_path(tmp_path):
    path = tmp_path / "lock"
    path.touch(0o000)
    with pytest.raises(PermissionError, match="lock"):
        places.is_locked(str(path))


def test_a_lock_ends_with_its_killed_holder(tmp_path):
    path = str(tmp_path / "lock")
    code = "import sys; from kueue import places; lock = places.lock_exclusive(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        assert places.holder(path) == child.pid
        with pytest.raises(KueueError, match=f"pid {child.pid}"):
            places.lock_exclusive(path)
        child.kill()
        child.wait()
        places.lock_exclusive(path).release()


def test_a_kept_root_is_locked_against_cleaners(tmp_path):

    descriptor = places.Places(str(tmp_path)).keep()
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


def test_the_local_socket_is_named_by_port_and_fingerprint(tmp_path):
    assert places.Places(str(tmp_path)).server_socket(11236, "ab12") == f"{tmp_path}/server/11236-ab12.sock"


@pytest.mark.parametrize("length", [10, 200])
def test_a_socket_can_be_reached_however_long_its_path_is(tmp_path, length):
    directory = places.own_directory(str(tmp_path / ("d" * length)))
    path = f"{directory}/s.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        for action in (server.bind, lambda address: (server.listen(), client.connect(address))):
            address, descriptor = places.socket_address(path)
            action(address)
            if descriptor >= 0:
                os.close(descriptor)
        assert os.path.exists(path)


def test_a_lock_that_cannot_be_made_is_one_sentence(tmp_path):
    with pytest.raises(StorageError, match=r"/gone/lock cannot be written: No such file or directory\."):
        places.lock_exclusive(str(tmp_path / "gone" / "lock"))


def test_a_lock_holds_on_a_full_disk_although_nobody_can_be_named(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        path = str(disk / "lock")
        places.lock_exclusive(path).release()
        os.truncate(path, 0)
        fill(disk)
        with places.lock_exclusive(path):
            assert places.is_locked(path)
            assert places.holder(path) is None
            with pytest.raises(KueueError, match="is running already: "):
                places.lock_exclusive(path)
        assert not places.is_locked(path)


def test_a_directory_that_cannot_be_had_is_one_sentence():
    with pytest.raises(StorageError, match="/proc/none/below cannot be used: No such file"):
        places.own_directory("/proc/none/below")
    with pytest.raises(StorageError, match="/proc/none cannot be used: No such file"):
        places.Places("/proc/none").keep()


def test_a_path_that_was_typed_is_absolute_and_a_home_that_nobody_has_is_a_plain_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.chdir(tmp_path)
    assert places.typed("~/x") == "/home/ann/x"
    assert places.typed("a/../b") == f"{tmp_path}/a/../b"
    assert places.typed("~nobody-of-this-name/x") == f"{tmp_path}/~nobody-of-this-name/x"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert places.typed("x") == "x"
    assert places.typed("/x") == "/x"
