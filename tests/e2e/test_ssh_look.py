"""Looking at a host: its sessions, its worker, its shell; nothing that it prints besides fools anybody."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kueue import __version__
from kueue_ops.remote import HostTrouble, Remote, RemoteOptions
from kueue_ops.remote_script import Answer, pack
from kueue_ops.sight import SESSION
from kueue_ops.ssh import HostConnection, Limits
from kueue_ops.ssh_settings import SshConfig
from tests.support.lab import SECRET
from tests.support.sshd import Sshd, need

SHELLS = ("bash", "zsh", "fish", "tcsh", "dash", "ksh", "csh")


@pytest.fixture
def new_host(tmp_path):
    hosts = []

    def make(**more):
        hosts.append(Sshd(tmp_path, **more))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def short_state():
    """A path that leaves room for the socket of a session."""
    with tempfile.TemporaryDirectory(prefix="kueue-state-") as path:
        yield path


@pytest.fixture
def host(new_host):
    host = new_host().start()
    host.install_worker()
    return host


def look(host, **options):
    with Remote(host.address, RemoteOptions(ssh_config=host.ssh_config, **options)) as remote:
        return remote.look()


def trouble_of(host, **options):
    with pytest.raises(HostTrouble) as caught:
        look(host, **options)
    assert "\n" not in str(caught.value)
    return caught.value.trouble


def screen(host, *args: str) -> str:
    need("screen")
    done = subprocess.run(
        ["screen", *args],
        env={**os.environ, **host.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def sockets(host) -> dict[str, int]:
    """Session name → pid, as the socket directory has them."""
    return {path.name.partition(".")[2]: int(path.name.partition(".")[0]) for path in host.screens.iterdir()}


def session(host, name: str) -> int:
    screen(host, "-dmS", name, "sleep", "1000")
    deadline = time.monotonic() + 20
    while name not in sockets(host) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sockets(host)[name]


# --- login shells ----------------------------------------------------------------------------------------------------

NASTY = 'it\'s "quoted" \\ !! $HOME `id` %s \\n * ~ # ; & | < > ( ) { } [ ] ^ ä€😀\ttab'


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_the_same_in_every_login_shell(new_host, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"not installed here: {shell}")
    host = new_host(shell=path).start()
    script = "\n".join(
        [
            "x='" + NASTY.replace("'", "'\\''") + "'",
            'printf "%s\\n" "$x" | tell x',
            "# ! a comment, and enough text for many words:",
            *(f"y{number}='some words ! of \\ filler'" for number in range(200)),
            'say y "$y199"',
            "cat | tell fed",
        ]
    )
    request = pack(script)
    with HostConnection(host.address, SshConfig(host.ssh_config), Limits(20, 60)) as connection:
        said = connection.run(request.command, b"line one\nline 2", until=request.end)
    answer = Answer(request.marker, said.stdout)
    assert answer.is_whole, said
    assert answer.text("x") == NASTY
    assert answer.word("y") == "some words ! of \\ filler"
    assert answer.lines("fed") == ("line one", "line 2")


RC = {
    "bash": ".bashrc",
    "zsh": ".zshenv",
    "fish": ".config/fish/config.fish",
    "tcsh": ".tcshrc",
}


def write_rc(host, shell: str, text: str) -> None:
    path = host.home / RC[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("shell", list(RC))
def test_a_start_up_file_that_prints_and_reads_fools_nobody(new_host, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"not installed here: {shell}")
    host = new_host(shell=path).start()
    host.install_worker()
    write_rc(
        host,
        shell,
        "echo kueue_worker\necho '\t12.kueue_worker\t(Detached)'\necho '{\"pid\": 1}'\ncat\n"
        "printf 'no newline at the end'\nls /nowhere\ntouch $HOME/was-read\nfalse\n",
    )
    sight = look(host)
    assert (host.home / "was-read").exists()
    assert sight.sessions == ()
    assert sight.worker_pid is None
    assert sight.host_name == socket.gethostname().partition(".")[0]
    assert sight.version == __version__


@pytest.mark.parametrize("shell", ["tcsh", "fish"])
def test_in_some_shells_exit_ends_the_start_up_file_alone(new_host, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"not installed here: {shell}")
    host = new_host(shell=path).start()
    host.install_worker()
    write_rc(host, shell, "touch $HOME/was-read\nexit 255\n")
    assert look(host).version == __version__
    assert (host.home / "was-read").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("code", [0, 255])
def test_a_start_up_file_that_exits_is_told_and_is_no_dead_worker(new_host, shell, code):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"not installed here: {shell}")
    host = new_host(shell=path).start()
    write_rc(host, shell, f"echo leaving now\nexit {code}\n")
    trouble = trouble_of(host)
    assert trouble.kind == "command"
    assert f"(exit code {code})" in trouble.sentence
    assert "leaving now" in trouble.sentence
    assert "echo ok" in trouble.hint


@pytest.mark.parametrize("noise", ["yes kueue_worker", "tr '\\0' a < /dev/zero"])
def test_a_start_up_file_that_prints_without_measure_does_not_hide_the_answer(host, noise):
    write_rc(host, "bash", f"{noise} | head -c 20000000\n")
    assert look(host, command_timeout_seconds=60).worker_name


def test_a_start_up_file_that_waits_for_ever_is_given_up_with_its_last_words(host):
    write_rc(host, "bash", "echo waiting for the licence server\nsleep 1000\n")
    begin = time.monotonic()
    trouble = trouble_of(host, command_timeout_seconds=1.0)
    assert time.monotonic() - begin < 10
    assert trouble.kind == "hung"
    assert "waiting for the licence server" in trouble.sentence


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        ".local/bin",
        "bin",
        ".local/share/pipx/venvs/kueue-lab/bin",
        ".local/pipx/venvs/kueue-lab/bin",
        ".local/share/uv/tools/kueue-lab/bin",
        ".local/share/kueue/bin",
        "venv/bin",
        ".venv/bin",
        "miniconda3/bin",
    ],
)
def test_the_worker_is_found_where_installers_put_it(new_host, place):
    host = new_host().start()
    path = host.install_worker(host.home / place)
    sight = look(host)
    assert sight.command == f"'{path}'"
    assert sight.version == __version__


def test_a_worker_that_is_nowhere_is_told_with_the_places_tried(new_host):
    sight = look(new_host().start())
    assert sight.command == ""
    assert any(place.endswith("/.local/bin") for place in sight.tried)
    assert any(place.startswith("PATH (") for place in sight.tried)


def test_the_setting_may_be_a_path_with_blanks_or_a_command_line(new_host):
    host = new_host().start()
    path = host.install_worker(host.home / "it's my venv" / "bin")
    assert look(host, worker_command="~/it's my venv/bin/kueue_worker").worker_name
    line = f'env A=1 "{path}" --name other'
    assert look(host, worker_command=line).worker_name == "other"
    missing = look(host, worker_command="~/nowhere/kueue_worker")
    assert (missing.command, missing.tried) == ("", ("~/nowhere/kueue_worker",))


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("#!/bin/sh\necho no licence today >&2\nexit 255\n", "command", "no licence today"),
        ("#!/bin/sh\nexit 255\n", "command", "exit code 255"),
        ("#!/nowhere/python\n", "not_found", "kueue_worker"),
        ("#!/bin/sh\necho 'kueue_worker: error: unrecognized arguments: --status' >&2; exit 2\n", "command", "too old"),
        ("#!/bin/sh\necho 'Error: /x: No space left on device' >&2; exit 1\n", "disk", "No space left"),
        ("#!/bin/sh\necho 'Error: /x: Read-only file system' >&2; exit 1\n", "disk", "Read-only file system"),
    ],
)
def test_a_worker_command_that_cannot_say_how_it_is_is_no_dead_worker(new_host, text, kind, words):
    host = new_host().start()
    host.script("kueue_worker", text)
    trouble = trouble_of(host)
    assert trouble.kind == kind
    assert words in trouble.sentence


def test_another_configuration_in_the_command_is_handed_to_the_worker(host):
    path = host.home / "other.toml"
    path.write_text(f'[common_settings]\nshared_secret = "{SECRET}"\n[worker_settings]\nworker_name = "from other"\n')
    path.chmod(0o600)
    assert look(host, worker_command="kueue_worker -c ~/other.toml").worker_name == "from other"


# --- sessions --------------------------------------------------------------------------------------------------------


def test_only_a_session_of_exactly_that_name_counts(host):
    for name in (f"{SESSION}_old", f"my.{SESSION}", f"{SESSION}.2"):
        session(host, name)
    assert look(host).sessions == ()
    pid = session(host, SESSION)
    (found,) = look(host).sessions
    assert (found.pid, found.is_dead) == (pid, False)


def test_a_dead_session_is_told_and_wiped_and_others_stay(host):
    pid = session(host, SESSION)
    other = session(host, f"{SESSION}_old")
    for each in (pid, other):
        os.kill(each, signal.SIGKILL)
    sight = look(host)
    assert [(one.pid, one.is_dead) for one in sight.sessions] == [(pid, True)]
    assert any("1 dead screen session" in note for note in sight.noted)
    assert sockets(host) == {f"{SESSION}_old": other}
    assert look(host).sessions == ()


def test_a_socket_directory_that_screen_refuses_is_replaced_by_a_private_one(new_host, short_state):
    need("screen")
    host = new_host(KUEUE_STATE_DIR=short_state).start()
    host.install_worker()
    host.screens.chmod(0o755)
    sight = look(host)
    assert sight.has_screen
    assert any("must have mode 700" in note for note in sight.noted)
    assert (Path(sight.state_dir) / "screen").stat().st_mode & 0o777 == 0o700


def test_a_screen_that_cannot_work_at_all_is_as_none_and_told(host):
    host.script("screen", "#!/bin/sh\necho \"Cannot make directory '/run/screen': Permission denied\"\nexit 1\n")
    sight = look(host)
    assert not sight.has_screen
    assert any("Cannot make directory '/run/screen'" in note for note in sight.noted)


def test_sessions_of_another_host_in_a_shared_directory_are_left_alone(host):
    host.script(
        "screen",
        '#!/bin/sh\n[ "$1" = -wipe ] && touch "$HOME/wiped"\n'
        f"printf 'There is a screen on:\\n\\t17.{SESSION}\\t(Remote or dead)\\n1 Socket in /nfs/screen.\\n'\n",
    )
    sight = look(host)
    assert sight.sessions == ()
    assert any("shared with other hosts" in note for note in sight.noted)
    assert not (host.home / "wiped").exists()


# --- the worker itself -----------------------------------------------------------------------------------------------


def test_status_works_without_a_configuration_and_with_a_broken_one(tmp_path):
    def status(*args):
        done = subprocess.run(
            [sys.executable, "-m", "kueue.worker.main", "--status", *args],
            env={**os.environ, "KUEUE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        return json.loads(done.stdout)

    bare = status()
    assert (bare["pid"], bare["running_version"], bare["has_config"]) == (None, None, False)
    assert bare["version"] == __version__
    assert bare["log_file"].startswith(str(tmp_path / "state"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[[[")
    assert "broken.toml" in status("-c", str(broken))["trouble"]
    assert status("--name", "other")["name"] == "other"
    log = Path(bare["log_file"])
    log.write_text("2026-01-01T00:00:00.000Z INFO  worker  first\n2026-01-01T00:00:00.000Z ERROR worker  the end\n")
    assert status()["last_words"] == "the end"


def test_logind_that_ends_everything_at_logout_is_told(host):
    host.script("busctl", "#!/bin/sh\necho 'b true'\n")
    sight = look(host)
    assert sight.ends_at_logout
    assert any("loginctl enable-linger" in note for note in sight.noted)
