"""A press of TAB as a real process: descriptor 8, silence, speed, and what is not even loaded."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from peer import answering

from kueue import places
from kueue.identity import identity_of

ROOT = Path(__file__).parents[3]
SECRET = "a secret for these tests alone"
HEAVY = {"trio", "rich", "ssl", "_ssl", "cryptography", "msgspec", "asyncio", "psutil", "fabric", "apscheduler"}


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory):
    """One cache for all: compiling at each press of TAB would take longer than a TAB may."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """A cache with the key of the secret, which takes a third of a second to derive."""
    directory = tmp_path_factory.mktemp("keys")
    directory.chmod(0o700)
    identity_of(SECRET, str(directory))
    return directory


class Home:
    """A home directory without anything in it, until `configure` is called."""

    def __init__(self, folder: Path, bytecode: Path, key: Path) -> None:
        self.folder = folder
        self.bytecode = bytecode
        self.key = key

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "KUEUE_STATE_DIR": str(self.folder / "state"),
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            **more,
        }

    def configure(self, server_port: int, server_name: str = "127.0.0.1") -> str:
        """Returns the path of the local socket that a server of this user would have."""
        state = places.Places(str(self.folder / "state"))
        shutil.copytree(self.key, state.cache, dirs_exist_ok=True)
        config = self.folder / ".config/kueue/config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(
            f'[common_settings]\nshared_secret = "{SECRET}"\nserver_name = "{server_name}"\nserver_port = {server_port}\n'
        )
        config.chmod(0o600)
        os.utime(config, (1, 1))  # one that was changed just now is not kept in the cache
        return state.server_socket(server_port, identity_of(SECRET, state.cache).fingerprint)

    def press(self, line: str, *options: str, **more: str) -> tuple[int, str, str]:
        """Exit code, what came on descriptor 8, and all that came anywhere else."""
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" 8>answer', "sh", sys.executable, *options, "-m", "kueue.cli.main"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), **more),
            check=False,
            timeout=60,
        )
        answer = self.folder / "answer"
        text = answer.read_text()
        answer.unlink()
        return done.returncode, text, done.stdout

    def seconds(self, line: str, times: int = 7) -> float:
        """The best of some presses, the first of which fills the caches."""
        self.press(line)
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            self.press(line)
            found.append(time.perf_counter() - begun)
        return min(found)

    def bare_seconds(self, times: int = 7) -> float:
        """The best of some starts of a Python that does nothing."""
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], env=self.environment(), check=True)
            found.append(time.perf_counter() - begun)
        return min(found)


@pytest.fixture
def home(tmp_path, bytecode, key):
    return Home(tmp_path, bytecode, key)


def test_the_protocol_of_argcomplete_is_spoken(home):
    code, answer, rest = home.press("kueue list-")
    assert (code, rest) == (0, "")
    assert answer.split("\v") == ["list-jobs", "list-workers", "list-resources"]
    assert list(home.folder.iterdir()) == []


def test_the_answer_goes_to_a_file_where_there_is_no_descriptor(home):
    code, answer, rest = home.press("kueue list-w", _ARGCOMPLETE_STDOUT_FILENAME=str(home.folder / "named"))
    assert (code, answer, rest) == (0, "", "")
    assert (home.folder / "named").read_text() == "list-workers"


@pytest.mark.parametrize(
    "broken", [{"COMP_POINT": "x"}, {"_ARGCOMPLETE": "y"}, {"_ARGCOMPLETE_STDOUT_FILENAME": "/no/a"}]
)
def test_whatever_goes_wrong_nothing_is_shown(home, broken):
    done = subprocess.run(
        [sys.executable, "-m", "kueue.cli.main"],
        capture_output=True,
        text=True,
        env=home.environment(**{"_ARGCOMPLETE": "1", "COMP_LINE": "kueue ", "COMP_POINT": "6", **broken}),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def loaded(text: str) -> set[str]:
    """Top-level modules in a report of ``-X importtime``."""
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in text.splitlines() if "|" in line}


def test_neither_verbs_nor_values_of_a_local_server_load_anything_heavy(home, peers):
    _, _, report = home.press("kueue list-", "-X", "importtime")
    assert "argcomplete" in loaded(report)
    assert not loaded(report) & (HEAVY | {"json", "socket"})
    rows = [{"id": 5, "state": "running", "payload": {"argv": ["true"]}}]
    peers(answering({"ListJobs": {"type": "JobList", "jobs": rows}}), home.configure(9))
    _, answer, report = home.press("kueue show-job ", "-X", "importtime", KUEUE_COMPLETION_SECONDS="20")
    assert answer == "5"
    assert not loaded(report) & HEAVY


def test_a_verb_that_is_run_does_not_load_what_completes(home):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kueue.cli.main", "cmd", "--help"],
        capture_output=True,
        text=True,
        env=home.environment(),
        check=False,
    )
    assert "kueue" in loaded(done.stderr)
    assert not loaded(done.stderr) & {"argcomplete"}


def test_a_warm_press_of_tab_is_not_felt(home):
    # 0.15 s, or on a machine where Python itself starts slowly what that is on a common one; if need be once more:
    # another program may take the machine for all of the presses.
    assert any(home.seconds("kueue ") < max(0.15, 6 * home.bare_seconds()) for _ in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["never answers", "full backlog", "refuses"])
def test_a_server_that_cannot_be_reached_is_not_waited_for(home, kind):
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        home.configure(hole.getsockname()[1])
        waiting = []
        if kind != "refuses":
            hole.listen(0)
        if kind == "full backlog":
            for _ in range(4):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(hole.getsockname())
        assert home.press("kueue show-job ") == (0, "", "")
        # Both presses start Python and load the same; what one takes longer is what was waited, or what another program
        # took of the machine meanwhile: not each time.
        waited = (home.seconds("kueue show-job ", times=1) - home.seconds("kueue ", times=1) for _ in range(20))
        assert any(seconds < 0.3 for seconds in waited)
        for one in waiting:
            one.close()


@pytest.mark.slow
def test_a_resolver_that_does_not_answer_is_not_waited_for(home):
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip, for a network in which nobody answers")
    home.configure(11236, "ralab.example")
    (home.folder / "resolv.conf").write_text("nameserver 10.99.0.2\noptions timeout:20 attempts:1\n")
    script = """
        mount --bind resolv.conf /etc/resolv.conf && ip link set lo up && ip link add v0 type veth peer name v1 &&
        ip addr add 10.99.0.1/24 dev v0 && ip link set v0 up && ip link set v1 up &&
        ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:01 dev v0 || exit 77
        exec "$@" 8>answer
    """
    line = "kueue show-job "
    begun = time.monotonic()
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "kueue.cli.main"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=home.folder,
        env=home.environment(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line))),
        check=False,
        timeout=60,
    )
    if done.returncode == 77:
        pytest.skip(f"no network of its own can be made here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - begun < 10  # the resolver alone would wait for 20 s
