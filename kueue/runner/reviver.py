"""Brings back a worker that died without an orderly stop."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

from kueue.runner.kernel import is_locked
from kueue.runner.log import Log
from kueue.runner.program import held_back, reset_signals
from kueue.runner.tree import lives, status
from kueue.runner.wire import os_bytes

FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 60.0
SETTLED_SECONDS = 10.0  # a worker that was attached for so long was well: the delays begin anew


@dataclass
class Reviver:
    """Knows how the worker is started, and when that is due. Times are boottime."""

    log: Log
    worker_lock: str
    """Held by whichever worker there is; empty: it is not looked at."""
    command: list[Any] = field(default_factory=list)
    env: list[Any] = field(default_factory=list)
    worker: tuple[int, int] = (0, 0)
    """Its number and start time."""
    due: float | None = None
    delay: float = FIRST_DELAY_SECONDS
    attached_at: float | None = None
    is_told: bool = False
    """That another worker is there, which has not attached."""

    def attached(self, order: dict[str, Any], now: float) -> None:
        self.command = list(order.get("restart_command") or ())
        self.env = list(order.get("restart_env") or ())
        pid = int(order.get("worker_pid") or 0)
        found = status(pid) if pid > 0 else None
        self.worker = (pid, found.start) if found else (0, 0)
        self.due = None
        self.attached_at = now
        self.is_told = False

    def detached(self) -> None:
        """In order: nobody is to be brought back."""
        self.command = []
        self.due = None

    def lost(self, now: float) -> None:
        if self.attached_at is not None and now - self.attached_at >= SETTLED_SECONDS:
            self.delay = FIRST_DELAY_SECONDS
        self.attached_at = None
        if self.command:
            self.due = now + self.delay

    def mirror(self) -> dict[str, Any]:
        return {"command": self.command, "env": self.env, "worker": list(self.worker)}

    def adopt(self, values: dict[str, Any], now: float) -> None:
        """Take over from a keeper that died; the worker attaches again by itself if it lives."""
        self.command = values.get("command") or []
        self.env = values.get("env") or []
        pid, start = values.get("worker") or (0, 0)
        self.worker = (pid, start)
        self.lost(now)

    def is_due(self, now: float) -> bool:
        return self.due is not None and now >= self.due

    def tick(self, now: float) -> None:
        if not self.is_due(now):
            return
        self.due = now + self.delay
        self.delay = min(self.delay * 2, LAST_DELAY_SECONDS)
        pid, start = self.worker
        if pid and lives(pid, start):
            return  # it lives and will attach again, or its own supervisor knows why not
        if self.worker_lock and is_locked(self.worker_lock):
            if not self.is_told:
                self.log("the worker is gone; another one runs and has not attached yet: none is started")
            self.is_told = True
            return
        self.log("the worker is gone: starting it again")
        self._start()

    def _start(self) -> None:
        command = [os_bytes(word) for word in self.command]
        env = {os_bytes(name): os_bytes(value) for name, value in self.env}
        signals = held_back()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            if os.fork() == 0:
                self._become(command, env, signals)
        except OSError as error:
            self.log(f"the worker cannot be started: {error.strerror}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _become(self, command: list[bytes], env: dict[bytes, bytes], signals: tuple[int, ...]) -> None:
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            os.closerange(3, 4096)
            reset_signals(signals)
            os.execvpe(command[0], command, env)  # noqa: S606 - without a shell
        except BaseException as error:  # noqa: BLE001 - the log is the only place that is left
            self.log(f"the worker cannot be started: {error}")
        finally:
            os._exit(127)
