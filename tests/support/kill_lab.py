"""A laboratory whose programs are killed: finds keepers, spawners and jobs by what the kernel says of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kueue import client, errors, places, transport
from tests.support.feature_lab import DONE, SMALL, FeatureLab

__all__ = ["DONE", "IS_FULL", "MORTAL", "SMALL", "KillLab", "ends_of", "is_stopped", "lives", "scaled", "sleepers"]

IS_FULL = os.environ.get("KUEUE_TEST_SCALE") == "full"
"""Acceptance at its full size; takes many minutes."""
MORTAL = {"worker_timeout_seconds": 10}
"""The shortest time-out that is allowed."""

FLOCK_PROBE = 'exec 9>probe.lock; flock -n 9 || { echo "$KUEUE_WORKER" >> twice; exit 99; }'
"""A shell line for a job: leaves the file `twice` if another attempt runs at the same time."""


def scaled(usual: int, full: int) -> int:
    return full if IS_FULL else usual


def stat_of(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int) -> bool:
    return bool(fields := stat_of(pid)) and fields[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """Stopped, or waiting in the kernel (a shell for the exec of a child that is stopped) with the stop before it."""
    fields = stat_of(pid)
    return bool(fields) and (fields[0] in "Tt" or (fields[0] == "D" and _stop_is_pending(pid)))


def _stop_is_pending(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    pending = status.partition("ShdPnd:")[2].split()[0]
    return bool(int(pending, 16) >> (signal.SIGSTOP - 1) & 1)


def words_of(pid: int) -> list[bytes]:
    """The command line; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def sleepers(mark: str) -> list[int]:
    """Pids of living processes `sleep MARK`, whoever started them."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return [pid for pid in pids if words_of(pid)[:2] == [b"sleep", mark.encode()] and lives(pid)]


def ends_of(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[str, Any]]:
    """Job → (state, return code)."""
    return {row["id"]: (row["state"], row.get("return_code")) for row in rows}


class KillLab(FeatureLab):
    """Kills what it is told to, by pid, and waits until the kernel agrees."""

    # --- processes ---------------------------------------------------------------------------------------------------

    def runner_processes(self, role: str, worker: str = "w1") -> list[int]:
        """Living pids of a worker's `keeper`s or `spawner`s, in the order of their numbers."""
        state = os.fsencode(f"{self.worker_state(worker)}")
        found = []
        for pid in self.runners():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == f"kueue-{role}" and state in words_of(pid):
                    found.append(pid)
        return sorted(pid for pid in found if lives(pid))

    def worker_state(self, worker: str = "w1") -> Path:
        return self.folder / "state" / "workers" / worker

    def spool(self, worker: str = "w1") -> Path:
        return self.worker_state(worker) / "spool"

    def kill(self, *pids: int) -> None:
        """SIGKILL to all at once, and wait until they are gone."""
        # Stopped first: else the second could see the first die, and do something about it.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in self.processes:
            if process.pid in pids:
                process.wait()
        self.until(lambda: not any(lives(pid) for pid in pids), "the killed are gone")

    def kill_server(self) -> None:
        assert self.server is not None
        self.kill(self.server.pid)

    def stop_server(self, number: int = signal.SIGTERM) -> int:
        assert self.server is not None
        self.server.send_signal(number)
        return self.server.wait(20)

    def pid_of_worker(self, name: str = "w1") -> int:
        """The worker that runs now, also one that was brought back by its runner; 0: there is none."""
        with contextlib.suppress(FileNotFoundError):
            return places.holder(str(self.worker_state(name) / "lock")) or 0
        return 0

    def is_online(self, name: str = "w1") -> bool:
        return self.worker(name).get("state") == "online"

    def until_online(self, name: str = "w1", seconds: float = 40) -> None:
        self.until(lambda: self.is_online(name), f"worker {name} is online", seconds=seconds)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def quick(self, *ranges: dict[str, Any]) -> list[int]:
        """Submit over the kept connection; see `range_of`."""
        self.ask("ServerInfo")
        assert self._client is not None
        answer = self._client.submit(ranges)
        return [job for first, last in answer["ids"] for job in range(first, last + 1)]

    def shell(self, script: str, **more: Any) -> int:
        return self.quick(self.range_of("sh", "-c", script, **more))[0]

    def range_of(
        self,
        *argv: str,
        cores: int = 1,
        argvs: Sequence[Sequence[str]] = (),
        cwd: Path | None = None,
        counters: Sequence[tuple[str, int]] = (),
        held: bool = False,
        count: int = 1,
        **terms: Any,
    ) -> dict[str, Any]:
        """Jobs as they travel."""
        return {
            "payload": {"argv": list(argv)},
            "place": {"cwd": str(cwd or self.folder), "env": [["PATH", os.environ["PATH"]]], "umask": 0o022},
            "request": {"slots": 1, "cores": cores, "ram_mb": 1, "counters": [list(one) for one in counters]},
            "terms": terms,
            "held": held,
            "count": count,
            "argvs": [list(one) for one in argvs],
        }

    def repeating_client(self, *, local: bool = False) -> client.Client:
        """One that repeats its requests for as long as the server is away."""
        one = self.identity()
        sockets = [places.find(str(self.folder / "state")).server_socket(self.port, one.fingerprint)] if local else []
        return client.Client(
            transport.Server("127.0.0.1", self.port, sockets, [one]), patience_seconds=None, tell=lambda _: None
        )

    def until_all(self, jobs: Sequence[int], *states: str, seconds: float = 60) -> None:
        wanted = set(jobs)

        def hold() -> bool:
            with contextlib.suppress(errors.Unreachable):
                return wanted <= {row["id"] for row in self.rows(*states)}
            return False

        self.until(hold, f"all are {' or '.join(states)}", seconds=seconds)

    def details(self, jobs: Sequence[int]) -> dict[int, dict[str, Any]]:
        """All about these jobs, as `show-job --json` tells it."""
        done = self.kueue("show-job", "--json", *map(str, jobs))
        assert done.returncode == 0, done.stderr
        return {one["id"]: one for one in json.loads(done.stdout)["jobs"]}

    def numbers(self, job: int) -> list[int]:
        """The numbers of a job's attempts; offers that came to nothing have none."""
        return [one["number"] for one in self.job(job)["attempts"] if one["number"]]

    def numbers_of(self, job: int) -> list[int]:
        """The same, asked over the kept connection."""
        (found,) = self.ask("ShowJobs", ids=[[job, job]])["jobs"]
        return [one["number"] for one in found["attempts"] if one.get("number")]

    def lines(self, name: str) -> list[str]:
        """What jobs appended to a file of the lab's folder."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def no_traceback(self) -> None:
        for path in self.folder.glob("*.log"):
            assert "Traceback" not in path.read_text(errors="replace"), self.logs()
