"""What SQLite's errors are called for people."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from kueue.errors import DiskFull, StorageError
from kueue.storage.damage import LEFT, words
from kueue.storage.room import has_room


def damaged(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{path} is damaged: {words(error)}", hint=LEFT)


def sentence(path: Path, error: sqlite3.Error, *, is_write: bool) -> StorageError:
    """`DiskFull` for all forms of that."""
    # Python 3.10 has no error codes; the texts are those of sqlite3_errstr and have not changed since 2004.
    text = str(error)
    if "is full" in text:
        return full(path)
    if "is locked" in text:
        return in_use(path)
    # Without words: those of SQLite quote a damaged name, and Python 3.10 leaves them out.
    if not text or any(sign in text for sign in ("malformed", "not a database", "no such", "Could not decode")):
        return damaged(path, error)
    # A used-up quota comes as an input/output error that does not say so.
    if is_write and "I/O" in text:
        with contextlib.suppress(OSError):
            if not has_room(path):
                return full(path)
    return StorageError(f"{path} cannot be used: {text}")


def full(path: Path) -> DiskFull:
    return DiskFull(
        f"The disk of {path.parent} is full: nothing was accepted",
        hint="Make room there; the server goes on by itself. Finished jobs go with `kueue clean-jobs`.",
    )


def full_for_another(path: Path) -> DiskFull:
    """No room for the state to be written anew: to drop finished jobs would take a commit, which has to wait, too."""
    return DiskFull(
        f"The disk of {path.parent} has no room to write the state anew, a file of which was made shorter: nothing was "
        "accepted",
        hint="Make room there, as much as the state takes; the server goes on by itself. Do not stop it: what was cut "
        "away only it still has.",
    )


def in_use(path: Path) -> StorageError:
    return StorageError(f"Another server uses {path}", hint="Stop it first, or give this one another state directory.")
