"""`kueue_server --recover`: what can be read of a damaged state becomes the new one; the damaged one is kept too."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from kueue import log, places
from kueue.errors import KueueError, UserError
from kueue.storage.backup import examined
from kueue.storage.opening import open_to_copy
from kueue.storage.salvage import salvage

COMPANIONS = ("", "-wal", "-shm", "-journal")
"""SQLite's own files of one database; they belong together."""

_log = log.logger("server")


def state_file(directory: Path) -> Path:
    """The store of the server whose state lies in `directory`."""
    return directory / "queue.sqlite"


def recover(directory: Path) -> int:
    """Exit code. The caller holds the server's lock.

    Raises `StorageError` when nothing can be saved, `UserError` when nothing is damaged: what may have run would be
    held for no reason.
    """
    source = state_file(directory)
    if not source.exists():
        raise UserError(f"There is nothing to recover: {source} does not exist.")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    draft = directory / f"recovered-{stamp}.sqlite"
    saved = salvage(source, draft, wall=time.time())
    if not saved.lost and _is_whole(source):
        draft.unlink()
        raise UserError(f"{source} is whole: there is nothing to recover.", hint="Start kueue_server as usual.")
    aside = f"{source.name}.damaged-{stamp}"
    for suffix in COMPANIONS:
        companion = source.with_name(source.name + suffix)
        if companion.exists():
            companion.rename(directory / (aside + suffix))
    draft.rename(source)
    places.sync_directory(directory)
    for sentence in saved.lost:
        _log.warning("lost: %s", sentence)
    if saved.held:
        _log.warning(
            "%d jobs may have run and are held: look at them, then `kueue release` or `kueue remove-job`", saved.held
        )
    kept = ", ".join(f"{count} {table}" for table, count in saved.kept.items())
    _log.info("recovered into %s: %s; the damaged state is %s", source, kept, directory / aside)
    return 0


def _is_whole(source: Path) -> bool:
    """Every page is as SQLite wrote it, and no half transaction waits beside it."""
    if source.with_name(f"{source.name}-journal").exists():
        return False
    try:
        with contextlib.closing(open_to_copy(source)) as connection:
            examined(connection, source)
    except (sqlite3.Error, ValueError, KueueError):  # ValueError: what is decoded from damaged pages
        return False
    return True
