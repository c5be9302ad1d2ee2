"""Places and settings, each content stored once and counted by the rows that name it."""

from __future__ import annotations

import sqlite3
from collections import Counter

from kueue.model import Place
from kueue.storage.rows import Settings, decode_place, decode_settings, digest, encode

CACHED = 4096
"""Contents remembered in memory; far more than a lab has in use at a time, at some kilobytes each."""


class Blobs:
    """Gives each content its number. Counts are collected and written by `settle`, once per transaction.

    After a rollback call `forget`: numbers given since may not exist.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ids: dict[Place | Settings, int] = {}
        self._contents: dict[int, Place | Settings] = {}
        self._changes: Counter[int] = Counter()

    def take(self, content: Place | Settings) -> int:
        """The number of the content, for one more row that names it."""
        number = self._ids.get(content)
        if number is None:
            number = self._stored(encode(content))
            self._remember(number, content)
        self._changes[number] += 1
        return number

    def drop(self, number: int, times: int = 1) -> None:
        """So many rows that named it go."""
        self._changes[number] -= times

    def settle(self) -> None:
        """Write the counts of this transaction and delete what nobody names any more."""
        changed = [(change, number) for number, change in self._changes.items() if change]
        self._changes.clear()
        self._connection.executemany("UPDATE blobs SET refs = refs + ? WHERE id = ?", changed)
        shrunk = [number for change, number in changed if change < 0]
        for number in shrunk:
            if self._connection.execute("DELETE FROM blobs WHERE id = ? AND refs <= 0", (number,)).rowcount:
                self._ids.pop(self._contents.pop(number, None), None)  # type: ignore[arg-type]  # None is no key

    def forget(self) -> None:
        self._ids.clear()
        self._contents.clear()
        self._changes.clear()

    def place(self, number: int) -> Place:
        found = self._contents.get(number)
        if not isinstance(found, Place):
            found = decode_place(self._body(number))
            self._remember(number, found)
        return found

    def settings(self, number: int) -> Settings:
        found = self._contents.get(number)
        if not isinstance(found, Settings):
            found = decode_settings(self._body(number))
            self._remember(number, found)
        return found

    def _remember(self, number: int, content: Place | Settings) -> None:
        if len(self._contents) >= CACHED:
            self._ids.clear()
            self._contents.clear()
        self._ids[content] = number
        self._contents[number] = content

    def _body(self, number: int) -> bytes:
        row = self._connection.execute("SELECT body FROM blobs WHERE id = ?", (number,)).fetchone()
        if row is None:
            # The same error as SQLite's own for what cannot be: the edge names the file and the way out.
            raise sqlite3.DatabaseError(f"malformed: content {number} is missing")
        return bytes(row[0])

    def _stored(self, body: bytes) -> int:
        key = digest(body)
        row = self._connection.execute("SELECT id FROM blobs WHERE digest = ?", (key,)).fetchone()
        if row is not None:
            return int(row[0])
        cursor = self._connection.execute("INSERT INTO blobs (refs, digest, body) VALUES (0, ?, ?)", (key, body))
        number = cursor.lastrowid
        assert number is not None
        return number
