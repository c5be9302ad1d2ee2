"""Whether a worker of this user and name runs on this machine, what it last said, and how to end it in order.

Rules
- A held lock says that it runs, nothing else does (`places.holder`).
- It works without a configuration and with a broken one: a person who asks why no worker runs has just that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kueue import __version__, config, log, places
from kueue.errors import KueueError

STOP_SECONDS = 20.0
"""An orderly stop takes less than 10 s; a machine that swaps takes longer."""
_RUNNING = "running"
"""Beside the lock: pid and version of the program that took it. Only of use while that pid holds it."""
_SECRETS = "fingerprints"
"""Beside the lock: pid of the program that took it, and the short names of the secrets that it proves."""
_TROUBLE = "trouble"
"""Beside the lock: pid of the program that took it, and a sentence on what hinders it now."""


class Presence:
    """The place of one worker on this machine."""

    def __init__(self, config_path: str | None = None, name: str = "") -> None:
        """Raises `KueueError` if there is no place for its state."""
        self.trouble = ""
        """What is wrong with the configuration; empty: nothing."""
        try:
            settings = config.load(config_path, ("worker_settings",))
        except KueueError as error:
            self.trouble = str(error)
            settings = config.Config(config_path or config.default_path(), exists=True)
        self.settings = settings
        self.name = name or settings.worker.worker_name or socket.gethostname().partition(".")[0]
        self.folder = places.find(settings.common.state_dir).worker(self.name)

    @property
    def lock(self) -> str:
        return f"{self.folder}/lock"

    @property
    def log_file(self) -> str:
        """Where ``--log-file`` of a worker that is started in the background shall lead."""
        return f"{self.folder}/worker.log"

    @property
    def pid(self) -> int | None:
        """Of the worker that runs now; None: none runs, or its pid cannot be told (then `is_running`)."""
        return places.holder(self.lock)

    @property
    def is_running(self) -> bool:
        return places.is_locked(self.lock)

    def status(self) -> dict[str, Any]:
        """The JSON object of ``kueue_worker --status``."""
        pid = self.pid
        return {
            "name": self.name,
            "is_running": self.is_running,
            "pid": pid,
            "version": __version__,
            "running_version": _running_version(self.folder, pid),
            "state_dir": self.folder,
            "log_file": self.log_file,
            "last_words": log.last_words(self.log_file),
            "config": self.settings.path,
            "has_config": bool(self.settings.exists),
            "trouble": " ".join(filter(None, (self.trouble, _noted_trouble(self.folder, pid)))),
        }

    def stop(self, *, by_force: bool = False) -> str:
        """Ends the worker, its jobs go on under their runner; returns a sentence.

        `by_force`: one that does not end in order is killed. Raises `KueueError` if it does not end.
        """
        pid = self.pid
        if pid is None:
            if self.is_running:
                raise places.nameless(f"The worker {self.name}", self.lock)
            return f"No worker {self.name} runs here."
        for number in (signal.SIGTERM, signal.SIGKILL)[: 2 if by_force else 1]:
            if self._ends_by(pid, number):
                how = "Killed" if number == signal.SIGKILL else "Stopped"
                return f"{how} the worker {self.name} (pid {pid}); its running jobs go on."
        raise KueueError(
            f"The worker {self.name} (pid {pid}) has not ended within {STOP_SECONDS:g} s.",
            hint="kueue_worker --stop --force kills it; its running jobs go on.",
        )

    def _ends_by(self, pid: int, number: signal.Signals) -> bool:
        """Is that worker gone, at last by this signal?"""
        try:
            # The descriptor means this process alone, also if the number is given to another one meanwhile.
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            if self.pid != pid:
                return True
            signal.pidfd_send_signal(process, number)
            # The end of the process and not of its lock: whoever is told "stopped" may look at the pid.
            end = select.poll()
            end.register(process, select.POLLIN)
            return bool(end.poll(1000 * STOP_SECONDS))
        except ProcessLookupError:
            return True
        finally:
            os.close(process)


def note_version(folder: str) -> None:
    """Called by the holder of the lock: leave word which version it is. Without room for it nobody will know."""
    with contextlib.suppress(OSError):
        Path(folder, _RUNNING).write_text(f"{os.getpid()} {__version__}\n", encoding="utf-8")


def note_secrets(folder: str, fingerprints: Iterable[str]) -> None:
    """Called by the holder of the lock: which secrets it proves from now on. `kueue up` compares them with its own."""
    with contextlib.suppress(OSError):
        Path(folder, _SECRETS).write_text(f"{os.getpid()} {' '.join(fingerprints)}\n", encoding="ascii")


def note_trouble(folder: str, trouble: str) -> None:
    """Called by the holder of the lock: what hinders it from now on; empty: nothing does."""
    path = Path(folder, _TROUBLE)
    with contextlib.suppress(OSError):
        if trouble:
            path.write_text(f"{os.getpid()} {trouble}\n", encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def _noted_trouble(folder: str, pid: int | None) -> str:
    with contextlib.suppress(OSError, ValueError):
        noted, _, trouble = Path(folder, _TROUBLE).read_text(encoding="utf-8").strip().partition(" ")
        if pid is not None and int(noted) == pid:
            return trouble
    return ""


def _running_version(folder: str, pid: int | None) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        noted, version = Path(folder, _RUNNING).read_text(encoding="utf-8").split()
        if pid is not None and int(noted) == pid:
            return version
    return None
