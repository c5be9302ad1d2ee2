"""Where a runner lives: its directory with lock, socket and what is known of it.

S/runners/<id>/lock       held by keeper and spawner; free only when both are gone
S/runners/<id>/socket     where workers attach
S/runners/<id>/info.json  pids with their start times, boot, version, protocol
S/runners/<id>/mains-<pid>  which process is whose, see `mains`
S/runners/<id>/log
S/spool/<offer>/          the attempts of all runners of this worker
"""
# ruff: noqa: PTH101, PTH105, PTH106, PTH108, PTH115, PTH123, PTH208 (pathlib would cost the runner memory)

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from kueue.runner import whole_file
from kueue.runner.kernel import is_locked
from kueue.runner.mains import boot_id
from kueue.runner.tree import lives, status
from kueue.runner.wire import PROTOCOL

KEEPER = "kueue-keeper"
SPAWNER = "kueue-spawner"
NAMES = (KEEPER, SPAWNER)
"""What the processes of runners are called in ``ps``."""


@dataclass(frozen=True)
class Rundir:
    """The places of one runner."""

    state: str
    runner: str

    @property
    def path(self) -> str:
        return f"{self.state}/runners/{self.runner}"

    @property
    def lock(self) -> str:
        return f"{self.path}/lock"

    @property
    def log(self) -> str:
        return f"{self.path}/log"

    @property
    def address(self) -> str:
        """Path of the socket."""
        return f"{self.path}/socket"

    @property
    def info(self) -> str:
        return f"{self.path}/info.json"

    @property
    def spool(self) -> str:
        return f"{self.state}/spool"

    @property
    def identity(self) -> str:
        """Whose state directory it is."""
        return f"{self.state}/identity"

    @property
    def worker_lock(self) -> str:
        """The lock of the worker that is run in this state directory."""
        return f"{self.state}/lock"

    def listen(self) -> socket.socket:
        """A listening socket at the usual place; an older one there is replaced in one step.

        The address goes through a descriptor of the directory: a Unix socket's path may have 107 bytes only (unix(7)).
        """
        folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.path}/socket.new")
                listener.bind(f"/proc/self/fd/{folder}/socket.new")
                os.chmod(f"{self.path}/socket.new", 0o600)
                listener.listen(16)
                os.replace(f"{self.path}/socket.new", self.address)
            except OSError:
                listener.close()
                raise
            return listener
        finally:
            os.close(folder)

    def write_info(self, version: str, keeper: int, spawners: list[int]) -> bool:
        """For the worker, whose guard must not take a spawner for a job, for whoever does not find the lock, and for
        people.

        False: the disk is full, and the older one is still there.
        """
        info = {
            "version": version,
            "protocol": PROTOCOL,
            "boot": _boot(),
            "keeper": _with_start(keeper),
            "spawners": [_with_start(pid) for pid in spawners],
        }
        try:
            whole_file.write(self.info, json.dumps(info).encode())
        except OSError:
            return False
        return True

    def is_dead(self) -> bool:
        """Nobody holds its lock. A lock that was removed or replaced is held all the same, and proves nothing: then
        neither its keeper nor a spawner may live either.
        """
        return not (is_locked(self.lock) or self._is_peopled())

    def _is_peopled(self) -> bool:
        try:
            with open(self.info, "rb") as file:
                info = json.loads(file.read())
            named = [info["keeper"], *info["spawners"]]
            is_of_this_boot = info.get("boot") in (None, _boot())  # a release before had none
            return is_of_this_boot and any(lives(int(pid), start) for pid, start in named)
        except (FileNotFoundError, NotADirectoryError):
            return _is_open_somewhere(self.lock)
        except OSError:
            return True  # as in `is_locked`
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return _is_open_somewhere(self.lock)  # emptied or overwritten: it tells as little as none

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                os.unlink(f"{self.path}/{name}")
            os.rmdir(self.path)


def others(state: str, own: str) -> list[Rundir]:
    """The directories of all other runners, dead or alive."""
    with contextlib.suppress(FileNotFoundError):
        return [Rundir(state, name) for name in os.listdir(f"{state}/runners") if name != own]
    return []


def _boot() -> str:
    return boot_id().decode("ascii", "replace")


def _is_open_somewhere(lock: str) -> bool:
    """Does a keeper or spawner hold this lock, whose file was removed? A child that is only being made does not have it
    open. What somebody moved away instead is not found.
    """
    gone = f"{os.path.realpath(lock)} (deleted)"
    for number in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to see
            if number.isdecimal() and _name_of(number) in NAMES:
                for handle in os.listdir(f"/proc/{number}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        if os.readlink(f"/proc/{number}/fd/{handle}") == gone:
                            return True
    return False


def _name_of(number: str) -> str:
    with open(f"/proc/{number}/comm", "rb", buffering=0) as file:
        return file.read(64).decode("utf-8", "replace").strip()


def _with_start(pid: int) -> tuple[int, int]:
    now: Any = status(pid)
    return (pid, now.start if now else 0)
