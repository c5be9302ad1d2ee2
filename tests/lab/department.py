"""kueue as a university department uses it on a `Cluster`: installed once into the shared home, operated from the first host.

The server is a service of the user there, the restart tool runs there in a real ``screen``. The state of each host is
on its own disk.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.cluster import Cluster, NetworkedHost
from tests.lab.host import USER
from tests.support import wheel

HOME = f"/home/{USER}"
STATE = "/var/tmp/kueue"
BIN = f"{HOME}/venv/bin"
TOOL = "kueue_restart_workers"
UP = "Its worker is up."
CTRL_C = "\003"
RECHECK_SECONDS = 2.0
CONNECT_SECONDS = 6.0
"""The limit for reaching a host."""

CONFIG = """
[common_settings]
shared_secret = "a secret of this department and of nobody else"
server_name = "{server}"
state_dir = "{state}"
[server_settings]
worker_timeout_seconds = 60
[metrics_settings]
server_bind = ""
[worker_settings]
worker_max_parallel_jobs = {slots}
dynamic_check_free_resources = false
cores = 16
ram_mb = 64000
[restart_workers]
ssh_user = "{user}"
hostnames = "{hosts}"
sleep_minutes_before_recheck = {recheck}
connect_timeout_seconds = {connect}
command_timeout_seconds = 90
"""

# Says each begin and each end; waits for the file `go` of its group. Several that fail within a second would have the
# server set their worker aside.
JOB = (
    'echo "$KUEUE_JOB_ID $KUEUE_ATTEMPT $KUEUE_WORKER $$" >> {group}.begun; echo before; sleep 1.2; '
    'until [ -e {group}.go ]; do sleep 0.5; done; echo after; echo "$KUEUE_JOB_ID" >> {group}.ended; exit {code}'
)


class Begun(NamedTuple):
    """An attempt that began, as the job itself wrote it down."""

    job: int
    attempt: int
    worker: str
    pid: int


class Look(NamedTuple):
    """A line of the tool about a host."""

    at: float
    """UTC seconds."""
    host: str
    text: str


class Department:
    """kueue on a cluster; `close` is the cluster's."""

    def __init__(self, cluster: Cluster, built: Path, *, slots: int = 7) -> None:
        self.cluster = cluster
        self.names = list(cluster.hosts)
        self.desk = cluster[self.names[0]]
        """Where server and restart tool run."""
        self.home = cluster.home
        self.jobs = self.home / "jobs"
        self.groups = 0
        # Its sessions write down what is shown at once.
        (self.home / ".screenrc").write_text("logfile flush 0\n")
        self.jobs.mkdir()
        text = CONFIG.format(
            server=self.names[0],
            state=STATE,
            slots=slots,
            user=USER,
            hosts=" ".join(self.names),
            recheck=RECHECK_SECONDS / 60,
            connect=CONNECT_SECONDS,
        )
        place = self.home / ".config/kueue"
        place.mkdir(parents=True)
        (place / "config.toml").write_text(text)
        (place / "config.toml").chmod(0o600)
        for path in (self.home / ".config", self.home / ".screenrc", self.jobs):
            cluster.own(path)
        self.install(built)
        self.desk.user(f"{BIN}/kueue_install", "systemd", "server", "--start")
        self.until(self.answers, "the server answers")

    # --- the installation --------------------------------------------------------------------------------------------

    def install(self, built: Path) -> None:
        """This wheel, over the one that is there."""
        shown = self.home / built.name
        if not shown.exists():
            shown.write_bytes(built.read_bytes())
            self.cluster.own(shown)
        make, link, put = wheel.commands(f"{HOME}/{built.name}", f"{HOME}/venv")
        fresh = [] if (self.home / "venv").exists() else [make, link]
        for command in (*fresh, put):
            self.desk.user(*command, seconds=200)

    def systemctl(self, *words: str, host: str = "") -> str:
        return (self.cluster[host] if host else self.desk).user("systemctl", "--user", *words)

    # --- the queue ---------------------------------------------------------------------------------------------------

    def kueue(self, *words: str) -> str:
        return self.desk.user("env", "-C", f"{HOME}/jobs", f"{BIN}/kueue", *words)

    def answers(self) -> bool:
        return self.finds(f"{BIN}/kueue", "list-workers", "--json")[0] == 0

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the server says of the workers that it sees, by name."""
        rows = json.loads(self.kueue("list-workers", "--json"))["workers"]
        return {row["name"]: row for row in rows if row["state"] in {"online", "offline", "set aside"}}

    def start_jobs(self, count: int) -> dict[int, int]:
        """Jobs in a new group, all of them begun: job → the exit code that it will have."""
        self.groups += 1
        codes = [10 + number for number in range(count)]
        lines = [JOB.format(group=self.group, code=code) for code in codes]
        path = self.jobs / f"{self.group}.lines"
        path.write_text("".join(f"{line}\n" for line in lines))
        self.cluster.own(path)
        ids = [
            int(word) for word in self.kueue("cmd", "-c", "1", "-r", "64", "--quiet", "--each-line", path.name).split()
        ]
        self.until(lambda: len({one.job for one in self.begun()}) == count, f"{count} jobs run")
        return dict(zip(ids, codes, strict=True))

    @property
    def group(self) -> str:
        return f"group{self.groups}"

    def begun(self) -> list[Begun]:
        path = self.jobs / f"{self.group}.begun"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [Begun(int(job), int(attempt), worker, int(pid)) for job, attempt, worker, pid in rows]

    def ended(self) -> list[int]:
        path = self.jobs / f"{self.group}.ended"
        return sorted(map(int, path.read_text().split())) if path.exists() else []

    def finish(self, jobs: dict[int, int]) -> list[dict[str, Any]]:
        """Let them end; what the server says of each in the end."""
        (self.jobs / f"{self.group}.go").touch()
        rows: list[dict[str, Any]] = []

        def have_ended() -> bool:
            rows[:] = json.loads(self.kueue("show-job", "--json", f"{min(jobs)}-{max(jobs)}"))["jobs"]
            return all(row["outcome"] for row in rows)

        self.until(have_ended, "all jobs have ended")
        return rows

    # --- the tool ----------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        """What the tool showed in its ``screen``."""
        return self.home / "tool.log"

    def start_tool(self) -> None:
        """``screen kueue_restart_workers``, as the manual has it, detached from the start."""
        line = f"cd; screen -L -Logfile {HOME}/tool.log -dmS {TOOL} {BIN}/{TOOL}"
        self.desk.ssh(self.names[0], line)
        self.until(self.tool_runs, "the tool runs in its screen")

    def tool_runs(self) -> bool:
        return f".{TOOL}\t" in self.screens(self.desk)

    def stop_tool(self) -> None:
        """Ctrl-C on its screen."""
        self.desk.user("screen", "-S", TOOL, "-X", "stuff", CTRL_C)
        self.until(lambda: not self.tool_runs(), "the tool ends")

    def tool(self, *words: str, seconds: float = 120) -> tuple[int, str, str]:
        """The exit code and what it said on both channels."""
        return self.finds(f"{BIN}/{TOOL}", *words, seconds=seconds)

    def finds(self, *words: str, seconds: float = 120) -> tuple[int, str, str]:
        """As `Host.user` on the desk, but a failure is an answer."""
        script = '"$@" >.out 2>.err; echo $?'
        code = int(self.desk.user("sh", "-c", script, "sh", *words, seconds=seconds))
        return code, (self.home / ".out").read_text(), (self.home / ".err").read_text()

    def looks(self, since: float = 0.0) -> list[Look]:
        """Each line that the tool said of a host, the oldest first; none older than `since`."""
        found = []
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.log.read_text(errors="replace").replace("\r", ""))
        for line in text.splitlines():
            parts = re.search(r"(\d{4}-[-\d:T.]+)Z\s+\w+\s+restart\s+host=(\S+) (.*)", line)
            if parts:
                at = datetime.fromisoformat(parts[1]).replace(tzinfo=timezone.utc).timestamp()
                if at >= since:
                    found.append(Look(at, parts[2], parts[3]))
        return found

    # --- workers -----------------------------------------------------------------------------------------------------

    def worker(self, name: str) -> tuple[int, int]:
        """Number there and moment of birth of the process that is the worker now; zeros: there is none."""
        host = self.cluster[name]
        try:
            pid, born = map(int, (host.disk / f"{STATE[1:]}/workers/{name}/lock").read_text().split())
            stat = host.root("cat", f"/proc/{pid}/stat")
        except (OSError, ValueError, AssertionError):
            return 0, 0
        fields = stat.rpartition(")")[2].split()
        return (pid, born) if int(fields[19]) == born and fields[0] not in "ZX" else (0, 0)

    def screens(self, host: NetworkedHost) -> str:
        return host.user("sh", "-c", "screen -ls || :")

    def sessions(self, name: str) -> list[int]:
        """Of the name of the worker, their numbers on that host."""
        return [int(pid) for pid in re.findall(r"(\d+)\.kueue_worker\t", self.screens(self.cluster[name]))]

    def all_up(self) -> dict[str, tuple[int, int]]:
        """The tool runs, and every host has a worker that the server sees."""
        for host in self.cluster.hosts.values():
            if not host.is_on:
                host.power_on()
        if not self.tool_runs():
            self.start_tool()

        def are_up() -> bool:
            # The server believes for a while in one whose host has lost its power.
            live = all(self.worker(name) != (0, 0) for name in self.names)
            return live and set(self.workers()) == set(self.names)

        self.until(are_up, "all hosts have a worker", seconds=120)
        return {name: self.worker(name) for name in self.names}

    def content(self) -> float:
        """Wait until the tool has found each worker up: the moment (UTC seconds) from which it can say nothing else.

        What it says just after `all_up` may stand on a word of the server from just before.
        """
        mark = time.time()

        def are_found() -> bool:
            return {look.host for look in self.looks(mark) if look.text.endswith(UP)} == set(self.names)

        return self.until(are_found, "the tool finds all workers up")

    # --- waiting -----------------------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], object], what: str, seconds: float = 60) -> float:
        """Wait for a condition: the moment (UTC seconds) when it held. Fails with the logs."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.told()}")
            time.sleep(0.1)
        return time.time()

    def told(self) -> str:
        """The last words of all who have a log."""
        parts = [f"--- {self.log.name}\n{self.log.read_text(errors='replace')[-6000:]}" if self.log.exists() else ""]
        on = [host for host in self.cluster.hosts.values() if host.is_on]
        parts += [f"--- {host.host_name}\n{host.journal()[-2500:]}" for host in on]
        return "\n".join(parts)
