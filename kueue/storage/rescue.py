"""What is done about a file of the open state that somebody made shorter: all is saved, or nothing is made worse.

Rules
- What is still there is written anew as a whole (`rewriting`), or nothing of it: a part of a log that was cut may be
  older than the state, and would damage it.
- Before anything is touched, a note is left for the next start (`cut`), which goes when nothing is lost. If there is
  no room for it, all waits. If it cannot be written at all, the rest of a cut log is thrown away without one, and the
  sentence says so: to bring that into the state would be worse.
- What is written anew takes the state's place before the old log goes: whenever we are killed, either the state with
  its log is there as it was, or the new one, by which the note tells that the log is void.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

from kueue import log, places
from kueue.core.facts import Aggregates
from kueue.errors import DiskFull, StorageError
from kueue.storage import cut
from kueue.storage.damage import DAMAGE, words
from kueue.storage.own_files import Cut, OwnFiles
from kueue.storage.rewriting import Unsound, rewritten
from kueue.storage.room import NO_ROOM, Ballast
from kueue.storage.sentences import full_for_another, sentence
from kueue.units import format_date

_log = log.logger("storage")


class Rescue:
    """Of the state at `path`."""

    def __init__(self, path: Path, queue_id: str, ballast: Ballast, wall: Callable[[], float]) -> None:
        self.lost: StorageError | None = None
        """What ended the service: the state as of now could not be saved."""
        self._path = path
        self._queue_id = queue_id
        self._ballast = ballast
        self._wall = wall
        self._is_told = False

    def save(self, connection: sqlite3.Connection, files: OwnFiles, found: Cut, sums: Aggregates | None) -> None:
        """Give a state the name that is written anew from what the connection has; it is of no use after that.

        Raises `StorageError`: there is nothing to go on with; `DiskFull`: not yet.
        """
        try:
            self._note(self._noted(found, sums))
            draft = rewritten(connection, self._path, cut_from=None if found.is_log else files.state_bytes)
        except Unsound as error:
            raise self._leave_unsound(error.draft, files, self.lose(files, found, sums, error)) from error
        except (*DAMAGE, OSError, MemoryError) as error:
            raise self._not_saved(files, found, sums, error) from error
        try:
            self._note(msgspec.structs.replace(self._noted(found, sums), anew=cut.mark(draft)))
            draft.replace(self._path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise self._not_saved(files, found, sums, error) from error
        try:
            places.sync_directory(self._path.parent)
            files.empty_log()
        except OSError as error:
            self.lost = StorageError(
                f"{self._path} was saved, but its directory or its log cannot be used: {error}",
                hint="Start the server again.",
            )
            raise self.lost from error
        _log.warning(
            "%s was made shorter while the server runs. Nothing is lost: the state was written anew. Leave the files "
            "of a running server alone",
            found.path,
        )

    def refuse(self) -> None:
        """Raises what ended the service, if something has."""
        if self.lost is not None:
            raise self.lost

    def _leave_unsound(self, draft: Path, files: OwnFiles, told: StorageError) -> StorageError:
        """It has what the state and its log have, and more: that is what `--recover` shall read."""
        try:
            draft.replace(self._path)
            places.sync_directory(self._path.parent)
            files.empty_log()
        except OSError:
            draft.unlink(missing_ok=True)
        return told

    def _not_saved(self, files: OwnFiles, found: Cut, sums: Aggregates | None, error: Exception) -> StorageError:
        """`DiskFull` if it can be tried again; else all that is still there was left to the next start."""
        is_full = isinstance(error, OSError) and error.errno in NO_ROOM
        if isinstance(error, sqlite3.Error):
            is_full = isinstance(sentence(self._path, error, is_write=True), DiskFull)
        if not is_full:
            return self.lose(files, found, sums, error)
        self._tell_that_it_waits(found)
        return full_for_another(self._path)

    def is_saved(self) -> None:
        """Nobody has the old state open any more. Raises `OSError`."""
        self._path.with_name(f"{self._path.name}-wal").unlink(missing_ok=True)
        cut.remove(self._path)
        self._is_told = False

    def lose(self, files: OwnFiles, found: Cut, sums: Aggregates | None, cause: BaseException) -> StorageError:
        """Leave the state as it was at the last checkpoint. The sentence about that, which ends the service."""
        since = self._as_of()
        with contextlib.suppress(OSError):
            self._note(self._noted(found, sums))
        left = cut.read(self._path)
        why = f"{found.path} was made shorter while the server runs, and what was cut away cannot be saved"
        if not found.is_log:
            self.lost = StorageError(
                f"{why} ({words(cause)}): nothing more was accepted",
                hint="`kueue_server --recover` saves what can be read, `kueue_server --restore FILE` takes a backup.",
            )
            return self.lost
        with contextlib.suppress(OSError):
            files.empty_log()
        when = format_date(since, self._wall()) if since else "the last checkpoint"
        is_noted = left is not None and left.is_log
        self.lost = StorageError(
            f"{why} ({words(cause)}): nothing more was accepted, and what was accepted since {when} is lost",
            hint=f"Start the server again: it goes on with what {self._path.name} holds, gives no number twice, and "
            "holds the jobs that waited then."
            if is_noted
            else f"Mend the disk of {self._path.parent} first. It did not take a note for the next start, which will "
            "give numbers of jobs again, and start what waited then.",
        )
        return self.lost

    def _note(self, note: cut.Note) -> None:
        """Raises `OSError`."""
        try:
            cut.write(self._path, note)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._ballast.release():
                raise
            cut.write(self._path, note)

    def _noted(self, found: Cut, sums: Aggregates | None) -> cut.Note:
        return cut.Note(self._queue_id, found.is_log, sums, self._as_of() if found.is_log else 0.0, self._wall())

    def _as_of(self) -> float:
        """UTC seconds of the last checkpoint: nothing else writes into the state. 0: not known."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_mtime
        return 0.0

    def _tell_that_it_waits(self, found: Cut) -> None:
        if not self._is_told:
            self._is_told = True
            _log.error(
                "%s was made shorter while the server runs; what it held only this server still has, and the disk has "
                "no room to write the state anew. Make room there, as much as the state takes; do not stop the server",
                found.path,
            )
