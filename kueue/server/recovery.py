"""`kueue_server --recover`: what can be read of a damaged state becomes the new one; the damaged one is kept too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from kueue import log, places
from kueue.errors import KueueError, StorageError, UserError
from kueue.server.exchange import exchange, free_stamp
from kueue.storage import cut
from kueue.storage.backup import examined, sweep_beside
from kueue.storage.damage import DAMAGE
from kueue.storage.in_use import refuse_used
from kueue.storage.opening import open_to_copy
from kueue.storage.salvage import salvage

_log = log.logger("server")


def state_file(directory: Path) -> Path:
    """The store of the server whose state lies in `directory`."""
    return directory / places.STATE_FILE


def recover(directory: Path) -> int:
    """Exit code. The caller holds the server's lock.

    Raises `StorageError` when nothing can be saved, `UserError` when nothing is damaged: what may have run would be
    held for no reason.
    """
    source = state_file(directory)
    if not source.exists():
        _finish(source)
        return 0
    refuse_used(source)  # a server whose lock and sockets were removed holds this one yet
    sweep_beside(source)
    stamp = free_stamp(lambda one: (_draft(source, one), _aside(source, one)))
    draft = _draft(source, stamp)
    try:
        with _told(source):
            saved = salvage(source, draft, wall=time.time())
            if not saved.lost and _is_whole(source):
                if cut.recovered(source):
                    _log.info("%s is whole, although it was once cut: start kueue_server as usual", source)
                    return 0
                raise UserError(f"{source} is whole: there is nothing to recover.", hint="Start kueue_server as usual.")
            aside = exchange(draft, source, _aside(source, stamp))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    cut.recovered(source)
    for sentence in saved.lost:
        _log.warning("lost: %s", sentence)
    if saved.held:
        _log.warning(
            "%d jobs may have run and are held: look at them, then `kueue release` or `kueue remove-job`", saved.held
        )
    kept = ", ".join(f"{count} {table}" for table, count in saved.kept.items())
    _log.info("recovered into %s: %s; the damaged state is %s", source, kept, aside)
    return 0


def _draft(source: Path, stamp: str) -> Path:
    return source.with_name(f"recovered-{stamp}.sqlite")


def _aside(source: Path, stamp: str) -> Path:
    return source.with_name(f"{source.name}.damaged-{stamp}")


def _finish(source: Path) -> None:
    """Give the newest of what killed recoveries have saved the name of the state: each was whole when it was named."""
    drafts = sorted(source.parent.glob("recovered-*.sqlite"))
    if not drafts:
        raise UserError(f"There is nothing to recover: {source} does not exist.")
    draft = drafts[-1]
    with _told(source):
        # A log that was left belongs to what the killed one has moved aside under its own stamp.
        exchange(draft, source, _aside(source, draft.stem.removeprefix("recovered-")))
    cut.recovered(source)
    sweep_beside(source)
    _log.warning("what may have run is held: `kueue list-jobs --held`, then `kueue release` or `kueue remove-job`")
    _log.info("finished the recovery that was interrupted: %s is %s", draft.name, source)


@contextlib.contextmanager
def _told(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{source} cannot be recovered: {error}.", hint="It was left as it is.") from error


def _is_whole(source: Path) -> bool:
    """Every page is as SQLite wrote it, and no half transaction waits beside it."""
    if source.with_name(f"{source.name}-journal").exists():
        return False
    try:
        with contextlib.closing(open_to_copy(source)) as connection:
            examined(connection, source)
    except (*DAMAGE, KueueError):
        return False
    return True
