"""The state written anew from what its connection has, when a file of it was cut.

Theory of operation
    What was committed of late is still in the page cache of the connection, whatever became of the files. So all pages
    are copied through it (sqlite.org/backup.html) into a file of another name. A page that neither cache nor files have
    is an error where it stood in the log, and zeros where it stood in the state. Only a copy without any of that, which
    SQLite then finds sound in every page, takes the state's place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kueue.storage.backup import PORTION_PAGES, examined, open_alone
from kueue.storage.damage import DAMAGE

RESERVE_BYTES = 2**20


class Unsound(Exception):
    """The copy lacks pages that were cut out of the state. It has all else, and is the caller's to remove."""

    def __init__(self, draft: Path) -> None:
        super().__init__("a part of it is nowhere any more")
        self.draft = draft


def rewritten(connection: sqlite3.Connection, path: Path, *, cut_from: int | None) -> Path:
    """A sound, flushed copy of the whole state beside it, not yet under its name.

    `cut_from`: the bytes that the state had before it was cut; None: it was its log. Raises `Unsound` if the copy of a
    state that was cut lacks something, and `sqlite3.Error` and others when there cannot be one, with "full" in its
    words for a full disk; nothing is left behind then, and the files are as they were.
    """
    # `kueue.storage.backup.sweep_beside` knows the name.
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with _stretched(path, cut_from) as size:
            page, count = _pages(connection, path)
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            _copy(connection, draft, count)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    try:
        _check(draft, page, has_holes=cut_from is not None and size % page != 0, may_have_zeros=cut_from is None)
    except DAMAGE as error:
        if cut_from is not None:
            raise Unsound(draft) from error
        draft.unlink(missing_ok=True)
        raise
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


@contextlib.contextmanager
def _stretched(path: Path, size: int | None) -> Iterator[int]:
    """SQLite asks the file for its length as long as its log has none. By name: to close it would drop the lock."""
    found = path.stat().st_size
    if size is None or size <= found:
        yield found
        return
    os.truncate(path, size)
    try:
        yield found
    finally:
        os.truncate(path, found)


def _pages(connection: sqlite3.Connection, path: Path) -> tuple[int, int]:
    """Bytes of a page, and how many of them there are; there is room for so many more."""
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    (count,) = connection.execute("PRAGMA page_count").fetchone()
    if shutil.disk_usage(path.parent).free < page * count + RESERVE_BYTES:
        raise sqlite3.OperationalError("database or disk is full")
    return page, count


def _copy(connection: sqlite3.Connection, draft: Path, count: int) -> None:
    (usual,) = connection.execute("PRAGMA cache_size").fetchone()
    target = open_alone(draft, "rw")
    try:
        target.execute("PRAGMA journal_mode = OFF").fetchall()
        target.execute("PRAGMA synchronous = OFF")
        # What is read must not drive out what only the cache has.
        connection.execute(f"PRAGMA cache_size = {count + PORTION_PAGES}")
        connection.backup(target)
    finally:
        connection.execute(f"PRAGMA cache_size = {usual}")
        target.close()


def _check(draft: Path, page: int, *, has_holes: bool, may_have_zeros: bool) -> None:
    if has_holes:
        raise sqlite3.DatabaseError("malformed: half of a page is missing")  # cannot be told from a whole one
    with draft.open("r+b") as file:
        os.fsync(file.fileno())
        while not may_have_zeros and (read := file.read(page)):
            if not any(read):
                raise sqlite3.DatabaseError("malformed: a page is missing")
    whole = open_alone(draft, "ro", is_still=True)
    try:
        examined(whole, draft)
    finally:
        whole.close()
