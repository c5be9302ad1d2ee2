"""A runner's own files are where others look for them, and are put back when somebody has removed or replaced them.

Whoever finds the lock free takes the runner for dead and kills what it left; whoever does not find the socket takes it
for mute, and what it runs may be given away.
"""
# ruff: noqa: PTH103, PTH112, PTH116, PTH123 (pathlib would cost the runner memory)

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kueue.runner.children import boottime
from kueue.runner.kernel import lock_file
from kueue.runner.mirror import OURSELVES
from kueue.runner.rundir import Rundir

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper

LOOK_SECONDS = 5.0  # between looks where nothing calls for one, when the keeper is awake anyway
WAKE_SECONDS = 12.0  # so long it sleeps at most; a worker that is attached wakes it every 10 s, and one wake has to do
LOCKS_KEPT = 8
IDENTITY_BYTES = 4096  # ten times as much as it has

Mark = tuple[int, ...]
"""What tells a file from another one that is put in its place."""


class Premises:
    """Those of one keeper. `lock`: a descriptor that holds the lock."""

    def __init__(self, keeper: Keeper, lock: int) -> None:
        self._locks = [lock]
        """All that we have had, the one that counts last."""
        self.due: float | None = None
        """When `look` is to be called next, if anybody is awake (boottime)."""
        self.wake_at: float | None = None
        """When to wake up for it."""
        self._keeper = keeper
        self._socket: Mark = ()
        self._info: Mark = ()
        self._is_told = False
        """That the lock cannot be put back."""

    def look(self, now: float) -> None:
        """Put back what is not there; what cannot be put back is tried again later.

        Where a look may hang none is made: whoever waits here pauses no job when the lease ends.
        """
        self.due, self.wake_at = now + LOOK_SECONDS, now + WAKE_SECONDS
        if not self._keeper.settings.is_local:
            return
        place = self._keeper.rundir
        if not (self._is_needed or os.path.isdir(place.path)):
            return  # removed with all of it, and by right
        with contextlib.suppress(OSError):
            self.hold()
        if self._keeper.desk.listener is not None and not _is_there(place.address, self._socket, _number):
            self._keeper.log("the socket was removed or replaced: there is a new one")
            self._keeper.desk.close_door()
        self.open_desk()
        if self._info and not _is_there(place.info, self._info, _content):
            self._keeper.log("info.json was removed or replaced: it is written anew")
            self.write_info()

    def look_soon(self) -> None:
        self.due = self.wake_at = boottime()

    @property
    def _is_needed(self) -> bool:
        keeper = self._keeper
        return bool(keeper.cares or not keeper.desk.is_empty or keeper.reviver.command)

    def hold(self) -> None:
        """See to it that the lock at its place is ours, if need be again. Raises `OSError`, with the path.

        Spawners that are there already do not share one that was put back: `Rundir.is_dead` asks for them by number.
        One that we had may come back; as we share it with them, nobody else could take it, not even we again.
        """
        place = self._keeper.rundir
        if not self._keeper.settings.is_local:
            return
        try:
            found = _number(os.stat(place.lock))
        except (FileNotFoundError, NotADirectoryError):
            found = ()
        except OSError:
            return  # nobody else can look at it either
        for handle in reversed(self._locks):
            if _number(os.fstat(handle)) == found:
                self._locks.remove(handle)
                self._locks.append(handle)
                return
        try:
            self._locks.append(_locked(place))
        except OSError as error:
            if not self._is_told:
                self._keeper.log(f"the lock was removed or replaced, and cannot be put back: {error}")
            self._is_told = True
            raise
        if len(self._locks) > LOCKS_KEPT:
            os.close(self._locks.pop(0))
        self._is_told = False
        self.look_soon()  # the rest may have gone with it
        self._keeper.log("the lock was removed or replaced: it is put back")

    @property
    def lock(self) -> int:
        """The descriptor that holds the lock."""
        return self._locks[-1]

    def are_strangers(self) -> bool:
        """Does this state directory belong to a worker of another identity by now? It was removed and made anew."""
        if not self._keeper.settings.is_local:
            return False
        try:
            with open(self._keeper.rundir.identity, "rb") as file:
                found = json.loads(file.read(IDENTITY_BYTES))["identity"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False
        return bool(found != self._keeper.settings.identity)

    def open_desk(self, *, is_needed: bool = False) -> None:
        """On a disk that takes nothing workers can attach when it is mended. `is_needed`: raises `OSError` instead."""
        keeper = self._keeper
        if keeper.desk.listener is not None:
            return
        try:
            keeper.desk.open(keeper.rundir)
        except OSError as error:
            if is_needed:
                raise
            keeper.log(f"workers cannot attach: {error}")
            keeper.once_more(OURSELVES)
        else:
            self._socket = _mark(keeper.rundir.address, _number)

    def write_info(self) -> None:
        keeper = self._keeper
        spawners = [child.pid for child in keeper.spawners.all]
        if keeper.rundir.write_info(keeper.settings.version, os.getpid(), spawners):
            self._info = _mark(keeper.rundir.info, _content)
        else:
            keeper.once_more(OURSELVES)


def _locked(place: Rundir) -> int:
    os.makedirs(place.path, mode=0o700, exist_ok=True)
    lock = lock_file(place.lock)
    if lock is None:
        raise OSError(errno.EBUSY, "somebody else holds it", place.lock)
    return lock


def _number(found: os.stat_result) -> Mark:
    """Enough for a file that we keep open: its number is given to no other."""
    return (found.st_dev, found.st_ino)


def _content(found: os.stat_result) -> Mark:
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _mark(path: str, read: Callable[[os.stat_result], Mark]) -> Mark:
    """Empty: there is none."""
    try:
        return read(os.stat(path))
    except OSError:
        return ()


def _is_there(path: str, mark: Mark, read: Callable[[os.stat_result], Mark]) -> bool:
    """Is the file at this path still that one? What cannot be looked at now counts as that."""
    try:
        return read(os.stat(path)) == mark
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
