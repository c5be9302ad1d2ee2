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
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kueue import __version__, places
from kueue.core.engine import Engine
from kueue.core.facts import Aggregates, AnyFact, JobHeld, NumbersRaised, TimeoutChanged
from kueue.core.settings import Settings
from kueue.errors import DiskFull, KueueError, StorageError, UserError
from kueue.model import JobState
from kueue.server.exchange import COMPANIONS, exchange, free_stamp
from kueue.server.recovery import state_file
from kueue.storage import cut, rows
from kueue.storage.backup import Summary, examined, open_alone, sweep_beside
from kueue.storage.damage import DAMAGE, SENSELESS, words
from kueue.storage.in_use import refuse_used
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
    source = Path(places.typed(file))
    made = _checked(source)
    target = state_file(Path(where.server))
    refuse_used(target)  # a server whose lock and sockets were removed holds this one yet
    stamp = free_stamp(lambda one: (_aside(target, one), _draft(target, one)))
    draft = _draft(target, stamp)
    try:
        held = _prepare(source, draft, target, made, where=where, take_over=take_over)
        aside = exchange(draft, target, _aside(target, stamp))
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"{source} cannot be restored: {getattr(error, 'strerror', None) or error}.",
            hint="The state is as it was.",
        ) from error
    finally:
        _remove(draft)
    with contextlib.suppress(OSError):  # one that stays costs the next start some care
        cut.remove(target)  # its numbers count by now
    sweep_beside(target)
    _tell(source, made, held, aside)
    return 0


def _draft(target: Path, stamp: str) -> Path:
    # `kueue.storage.opening` knows the name: a state that is missing beside a draft is not made anew.
    return target.with_name(f"{target.name}.restored-{stamp}")


def _aside(target: Path, stamp: str) -> Path:
    return target.with_name(f"{target.name}.before-{stamp}")


def _remove(draft: Path) -> None:
    for suffix in (*COMPANIONS, ".ballast"):
        with contextlib.suppress(OSError):
            draft.with_name(draft.name + suffix).unlink()


def _checked(source: Path) -> Summary:
    """Refuses what is no whole backup of a format that we know. The file is only read."""
    try:
        if not stat.S_ISREG(source.stat().st_mode):
            raise UserError(f"{source} is not a file.")  # a FIFO would be waited for, with the lock held
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
        # Also what an earlier restore has put aside, which is no copy: to go back must be possible.
        connection = open_alone(source, "ro", is_still=True)
        try:
            return examined(connection, source)
        finally:
            connection.close()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}.") from error
    except DAMAGE as error:
        raise UserError(f"{source} is damaged: {words(error)}.", hint="Take another backup.") from error


def _prepare(
    source: Path, draft: Path, present: Path, made: Summary, *, where: places.Places, take_over: bool
) -> list[int]:
    """Make `draft` from the backup, with numbers raised and waiting jobs held. Returns those jobs."""
    draft.touch(mode=0o600, exist_ok=False)
    shutil.copyfile(source, draft)
    with _named(source, draft):
        store = SqliteStore(draft, is_network=where.is_network, take_over=take_over)
        try:
            engine = Engine(Settings(), queue_id=store.queue_id, version=__version__)
            engine.replay(store.aggregates(), store.replay())
            wall = time.time()
            facts = decided(engine, _numbers(present, made.queue_id), wall)
            store.commit(Batch(facts=tuple(facts), aggregates=engine.aggregates(), wall=wall))
            held = [fact.job for fact in facts if isinstance(fact, JobHeld)]
        finally:
            store.close()
    if draft.with_name(f"{draft.name}-wal").exists():
        raise StorageError(f"The disk of {draft.parent} does not take the restored state: nothing was changed.")
    return sorted(held)


@contextlib.contextmanager
def _named(source: Path, draft: Path) -> Iterator[None]:
    """What is wrong with the draft is wrong with the backup, which is the file that people know; no state is to be
    recovered.
    """
    try:
        yield
    except DiskFull:
        raise
    except StorageError as error:
        # Only the word about another host has a way out of its own.
        hint = error.hint if "--take-over" in error.hint else "Take another backup."
        raise StorageError(str(error).replace(str(draft), str(source)), hint=hint) from error
    except (*DAMAGE, *SENSELESS) as error:
        raise StorageError(f"{source} is damaged: {words(error)}.", hint="Take another backup.") from error


def decided(engine: Engine, given: Aggregates | None, wall: float, principal: str = PRINCIPAL) -> list[AnyFact]:
    """What makes a backup, as replayed, a record to go on with: its numbers are raised, its waiting jobs held.

    `given`: the sums of the state that is replaced; None if they are not known. The engine has evolved by the facts.
    """
    facts: list[AnyFact] = [_raised(engine.aggregates(), given, wall)]
    if given is not None and given.timeout_seconds > engine.state.sums.timeout_seconds:
        # Workers may hold leases by the longer one yet: a server that is started with a shorter one lets it pass first.
        facts.append(TimeoutChanged(seconds=given.timeout_seconds, wall=wall))
    waiting = [job.id for job in engine.state.jobs.values() if job.state is JobState.PENDING]
    facts += [JobHeld(job=job, principal=principal, wall=wall) for job in waiting]
    for fact in facts:
        engine.state.evolve(fact)
    return facts


def _raised(sums: Aggregates, given: Aggregates | None, wall: float) -> NumbersRaised:
    if given is None:
        return NumbersRaised(next_job=sums.next_job + SKIPPED, next_offer=sums.next_offer + SKIPPED, wall=wall)
    return NumbersRaised(next_job=given.next_job, next_offer=max(given.next_offer, sums.next_offer), wall=wall)


def _numbers(present: Path, queue_id: str) -> Aggregates | None:
    """The sums of the state that is replaced, if it is a later one of the same queue and can be read."""
    note = cut.read(present)
    if note is not None:
        # More were given than what is left of the state knows of.
        return note.sums if note.queue_id == queue_id else None
    if not present.exists():
        return None
    with contextlib.suppress(*DAMAGE, KueueError, OSError, TypeError):
        connection = open_to_copy(present)
        try:
            given = rows.aggregates(connection)
            (found,) = connection.execute("SELECT value FROM meta WHERE key = 'queue_id'").fetchone()
        finally:
            connection.close()
        if found == queue_id:
            return given
    return None


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
