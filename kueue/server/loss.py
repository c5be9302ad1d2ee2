"""The start after files of the state were cut while the server ran, and not all could be saved.

The state is then like a backup of its last checkpoint, and what is done is what a restore does (`restore.decided`):
numbers go on above all that were given, and jobs that waited then are held, for they may have run since.
"""

from __future__ import annotations

import time

from kueue import __version__, log
from kueue.core.engine import Engine
from kueue.core.facts import JobHeld
from kueue.core.settings import Settings
from kueue.errors import DiskFull, StorageError
from kueue.server.restore import RANGES_SHOWN, decided
from kueue.storage import cut
from kueue.storage.damage import SENSELESS
from kueue.storage.plan import folded
from kueue.storage.sqlite import SqliteStore
from kueue.storage.store import Batch
from kueue.units import format_date, format_id_ranges

PRINCIPAL = "server"

_log = log.logger("server")


def settle(store: SqliteStore) -> None:
    """Deal with what `storage.cut` has noted, if it has. Raises `StorageError`; the note stays then."""
    note = cut.read(store.path)
    if note is None:
        return
    if note.queue_id in ("", store.queue_id):
        engine = Engine(Settings(), queue_id=store.queue_id, version=__version__)
        try:
            engine.replay(store.aggregates(), store.replay())
        except SENSELESS:
            return  # the service finds the same, and has the words for it
        wall = time.time()
        facts = decided(engine, note.sums, wall, PRINCIPAL)
        batch = Batch(facts=tuple(facts), aggregates=engine.aggregates(), wall=wall)
        try:
            store.commit(batch)
        except DiskFull:
            store.release_ballast()
            store.commit(batch)
        _tell(note, engine.aggregates().next_job, sorted(fact.job for fact in facts if isinstance(fact, JobHeld)))
    try:
        cut.remove(store.path)
    except OSError as error:
        raise StorageError(
            f"The note about what was lost beside {store.path} cannot be removed: {error}.",
            hint="Nothing more is accepted before that: a later start would take what is new for lost, too.",
        ) from error


def _tell(note: cut.Note, next_job: int, held: list[int]) -> None:
    now = time.time()
    lost = (
        f"what was accepted since {format_date(note.since_wall, now)} is lost" if note.since_wall else "not all is left"
    )
    _log.warning(
        "a file of the state was made shorter while the server ran%s: %s. Numbers go on at job %d",
        f" (seen {format_date(note.cut_wall, now)})" if note.cut_wall else "",
        lost,
        next_job,
    )
    if held:
        ranges = folded(held)
        ids = format_id_ranges(ranges if len(ranges) <= RANGES_SHOWN else [(held[0], held[-1])])
        _log.warning(
            "%d jobs waited then. They may have run since, so they are held: look at them, then `kueue release %s` or "
            "`kueue remove-job %s`",
            len(held),
            ids,
            ids,
        )
