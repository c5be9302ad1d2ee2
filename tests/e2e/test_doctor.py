"""``kueue doctor`` on a machine where something is wrong: each finding is provoked, with real programs where there are.

Scripts stand for what belongs to the outside world and cannot be had in every state here: loginctl, systemctl, quota,
timedatectl.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kueue
from kueue import identity
from kueue.cli.doctor.finding import STATES, TOPICS
from tests.support.deaf import DEAF
from tests.support.file_server import dead_file_server
from tests.support.lab import SECRET, Lab
from tests.support.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 10.0
LATER_SECONDS = 10.0  # two busy processors may take as long again
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")


class Doctor(Lab):
    """A laboratory that is looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.mounts: list[Path] = []
        self.config()
        self.home = folder / "home"
        self.home.mkdir()

    def tool(self, name: str, script: str) -> None:
        """A program of the outside world."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *words, config="lab.toml", env=None, wrap=(), **more):
        environ = self.environment(PATH=f"{self.tools}:{os.environ['PATH']}") if env is None else env
        begin = time.monotonic()
        done = subprocess.run(
            [*wrap, sys.executable, "-s", "-m", "kueue.cli.main", "-c", str(self.folder / config), "doctor", *words],
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL, env=environ,
            **{"cwd": self.folder, **more},
        )  # fmt: skip
        self.seconds = time.monotonic() - begin
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 1), done.stderr
        return done

    def look(self, config="lab.toml", **more):
        """Findings by name; what every answer must be is held here."""
        done = self.run("--json", config=config, **more)
        answer = json.loads(done.stdout)
        assert set(answer) == {"findings", "ok"}
        found = {one["name"]: one for one in answer["findings"]}
        assert len(found) == len(answer["findings"]), "no name stands there twice"
        assert [name for name in found if "." not in name] == list(TOPICS)
        for one in answer["findings"]:
            assert set(one) == {"name", "state", "text", "hint", "value"}
            assert one["state"] in STATES
            assert one["text"]
            assert one["name"].partition(".")[0] in TOPICS
            assert one["hint"] or one["state"] in ("ok", "note"), one
        assert answer["ok"] == (done.returncode == 0) == all(one["state"] != "problem" for one in found.values())
        assert SECRET not in done.stdout
        assert "PRIVATE" not in done.stdout
        return found

    def environment(self, **extra):
        return super().environment(**{"PYTHONNOUSERSITE": "1", **extra})

    def start_changed(self, change: str, module: str, config: str, log: str) -> subprocess.Popen:
        """A program in which one thing is otherwise, as in another version or with another clock."""
        with (self.folder / f"{log}.log").open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", f"{change}\nfrom {module} import main\nmain(['-c', {str(self.folder / config)!r}])"],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=self.environment(), cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def mount(self, kind: str, path: Path, options: str, source: str = "kueue-test") -> None:
        path.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", kind, "-o", options, source, str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
        self.mounts.append(path)

    def close(self) -> None:
        super().close()
        for path in reversed(self.mounts):
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def lab(tmp_path):
    lab = Doctor(tmp_path)
    yield lab
    lab.close()


@pytest.fixture
def hung():
    """Makes directories that hang whoever looks into them."""
    with contextlib.ExitStack() as opened:

        def make(path: Path) -> Path:
            path.mkdir(exist_ok=True)
            return opened.enter_context(dead_file_server(path))

        yield make


def everything_below(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


# --- a machine that is well, and one where nothing is there ----------------------------------------------------------


def test_a_machine_that_is_well_has_no_problem_and_nothing_is_written(lab):
    lab.start_server()
    lab.start_worker("w1")
    before = everything_below(lab.home)
    found = lab.look(config="w1.toml")
    assert everything_below(lab.home) == before
    assert [one for one in found.values() if one["state"] == "problem"] == []
    assert found["python"]["value"]["version"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["version"]["value"]["version"] == kueue.__version__
    config = found["config"]["value"]
    assert config["fingerprint"] == identity.identity_of(SECRET).fingerprint
    assert config["mode"] == "0600"
    server = found["server"]["value"]
    assert (server["version"], server["pid"]) == (kueue.__version__, lab.server.pid)
    assert server["tcp"] == {"127.0.0.1": "open"}
    assert 0 < server["rtt_ms"] < 5000
    clock = found["clock"]["value"]
    assert abs(clock["offset_seconds"]) <= clock["uncertainty_seconds"] + 0.01, "it is the same clock"
    worker = found["worker"]
    assert worker["state"] == "ok"
    assert worker["value"]["pid"] == lab.workers["w1"].pid
    assert worker["value"]["version"] == kueue.__version__
    for name, path in (("home", lab.home), ("cwd", lab.folder)):
        value = found[name]["value"]
        assert (value["path"], value["inode"]) == (str(path), path.stat().st_ino)
        assert value["fstype"]
        assert value["source"]
    assert found["state"]["value"]["path"] == str(lab.folder / "state")


def test_a_person_gets_one_line_for_each_finding_and_colour_only_on_a_terminal(lab):
    done = lab.run()
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if "." not in line.split()[1]] == list(TOPICS)
    assert {line.split()[0] for line in lines} <= set(STATES)
    assert "\x1b" not in done.stdout
    outer, inner = os.openpty()
    command = [sys.executable, "-m", "kueue.cli.main", "-c", str(lab.folder / "lab.toml"), "doctor"]
    with subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=lab.environment(TERM="xterm"), cwd=lab.folder
    ) as process:
        os.close(inner)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while piece := os.read(outer, 65536):
                shown += piece
        os.close(outer)
    assert process.returncode == 1, "no server runs"
    assert b"\x1b[31mproblem" in shown


def test_without_settings_server_terminal_and_variables_it_says_so_and_makes_none(lab):
    before = everything_below(lab.home)
    done = subprocess.run(
        [sys.executable, "-m", "kueue.cli.main", "doctor", "--json"],
        env={"HOME": str(lab.home), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd="/", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["config"]["state"] == "problem"
    assert found["config"]["text"] == f"There is no settings file {lab.home}/.config/kueue/config.toml."
    assert found["server"]["state"] == found["worker"]["state"] == "note"
    assert found["state"]["value"]["path"] == f"{lab.home}/.local/state/kueue"
    assert everything_below(lab.home) == before


def test_a_dead_home_a_mute_server_and_hung_tools_do_not_hold_it_up(lab, hung, tmp_path):
    environ = lab.environment(PATH=f"{lab.tools}:{os.environ['PATH']}")
    hung(lab.home)  # from here on the test itself must not look there
    for name in ("quota", "loginctl", "systemctl", "timedatectl", "screen"):
        lab.tool(name, "sleep 60")
    with socket.create_server(("127.0.0.1", lab.port)):
        found = lab.look(env=environ)
    assert lab.seconds < LONGEST_SECONDS + LATER_SECONDS
    print(f"\neverything hangs: {lab.seconds:.1f} s")
    assert found["home"]["state"] == "problem"
    assert "does not answer" in found["home"]["text"]
    assert "deadserver:/home" in found["home"]["text"], "where it comes from is known without it"
    assert f"findmnt {lab.home}" in found["home"]["hint"]
    assert found["shell"]["state"] == "problem"
    assert found["server"]["state"] == "problem"


def test_settings_on_a_dead_file_server_are_said_to_be_there(lab, hung):
    place = hung(lab.folder / "dead")
    found = lab.look(config="dead/config.toml")
    assert found["config"]["state"] == "problem"
    assert f"does not answer (while reading {place}/config.toml)" in found["config"]["text"]
    assert found["server"]["text"] == "Not asked: the settings cannot be used."
    assert found["home"]["state"] != "problem"


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_that_others_can_read_are_a_problem_with_the_command_that_mends_it(lab):
    (lab.folder / "lab.toml").chmod(0o644)
    config = lab.look()["config"]
    assert config["state"] == "problem"
    assert "(mode 0644)" in config["text"]
    assert f"chmod 600 {lab.folder}/lab.toml" in config["hint"]


def test_settings_that_cannot_be_parsed_are_a_problem_with_the_line(lab):
    path = lab.folder / "lab.toml"
    path.write_text("[common_settings]\nserver_name = ralab01\n")
    path.chmod(0o600)
    config = lab.look()["config"]
    assert config["state"] == "problem"
    assert "line 2" in config["text"]


def test_a_mistake_of_another_section_does_not_hide_the_server(lab):
    lab.start_server()
    lab.config("lab", worker_settings={"cores": "many"})
    found = lab.look()
    assert found["config"]["state"] == "problem"
    assert "worker_settings.cores must be a whole number" in found["config"]["text"]
    assert found["server"]["state"] == "ok"


def test_unknown_keys_weak_secrets_a_rotation_and_an_open_directory_are_told(lab):
    weak = {"shared_secret": "shorter one", "shared_secret_previous": SECRET, "sever_name": "x", "prot": 1}
    lab.config("lab", common_settings=weak)
    lab.folder.chmod(0o777)
    try:
        found = lab.look()
    finally:
        lab.folder.chmod(0o700)
    assert "did you mean server_name?" in found["config.key"]["text"]
    assert "common_settings.prot" in found["config.key2"]["text"]
    assert "has only 11 characters" in found["config.secret"]["text"]
    assert identity.identity_of(SECRET).fingerprint in found["config.rotation"]["text"]
    assert found["config"]["value"]["previous_fingerprint"] == identity.identity_of(SECRET).fingerprint
    assert found["config.directory"]["hint"] == f"Type `chmod go-w {lab.folder}`."
    assert {found[name]["state"] for name in found if name.startswith("config.")} == {"warning", "note"}


# --- server ----------------------------------------------------------------------------------------------------------


def test_nobody_at_the_port_of_this_machine_means_that_no_server_runs(lab):
    server = lab.look()["server"]
    assert server["state"] == "problem"
    assert server["text"] == f"127.0.0.1, port {lab.port} (127.0.0.1) is not reached: no server runs on this machine."
    assert "`kueue up`" in server["hint"]
    assert server["value"]["tcp"] == {"127.0.0.1": "ECONNREFUSED"}


def test_a_server_that_listens_elsewhere_is_reached_by_the_local_socket_alone(lab):
    lab.settings["server_settings"]["bind_addresses"] = "127.0.0.2"
    lab.config()
    lab.server = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), log="server")
    lab.until(lambda: lab.kueue("--patience", "0", "version").returncode == 0, "it answers", process=lab.server)
    server = lab.look()["server"]
    assert server["state"] == "warning"
    assert "nobody listens there" in server["text"]
    assert "workers elsewhere do not" in server["text"]
    assert server["value"]["version"] == kueue.__version__


def test_an_unknown_name_is_told_from_a_server_that_is_away(lab):
    lab.config("lab", common_settings={"server_name": "no-such-host.invalid"})
    server = lab.look()["server"]
    assert server["state"] == "problem"
    assert server["text"].startswith("The server's name no-such-host.invalid is not known here: ")
    assert "/etc/hosts" in server["hint"]


def test_a_port_that_swallows_connections_is_guessed_to_be_a_firewall(lab):
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", lab.port))
        full.listen(0)
        for _ in range(4):  # the queue takes one; whoever comes after gets no answer
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", lab.port))
        server = lab.look()["server"]
    assert server["state"] == "problem"
    assert server["value"]["tcp"] == {"127.0.0.1": "ETIMEDOUT"}
    assert "a firewall drops the connection" in server["text"]
    assert f"ufw allow {lab.port}/tcp" in server["hint"]


@only_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_machine_without_network_has_no_route(lab):
    lab.config("lab", common_settings={"server_name": "192.0.2.1"})
    server = lab.look(wrap=("unshare", "-n"))["server"]
    assert server["state"] == "problem"
    assert server["value"]["tcp"] == {"192.0.2.1": "ENETUNREACH"}
    assert "no route" in server["text"]


def test_a_mute_listener_is_no_server(lab):
    with socket.create_server(("127.0.0.1", lab.port)):
        server = lab.look()["server"]
    assert server["state"] == "problem"
    assert "is not reached" in server["text"]
    assert server["value"]["tcp"] == {"127.0.0.1": "open"}


def test_another_program_at_the_port_is_told_from_another_secret(lab):
    def greet(listener):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(ConnectionError):  # the first that comes leaves at once
                    peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    peer.recv(1000)

    with socket.create_server(("127.0.0.1", lab.port)) as listener:
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        server = lab.look()["server"]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert server["state"] == "problem"
    assert server["text"] == f"What listens at 127.0.0.1, port {lab.port} is no kueue server."


def test_another_secret_is_told_from_a_server_that_is_away(lab):
    lab.start_server()
    lab.config("lab", common_settings={"shared_secret": "quite another secret of the lab"})
    server = lab.look()["server"]
    assert server["state"] == "problem"
    assert "does not take our secret" in server["text"]
    assert "fingerprint" in server["hint"]


def test_a_server_that_has_not_read_the_new_secret_is_told(lab):
    lab.start_server()
    secrets = {"shared_secret": "quite another secret of the lab", "shared_secret_previous": SECRET}
    lab.config("lab", common_settings=secrets)
    found = lab.look()
    assert found["server"]["state"] == "ok"
    assert "takes the previous secret only" in found["server.secret"]["text"]


def test_another_version_and_another_time_of_the_server_are_warnings(lab):
    change = (
        "import time, kueue, kueue.clock\nkueue.__version__ = '0.0.9'\nkueue.clock.wall = lambda: time.time() - 100"
    )
    lab.server = lab.start_changed(change, "kueue.server.main", "lab.toml", "server")
    lab.until(lab.answers, "the server answers", process=lab.server)
    found = lab.look()
    assert found["server"]["state"] == "ok"
    assert found["server.version"]["text"] == f"The server is kueue 0.0.9, this is {kueue.__version__}."
    clock = found["clock"]
    assert clock["state"] == "warning"
    assert -101 < clock["value"]["offset_seconds"] < -99
    assert "behind ours" in clock["text"]


def test_localhost_is_told_to_be_another_machine_elsewhere(lab):
    lab.settings["common_settings"]["server_name"] = "localhost"
    lab.config()
    lab.start_server()
    found = lab.look()
    assert found["server"]["state"] == "ok"
    assert found["server.name"]["state"] == "note"


@only_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_an_address_of_etc_hosts_that_only_this_machine_can_reach_is_told(lab):
    hosts = lab.folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 ralab01\n")
    lab.settings["server_settings"]["bind_addresses"] = "0.0.0.0"
    lab.config()
    lab.start_server()
    lab.config("lab", common_settings={"server_name": "ralab01"})
    script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    found = lab.look(wrap=("unshare", "-m", "sh", "-c", script, "sh"))
    assert found["server"]["state"] == "ok"
    assert found["server.name"]["state"] == "warning"
    assert "ralab01 is 127.0.1.1 here" in found["server.name"]["text"]


# --- worker ----------------------------------------------------------------------------------------------------------


def test_no_worker_is_a_note(lab):
    lab.start_server()
    worker = lab.look()["worker"]
    assert worker["state"] == "note"
    assert "kueue_worker" in worker["hint"]


def test_an_offline_worker_is_told_with_the_command_that_mends_it(lab):
    lab.start_server()
    lab.start_worker("w1")
    assert lab.kueue("node", "offline", "w1").returncode == 0
    worker = lab.look(config="w1.toml")["worker"]
    assert worker["state"] == "note"
    assert worker["value"]["state"] == "offline"
    assert worker["hint"] == "Type `kueue node online w1`."


def test_a_worker_of_another_version_is_a_warning(lab):
    lab.start_server()
    lab.config("w1", worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    process = lab.start_changed("import kueue\nkueue.__version__ = '0.0.9'", "kueue.worker.main", "w1.toml", "w1")
    lab.until(lambda: lab.worker("w1").get("state") == "online", "it is online", process=process)
    worker = lab.look(config="w1.toml")["worker"]
    assert worker["state"] == "warning"
    assert f"is kueue 0.0.9, installed is {kueue.__version__}" in worker["text"]
    assert f"`kill {process.pid}`" in worker["hint"]


def test_a_worker_that_the_server_does_not_know_is_a_problem(lab):
    lab.start_server()
    named = {**lab.settings["worker_settings"], "worker_name": "w1"}
    lab.config("lost", worker_settings=named, common_settings={"server_port": free_port()})
    lab.config("w1", worker_settings=named)
    process = lab.start("kueue.worker.main", "-c", str(lab.folder / "lost.toml"), log="w1")
    lock = lab.folder / "state/workers/w1/lock"
    lab.until(lambda: lock.exists() and lock.read_text(), "it runs", process=process)
    worker = lab.look(config="w1.toml")["worker"]
    assert worker["state"] == "problem"
    assert f"The worker w1 (pid {process.pid}) runs, but the server does not know it." == worker["text"]


def test_a_silent_worker_is_a_problem_while_it_runs_and_a_warning_when_it_does_not(lab):
    lab.start_server(
        server_settings={"worker_timeout_seconds": 10, "maintenance_interval_seconds": 1, "bind_addresses": "127.0.0.1"}
    )
    process = lab.start_worker("w1")
    assert lab.submit("-c", "1", "-r", "10", "sleep", "300") == 0
    lab.until(lambda: lab.job(0)["state"] == "running", "the job runs")
    process.send_signal(signal.SIGSTOP)
    lab.until(lambda: lab.worker("w1").get("state") == "silent", "the server calls it silent", seconds=60)
    worker = lab.look(config="w1.toml")["worker"]
    assert worker["state"] == "problem"
    assert "is silent at the server" in worker["text"]
    for pid in lab.runners():  # they would start it again
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    worker = lab.look(config="w1.toml")["worker"]
    assert worker["state"] == "warning"
    assert "does not run, and the server waits for it (silent)" in worker["text"]


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_home_that_is_not_there_is_a_problem(lab):
    home = lab.look(env={**lab.environment(), "HOME": str(lab.folder / "away")})["home"]
    assert home["state"] == "problem"
    assert home["text"] == f"The home {lab.folder}/away is not there."


@only_root
def test_a_read_only_home_and_a_home_of_somebody_else_are_warnings(lab):
    os.chown(lab.home, 12345, 12345)
    home = lab.look()["home"]
    assert home["state"] == "warning"
    assert "belongs to another user (uid 12345)" in home["text"]
    lab.mount("tmpfs", lab.home, "ro,size=1m")
    home = lab.look()["home"]
    assert home["state"] == "warning"
    assert "read-only" in home["text"]
    assert home["value"]["fstype"] == "tmpfs"


def test_it_finds_the_same_where_whoever_started_it_ignores_the_end_of_children(lab):
    lab.tool("loginctl", "echo it is broken >&2; exit 1")
    usual, found = lab.look(), lab.look(wrap=DEAF)
    assert {name: one["state"] for name, one in found.items()} == {name: one["state"] for name, one in usual.items()}
    assert found["linger"]["text"] == usual["linger"]["text"]


def test_a_current_directory_that_was_removed_is_a_warning(lab):
    gone = lab.folder / "gone"
    gone.mkdir()
    found = lab.look(cwd=gone, wrap=("sh", "-c", f'rmdir {gone}; exec "$@"', "sh"))
    assert found["cwd"]["state"] == "warning"
    assert found["cwd"]["value"]["path"] == ""


@only_root
def test_a_state_directory_in_memory_and_a_full_one_are_told(lab):
    state = lab.folder / "state"
    lab.mount("tmpfs", state, "size=64m,mode=0700,nr_inodes=4000")
    found = lab.look()
    assert found["state"]["state"] == "warning"
    assert found["state"]["value"]["fstype"] == "tmpfs"
    assert "is in memory (tmpfs)" in found["state.memory"]["text"]
    assert found["spool"]["state"] == "warning"
    assert "output_limit_mb" in found["spool"]["hint"]
    with (state / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))
    found = lab.look()
    assert found["state"]["state"] == "problem"
    assert "0 MB free: too little for the queue" in found["state"]["text"]
    assert "clean-jobs" in found["state"]["hint"]


@only_root
def test_a_state_directory_without_files_left_is_a_problem(lab):
    state = lab.folder / "state"
    lab.mount("tmpfs", state, "size=64m,mode=0700,nr_inodes=20")
    with contextlib.suppress(OSError):
        for number in range(30):
            (state / str(number)).touch()
    found = lab.look()["state"]
    assert found["state"] == "problem"
    assert found["value"]["free_inodes"] == 0
    assert "and 0 files: too little" in found["text"]


@only_root
def test_a_state_directory_that_is_not_ours_to_write_is_a_problem(lab):
    state = lab.folder / "state"
    state.mkdir()
    os.chown(state, 12345, 12345)
    assert "belongs to another user (uid 12345)" in lab.look()["state"]["text"]
    os.chown(state, 0, 0)
    state.chmod(0o770)
    found = lab.look()["state"]
    assert found["state"] == "problem"
    assert found["hint"] == f"Type `chmod go-w {state}`."
    state.rmdir()
    state.touch()
    assert lab.look()["state"]["text"] == f"{state} is not a directory."
    state.unlink()
    lab.mount("tmpfs", state, "ro,size=64m,mode=0700")
    found = lab.look()["state"]
    assert found["state"] == "problem"
    assert "mounted read-only" in found["text"]


def test_a_tmpdir_that_is_not_there_is_a_warning(lab):
    found = lab.look(env=lab.environment(TMPDIR="/no/such/folder"))
    assert found["spool.tmpdir"]["text"] == "TMPDIR is /no/such/folder, which is not there."


def test_an_account_over_its_quota_is_a_warning(lab):
    lab.tool("quota", 'echo "Disk quotas for user ada:"; echo "/dev/sda1 1000* 900 1100 6days"; exit 1')
    found = lab.look()["home.quota"]
    assert found["state"] == "warning"
    assert "1000*" in found["text"]


# --- the host --------------------------------------------------------------------------------------------------------

BASH_ONLY = pytest.mark.skipif(
    not os.path.realpath(__import__("pwd").getpwuid(os.getuid()).pw_shell).endswith("/bash"),
    reason="the login shell of whoever runs the tests is not bash",
)


@BASH_ONLY
@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("echo Welcome to ralab01", "warning", "prints something before a command sent by ssh runs, which breaks scp"),
        ("echo Welcome >&2", "warning", "Welcome"),
        ("umask 000", "warning", "others can change what jobs write"),
        ("umask 077", "ok", "silent"),
        ("exit 3", "problem", "does not run a command sent by ssh: exit code 3"),
        ("exec sleep 60", "problem", "it does not come back"),
    ],
)
def test_start_up_files_of_the_shell_that_print_exit_or_hang_are_told(lab, script, state, text):
    (lab.home / ".bashrc").write_text(f"{script}\n")
    shell = lab.look()["shell"]
    assert shell["state"] == state
    assert text in shell["text"]
    assert lab.seconds < LONGEST_SECONDS + LATER_SECONDS


@BASH_ONLY
def test_programs_that_a_command_sent_by_ssh_finds_are_named(lab):
    for name in ("kueue", "kueue_server", "kueue_worker"):
        lab.tool(name, "exit 0")
    assert "not on the PATH of a command sent by ssh" in lab.look()["version"]["text"]
    (lab.home / ".bashrc").write_text(f"PATH={lab.tools}:$PATH\n")
    version = lab.look()["version"]
    assert version["state"] == "ok"
    assert version["value"]["programs"]["kueue_worker"] == f"{lab.tools}/kueue_worker"


def test_a_stale_ssh_agent_is_a_note(lab):
    found = lab.look(env=lab.environment(SSH_AUTH_SOCK=str(lab.folder / "agent.17")))
    assert found["shell.agent"]["state"] == "note"
    with socket.socket(socket.AF_UNIX) as agent:
        directory = os.open(lab.folder, os.O_PATH)
        agent.bind(f"/proc/self/fd/{directory}/a")
        os.close(directory)
        agent.listen()
        short = Path(f"/tmp/kueue-agent-{os.getpid()}-{lab.port}")
        short.symlink_to(lab.folder / "a")
        try:
            assert "shell.agent" not in lab.look(env=lab.environment(SSH_AUTH_SOCK=str(short)))
        finally:
            short.unlink()


def test_low_limits_are_told(lab):
    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
        resource.setrlimit(resource.RLIMIT_NPROC, (400, 400))
        resource.setrlimit(10, (1000, 1000))  # RLIMIT_LOCKS

    found = lab.look(preexec_fn=lower)
    assert found["limits"]["state"] == "problem"
    assert "jobs cannot be marked" in found["limits"]["text"]
    assert "At most 500 open files" in found["limits.nofile"]["text"]
    assert "At most 400 processes" in found["limits.nproc"]["text"]


@only_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_hidden_proc_is_a_note(lab):
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    found = lab.look(wrap=("unshare", "-m", "sh", "-c", script, "sh"))
    assert found["limits.hidepid"]["state"] == "note"


LOGIND = """case "$*" in
*KillUserProcesses*) echo KillUserProcesses={kills}; echo KillExcludeUsers=root2 ;;
*Linger*) echo Linger={linger} ;;
esac"""


@pytest.mark.parametrize(
    ("kills", "linger", "state", "text"),
    [
        ("no", "yes", "ok", "services run without a login"),
        ("no", "no", "note", "end at logout"),
        ("yes", "no", "warning", "KillUserProcesses"),
    ],
)
def test_linger_is_judged_by_what_ends_at_logout(lab, kills, linger, state, text):
    lab.tool("loginctl", LOGIND.format(kills=kills, linger=linger))
    lab.tool("systemctl", "echo Failed to connect to bus: No medium found >&2; exit 1")
    linger_found = lab.look()["linger"]
    assert linger_found["state"] == state
    assert text in linger_found["text"]
    assert ("enable-linger" in linger_found["hint"]) == (state != "ok")


def unit(name, enabled, active):
    return f"Id={name}.service\nLoadState=loaded\nUnitFileState={enabled}\nActiveState={active}\n"


@pytest.mark.parametrize(
    ("units", "state", "text"),
    [
        ([], "ok", "no unit of kueue is installed"),
        ([("kueue-worker", "enabled", "active")], "ok", "kueue-worker active"),
        ([("kueue-worker", "enabled", "inactive")], "note", "Enabled, but not running here: kueue-worker"),
        (
            [("kueue-server", "enabled", "failed"), ("kueue-worker", "enabled", "active")],
            "problem",
            "Failed: kueue-server",
        ),
    ],
)
def test_units_are_judged_by_their_state(lab, units, state, text):
    missing = "Id=kueue-restart-workers.service\nLoadState=not-found\nUnitFileState=\nActiveState=inactive\n"
    (lab.folder / "units").write_text("\n".join([*(unit(*one) for one in units), missing]))
    lab.tool("systemctl", f"cat {lab.folder}/units")
    lab.tool("loginctl", LOGIND.format(kills="no", linger="no"))
    found = lab.look()
    assert found["systemd"]["state"] == state
    assert text in found["systemd"]["text"]
    if any(enabled == "enabled" for _, enabled, _ in units):
        assert found["linger"]["state"] == "warning", "enabled units need it"


def test_without_screen_it_says_so(lab):
    found = lab.look(env={**lab.environment(), "PATH": str(lab.tools)})
    assert found["screen"]["state"] == "note"
    assert "Not installed" in found["screen"]["text"]


@pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed")
def test_sessions_of_screen_are_named_and_dead_ones_and_a_bad_directory_are_told(lab):
    sockets = Path(f"/tmp/kueue-screen-{os.getpid()}-{lab.port}")  # a socket's path is short
    sockets.mkdir(mode=0o700)
    env = lab.environment(SCREENDIR=str(sockets))
    try:
        subprocess.run(["screen", "-dmS", "kueue_worker", "sleep", "300"], env=env, check=True, timeout=20)
        lab.until(lambda: list(sockets.iterdir()), "the session is there")
        found = lab.look(env=env)["screen"]
        assert found["state"] == "ok"
        (session,) = found["value"]["sessions"]
        assert session.endswith(".kueue_worker")
        assert session in found["text"]
        os.kill(int(session.partition(".")[0]), signal.SIGKILL)
        lab.until(lambda: not Path(f"/proc/{session.partition('.')[0]}").exists(), "it is dead")
        found = lab.look(env=env)["screen"]
        assert found["state"] == "note"
        assert f"dead sessions: {session}" in found["text"]
        sockets.chmod(0o755)
        found = lab.look(env=env)["screen"]
        assert found["state"] == "warning"
        assert "mode 700" in found["text"]
    finally:
        shutil.rmtree(sockets)


@pytest.mark.parametrize(("said", "synchronised"), [("yes", True), ("no", False), ("", None)])
def test_whether_the_clock_is_synchronised_is_what_timedatectl_says(lab, said, synchronised):
    lab.tool("timedatectl", f"echo {said}")
    clock = lab.look()["clock"]
    assert clock["value"]["synchronised"] is synchronised
    assert ("is not synchronised" in clock["text"]) == (synchronised is False)
