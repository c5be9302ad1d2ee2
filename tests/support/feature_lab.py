"""A laboratory for acceptance tests: looks at the queue cheaply, holds jobs at gates, and is left as it was found."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kueue import client, errors, identity, places, transport
from tests.support.lab import SECRET, Lab
from tests.support.server_program import Worker

SMALL = ("-c", "1", "-r", "1")
LIVE = ("held", "pending", "offered", "running")
DONE = ("succeeded", "failed", "canceled")


class FeatureLab(Lab):
    """What is tested goes through the command; what a test merely waits for is asked over one kept connection."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._client: client.Client | None = None
        self._gates = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- looking -----------------------------------------------------------------------------------------------------

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The answer to a question, as it travels."""
        return self.ask_parts(kind, **fields)[-1]

    def ask_parts(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        if self._client is None:
            server = transport.Server("127.0.0.1", self.port, (), [self.identity()])
            self._client = client.Client(server)
            self._client.tell = lambda _: None
        return self._client.ask_parts(kind, **fields)

    def rows(self, *states: str) -> list[dict[str, Any]]:
        """Jobs in these states, or all, as the server lists them."""
        return [row for part in self.ask_parts("ListJobs", states=list(states)) for row in part["jobs"]]

    def state(self, job: int) -> str:
        found = self.ask("ListJobs", ids=[[job, job]])["jobs"]
        return str(found[0]["state"]) if found else "unknown"

    def states(self, jobs: Sequence[int]) -> list[str]:
        known = {row["id"]: str(row["state"]) for row in self.rows()}
        return [known.get(job, "unknown") for job in jobs]

    def machines(self) -> dict[str, dict[str, Any]]:
        """Workers that are connected or silent, by name."""
        return {row["name"]: row for row in self.ask("ListWorkers")["workers"] if row["state"] != "away"}

    def worker(self, name: str) -> dict[str, object]:
        with contextlib.suppress(errors.Unreachable):
            return self.machines().get(name, {})
        return {}

    def identity(self) -> identity.Identity:
        """The one that the server of the lab has derived from the secret and keeps in its cache."""
        return identity.identity_of(SECRET, places.find(str(self.folder / "state")).cache)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def until_state(self, job: int, *states: str, seconds: float = 30) -> None:
        self.until(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}", seconds=seconds)

    def end_of(self, job: int, state: str = "succeeded", *, seconds: float = 30) -> dict[str, Any]:
        """All about a job, once it is done, as `show-job --json` tells it."""
        self.until_state(job, *DONE, seconds=seconds)
        found = self.job(job)
        assert found["state"] == state, found
        return found

    def remains(self, holds: Callable[[], object], seconds: float) -> None:
        """A claim about what must not happen is looked at for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert holds(), self.logs()
            time.sleep(0.02)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def run(self, *args: str, **more: Any) -> dict[str, Any]:
        """Submit, wait for the end, tell all about it."""
        job = self.submit(*args, **more)
        self.until_state(job, *DONE)
        return self.job(job)

    def output(self, job: int, stream: str = "stdout") -> str:
        """The output as `log` prints it."""
        done = self.kueue("log", *(["--stderr"] if stream == "stderr" else []), str(job))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes_of(self, job: int) -> list[int]:
        """Pids of the living processes of a job, by the environment it was given."""
        mark, found = b"KUEUE_JOB_ID=%d" % job, []
        for pid in self.members():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if mark in words and state != "Z":
                    found.append(pid)
        return found

    def peer(self, name: str, **fields: Any) -> Worker:
        """A worker that does what the test says; the test closes it."""
        one = self.identity()
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return Worker(one.client_context().wrap_socket(plain, server_hostname=one.server_hostname), name, **fields)

    def gate(self) -> Gate:
        self._gates += 1
        return Gate(self.folder / f"gate{self._gates}")

    def settle(self) -> None:
        """End what a test left running."""
        left = [row["id"] for row in self.rows(*LIVE)]
        if left:
            self.kueue("remove-job", "--kill", *map(str, left))
            self.until(lambda: not self.rows(*LIVE), "all jobs are done")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        super().close()


class Gate:
    """Jobs that wait here use no processor and go on when the test says so.

    `command` is the job's argv: it tells that it has begun by a line in `begun`, waits, and exits with 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun_path = path.with_suffix(".begun")
        os.mkfifo(path)

    @property
    def command(self) -> tuple[str, ...]:
        return ("sh", "-c", f"echo $KUEUE_JOB_ID >> {self.begun_path}; read x < {self.path}; exit 0")

    @property
    def begun(self) -> list[int]:
        """Ids of the jobs that have come to the gate, in order."""
        try:
            return [int(line) for line in self.begun_path.read_text().split()]
        except FileNotFoundError:
            return []

    def open(self) -> None:
        """Let pass whoever waits now; does nothing if nobody does."""
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
