"""Where a runner lives: its directory with lock, socket and what is known of it.

S/runners/<id>/lock       held by keeper and spawner; free only when both are gone
S/runners/<id>/socket     where workers attach
S/runners/<id>/info.json  pids with their start times, version, protocol
S/runners/<id>/mains-<pid>  which process is whose, see `mains`
S/runners/<id>/log
S/spool/<offer>/          the attempts of all runners of this worker
"""
# ruff: noqa: PTH101, PTH105, PTH106, PTH108, PTH208 (pathlib would cost the runner memory)

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from kueue.runner import whole_file
from kueue.runner.kernel import is_locked
from kueue.runner.tree import status


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
    def spool(self) -> str:
        return f"{self.state}/spool"

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
                os.replace(f"{self.path}/socket.new", f"{self.path}/socket")
            except OSError:
                listener.close()
                raise
            return listener
        finally:
            os.close(folder)

    def write_info(self, version: str, protocol: int, keeper: int, spawners: list[int]) -> bool:
        """For the worker, whose guard must not take a spawner for a job, and for people.

        False: the disk is full, and the older one is still there.
        """
        info = {
            "version": version,
            "protocol": protocol,
            "keeper": _with_start(keeper),
            "spawners": [_with_start(pid) for pid in spawners],
        }
        try:
            whole_file.write(f"{self.path}/info.json", json.dumps(info).encode())
        except OSError:
            return False
        return True

    def is_dead(self) -> bool:
        return not is_locked(self.lock)

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


def _with_start(pid: int) -> tuple[int, int]:
    now: Any = status(pid)
    return (pid, now.start if now else 0)
