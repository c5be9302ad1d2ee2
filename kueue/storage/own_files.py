"""The files of an open state: do their names still lead to them?

Theory of operation
    SQLite goes on writing to a log whose name was taken away, or leads to another file by now; whoever opens the state
    next would not find it. As long as we live it can be read, so it goes into the state file, and SQLite is made to
    begin another log: it leaves its journal mode and comes back, all under the lock that it holds. A journal is empty
    between two transactions; one without a name could undo nothing after a crash.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import TypeAlias

from kueue import log
from kueue.errors import StorageError

File: TypeAlias = tuple[int, int]
"""(device, inode)."""

_log = log.logger("storage")


def file_at(path: Path | str) -> File:
    """Raises `OSError`."""
    found = os.stat(path)  # noqa: PTH116  asked before each commit: half the price of that of pathlib
    return found.st_dev, found.st_ino


class OwnFiles:
    """Of the state at `path`, which `connection` has open and locked."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, is_network: bool) -> None:
        self.state = file_at(path)
        self._connection = connection
        self._path = path
        self._is_network = is_network
        self._log = f"{path}-journal" if is_network else f"{path}-wal"
        self._known: File | None = None
        """The log; None: SQLite has had no reason to open one."""
        self._is_told = False
        self.note()

    def note(self) -> None:
        """To be called behind each transaction: the first one makes the log."""
        if self._known is None:
            with contextlib.suppress(OSError):
                self._known = file_at(self._log)

    def assure(self) -> None:
        """To be called before each transaction. Raises `StorageError` when what is written would not be found again.

        Raises `sqlite3.Error` while a log that was taken away cannot be saved; call it again after a full disk.
        """
        if not _is(self._path, self.state):
            raise StorageError(
                f"{self._path} was removed or replaced while the server runs: nothing was accepted",
                hint="Put it back if you can, and start the server again.",
            )
        if self._known is None or _is(self._log, self._known):
            return
        try:
            self._begin_another_log()
        except sqlite3.Error:
            if not self._is_told:
                self._is_told = True
                _log.error(
                    "%s was removed or replaced while the server runs; what it held only this server still has, and it "
                    "cannot be saved yet",
                    self._log,
                )
            raise
        _log.warning(
            "%s was removed or replaced while the server runs. Nothing is lost: what it held is in %s now, and another "
            "one was begun. Leave the files of a running server alone",
            self._log,
            self._path.name,
        )
        self._is_told = False

    def _begin_another_log(self) -> None:
        if self._is_network:
            self._mode("OFF")  # the only way to have it closed without giving up the lock
            self._mode("TRUNCATE")
        else:
            # Leaving the mode would do this, too, and drop the log whether it succeeds or not.
            (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_busy:
                raise sqlite3.OperationalError(f"{self._log} was removed, and what it held cannot be read")
            self._mode("DELETE")
            self._mode("WAL")
            self._connection.execute("SELECT count(*) FROM meta").fetchall()  # the first reader makes the log
        self._known = None
        self.note()

    def _mode(self, wanted: str) -> None:
        (mode,) = self._connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
        if mode.upper() != wanted:
            raise sqlite3.OperationalError(f"{self._log} was removed, and no other can be begun")


def _is(path: Path | str, known: File) -> bool:
    with contextlib.suppress(OSError):
        return file_at(path) == known
    return False
