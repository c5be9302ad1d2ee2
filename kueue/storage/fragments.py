"""Reads the tables of a damaged state file as far as they answer.

Why this way
- Tables are read from both ends and then by halves around what does not answer, so that a bad page costs its own rows.
- The first page of our file is known: if it is spoiled, the copy gets that of a new file.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import TypeAlias

from kueue.errors import StorageError
from kueue.storage import cut, schema
from kueue.storage.damage import DAMAGE
from kueue.storage.plan import folded

Row: TypeAlias = tuple[int | float | str | bytes | None, ...]

TABLES = ("nodes", "blobs", "ranges", "live", "done_ids", "finished", "outputs", "requests", "events")
"""All with a whole number as their key, which is their first column."""

TOP = 2**62
"""Above every number that we ever gave."""

READS = 100_000
"""Reads that may fail in one table before the rest of it is given up: some seconds."""

WINDOW = 2000
"""Numbers tried one by one behind the last that answers."""

LEAPS = 40
"""Doublings of the step when looking further behind it."""


def open_copy(source: Path, bench: Path) -> sqlite3.Connection:
    """A connection to a copy of the damaged file, with as much of its beginning mended as is needed.

    Raises `StorageError` if its tables cannot be found at all.
    """
    copy = bench / "copy"
    for mend in (_as_it_is, _first_page):
        for suffix in ("", "-journal") if cut.is_log_void(source) else ("", "-wal", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source.with_name(source.name + suffix), copy.with_name(copy.name + suffix))
        mend(copy)
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            # Spoiled text shall cost no more than itself.
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            if _has_tables(connection):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise StorageError(f"Nothing of {source} can be read", hint="If there is a backup, put it in its place.")


def _has_tables(connection: sqlite3.Connection) -> bool:
    """With the columns by which they are read."""
    with contextlib.suppress(*DAMAGE), contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        schema.create(fresh)
        query = "SELECT name, pk FROM pragma_table_info(?)"
        return all(
            connection.execute(query, (table,)).fetchall() == fresh.execute(query, (table,)).fetchall()
            for table in (*TABLES, "meta", "aggregates")
        )
    return False


def _as_it_is(_copy: Path) -> None:
    """The first try: perhaps nothing but a page in the middle is spoiled."""


def _first_page(copy: Path) -> None:
    """Give the copy the header and the list of tables of a new file: tables begin at the same pages in both."""
    fresh = copy.with_name("fresh")
    connection = sqlite3.connect(fresh, isolation_level=None)
    try:
        schema.create(connection)
        connection.execute("COMMIT")
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    finally:
        connection.close()
    page = bytearray(fresh.read_bytes()[:size])
    # Offsets of sqlite.org/fileformat2: the size in pages, then an empty list of free pages (which only wastes some).
    page[28:32] = (copy.stat().st_size // size).to_bytes(4, "big")
    page[32:40] = bytes(8)
    with copy.open("r+b") as file:
        file.write(page)


def read_table(connection: sqlite3.Connection, table: str) -> tuple[dict[int, Row], list[str]]:
    """Rows by number, and a sentence for each loss."""
    (key,) = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk = 1", (table,)).fetchone()
    # Constants and names of our own columns: nothing in these texts comes from outside.
    select = f"SELECT * FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"  # noqa: S608
    found, is_whole = _walk(connection, select, 0, TOP)
    if is_whole:
        return found, []
    down, _ = _walk(connection, f"{select} DESC", 0, TOP)
    low = max(found, default=-1) + 1
    gaps = [(low, min(down) - 1)] if down else _leap(connection, select, low, found)
    found.update(down)
    if not found:
        return found, [f"{table}: nothing of it could be read"]
    unread = _close_in(connection, select, gaps, found)
    sentences = [
        f"{table}: numbers {first} to {last} could not be read, if there were any"
        for first, last in folded(sorted(unread))
    ]
    if not down:
        sentences.append(f"{table}: whatever comes after number {max(found)} could not be read")
    return found, sentences or [f"{table}: a page without rows could not be read"]


def _leap(connection: sqlite3.Connection, select: str, low: int, found: dict[int, Row]) -> list[tuple[int, int]]:
    """Look for rows behind a bad place when the end is bad too, in doubling steps. Returns the gaps left."""
    gaps: list[tuple[int, int]] = []
    while True:
        for power in range(LEAPS):
            behind, is_whole = _walk(connection, select, low + 2**power, TOP)
            if behind or is_whole:
                break
        else:
            return [*gaps, (low, low + WINDOW)]
        found.update(behind)
        gaps.append((low, low + 2**power - 1))
        if is_whole:
            return gaps
        low = max(behind) + 1


def _close_in(
    connection: sqlite3.Connection, select: str, gaps: list[tuple[int, int]], found: dict[int, Row]
) -> set[int]:
    """Read what answers in the gaps, by halves. Returns the numbers that do not answer."""
    unread: set[int] = set()
    for _ in range(READS):
        if not gaps:
            break
        low, high = gaps.pop()
        if low > high:
            continue
        up, is_whole = _walk(connection, select, low, high)
        found.update(up)
        if is_whole:
            continue
        low = max(up, default=low - 1) + 1
        if low >= high:
            unread |= set(range(low, high + 1))
            continue
        middle = (low + high) // 2
        gaps += [(low, middle), (middle + 1, high)]
    for low, high in gaps:
        unread |= set(range(low, min(high, low + WINDOW) + 1))
    return unread


def _walk(connection: sqlite3.Connection, query: str, low: int, high: int) -> tuple[dict[int, Row], bool]:
    """The rows up to the first that does not answer, and whether there was none such."""
    found: dict[int, Row] = {}
    try:
        for row in connection.execute(query, (low, high)):
            if isinstance(row[0], int) and low <= row[0] <= high:
                found[row[0]] = row
    except (*DAMAGE, OverflowError):
        return found, False
    return found, True
