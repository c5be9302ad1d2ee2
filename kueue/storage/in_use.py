"""Whether a program has the state open, as SQLite's own lock on it says.

It is asked of the kernel, and SQLite is not: to open a state brings its log in or undoes a half transaction, and a
damaged one cannot be opened. The bytes are those of the lock-byte page (sqlite.org/fileformat2, 1.2); a connection to
a log or in exclusive mode holds some of them for as long as it is open, also where its file was cut meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kueue import places
from kueue.errors import StorageError

_FIRST, _COUNT = 0x40000000, 512


def refuse_used(path: Path) -> None:
    """Raises `StorageError` while another process has the state open. One that cannot be looked at is nobody's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        pid = places.hindrance(descriptor, fcntl.F_WRLCK, _FIRST, _COUNT)
    except OSError:
        return  # a file system without locks: nobody can be seen there, by SQLite either
    finally:
        os.close(descriptor)
    if pid is not None:
        who = f"pid {pid}" if pid > 0 else "its pid is not known"
        raise StorageError(
            f"Another server or program uses {path} ({who}); nothing was changed.",
            hint=f"Stop it first: kill {pid}" if pid > 0 else f"Stop it first; fuser {path} tells its pid.",
        )
