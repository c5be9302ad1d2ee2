"""Starting, stopping and renewing workers over ssh: what is started lives on, and what dies is told with its reason."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kueue import places
from kueue_ops.remote import HostTrouble, Remote, RemoteOptions
from kueue_ops.sight import SESSION
from tests.support.lab import SECRET
from tests.support.ports import free_port
from tests.support.sshd import SSHD, Sshd, need

CONFIG = f"""
[common_settings]
shared_secret = "{SECRET}"
server_name = "127.0.0.1"
server_port = {{port}}
"""


@pytest.fixture
def new_host(tmp_path):
    hosts = []

    def make(config=CONFIG, **more):
        host = Sshd(tmp_path, name=f"host{len(hosts)}", **more)
        hosts.append(host)
        if config:
            path = host.home / ".config/kueue/config.toml"
            path.parent.mkdir(parents=True)
            path.write_text(config.format(port=free_port()))
            path.chmod(0o600)
        host.install_worker()
        return host

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def host(new_host):
    return new_host().start()


def remote(host, **options):
    return Remote(host.address, RemoteOptions(ssh_config=host.ssh_config, **options))


def start(host, **options):
    with remote(host, **options) as there:
        return there.start(there.look())


def look(host):
    with remote(host) as there:
        return there.look()


def trouble_of(act):
    with pytest.raises(HostTrouble) as caught:
        act()
    assert "\n" not in str(caught.value)
    return caught.value.trouble


def wait_until(holds, what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Ended; its parent may not have noticed yet."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


# --- starting --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_worker_is_started_in_a_session_of_that_name_from_every_shell(new_host, shell):
    need("screen", shell)
    host = new_host(shell=shutil.which(shell)).start()
    begin = time.monotonic()
    report = start(host)
    assert time.monotonic() - begin < 10
    assert (report.how, report.noted) == ("screen", ())
    sight = look(host)
    assert sight.worker_pid == report.pid == places.holder(f"{sight.state_dir}/lock")
    assert [one.is_dead for one in sight.sessions] == [False]
    # The session is the worker: it ends with it.
    os.kill(report.pid, signal.SIGTERM)
    wait_until(lambda: not list(host.screens.iterdir()), "the session ends with its worker")


@pytest.mark.slow
def test_twenty_of_twenty_workers_outlive_the_connection(host):
    """Each of its own name, so that all live at once; the connection is gone when they are counted."""
    need("screen")

    def one(number: int) -> int:
        with remote(host, worker_command=f"{host.bin}/kueue_worker --name w{number}") as there:
            sight = there.look()
            begin = time.monotonic()
            report = there.start(sight)
            assert time.monotonic() - begin < 30
            assert report.pid is not None
            return report.pid

    pids = []
    for number in range(20):
        # A live session of the name keeps a second start away; this one belongs to another worker, so it gives way.
        for path in host.screens.iterdir():
            path.rename(host.folder / f"hidden-{path.name}")
        pids.append(one(number))
    wait_until(lambda: not _sessions_of(host), "the connections have ended")
    time.sleep(2)
    assert len(set(pids)) == 20
    assert [pid for pid in pids if is_gone(pid)] == []


def _sessions_of(host) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()]


def test_no_stream_and_no_process_of_the_login_stays_behind(host):
    start(host)
    wait_until(lambda: not _sessions_of(host), "sshd has no session left")


def test_a_second_start_finds_the_first_worker(host):
    first = start(host)
    second = start(host)
    assert second.how == "running"
    assert second.pid == first.pid


def test_without_screen_a_worker_is_started_all_the_same_with_a_note(host):
    host.script("screen", "#!/bin/sh\necho no screen for you; exit 1\n")
    report = start(host)
    assert report.how == "setsid"
    assert "no screen there" in report.noted[0]
    wait_until(lambda: not _sessions_of(host), "sshd has no session left")
    assert os.getsid(report.pid) != os.getsid(host.process.pid)
    assert Path(f"/proc/{report.pid}/stat").read_text().rpartition(")")[2].split()[4] == "0"  # no terminal
    assert look(host).worker_pid == report.pid


def test_the_environment_is_kept_through_a_screen_that_loses_it(new_host):
    """A set-id screen loses LD_LIBRARY_PATH; this one is made to lose it the same way."""
    need("screen")
    library = "/opt/it's a lib:/other $HOME"
    host = new_host(LD_LIBRARY_PATH=library, MARK="kept").start()
    host.script("screen", f'#!/bin/sh\nexec env -u LD_LIBRARY_PATH {shutil.which("screen")} "$@"\n')
    report = start(host)
    found = environment_of(report.pid)
    assert found["LD_LIBRARY_PATH"] == library
    assert found["MARK"] == "kept"
    assert found["STY"].endswith(f".{SESSION}")
    assert "INVOCATION_ID" not in found
    assert "LC_ALL" not in found


def test_a_worker_keeps_the_umask_of_the_login(host):
    host.script("kueue_umask", f'#!/bin/sh\numask 027\nexec {host.bin}/kueue_worker "$@"\n')
    report = start(host, worker_command="kueue_umask")
    status = Path(f"/proc/{report.pid}/status").read_text()
    assert "Umask:\t0027" in status


@pytest.mark.parametrize("is_short", [True, False])
def test_a_private_socket_directory_serves_when_screens_own_is_refused(new_host, tmp_path, is_short):
    need("screen")
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(tempfile.TemporaryDirectory()) if is_short else str(tmp_path / ("long" * 20))
        host = new_host(KUEUE_STATE_DIR=base).start()
        private = f"/tmp/kueue-{os.getuid()}-{_checksum(look(host).state_dir)}"
        assert not Path(private).exists()
        stack.callback(lambda: is_short or shutil.rmtree(private))
        stack.callback(host.close)
        _use_a_private_directory(host)
        assert Path(private).exists() is not is_short


def _checksum(text: str) -> str:
    return subprocess.run(["cksum"], input=text, capture_output=True, text=True, check=True).stdout.split()[0]


def _use_a_private_directory(host):
    host.screens.chmod(0o755)
    report = start(host)
    assert report.how == "screen"
    sight = look(host)
    assert sight.worker_pid == report.pid
    assert len(sight.sessions) == 1
    with remote(host) as there:
        there.stop()
    assert look(host).sessions == ()


@pytest.mark.parametrize("works", [True, False])
def test_where_logind_ends_logins_a_scope_is_used_if_there_is_one(host, works):
    host.script("busctl", "#!/bin/sh\necho 'b true'\n")
    host.script(
        "systemd-run",
        '#!/bin/sh\necho "$XDG_RUNTIME_DIR $*" >> "$HOME/scopes"\n'
        + (
            'while [ "$1" != -- ] && [ "$1" != true ]; do shift; done\n[ "$1" = -- ] && shift\nexec "$@"\n'
            if works
            else "exit 1\n"
        ),
    )
    report = start(host)
    assert report.pid is not None
    asked = (host.home / "scopes").read_text()
    assert asked.startswith(f"/run/user/{os.getuid()} --user --scope --quiet true")
    assert ("screen -dmS" in asked) is works
    assert bool(report.noted) is not works
    if not works:
        assert "loginctl enable-linger" in report.noted[0]


# --- workers that do not live ----------------------------------------------------------------------------------------


def test_a_worker_that_waits_for_its_configuration_lives_and_says_so(new_host):
    need("screen")
    host = new_host(config="").start()
    report = start(host)
    assert report.pid is None
    assert "config.toml does not exist" in report.noted[0]
    with remote(host) as there:
        sight = there.look()
        assert len(sight.sessions) == 1
        assert there.stop()
        assert there.look().sessions == ()
    wait_until(lambda: not host.members(), "nothing of it is left")


def test_a_worker_that_ends_at_once_is_told_with_its_last_words(new_host):
    host = new_host(config=CONFIG + '[worker_settings]\nworker_name = "a"\ncores = -3\n').start()
    begin = time.monotonic()
    trouble = trouble_of(lambda: start(host))
    assert time.monotonic() - begin < 20
    assert trouble.kind == "died"
    assert "cores must be at least 0" in trouble.sentence
    assert "cores must be at least 0" in look(host).last_words


def test_a_worker_that_crashes_at_once_leaves_its_reason(host):
    host.script("sitecustomize.py", "")
    broken = host.folder / "broken" / "trio"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('trio was built for another Python')")
    text = (host.bin / "kueue_worker").read_text().replace("PYTHONPATH=", f"PYTHONPATH={broken.parent}:")
    host.script("kueue_worker", text)
    trouble = trouble_of(lambda: start(host))
    assert trouble.kind == "died"
    assert "trio was built for another Python" in trouble.sentence


@pytest.mark.parametrize("has_screen", [True, False])
def test_what_a_worker_says_before_its_log_is_open_and_what_signal_ends_it_are_told(host, has_screen):
    if not has_screen:
        host.script("screen", "#!/bin/sh\nexit 1\n")
    good = (host.bin / "kueue_worker").read_text()
    for end, words in (
        ("echo 'libpython3.11.so: cannot open shared object file' >&2; exit 127", "cannot open shared object file"),
        ("kill -SEGV $$", "Segmentation fault"),
        ("exit 9", "exit code 9"),
    ):
        host.script(
            "kueue_worker", good.replace("#!/bin/sh\n", f'#!/bin/sh\ncase "$*" in *--log-file*) {end};; esac\n')
        )
        trouble = trouble_of(lambda: start(host))
        assert trouble.kind == "died"
        assert words in trouble.sentence


def test_a_screen_that_starts_nothing_and_says_nothing_is_passed_over(host):
    host.script("screen", '#!/bin/sh\ncase $1 in -ls) echo "No Sockets found in /x." ;; esac\nexit 0\n')
    report = start(host)
    assert (report.how, report.pid) == ("setsid", look(host).worker_pid)
    assert "its screen starts nothing" in report.noted[0]


def test_old_last_words_are_not_taken_for_new_ones(host):
    sight = look(host)
    Path(sight.log_file).write_text("2026-01-01T00:00:00.000Z ERROR worker  an old story\n")
    status = json.dumps({"name": "w", "pid": None, "state_dir": sight.state_dir, "log_file": sight.log_file})
    host.script("kueue_worker", f"#!/bin/sh\ncase $* in *--status*) echo '{status}'; exit 3 ;; esac\nexit 1\n")
    trouble = trouble_of(lambda: start(host))
    assert trouble.kind == "died"
    assert "an old story" not in trouble.sentence


def test_a_worker_that_was_not_found_cannot_be_started(host):
    trouble = trouble_of(lambda: start(host, worker_command="/nowhere/kueue_worker"))
    assert trouble.kind == "not_found"
    assert "/nowhere/kueue_worker" in trouble.sentence


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_full_disk_and_a_read_only_one_are_named(new_host, tmp_path, kind):
    """In a mount namespace of that sshd alone."""
    need("unshare", "mount")
    host = new_host()
    state = Path(host.environment["KUEUE_STATE_DIR"])
    state.mkdir(mode=0o700)
    host.start()
    sight = look(host)
    host.process.kill()
    host.process.wait()
    extra = "head -c 1M /dev/zero > {0}/filler" if kind == "full" else "mount -o remount,ro {0}"
    script = (
        f"mount -t tmpfs -o size=64k,mode=700 tmpfs {state} && mkdir -p -m 700 {sight.state_dir}; "
        f"{extra.format(state)} 2>/dev/null; exec {SSHD} -D -e -f {host.folder}/sshd_config"
    )
    with open(host.folder / "sshd.log", "ab") as log:
        host.process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    found = []

    def reached():
        with contextlib.suppress(HostTrouble):
            found.append(trouble_of(lambda: start(host)))
        return found and found[-1].kind != "refused"

    wait_until(reached, "sshd listens again")
    assert found[-1].kind == "disk", found[-1]
    assert str(state) in found[-1].sentence
    assert ("No space left" if kind == "full" else "Read-only") in found[-1].sentence


# --- stopping and renewing -------------------------------------------------------------------------------------------


def test_a_worker_is_stopped_in_order_and_its_session_is_gone(host):
    report = start(host)
    with remote(host) as there:
        assert f"pid {report.pid}" in there.stop()
        assert is_gone(report.pid)
        sight = there.look()
        assert (sight.worker_pid, sight.sessions) == (None, ())
        assert "stopping on SIGTERM" in Path(sight.log_file).read_text()
        assert sight.last_words
        assert "No worker" in there.stop()


@pytest.mark.slow
def test_a_worker_is_renewed_whatever_state_it_is_in(host):
    first = start(host)
    with remote(host) as there:
        second = there.renew(there.look())
        assert second.pid not in {None, first.pid}
        assert is_gone(first.pid)
        # A session whose worker is gone, and one that never got as far as to take its lock.
        os.kill(second.pid, signal.SIGTERM)
        wait_until(lambda: is_gone(second.pid), "it ended")
        stuck = host.script("kueue_worker", "#!/bin/sh\nsleep 1000\n", host.folder / "stuck")
        subprocess.run(["screen", "-dmS", SESSION, str(stuck)], env={**os.environ, **host.environment}, check=True)
        wait_until(lambda: len(there.look().sessions) == 1, "a session without a worker")
        third = there.renew(there.look())
        assert third.pid is not None
        sight = there.look()
        assert sight.worker_pid == third.pid
        assert [one.program for one in sight.sessions] == [""]


@pytest.mark.slow
def test_a_session_of_our_name_in_which_somebody_edits_is_left_alone(host):
    need("screen")
    environment = {**os.environ, **host.environment}
    subprocess.run(["screen", "-dmS", SESSION, "tail", "-f", "/dev/null"], env=environment, check=True)
    wait_until(lambda: [one.program for one in look(host).sessions] == ["tail"], "it is seen as somebody's")
    (theirs,) = look(host).sessions
    assert f"{theirs.pid}.{SESSION} (tail) runs no worker and is left alone" in look(host).noted[0]
    first = start(host)
    assert (first.how, first.pid is not None) == ("screen", True)
    # A second window of the worker's own session is somebody's as well.
    (ours,) = (one for one in look(host).sessions if one.pid != theirs.pid)
    more = ["screen", "-S", f"{ours.pid}.{SESSION}", "-X", "screen", "tail", "-f", "/dev/null"]
    subprocess.run(more, env=environment, check=True)
    wait_until(lambda: len(_children(ours.pid)) == 2, "the window is open")
    with remote(host) as there:
        second = there.renew(there.look())
        assert second.pid not in {None, first.pid}
        there.stop()
        assert is_gone(second.pid)
        assert {(one.pid, one.program) for one in there.look().sessions} == {(theirs.pid, "tail"), (ours.pid, "tail")}


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
def test_a_renewal_comes_to_its_end_though_the_connection_breaks_in_the_middle(host):
    first = start(host)
    good = (host.bin / "kueue_worker").read_text()
    gate, stopped = host.folder / "gate", host.folder / "stopped"
    wait = f"case $* in *--stop*) touch {stopped}; while [ ! -e {gate} ]; do sleep 0.1; done ;; esac\n"
    host.script("kueue_worker", good.replace("#!/bin/sh\n", f"#!/bin/sh\n{wait}"))
    with remote(host) as there:
        sight = there.look()
        with ThreadPoolExecutor(1) as pool:
            renewal = pool.submit(there.renew, sight)
            wait_until(stopped.exists, "it is about to stop the worker")
            there.close()
            assert isinstance(renewal.exception(60), HostTrouble)
    wait_until(lambda: not _sessions_of(host), "sshd has no session left")
    gate.touch()
    wait_until(lambda: look(host).worker_pid not in {None, first.pid}, "a new worker", seconds=60)
    assert is_gone(first.pid)


@pytest.mark.slow
def test_a_hung_worker_is_killed_and_renewed(host):
    # Without a session: screen wakes what is stopped in its windows.
    host.script("screen", "#!/bin/sh\nexit 1\n")
    report = start(host)
    os.kill(report.pid, signal.SIGSTOP)
    with remote(host) as there:
        trouble = trouble_of(there.stop)
        assert trouble.kind == "command"
        assert "has not ended within" in trouble.sentence
        again = there.renew(there.look())
        assert is_gone(report.pid)
        wait_until(lambda: there.look().worker_pid not in {None, report.pid}, "another worker lives")
    assert again.how in {"setsid", "running"}


# --- doctor and configuration ----------------------------------------------------------------------------------------


def test_the_doctor_beside_the_worker_is_asked(host):
    with remote(host) as there:
        found = there.run_doctor()
    assert found
    host.script("kueue", "#!/bin/sh\necho 'some noise' >&2\necho '{\"a\":'\necho '[1, 2]}'\nexit 255\n")
    with remote(host) as there:
        assert there.run_doctor() == {"a": [1, 2]}
    host.script("kueue", "#!/bin/sh\necho 'kueue: invalid choice: doctor' >&2\nexit 2\n")
    with remote(host) as there:
        assert "invalid choice: doctor" in trouble_of(there.run_doctor).sentence


def test_doctor_and_configuration_mean_the_file_that_the_worker_command_names(new_host):
    host = new_host(config="").start()
    path = host.home / "it's ä.toml"
    with remote(host, worker_command='kueue_worker -c "$HOME/it\'s ä.toml" --name w1') as there:
        assert there.push_config(CONFIG.format(port=free_port())) == "written"
        (config,) = (one for one in there.run_doctor()["findings"] if one["name"] == "config")
    assert (config["state"], config["value"]["path"]) == ("ok", str(path))
    assert not (host.home / ".config").exists()


def test_a_worker_command_that_does_not_run_is_no_reason_to_ask_no_doctor(host):
    broken = host.script("kueue_broken", "#!/bin/sh\nexit 3\n")
    with remote(host, worker_command=str(broken)) as there:
        assert any(one["name"] == "config" for one in there.run_doctor()["findings"])
        assert "does not run there" in trouble_of(lambda: there.push_config("text")).sentence
    with remote(host, worker_command="/nowhere/kueue_worker") as there:
        assert there.push_config("text", force=True) == "written"
    assert (host.home / ".config/kueue/config.toml").read_text() == "text"


def test_a_short_limit_for_commands_does_not_cut_off_the_doctor_who_has_limits_of_his_own(host):
    host.script("kueue", "#!/bin/sh\nsleep 3\necho '[1]'\n")
    with remote(host, command_timeout_seconds=1.0) as there:
        assert there.run_doctor() == [1]


def test_a_configuration_is_put_there_private_and_never_over_another_one(new_host):
    host = new_host(config="").start()
    path = host.home / ".config/kueue/config.toml"
    text = "# it's ä\n" + "x = 1\n" * 50_000
    with remote(host) as there:
        assert there.push_config(text) == "written"
        assert path.read_text() == text
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        path.chmod(0o644)
        assert there.push_config(text) == "same"
        assert path.stat().st_mode & 0o777 == 0o600
        assert there.push_config("other") == "differs"
        assert path.read_text() == text
        assert there.push_config("other", force=True) == "written"
        assert path.read_text() == "other"
    assert [one.name for one in path.parent.iterdir()] == ["config.toml"]


def test_a_configuration_that_is_a_link_stays_one(new_host, tmp_path):
    host = new_host(config="").start()
    real = host.home / "dotfiles" / "kueue.toml"
    path = host.home / "link.toml"
    real.parent.mkdir()
    path.symlink_to(real)
    with remote(host, worker_command="kueue_worker -c ~/link.toml") as there:
        assert there.push_config("text") == "written"
    assert path.is_symlink()
    assert real.read_text() == "text"


def test_a_configuration_that_a_start_up_file_eats_is_not_written(new_host):
    host = new_host(config="").start()
    (host.home / ".bashrc").write_text("head -c 3 >/dev/null\n")
    with remote(host) as there:
        trouble = trouble_of(lambda: there.push_config("text"))
    assert "start-up file" in trouble.sentence
    assert not (host.home / ".config/kueue/config.toml").exists()


def test_a_configuration_that_cannot_be_written_is_told(new_host):
    host = new_host(config="").start()
    (host.home / ".config").write_text("a file")
    with remote(host) as there:
        trouble = trouble_of(lambda: there.push_config("text"))
    assert ".config/kueue/config.toml could not be written" in trouble.sentence


@pytest.mark.slow
def test_many_threads_start_one_worker(host):
    """Whoever comes later finds the first one; nobody ends up with two."""
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: _attempt(host), range(4)))
    pids = {report.pid for report in reports if report is not None}
    assert len(pids) == 1
    assert look(host).worker_pid in pids


def _attempt(host):
    try:
        return start(host)
    except HostTrouble:
        # It came in the moment between the first worker's lock and its own: the lock kept it away.
        return None
