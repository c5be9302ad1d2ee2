"""Can a row that was read from a damaged file be believed? Its columns have their types, and its body says the same."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from kueue.core.facts import JobDone, NodeChanged, RequestAnswered
from kueue.core.jobs import payload_of
from kueue.model import Place, kind_of
from kueue.storage import rows
from kueue.storage.fragments import TABLES, TOP, Row

_TYPES: Mapping[str, type] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}
_QUEUE_ID = re.compile(r"[0-9a-f]{32}")

Column: TypeAlias = tuple[type, bool]
"""Its type, and whether it may be empty."""


class Columns:
    """The columns of all tables, as a whole file has them."""

    def __init__(self, whole: sqlite3.Connection) -> None:
        query = 'SELECT type, NOT "notnull" AND NOT pk FROM pragma_table_info(?)'
        self._columns: dict[str, list[Column]] = {
            table: [(_TYPES[kind], bool(may_miss)) for kind, may_miss in whole.execute(query, (table,))]
            for table in TABLES
        }

    def is_sound(self, table: str, row: Row) -> bool:
        """Whether this row of that table can be taken as it is."""
        if len(row) != len(self._columns[table]) or not all(map(_fits, row, self._columns[table])):
            return False
        try:
            return table not in _AGREES or _AGREES[table](row)
        except msgspec.DecodeError:
            return False


def _fits(value: object, column: Column) -> bool:
    kind, may_miss = column
    if value is None:
        return may_miss
    # No number of ours is negative, and SQLite holds none that is larger.
    return type(value) is kind and (not isinstance(value, (int, float)) or 0 <= value <= TOP)


def content(body: object) -> Place | rows.Settings | None:
    """The place, or the request with its terms, that stands in this body of `blobs`; none if it is neither."""
    decoders: tuple[Callable[[bytes], Place | rows.Settings], ...] = (rows.decode_place, rows.decode_settings)
    for decode in decoders:
        with contextlib.suppress(msgspec.DecodeError):
            return decode(body if isinstance(body, bytes) else b"")
    return None


def is_queue_id(value: object) -> bool:
    return isinstance(value, str) and _QUEUE_ID.fullmatch(value) is not None


def _node(row: Row) -> bool:
    fact = rows.decode_fact(_body(row))
    return isinstance(fact, NodeChanged) and fact.node.id == row[0]


def _content(row: Row) -> bool:
    return rows.digest(_body(row)) == row[2] and content(row[3]) is not None


def _range(row: Row) -> bool:
    body = rows.decode_range(_body(row))
    first, last = row[:2]
    return isinstance(first, int) and last == first + (len(body.argvs) or body.count) - 1


def _live(row: Row) -> bool:
    fact = rows.decode_fact(_body(row))
    # What is done stands elsewhere.
    return not isinstance(fact, JobDone) and (getattr(fact, "job", None), getattr(fact, "offer", None)) == row[1:3]


def _finished(row: Row) -> bool:
    payload = row[6]
    assert isinstance(payload, bytes)
    payload_of(payload)
    return kind_of(rows.decode_finished(_body(row)).outcome) == row[1]


def _output(row: Row) -> bool:
    rows.decode_end(_body(row))
    return True


def _request(row: Row) -> bool:
    return isinstance(rows.decode_fact(_body(row)), RequestAnswered)


def _body(row: Row) -> bytes:
    body = row[-1]
    assert isinstance(body, bytes)
    return body


_AGREES: Mapping[str, Callable[[Row], bool]] = {
    "nodes": _node,
    "blobs": _content,
    "ranges": _range,
    "live": _live,
    "finished": _finished,
    "outputs": _output,
    "requests": _request,
}
