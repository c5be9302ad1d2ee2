"""Room on the disk: is there any, and the ballast that is given up when there is not."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path

from kueue.storage.limits import BALLAST_BYTES, PROBE_BYTES

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk is full, the user's share of it is used up, or a file may not grow: three ways to say the same."""


def has_room(beside: Path, *, size: int = PROBE_BYTES) -> bool:
    """Whether files beside this one can take `size` bytes more. Raises `OSError` if the disk fails in another way."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if allowed != resource.RLIM_INFINITY and _largest(beside) + size > allowed:
        return False
    return has_room_for(beside, size)


def has_room_for(beside: Path, size: int) -> bool:
    """Whether another file of `size` bytes can lie beside this one. Asked by taking the room: statvfs(2) knows of no
    quota. Raises `OSError` as above.
    """
    trial = beside.with_name(f"{beside.name}.trial-{os.getpid()}")
    try:
        return _allocate(trial, size)
    finally:
        trial.unlink(missing_ok=True)


def _largest(database: Path) -> int:
    sizes = [0]
    for name in (database, database.with_name(f"{database.name}-wal")):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(name.stat().st_size)
    return max(sizes)


def _allocate(path: Path, size: int) -> bool:
    """Make a file that really takes `size` bytes of the disk; false, and no file, if there is no room."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in NO_ROOM:
            return False
        raise
    finally:
        os.close(descriptor)
    return True


class Ballast:
    """A file that keeps room aside beside the database."""

    def __init__(self, database: Path, *, size: int = BALLAST_BYTES) -> None:
        self._path = database.with_name(f"{database.name}.ballast")
        self._size = size

    @property
    def is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size == self._size
        return False

    def release(self) -> bool:
        """Give the room up. True if there was any."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def restore(self) -> bool:
        """Take the room again; false while the disk does not have it."""
        return self.is_there or _allocate(self._path, self._size)
