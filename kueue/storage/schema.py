"""The tables of the state file, its version, and the steps from older versions to this one.

Rules
- Whoever changes a table, a fact or a finished job so that a file of `FORMAT` reads differently gives `FORMAT` the next
  number, adds a step to `STEPS`, and checks in a file of the old format. A test compares the definitions.
- A step runs inside one transaction, after a backup of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import TypeAlias

Step: TypeAlias = Callable[[sqlite3.Connection], None]

APPLICATION_ID = 0x6B756575
"""``kueu`` in the header of the file, so that file(1) and we can tell it from any other database."""

FORMAT = 1

STEPS: Mapping[int, Step] = {}
"""Format → what makes the next one of it."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE aggregates (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB NOT NULL);
CREATE TABLE nodes (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE blobs (
    id INTEGER PRIMARY KEY, refs INTEGER NOT NULL, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL
);
CREATE TABLE ranges (
    first INTEGER PRIMARY KEY, last INTEGER NOT NULL, remaining INTEGER NOT NULL, seq INTEGER NOT NULL,
    principal TEXT NOT NULL, wall REAL NOT NULL, place INTEGER NOT NULL, settings INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE live (seq INTEGER PRIMARY KEY, job INTEGER NOT NULL, offer INTEGER, body BLOB NOT NULL);
CREATE INDEX live_by_job ON live (job, offer);
CREATE TABLE done_ids (id INTEGER PRIMARY KEY);
CREATE TABLE finished (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, ended REAL NOT NULL, run_seconds REAL NOT NULL,
    place INTEGER NOT NULL, settings INTEGER NOT NULL, payload BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX finished_by_kind ON finished (kind, id);
CREATE INDEX finished_by_end ON finished (kind, ended);
CREATE TABLE outputs (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE requests (seq INTEGER PRIMARY KEY, wall REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, wall REAL NOT NULL, job INTEGER, last INTEGER, who TEXT NOT NULL, what TEXT NOT NULL
);
CREATE INDEX events_of_one ON events (job) WHERE last IS NULL AND job IS NOT NULL;
CREATE INDEX events_of_many ON events (job) WHERE last IS NOT NULL;
"""


def create(connection: sqlite3.Connection) -> None:
    """Lay down the tables in an empty database, in one transaction."""
    # So that room taken by a long history can be given back to the disk; it must be set before the first table.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")


def version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(connection: sqlite3.Connection, *, target: int, steps: Mapping[int, Step]) -> None:
    """Bring the tables to `target` in one transaction: all steps or none. The caller has made a backup."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for version in range(version_of(connection), target):
            steps[version](connection)
        connection.execute(f"PRAGMA user_version = {target}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
