"""Files that are replaced in one step: whoever reads one sees the old or the new one, whole.

Nothing is flushed, as in `spool`. When there is no room the old one stays, and nothing is left beside it.
"""
# ruff: noqa: PTH104, PTH108 (pathlib would cost the runner memory)

from __future__ import annotations

import contextlib
import errno
import os

DRAFT = ".new"
"""Ends the name of a file that is not whole yet."""


def write(path: str, body: bytes) -> None:
    """Mode 0600. Raises `OSError`."""
    os.close(written(path, body))


def written(path: str, body: bytes) -> int:
    """The same; returns a descriptor that appends to the new file."""
    draft = path + DRAFT
    # Emptied, not removed: a draft that a killed writer has left takes no room of its own.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fill(descriptor, body)
        os.rename(draft, path)
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return descriptor


def fill(descriptor: int, body: bytes) -> None:
    """Write all of it. Raises `OSError`, also where the kernel takes a part: that is a disk without room for more."""
    if os.write(descriptor, body) < len(body):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
