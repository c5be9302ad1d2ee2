"""`kueue_server --restore FILE`: a backup becomes the state; what was there is kept beside it.

Rules
- The backup is checked whole before anything is touched, and what was there is moved, never removed.
- Numbers go on above all that were ever given: the state that is replaced tells them; if it cannot be read, or is of
  another queue, 100,000 of each kind are left out. Attempts of the numbers between are nobody's to stop.
- Jobs that waited when the backup was made may have run since, or may be running: they are *held*, so that nothing
  runs twice by itself. A job that ran then goes on if its worker still has it; else it counts as lost and runs again.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from pathlib import Path

import msgspec

from kueue import __version__, places
from kueue.core.engine import Engine
from kueue.core.facts import Aggregates, AnyFact, JobHeld, NumbersRaised
from kueue.core.settings import Settings
from kueue.errors import KueueError, StorageError, UserError
from kueue.model import JobState
from kueue.server.recovery import COMPANIONS, state_file
from kueue.storage import rows
from kueue.storage.backup import Summary, examined, open_alone, sync_directory
from kueue.storage.opening import MAGIC, check_header, open_to_copy
from kueue.storage.plan import folded
from kueue.storage.sqlite import SqliteStore
from kueue.storage.store import Batch
from kueue.units import format_id_ranges

SKIPPED = 100_000
"""Numbers left out when it is not known which were given since the backup."""
RANGES_SHOWN = 10
PRINCIPAL = "restore"


def restore(where: places.Places, file: str, *, take_over: bool) -> int:
    """Exit code. The caller holds the server's lock. Raises `KueueError`; all is as it was then."""
    source = Path(file).expanduser().absolute()
    made = _checked(source)
    target = state_file(Path(where.server))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    draft = target.with_name(f"{target.name}.restored-{stamp}")
    try:
        held = _prepare(source, draft, target, made, where=where, take_over=take_over)
        aside = _put_aside(target, stamp)
        draft.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise StorageError(f"{source} cannot be restored: {error.strerror or error}.") from error
    finally:
        for suffix in (*COMPANIONS, ".ballast"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    _tell(source, made, held, aside)
    return 0


def _checked(source: Path) -> Summary:
    """Refuses what is no whole backup of a format that we know. The file is only read."""
    try:
        with source.open("rb") as file:
            header = file.read(100)
        if not header.startswith(MAGIC):
            raise UserError(f"{source} is not a backup of kueue: it is not a database.")
        if any(source.with_name(source.name + suffix).exists() for suffix in ("-wal", "-journal")):
            raise UserError(
                f"{source} has a log beside it: it is a state in use, or a copy of one.",
                hint="Make backups with `kueue_server --backup FILE`.",
            )
        check_header(source)
        connection = open_alone(source, "ro")
        try:
            return examined(connection, source)
        finally:
            connection.close()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}.") from error
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise UserError(f"{source} is damaged: {error}.", hint="Take another backup.") from error


def _prepare(
    source: Path, draft: Path, present: Path, made: Summary, *, where: places.Places, take_over: bool
) -> list[int]:
    """Make `draft` from the backup, with numbers raised and waiting jobs held. Returns those jobs."""
    draft.touch(mode=0o600, exist_ok=False)
    shutil.copyfile(source, draft)
    store = SqliteStore(draft, is_network=where.is_network, take_over=take_over)
    try:
        engine = Engine(Settings(), queue_id=store.queue_id, version=__version__)
        engine.replay(store.aggregates(), store.replay())
        wall = time.time()
        facts: list[AnyFact] = [_raised(store.aggregates(), _numbers(present, made.queue_id), wall)]
        held = [job.id for job in engine.state.jobs.values() if job.state is JobState.PENDING]
        facts += [JobHeld(job=job, principal=PRINCIPAL, wall=wall) for job in held]
        for fact in facts:
            engine.state.evolve(fact)
        store.commit(Batch(facts=tuple(facts), aggregates=engine.aggregates(), wall=wall))
    finally:
        store.close()
    if draft.with_name(f"{draft.name}-wal").exists():
        raise StorageError(f"The disk of {draft.parent} does not take the restored state: nothing was changed.")
    return sorted(held)


def _raised(sums: Aggregates, given: Aggregates | None, wall: float) -> NumbersRaised:
    if given is None:
        return NumbersRaised(next_job=sums.next_job + SKIPPED, next_offer=sums.next_offer + SKIPPED, wall=wall)
    return NumbersRaised(next_job=given.next_job, next_offer=max(given.next_offer, sums.next_offer), wall=wall)


def _numbers(present: Path, queue_id: str) -> Aggregates | None:
    """The sums of the state that is replaced, if it is a later one of the same queue and can be read."""
    if not present.exists():
        return None
    with contextlib.suppress(sqlite3.Error, KueueError, OSError, msgspec.DecodeError, TypeError):
        connection = open_to_copy(present)
        try:
            (body,) = connection.execute("SELECT body FROM aggregates").fetchone()
            (found,) = connection.execute("SELECT value FROM meta WHERE key = 'queue_id'").fetchone()
        finally:
            connection.close()
        if found == queue_id:
            return rows.decode_aggregates(body)
    return None


def _put_aside(target: Path, stamp: str) -> Path | None:
    """Move what is there out of the way, with its log. Returns its new name; none if there was nothing."""
    aside = target.with_name(f"{target.name}.before-{stamp}")
    for suffix in COMPANIONS:
        companion = target.with_name(target.name + suffix)
        if companion.exists():
            companion.rename(aside.with_name(aside.name + suffix))
    return aside if aside.exists() else None


def _tell(source: Path, made: Summary, held: list[int], aside: Path | None) -> None:
    lines = [f"Restored {source}: {made.live} jobs not over, {made.finished} finished."]
    if aside is not None:
        lines.append(f"What was there is {aside} now.")
    if held:
        ranges = folded(held)
        ids = format_id_ranges(ranges if len(ranges) <= RANGES_SHOWN else [(held[0], held[-1])])
        lines.append(
            f"{len(held)} jobs waited when the backup was made. They may have run since, so they are held: "
            f"look at them, then `kueue release {ids}` or `kueue remove-job {ids}`."
        )
    print("\n".join(lines))  # noqa: T201  the result
