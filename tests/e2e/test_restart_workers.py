"""The restart tool as a program: real sshd, screen, server and workers; each host has a home and a state of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.file_server import dead_file_server
from tests.support.lab import Lab
from tests.support.ports import free_port
from tests.support.sshd import CHECKOUT, Sshd, need
from tests.support.terminal import Terminal

pytestmark = pytest.mark.slow

QUICK = 0.02
"""Minutes: a little more than a second."""


class Farm:
    """A server, hosts that can be logged in to by their names, and the tool."""

    def __init__(self, folder: Path) -> None:
        need("screen")
        self.folder = folder
        self.lab = Lab(folder)
        self.hosts: dict[str, Sshd] = {}
        self.ssh = folder / "home" / ".ssh"
        self.ssh.mkdir(parents=True, mode=0o700)
        (self.ssh / "config").write_text("")
        self.sockets: list[socket.socket] = []
        self.logs = 0

    def host(self, name: str, **environment: str) -> Sshd:
        """A new host; its worker has its name."""
        sshd = Sshd(self.folder, name=name, **environment)
        self.hosts[name] = sshd
        sshd.start()
        sshd.install_worker()
        self.give_settings(name)
        self.alias(name, sshd.port, f"IdentityFile {sshd.key}", f"UserKnownHostsFile {sshd.known_hosts}")
        return sshd

    def give_settings(self, name: str) -> Path:
        path = self.lab.config(
            f"of-{name}", worker_settings={**self.lab.settings["worker_settings"], "worker_name": name}
        )
        place = self.hosts[name].home / ".config" / "kueue"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place / "config.toml")
        return place / "config.toml"

    def alias(self, name: str, port: int, *lines: str, address: str = "127.0.0.1") -> None:
        entry = [f"Host {name}", f"HostName {address}", f"Port {port}", "IdentityAgent none", *lines, ""]
        with (self.ssh / "config").open("a") as file:
            file.write("\n  ".join(entry) + "\n")

    def mute(self, name: str) -> None:
        """A host that takes connections and says nothing."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.sockets.append(listener)
        self.alias(name, listener.getsockname()[1])

    def settings(self, hostnames: str | None = None, **keys: object) -> Path:
        any_host = next(iter(self.hosts.values()), None)
        section = {
            "ssh_user": any_host.user if any_host else "nobody",
            "hostnames": " ".join(self.hosts) if hostnames is None else hostnames,
            "sleep_minutes_before_recheck": QUICK,
            "connect_timeout_seconds": 15,
            "command_timeout_seconds": 60,
            **keys,
        }
        return self.lab.config("lab", restart_workers=section)

    # --- the tool ----------------------------------------------------------------------------------------------------

    def run(self, *args: str, timeout: float = 150, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.lab.python, "-m", "kueue_ops.restart_workers", "-c", str(self.folder / "lab.toml"), *args],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env=self.environment(**environment),
            cwd=self.folder,
            check=False,
        )

    def start(self, *args: str, **environment: str) -> Tool:
        self.logs += 1
        log = f"tool{self.logs}"
        process = self.lab.start(
            "kueue_ops.restart_workers",
            "-c",
            str(self.folder / "lab.toml"),
            *args,
            log=log,
            **self.path(),
            **environment,
        )
        return Tool(self.lab, process, log)

    def path(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'ops'}"}

    def environment(self, **extra: str) -> dict[str, str]:
        return self.lab.environment(**self.path(), **extra)

    # --- the hosts ---------------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int | None:
        """Of the worker of that host."""
        lock = self.hosts[name].folder / "state" / "workers" / name / "lock"
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may be about to be written
            pid = int(lock.read_text().split()[0])
            if b"kueue.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    def screen(self, name: str, *args: str) -> str:
        host = self.hosts[name]
        return subprocess.run(
            ["screen", *args],
            capture_output=True,
            text=True,
            env={**self.lab.environment(), **host.environment},
            stdin=subprocess.DEVNULL,
            check=False,
        ).stdout

    def sessions(self, name: str) -> list[str]:
        return re.findall(r"\d+\.kueue_worker\b", self.screen(name, "-ls"))

    def is_online(self, name: str) -> bool:
        return self.lab.worker(name).get("state") == "online"

    def close(self) -> None:
        for process in self.lab.processes:
            if process.poll() is None:
                process.kill()
        for host in self.hosts.values():
            host.close()
        for one in self.sockets:
            one.close()
        self.lab.close()


class Tool:
    """One run of the tool in the background."""

    def __init__(self, lab: Lab, process: subprocess.Popen[bytes], log: str) -> None:
        self.lab = lab
        self.process = process
        self.name = log

    def lines(self, *words: str) -> list[str]:
        """Lines of its log that hold all these words."""
        return [line for line in self.lab.log(self.name).splitlines() if all(word in line for word in words)]

    def until(self, *words: str, count: int = 1, seconds: float = 90) -> None:
        self.lab.until(
            lambda: len(self.lines(*words)) >= count,
            f"{count} lines with {words}",
            seconds=seconds,
            process=self.process,
        )

    def moments(self, *words: str) -> list[float]:
        stamps = [line.split()[0] for line in self.lines(*words)]
        return [time.mktime(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")) + float(stamp[19:-1]) for stamp in stamps]

    def stop(self, number: int = signal.SIGTERM, *, seconds: float = 5) -> int:
        begun = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert time.monotonic() - begun < seconds, self.lab.log(self.name)
        return code


@pytest.fixture
def farm(tmp_path):
    made = Farm(tmp_path)
    yield made
    made.close()


# --- the round --------------------------------------------------------------------------------------------------------


def test_a_host_without_a_worker_has_a_detached_one_after_a_round_and_keeps_it(farm):
    farm.lab.start_server()
    farm.host("h1")
    farm.settings()
    first = farm.run("--once")
    assert first.returncode == 0, first.stderr
    assert "WARN" in first.stderr
    assert first.stdout.startswith("h1  up")
    assert farm.is_online("h1")
    assert len(farm.sessions("h1")) == 1
    pid = farm.pid("h1")
    tool = farm.start()
    tool.until("INFO", "host=h1", "is up", count=5)
    assert farm.pid("h1") == pid
    assert len(farm.sessions("h1")) == 1
    assert not tool.lines("WARN")

    os.kill(pid, signal.SIGKILL)
    tool.until("host=h1", "its worker was")
    farm.lab.until(lambda: farm.is_online("h1") and farm.pid("h1") not in {None, pid}, "a new worker", seconds=60)
    assert len(farm.sessions("h1")) == 1
    assert tool.stop() == 0


def test_hosts_that_cannot_be_reached_get_a_line_each_round_and_delay_nobody(farm):
    farm.lab.start_server()
    for name in ("mute", "mute2", "mute3"):
        farm.mute(name)
    farm.alias("closed", free_port())
    farm.host("good")
    # One lane, and three silent hosts before the good one: who is only waited for has no lane.
    farm.settings("mute mute2 mute3 closed no-such-host.invalid good", connect_timeout_seconds=8, parallel_hosts=1)
    begun = time.monotonic()
    tool = farm.start()
    farm.lab.until(lambda: farm.is_online("good"), "the good host has a worker", seconds=60, process=tool.process)
    took = time.monotonic() - begun
    for host in ("closed", "no-such-host.invalid", "mute"):
        tool.until(f"host={host}", count=2)
    assert tool.lines("host=mute")
    # The mute one takes its whole limit; nobody waits for it.
    assert tool.moments("host=good")[0] < tool.moments("host=mute")[0]
    assert took < 30
    first = tool.lines("host=closed")[0]
    assert "ERROR" in first
    assert len(tool.lines("host=closed")[1]) <= len(first)
    # One is always in the middle of waiting for the mute host.
    assert tool.stop(signal.SIGINT) == 0


def test_a_tenth_of_a_minute_is_six_seconds(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.settings("closed", sleep_minutes_before_recheck=0.1)
    tool = farm.start()
    tool.until("host=closed", count=3)
    first, second, third = tool.moments("host=closed")[:3]
    assert 4 <= second - first <= 8
    assert 4 <= third - second <= 8
    assert tool.stop() == 0


def test_a_session_without_a_worker_is_renewed_and_one_of_somebody_else_is_left_alone(farm):
    farm.lab.start_server()
    host = farm.host("h1")
    farm.settings()
    stuck = host.script("kueue_worker", "#!/bin/sh\nsleep 1000\n", host.folder / "stuck")
    farm.screen("h1", "-dmS", "kueue_worker", str(stuck))
    farm.screen("h1", "-dmS", "kueue_worker", "tail", "-f", "/dev/null")
    farm.lab.until(lambda: len(farm.sessions("h1")) == 2, "the sessions are there")
    done = farm.run("--once")
    assert done.returncode == 0, done.stderr
    assert "renewed" in done.stderr
    (theirs,) = re.findall(r"the screen session (\d+\.kueue_worker) \(tail\) runs no worker", done.stderr)
    assert farm.is_online("h1")
    assert theirs in farm.sessions("h1")
    assert len(farm.sessions("h1")) == 2
    assert not _runs(stuck)


def _runs(program: Path) -> bool:
    """Is there a process that was started as this?"""
    mark = str(program).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0")[:2]:
                return True
    return False


def test_without_a_server_a_worker_is_started_and_one_that_lives_is_left_alone(farm):
    farm.lab.config()
    farm.host("h1")
    farm.host("h2")
    farm.settings()
    tool = farm.start()
    farm.lab.until(lambda: farm.pid("h1") and farm.pid("h2"), "both have a worker", seconds=60, process=tool.process)
    pids = farm.pid("h1"), farm.pid("h2")
    for host in ("h1", "h2"):
        tool.until(f"host={host}", "left alone", count=3)
    assert (farm.pid("h1"), farm.pid("h2")) == pids
    assert len(tool.lines("is not reached:")) == 1
    farm.lab.start_server()
    tool.until("answers again")
    farm.lab.until(lambda: farm.is_online("h1") and farm.is_online("h2"), "both are online", seconds=60)
    assert (farm.pid("h1"), farm.pid("h2")) == pids
    assert tool.stop() == 0


@pytest.mark.parametrize("before", ["0.0.1", "99.0"])
def test_workers_of_another_version_are_renewed_one_after_the_other_and_their_jobs_go_on(farm, before):
    old = farm.folder / "old"
    shutil.copytree(CHECKOUT / "kueue", old / "kueue", ignore=shutil.ignore_patterns("__pycache__"))
    stated = old / "kueue" / "__init__.py"
    stated.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{before}"', stated.read_text()))
    farm.lab.start_server()
    for name in ("h1", "h2"):
        host = farm.host(name)
        program = host.bin / "kueue_worker"
        # The first place is where kueue is looked for; the Python may lie in the checkout, too.
        program.write_text(program.read_text().replace(str(CHECKOUT), str(old), 1))
    farm.settings()
    assert farm.run("--once").returncode == 0
    assert {farm.lab.worker(name)["version"] for name in ("h1", "h2")} == {before}
    pids = {name: farm.pid(name) for name in ("h1", "h2")}
    gate = farm.folder / "gate"
    jobs = [
        farm.lab.submit("--cpus", "16", "--", "sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done; exit 7")
        for _ in range(2)
    ]
    farm.lab.until(lambda: all(farm.lab.job(job)["state"] == "running" for job in jobs), "both jobs run")

    for host in farm.hosts.values():
        host.install_worker()
    done = farm.run("--once")
    assert done.returncode == 0, done.stderr
    renewed = [line for line in done.stderr.splitlines() if "It is renewed" in line or "is up." in line]
    # The second one is begun when the first one is seen with its new version, not before.
    assert [("It is renewed" in line) for line in renewed] == [True, False, True, False], done.stderr
    for name in ("h1", "h2"):
        assert farm.pid(name) not in {None, pids[name]}
        assert farm.lab.worker(name)["version"] != before
    gate.touch()
    for job in jobs:
        assert farm.lab.kueue("wait-job", str(job)).returncode == 7
        assert [one["number"] for one in farm.lab.job(job)["attempts"] if one["number"]] == [1]


def test_a_worker_that_crashes_at_once_is_given_up_with_the_reason_and_tried_again_when_something_changes(farm):
    farm.lab.start_server()
    host = farm.host("h1")
    good = (host.bin / "kueue_worker").read_text()
    # The last word is the log file that the worker is told to write.
    broken = 'for log; do :; done; case "$*" in *--log-file*) echo "the licence is missing" >> "$log"; exit 3;; esac\n'
    host.script("kueue_worker", good.replace("#!/bin/sh\n", f"#!/bin/sh\n{broken}"))
    farm.settings(sleep_minutes_before_recheck=0)
    tool = farm.start()
    tool.until("host=h1", "ERROR", "Given up", seconds=150)
    (line,) = tool.lines("host=h1", "ERROR", "Given up")
    assert "licence is missing" in line
    assert len(tool.lines("host=h1", "One is started")) + len(tool.lines("host=h1", "It is renewed")) == 5
    tool.until("host=h1", "Still given up", count=2)
    # A change of the settings is reason enough to try again.
    host.script("kueue_worker", good)
    os.utime(farm.folder / "lab.toml")
    farm.lab.until(lambda: farm.is_online("h1"), "it is online", seconds=60)
    assert tool.stop() == 0


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_round_says_by_its_exit_code_that_a_host_has_no_worker(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.settings("closed")
    done = farm.run("--once")
    assert done.returncode == 1
    assert done.stdout.startswith("closed  DOWN")
    assert len(done.stdout.splitlines()) == 1
    answer = json.loads(farm.run("--status", "--json").stdout)
    assert (answer["running"], answer["hosts"][0]["is_reachable"]) == (False, False)
    assert "refuses" in answer["hosts"][0]["sentence"]


def test_the_status_shows_what_the_running_tool_knows_and_says_when_none_runs(farm):
    farm.lab.start_server()
    farm.host("h1")
    farm.alias("closed", free_port())
    farm.settings("h1 closed", sleep_minutes_before_recheck=60)
    before = farm.run("--status")
    assert before.returncode == 1
    assert "does not run" in before.stderr
    assert [line.split("|")[1].strip() for line in before.stdout.splitlines()] == ["host", "h1", "closed"]

    tool = farm.start()
    tool.until("host=h1", "is up")
    tool.until("host=closed")

    def row() -> dict[str, object]:
        return json.loads(farm.run("--status", "--json").stdout)["hosts"][0]

    farm.lab.until(lambda: row()["has_worker"] and row()["is_settled"], "the status is written", seconds=60)
    shown = farm.run("--status", "--json")
    assert shown.returncode == 1  # the closed one
    answer = json.loads(shown.stdout)
    assert (answer["running"], answer["pid"], answer["server_reached"]) == (True, tool.process.pid, True)
    up, closed = answer["hosts"]
    assert (up["host"], up["is_reachable"], up["worker"], up["server"]) == ("h1", True, "h1", "alive")
    assert up["session"].startswith("screen ")
    assert up["last_action"] == "started"
    assert 3000 < up["next_wall"] - time.time() < 3800
    assert (closed["is_reachable"], closed["server"]) == (False, "not seen")
    table = farm.run("--status", "h1")
    assert table.returncode == 0
    assert re.search(
        r"h1 +\| yes +\| screen \d+ +\| h1 +\| alive +\| started .* ago +\| in 1\.0 h|60 min", table.stdout
    )
    assert not list((farm.folder / "state" / "restart_workers").glob("*.json.*"))
    assert tool.stop() == 0
    assert "does not run" in farm.run("--status").stderr


def test_stopping_the_workers_leaves_their_jobs_alone_and_is_refused_beside_the_loop(farm):
    farm.lab.start_server()
    farm.host("h1")
    farm.settings()
    tool = farm.start()
    farm.lab.until(lambda: farm.is_online("h1"), "it is online", seconds=60)
    refused = farm.run("--stop")
    assert refused.returncode == 1
    assert f"pid {tool.process.pid}" in refused.stderr
    assert farm.pid("h1")
    assert tool.stop() == 0

    gate = farm.folder / "gate"
    job = farm.lab.submit("sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done; exit 9")
    farm.lab.until(lambda: farm.lab.job(job)["state"] == "running", "the job runs")
    done = farm.run("--stop")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("h1: ")
    farm.lab.until(lambda: farm.pid("h1") is None and not farm.sessions("h1"), "the worker is gone")
    gate.touch()
    assert farm.run("--once").returncode == 0
    assert farm.lab.kueue("wait-job", str(job)).returncode == 9


def test_the_check_has_a_line_for_each_finding_on_each_host_and_compares_the_hosts(farm):
    farm.lab.start_server()
    farm.host("h1")
    farm.host("h2")
    farm.alias("closed", free_port())
    farm.settings("h1 h2 closed")
    done = farm.run("--check", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)["findings"]
    by_host = {host: {one["name"]: one for one in found if one["host"] == host} for host in ("h1", "h2", "closed")}
    assert by_host["closed"].keys() == {"reachable"}
    assert by_host["closed"]["reachable"]["state"] == "problem"
    for host in ("h1", "h2"):
        wanted = {"reachable", "python", "version", "home", "cwd", "server", "clock", "state", "linger", "screen"}
        assert wanted <= by_host[host].keys()
        assert by_host[host]["server"]["state"] == "ok"
    compared = {one["name"]: one for one in found if one["host"] == "all hosts"}
    assert compared["version"]["state"] == compared["config"]["state"] == "ok"
    assert compared["home"]["state"] == "warning"  # two homes of two names
    text = farm.run("--check", "h1")
    assert text.returncode in {0, 1}
    assert len(text.stdout.splitlines()) >= 12


def test_settings_are_copied_only_where_there_are_none_unless_forced(farm):
    farm.lab.config()
    farm.host("h1")
    farm.host("h2")
    other = farm.hosts["h2"].home / ".config/kueue/config.toml"
    shutil.rmtree(farm.hosts["h1"].home / ".config")
    kept = other.read_text()
    ours = farm.settings().read_text()
    done = farm.run("--push-config")
    assert done.returncode == 1
    assert "h1: the settings were written" in done.stdout
    assert "h2: other settings" in done.stderr
    assert "--force" in done.stderr
    written = farm.hosts["h1"].home / ".config/kueue/config.toml"
    assert written.read_text() == ours
    assert written.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == kept
    again = farm.run("--push-config", "h1")
    assert (again.returncode, again.stdout) == (0, "h1: the settings were there already\n")
    assert farm.run("--push-config", "--force", "h2").returncode == 0
    assert other.read_text() == ours


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_one_round_at_once_though_a_host_hangs(farm, number):
    farm.lab.config()
    farm.mute("mute")
    farm.alias("closed", free_port())
    farm.settings("mute closed", connect_timeout_seconds=60)
    tool = farm.start("--once")
    tool.until("host=closed")
    assert tool.stop(number) == -signal.SIGINT


def test_a_terminal_shows_how_far_it_is_and_the_log_above_it(farm):
    farm.lab.config()
    farm.mute("mute")
    farm.alias("closed", free_port())
    farm.settings("mute closed", connect_timeout_seconds=3)
    argv = [farm.lab.python, "-m", "kueue_ops.restart_workers", "-c", str(farm.folder / "lab.toml"), "--once"]
    with contextlib.closing(Terminal(argv, farm.environment(TERM="xterm"), farm.folder)) as terminal:
        terminal.until("1/2")
        shown = terminal.until("mute    DOWN", "closed  DOWN", seconds=60)
        assert "ERROR restart  host=closed" in shown
    piped = farm.run("--once")
    assert "1/2" not in piped.stderr


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (None, ("[restart_workers]", "hostnames =", "Hint")),
        ({"ssh_user": "a"}, ("hostnames",)),
        ({"ssh_user": "a", "hostnames": ""}, ("hostnames",)),
        ({"ssh_user": "a", "hostnames": " \n "}, ("names no host", "Hint")),
        ({"ssh_user": "a", "hostnames": "h1 h2:ssh"}, ("h2:ssh", "Hint")),
        ({"ssh_user": "a", "hostnames": "h1", "sleep_minutes_before_recheck": -1}, ("sleep_minutes",)),
    ],
)
def test_wrong_settings_are_said_in_a_sentence(farm, section, words):
    farm.lab.config("lab", **({} if section is None else {"restart_workers": section}))
    done = farm.run("--once")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_settings_file_it_is_said_so(farm):
    done = farm.run("--once", "-c", str(farm.folder / "none.toml"))
    assert done.returncode == 2
    assert "There is no settings file" in done.stderr


def test_hosts_named_twice_and_unknown_keys_are_remarked_once(farm):
    farm.lab.config()
    port = free_port()
    farm.alias("closed", port)
    farm.settings("closed CLOSED closed", sleep_minute_before_recheck=1)
    done = farm.run("--once")
    assert len(done.stdout.splitlines()) == 1
    assert len(re.findall("more than once", done.stderr)) == 1
    assert len(re.findall("did you mean sleep_minutes_before_recheck", done.stderr)) == 1


def test_a_host_that_is_not_in_the_settings_is_refused(farm):
    farm.lab.config()
    farm.settings("ralab01 ralab02")
    done = farm.run("--status", "ralab3")
    assert done.returncode == 1
    assert "Did you mean ralab0" in done.stderr


def test_a_second_one_says_that_the_first_one_runs_and_a_hangup_looks_at_all_hosts_now(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.alias("other", free_port())
    farm.settings("closed", sleep_minutes_before_recheck=100_000)
    tool = farm.start()
    tool.until("host=closed")
    for args in ([], ["--once"]):
        second = farm.run(*args)
        assert second.returncode == 1
        assert f"running already (pid {tool.process.pid})" in second.stderr
        assert f"kill -HUP {tool.process.pid}" in second.stderr
    farm.settings("closed other", sleep_minutes_before_recheck=100_000)
    tool.process.send_signal(signal.SIGHUP)
    tool.until("host=closed", count=2)
    tool.until("host=other")
    farm.lab.config("lab", restart_workers={"ssh_user": "a", "hostnames": ""})
    tool.process.send_signal(signal.SIGHUP)
    tool.until("the settings stay as they were")
    assert tool.stop(signal.SIGINT) == 0


def test_a_second_one_beside_one_round_is_not_told_of_a_hangup_which_would_end_that(farm):
    farm.lab.config()
    farm.mute("mute")
    farm.alias("closed", free_port())
    farm.settings("mute closed", connect_timeout_seconds=60)
    tool = farm.start("--once")
    tool.until("host=closed")
    for args in ([], ["--once"], ["--stop"]):
        second = farm.run(*args)
        assert second.returncode == 1
        assert f"(pid {tool.process.pid})" in second.stderr
        assert f"kill {tool.process.pid}" in second.stderr
        assert "-HUP" not in second.stderr
    assert tool.stop() == -signal.SIGINT


def test_a_second_one_is_refused_also_where_the_settings_name_another_state_directory_since(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    here = {"KUEUE_STATE_DIR": ""}

    def settings(place: str) -> None:
        common = {**farm.lab.settings["common_settings"], "state_dir": str(farm.folder / place)}
        farm.lab.settings["common_settings"] = common
        farm.settings("closed", sleep_minutes_before_recheck=60)

    settings("one")
    tool = farm.start(**here)
    tool.until("host=closed")
    for count, place in enumerate(["two", "one", "two"], 2):
        settings(place)
        tool.process.send_signal(signal.SIGHUP)
        tool.until("looked at every 60 min", count=count)
        second = farm.run(**here)
        assert second.returncode == 1
        assert f"running already (pid {tool.process.pid})" in second.stderr
        assert json.loads(farm.run("--status", "--json", **here).stdout)["pid"] == tool.process.pid
    settings("one")
    assert farm.run("--once", **here).returncode == 1  # the first place stays its own, too
    assert tool.stop() == 0


def test_a_home_whose_name_is_no_text_ends_nothing(farm):
    farm.lab.config()
    farm.settings("h1")
    home = os.fsencode(farm.folder) + b"/h\xe9"
    os.makedirs(home + b"/.ssh/config")
    done = farm.run("--once", HOME=os.fsdecode(home))
    assert done.returncode == 1
    assert re.fullmatch("h1  DOWN  .*/h\ufffd/.ssh/config cannot be read: .*\n", done.stdout), done.stdout
    tool = farm.start(HOME=os.fsdecode(home))
    tool.until("host=h1", "cannot be read", count=2)
    (row,) = json.loads(farm.run("--status", "--json").stdout)["hosts"]
    assert row["sentence"].startswith(os.fsdecode(home))
    assert tool.stop() == 0


def test_settings_on_a_dead_file_server_hold_up_neither_looks_nor_signals(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.alias("other", free_port())
    place = farm.folder / "server"
    place.mkdir()
    farm.settings("closed").rename(place / "lab.toml")
    tool = farm.start("-c", str(place / "lab.toml"))
    tool.until("host=closed")
    with dead_file_server(place):
        tool.process.send_signal(signal.SIGHUP)
        tool.until("host=closed", count=len(tool.lines("host=closed")) + 3)
        farm.settings("closed other").rename(farm.folder / "next.toml")
        assert not tool.lines("host=other")
    (farm.folder / "next.toml").rename(place / "lab.toml")
    tool.process.send_signal(signal.SIGHUP)
    tool.until("host=other")
    with dead_file_server(place):
        tool.process.send_signal(signal.SIGHUP)
        assert tool.stop() == 0


def test_a_service_manager_is_told_that_it_is_ready_alive_and_stopping(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.settings("closed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        address = farm.folder / "notify"
        channel.bind(str(address))
        channel.settimeout(30)
        tool = farm.start(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="600000")
        said: list[str] = []
        while said.count("WATCHDOG=1") < 3 or not any(word.startswith("STATUS=") for word in said):
            said.append(channel.recv(4096).decode())
        assert said[0] == "READY=1"
        tool.process.send_signal(signal.SIGHUP)
        while not said[-1].startswith("RELOADING=1\nMONOTONIC_USEC="):
            said.append(channel.recv(4096).decode())
        while said[-1] != "READY=1":
            said.append(channel.recv(4096).decode())
        assert tool.stop() == 0
        while said[-1] != "STOPPING=1":
            said.append(channel.recv(4096).decode())


@pytest.mark.parametrize("option", ["--json", "--force"])
def test_options_that_do_not_fit_are_refused(farm, option):
    farm.lab.config()
    done = farm.run(option)
    assert done.returncode == 2
    assert option in done.stderr


def test_results_go_to_any_stream_and_what_cannot_be_written_is_an_error_of_one_line(farm):
    farm.lab.config()
    farm.alias("closed", free_port())
    farm.settings("closed münchen.invalid")
    plain = farm.run("--once", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert plain.returncode == 1
    assert len(plain.stdout.splitlines()) == 2
    tool = f"{farm.lab.python} -m kueue_ops.restart_workers -c {farm.folder / 'lab.toml'}"

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, env=farm.environment(), check=False, timeout=60
        )

    silent = shell(f"{tool} --once 2>&-")
    assert silent.returncode == 1
    assert len(silent.stdout.splitlines()) == 2
    full = shell(f"{tool} --once >/dev/full")
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1].startswith("Error: The results cannot be written")
