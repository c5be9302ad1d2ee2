"""What the disk says of a worker's runners: which of them live, and what is recorded of attempts."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import trio

from kueue import places, threads
from kueue.errors import KueueError
from kueue.worker.processes import lives, of_runner

T = TypeVar("T")

AGAIN_SECONDS = 1.0  # between looks at a disk that cannot be read

StartRecord = tuple[int, dict[str, Any]]
"""Offer, and what its runner wrote down before it made the process; under ``end`` how it ended, None: not yet."""

log = logging.getLogger(__name__)


class RunnerDisk:
    """The directories ``runners`` and ``spool`` in `state_dir`, the worker's own."""

    def __init__(self, state_dir: Path) -> None:
        self.runners = state_dir / "runners"
        self._spool = state_dir / "spool"

    async def records(self) -> list[StartRecord]:
        """As `start_records`. Raises `KueueError`."""
        try:
            return await threads.patiently(start_records, self._spool)
        except OSError as error:
            raise _unreadable(self._spool, error) from error

    def living(self) -> list[Path]:
        """The directories of those that live. Raises `KueueError`."""
        try:
            return [path for path in self.runners.iterdir() if self.is_alive(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.runners, error) from error

    def is_alive(self, runner: str) -> bool:
        """Does it hold its lock? One that cannot be looked at may be held, and what the dead leave is killed.

        Nor is one dead whose lock was removed or replaced, as long as one of its processes lives.
        """
        folder = self.runners / runner
        try:
            if places.is_locked(str(folder / "lock")):
                return True
        except NotADirectoryError:
            return False
        except OSError:
            return True
        return any(lives(pid, start) for pid, start in of_runner(folder).items())

    def keeper(self, runner: str) -> int | None:
        """The pid of its keeper if that lives; None: not known. Blocks on the disk."""
        pid, start = next(iter(of_runner(self.runners / runner).items()), (0, 0))
        return pid if lives(pid, start) else None


async def once_readable(read: Callable[[], Awaitable[T]]) -> T:
    """What `read` returns as soon as the disk lets it: what is not known yet may not be called gone."""
    is_told = False
    while True:
        try:
            return await read()
        except KueueError as error:
            if not is_told:
                log.warning("%s %s", error, error.hint)
            is_told = True
        await trio.sleep(AGAIN_SECONDS)


def start_records(spool: Path) -> list[StartRecord]:
    """Those of all attempts whose end was not acknowledged. Blocks on the disk: kept output may be in 100,000 folders,
    each of which is looked into.
    """
    return list(_start_records(spool))


def _start_records(spool: Path) -> Iterator[StartRecord]:
    for folder in spool.iterdir() if spool.is_dir() else ():
        if folder.name.isdecimal():
            record = _read(folder / "start.json")
            if isinstance(record, dict) and {"job", "queue_id", "runner"} <= record.keys():
                yield int(folder.name), {**record, "end": _read(folder / "exit.json")}


def _read(path: Path) -> object:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_bytes())
    return None


def _unreadable(folder: Path, error: OSError) -> KueueError:
    return KueueError(
        f"{folder} cannot be read: {error.strerror or error}.",
        hint="It is looked at again until it can be; jobs that were running go on.",
    )
