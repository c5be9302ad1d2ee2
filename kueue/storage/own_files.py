"""The files of an open state: do their names still lead to them, and are they as long as they were?

Rules
- Nothing of ours makes the log shorter but a commit, `SqliteStore.tidy` and what is done about files that are gone or
  were cut (`_begin_another_log`, `empty_log`), and the state but a checkpoint behind a vacuum, also one of the process
  before. Whatever is shorter before the next transaction was cut by somebody else.
- That costs no further stat(2): the lengths come with what is asked anyway, and the log's behind a commit from a
  descriptor of our own. Nobody locks a log, so that one may be closed; the state has none (see `SqliteStore`).

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
from kueue.storage.limits import LOG_BYTES

File: TypeAlias = tuple[int, int]
"""(device, inode)."""


class Cut(Exception):
    """Somebody made a file of the open state shorter."""

    def __init__(self, path: Path, *, is_log: bool) -> None:
        super().__init__(f"{path} was made shorter")
        self.path = path
        self.is_log = is_log


_log = log.logger("storage")


def file_at(path: Path | str) -> File:
    """Raises `OSError`."""
    found = os.stat(path)  # noqa: PTH116  as `_seen`
    return found.st_dev, found.st_ino


class OwnFiles:
    """Of the state at `path`, which `connection` has open and locked. To be closed before it."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, is_network: bool) -> None:
        about = os.stat(path)  # noqa: PTH116  as `_seen`
        self.state = (about.st_dev, about.st_ino)
        self.state_bytes = about.st_size
        """No less than that."""
        self._is_to_shrink = False
        """A vacuum has emptied its end, and no checkpoint has taken it away yet."""
        self._connection = connection
        self._path = path
        (self._page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        self._is_network = is_network
        self._log = f"{path}-journal" if is_network else f"{path}-wal"
        self._known: File | None = None
        """The log; None: SQLite has had no reason to open one."""
        self._held = -1
        """Our descriptor of it; -1 of a journal, too, which is empty between two transactions."""
        self._log_bytes = 0
        self._is_told = False
        self.tidied()  # a vacuum of before the start may still be in the log

    def note(self) -> None:
        """To be called behind each transaction, whatever became of it: the first one makes the log."""
        if self._known is None:
            self._know_log()
        if self._held >= 0:
            size = os.lseek(self._held, 0, os.SEEK_END)
            # A commit cuts a long log down to its limit. One that is shorter than that was cut while we wrote.
            if size >= min(self._log_bytes, LOG_BYTES):
                self._log_bytes = size

    def _know_log(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_network:
                self._known = file_at(self._log)
                return
            self._held = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
            about = os.fstat(self._held)
            self._known = about.st_dev, about.st_ino

    def tidied(self) -> None:
        """To be called behind whatever may have made a file shorter: a vacuum, a checkpoint."""
        if self._held >= 0:
            self._log_bytes = os.lseek(self._held, 0, os.SEEK_END)
        self.note()
        found = _seen(self._path)
        if found is not None and found[0] == self.state:
            (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
            needed = pages * self._page_bytes  # of a state into which all has gone that its log holds
            self.state_bytes = min(found[1], needed)
            self._is_to_shrink = found[1] > needed

    def assure(self) -> None:
        """To be called before each transaction. Raises `StorageError` when what is written would not be found again.

        Raises `Cut`, and `sqlite3.Error` while a log that was taken away cannot be saved; call it again after a full
        disk.
        """
        state = _seen(self._path)
        if state is None or state[0] != self.state:
            raise StorageError(
                f"{self._path} was removed or replaced while the server runs: nothing was accepted",
                hint="Put it back if you can, and start the server again.",
            )
        if state[1] < self.state_bytes:
            raise Cut(self._path, is_log=False)
        if not self._is_to_shrink:
            self.state_bytes = state[1]
        if self._known is None:
            return
        log = _seen(self._log)
        if log is not None and log[0] == self._known:
            if log[1] < self._log_bytes:
                raise Cut(Path(self._log), is_log=True)
            return
        self._refuse_cut_log()  # as it was before it was removed
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

    def refuse_cut(self) -> None:
        """Raises `Cut`; not where the state's name leads elsewhere: what lies there is not ours to replace."""
        state = _seen(self._path)
        if state is None or state[0] != self.state:
            return
        if state[1] < self.state_bytes:
            raise Cut(self._path, is_log=False)
        self._refuse_cut_log()

    def _refuse_cut_log(self) -> None:
        if self._held >= 0 and os.lseek(self._held, 0, os.SEEK_END) < self._log_bytes:
            raise Cut(Path(self._log), is_log=True)

    def empty_log(self) -> None:
        """Take away what is left of a log, so that no checkpoint brings a part of it into the state. Raises `OSError`.

        SQLite makes one when it closes the file.
        """
        if self._held >= 0:
            os.ftruncate(self._held, 0)
            os.fsync(self._held)

    def close(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def _begin_another_log(self) -> None:
        if self._is_network:
            self._mode("OFF")  # the only way to have it closed without giving up the lock
            self._mode("TRUNCATE")
        else:
            # Leaving the mode would do this, too, and drop the log whether it succeeds or not.
            (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_busy:
                raise sqlite3.OperationalError(f"{self._log} was removed, and what it held cannot be read")
            self.close()  # it is empty now
            self._log_bytes = 0
            self._mode("DELETE")
            self._mode("WAL")
            self._connection.execute("SELECT count(*) FROM meta").fetchall()  # the first reader makes the log
        self._known = None
        self.tidied()

    def _mode(self, wanted: str) -> None:
        (mode,) = self._connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
        if mode.upper() != wanted:
            raise sqlite3.OperationalError(f"{self._log} was removed, and no other can be begun")


def _seen(path: Path | str) -> tuple[File, int] | None:
    """A file and its length in bytes."""
    with contextlib.suppress(OSError):
        found = os.stat(path)  # noqa: PTH116  asked before each commit: half the price of that of pathlib
        return (found.st_dev, found.st_ino), found.st_size
    return None
