"""The state written anew from what its connection has, when a file of it was cut.

Theory of operation
    What was committed of late is still in the page cache of the connection, whatever became of the files. So all pages
    are copied through it (sqlite.org/backup.html) into a file of another name. A page that neither cache nor files have
    is an error where it stood in the log, and zeros where it stood in the state. Only a copy without any of that, which
    SQLite then finds sound in every page, takes the state's place. What was read must stay in the cache until the end,
    for nobody knows which pages are nowhere else: a state larger than half of the free memory is not copied.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kueue.storage.backup import PORTION_PAGES, examined, open_alone
from kueue.storage.damage import DAMAGE
from kueue.storage.room import has_room_for

RESERVE_BYTES = 2**20

LOCK_BYTE = 2**30
"""The page with this offset is never written: sqlite.org/fileformat2, "The Lock-Byte Page"."""

MEMORY = Path("/proc/meminfo")

_FULL = "database or disk is full"


class Unsound(Exception):
    """The copy lacks pages that were cut out of the state. It has all else, and is the caller's to remove."""

    def __init__(self, draft: Path) -> None:
        super().__init__("a part of it is nowhere any more")
        self.draft = draft


def rewritten(connection: sqlite3.Connection, path: Path, *, cut_from: int | None) -> Path:
    """A sound, flushed copy of the whole state beside it, not yet under its name.

    `cut_from`: the bytes that the state had before it was cut; None: it was its log. Raises `Unsound` if the copy of a
    state that was cut lacks something, and `sqlite3.Error`, `OSError` or `MemoryError` when there cannot be one, for a
    full disk with "is full" in its words or its number; nothing is left behind then, and the files are as they were.
    """
    # `kueue.storage.backup.sweep_beside` knows the name.
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with _stretched(path, cut_from) as size:
            page, count = _pages(connection, path)
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            _copy(connection, draft, count)
    except BaseException as error:
        is_full = _is_full(path, error)  # asked while the draft takes its part of what there was
        draft.unlink(missing_ok=True)
        if is_full:
            raise sqlite3.OperationalError(_FULL) from error
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
    if page * count > _free_memory() // 2:
        raise MemoryError(f"the state has {page * count >> 20} MiB, more than half of the memory that is free")
    if not has_room_for(path, page * count + RESERVE_BYTES):
        raise sqlite3.OperationalError(_FULL)
    return page, count


def _free_memory() -> int:
    """Bytes that the machine can give without driving anything out."""
    with contextlib.suppress(OSError):
        for line in MEMORY.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**62  # not told


def _is_full(path: Path, error: BaseException) -> bool:
    """A used-up quota comes as an input/output error that does not say so."""
    with contextlib.suppress(OSError):
        return isinstance(error, sqlite3.Error) and "I/O" in str(error) and not has_room_for(path, RESERVE_BYTES)
    return False


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
        if not may_have_zeros and lacks_a_page(file, page):
            raise sqlite3.DatabaseError("malformed: a page is missing")
    whole = open_alone(draft, "ro", is_still=True)
    try:
        examined(whole, draft)
    finally:
        whole.close()


def lacks_a_page(file: BinaryIO, page: int) -> bool:
    """A page of `page` bytes that is in use is all zeros."""
    unused, zeros = _unused(file, page), bytes(page)
    file.seek(0)
    number = 0
    while read := file.read(page):
        number += 1
        if read == zeros and number not in unused:
            return True
    return False


def _unused(file: BinaryIO, page: int) -> set[int]:
    """Pages of which nobody reads anything. Layout: sqlite.org/fileformat2, "The Freelist"."""
    unused = {LOCK_BYTE // page + 1}
    file.seek(32)
    trunk, total = struct.unpack(">II", file.read(8))
    for _ in range(total):  # not for ever where a spoiled list goes in a circle
        if not trunk:
            break
        file.seek((trunk - 1) * page)
        read = file.read(page)
        if len(read) < page:
            break
        trunk, leaves = struct.unpack_from(">II", read)
        unused.update(struct.unpack_from(f">{min(leaves, page // 4 - 2)}I", read, 8))
    return unused
