"""Saves what can be read of a damaged state file into a new one, and tells what was lost.

Rules
- The damaged file is only copied; every attempt works on the copy.
- Nothing is taken that contradicts itself (`kueue.storage.sound`) or the rest: what is written has been replayed.
- A job of which it is no longer certain that nothing of it runs or ran is *held*: a person releases it. Nothing that
  was salvaged starts twice by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from kueue.core.facts import Aggregates, AnyFact, JobHeld, JobOffered, JobsFolded, JobsSubmitted
from kueue.core.state import State
from kueue.errors import KueueError, StorageError
from kueue.model import JobState, Place, Request, Terms
from kueue.storage import rows, sound
from kueue.storage.damage import DAMAGE
from kueue.storage.fragments import TABLES, TOP, Row, open_copy, read_table
from kueue.storage.opening import Wanted, connect, this_host
from kueue.storage.plan import folded

OFFERS_SKIPPED = 100_000
"""Numbers left out when it is not known which were given: an offer number must never be used twice."""

LONGEST_TIMEOUT_SECONDS = 3600.0
"""Assumed when it is lost on which `worker_timeout_seconds` workers rely: above what a lab sets, and it passes once."""


class Salvage(NamedTuple):
    """What became of a damaged file."""

    kept: dict[str, int]
    """Table → rows in the new file."""
    held: int
    """Jobs that wait for `kueue release`, because they may have run."""
    lost: tuple[str, ...]
    """One sentence for each loss; empty: all was readable."""


def salvage(source: Path, target: Path, *, wall: float) -> Salvage:
    """Make `target` from what `source` still tells. `wall`: UTC seconds, for the record.

    Raises `StorageError` if `target` exists, the disk has no room for a copy, or nothing at all can be read.
    """
    if target.exists():
        raise StorageError(f"{target} exists", hint="Name a file that does not exist yet.")
    if not source.exists():
        raise StorageError(f"{source} does not exist")
    bench = target.with_name(f"{target.name}.salvage-{os.getpid()}")
    try:
        bench.mkdir(mode=0o700, parents=True)
        new = connect(Wanted(bench / "new", is_network=False, host=this_host(), take_over=False))
        try:
            report = _Rescue(open_copy(source, bench), new, wall).run()
            new.execute("PRAGMA journal_mode = DELETE").fetchall()
        finally:
            new.close()
        (bench / "new").replace(target)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"Nothing could be saved from {source}: {error}") from error
    finally:
        shutil.rmtree(bench, ignore_errors=True)
    return report


class _Rescue:
    """One rescue, from a readable copy into an open new file."""

    def __init__(self, old: sqlite3.Connection, new: sqlite3.Connection, wall: float) -> None:
        self._old = old
        self._new = new
        self._wall = wall
        self._lost: list[str] = []
        self._incomplete: set[str] = set()
        self._tables: dict[str, dict[int, Row]] = {}
        self._places: dict[int, Place] = {}
        """Of `blobs`, by number; so are the next."""
        self._settings: dict[int, rows.Settings] = {}
        self._columns = sound.Columns(new)

    def run(self) -> Salvage:
        try:
            self._tables = {table: self._read(table) for table in TABLES}
            meta, sums = self._read_meta(), self._read_sums()
        finally:
            self._old.close()
        self._drop_unsound()
        latest_offer = self._latest_offer()  # what is dropped after this has been given, too
        self._settle_contents()
        self._settle_ranges()
        held = self._settle_jobs()
        if not any(self._tables.values()) and sums is None:
            raise StorageError("Nothing at all could be read")
        self._write(meta, self._sums(sums, latest_offer))
        return Salvage({table: len(found) for table, found in self._tables.items()}, held, tuple(self._lost))

    def _lose(self, table: str, sentence: str) -> None:
        self._incomplete.add(table)
        self._lost.append(sentence)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self, table: str) -> dict[int, Row]:
        found, sentences = read_table(self._old, table)
        for sentence in sentences:
            self._lose(table, sentence)
        return found

    def _read_meta(self) -> dict[str, str]:
        meta: dict[str, str] = {}
        try:
            meta.update(self._old.execute("SELECT key, value FROM meta"))
        except DAMAGE:
            self._lose("meta", "the marks of the queue could not be read in full")
        if not sound.is_queue_id(meta.get("queue_id")):
            self._lose("meta", "the queue has a new identity: attempts that still run on workers do not belong to it")
            return {}
        return {"queue_id": meta["queue_id"]}

    def _read_sums(self) -> Aggregates | None:
        with contextlib.suppress(*DAMAGE):
            return rows.aggregates(self._old)
        self._lose("aggregates", "the sums over all jobs ever; they begin anew from what is left")
        return None

    # --- judging ----------------------------------------------------------------------------------------------------

    def _drop_unsound(self) -> None:
        for table, found in self._tables.items():
            for key, row in list(found.items()):
                if not self._columns.is_sound(table, row):
                    del found[key]
                    self._lose(table, f"{table}: number {key} is spoiled")

    def _settle_contents(self) -> None:
        """Places and settings: live jobs without theirs are lost, finished ones get an empty one."""
        contents = self._tables["blobs"]
        # Of no content that is there: the next one of the store that is saved gets the number behind the highest.
        spare_place = max(contents, default=0) + 1
        spare_settings = spare_place + 1
        contents[spare_place] = (spare_place, 0, *_content(Place("/")))
        contents[spare_settings] = (spare_settings, 0, *_content(rows.Settings(Request(), Terms())))
        by_digest: dict[object, int] = {}
        same: dict[object, int] = {number: by_digest.setdefault(row[2], number) for number, row in contents.items()}
        for number in same.values():
            content = sound.content(contents[number][-1])
            if isinstance(content, Place):
                self._places[number] = content
            elif content is not None:
                self._settings[number] = content
        refs = dict.fromkeys(contents, 0)
        for first, row in list(self._tables["ranges"].items()):
            place, settings = same.get(row[6], -1), same.get(row[7], -1)
            if place not in self._places or settings not in self._settings:
                del self._tables["ranges"][first]
                self._lose("ranges", f"jobs {first} to {row[1]!r}: their directory or request is lost, and so are they")
                continue
            self._tables["ranges"][first] = (*row[:6], place, settings, *row[8:])
            refs[place] += 1
            refs[settings] += 1
        for job, row in list(self._tables["finished"].items()):
            place, settings = same.get(row[4], -1), same.get(row[5], -1)
            if place not in self._places or settings not in self._settings:
                place = place if place in self._places else same[spare_place]
                settings = settings if settings in self._settings else same[spare_settings]
                self._lose("finished", f"job {job}: its directory or request is lost; how it ended is known")
            self._tables["finished"][job] = (*row[:4], place, settings, *row[6:])
            refs[place] += 1
            refs[settings] += 1
        self._tables["blobs"] = {
            number: (number, refs[number], *row[2:]) for number, row in contents.items() if refs[number]
        }

    def _settle_ranges(self) -> None:
        """Submissions in the order of their jobs, none twice, each before all that happened to its jobs."""
        ranges = self._tables["ranges"]
        end = -1
        for first, row in sorted(ranges.items()):
            if first <= end:
                del ranges[first]
                self._lose("ranges", f"ranges: number {first} is spoiled")
            else:
                end = _int(row[1])
        begins: dict[int, int] = {}
        for seq, row in sorted(self._tables["live"].items(), reverse=True):
            begins[_int(row[1])] = seq
        latest = TOP
        for first, row in sorted(ranges.items(), reverse=True):
            jobs = range(first, _int(row[1]) + 1)
            latest = min(latest, _int(row[3]), *(begins[job] for job in jobs if job in begins))
            ranges[first] = (*row[:3], latest, *row[4:])

    def _settle_jobs(self) -> int:
        """Make live facts, ranges and done ids agree. Returns the number of jobs held."""
        over = self._tables["done_ids"].keys() | self._tables["finished"].keys()
        histories: dict[int, list[tuple[int, AnyFact]]] = {}
        for seq, row in sorted(self._tables["live"].items()):
            if row[1] not in over:
                histories.setdefault(_int(row[1]), []).append((seq, rows.decode_fact(_bytes(row[-1]))))
        states, refused = self._replayed(over, histories)
        for job in sorted(refused):
            self._lose("live", f"job {job}: what became of it; it is held")
        next_seq = max([*self._tables["live"], *(_int(row[3]) for row in self._tables["ranges"].values()), 0]) + 1
        live: dict[int, Row] = {}
        kept_done: set[int] = set()
        held = 0
        for first, row in list(self._tables["ranges"].items()):
            jobs = range(first, _int(row[1]) + 1)
            begins_held = rows.decode_range(_bytes(row[-1])).held
            done = {job for job in jobs if job in over}
            if len(done) == len(jobs):
                del self._tables["ranges"][first]
                continue
            kept_done |= done
            self._tables["ranges"][first] = (*row[:2], len(jobs) - len(done), *row[3:])
            for job in (job for job in jobs if job not in done):
                history = histories.pop(job, [])
                state = states.get(job)
                # If a fact is missing anywhere, a job that seems untouched may have been the one it was about.
                if state is None or (self._is_in_doubt and state is JobState.PENDING):
                    history = []
                    if not begins_held:
                        history = [(next_seq, JobHeld(job=job, principal="recovery", wall=self._wall))]
                        next_seq += 1
                    held += 1
                for seq, fact in history:
                    live[seq] = (seq, job, getattr(fact, "offer", None), rows.encode(fact))
        for begin, end in folded(sorted(histories)):
            self._lose("ranges", f"jobs {begin} to {end}: their submission is lost, and so are they")
        self._tables["live"] = live
        self._tables["done_ids"] = {job: (job,) for job in kept_done}
        return held

    def _replayed(
        self, over: set[int], histories: Mapping[int, Sequence[tuple[int, AnyFact]]]
    ) -> tuple[dict[int, JobState], set[int]]:
        """The states of the jobs that are not over after all this, and those jobs that cannot have gone through it."""
        refused = {job for job, history in histories.items() if not self._is_complete(history)} | _twice(histories)
        while True:
            state, known = self._submitted(over), set(refused)
            facts = [(seq, job, fact) for job in histories.keys() & state.jobs.keys() for seq, fact in histories[job]]
            for _, job, fact in sorted(facts, key=itemgetter(0)):
                if job not in refused:
                    try:
                        state.evolve(fact)
                    except (KueueError, LookupError):
                        refused.add(job)
            if refused == known:  # else those behind one that was refused have met what was left of it
                refused &= state.jobs.keys()
                return {job: found.state for job, found in state.jobs.items() if job not in refused}, refused

    def _submitted(self, over: set[int]) -> State:
        """Workers, and the jobs that are not over, before anything happened to them."""
        state = State()
        for row in self._tables["nodes"].values():
            state.evolve(rows.decode_fact(_bytes(row[-1])))
        for first, row in sorted(self._tables["ranges"].items()):
            place, settings = self._places[_int(row[6])], self._settings[_int(row[7])]
            made = rows.job_range(rows.decode_range(_bytes(row[-1])), place, settings)
            state.evolve(JobsSubmitted(first_id=first, ranges=(made,), principal="", wall=0.0))
            state.evolve(JobsFolded(ids=folded([job for job in range(first, first + made.size) if job in over])))
        return state

    def _is_complete(self, history: Sequence[tuple[int, AnyFact]]) -> bool:
        """Neither an offer that these facts are about is missing, nor the worker of one."""
        offers: set[int | None] = {None}
        for _, fact in history:
            if isinstance(fact, JobOffered):
                if fact.node not in self._tables["nodes"]:
                    return False
                offers.add(fact.offer)
            elif getattr(fact, "offer", None) not in offers:
                return False
        return True

    @property
    def _is_in_doubt(self) -> bool:
        """Something that happened to a live job may be unknown."""
        return bool(self._incomplete & {"live", "done_ids"})

    def _latest_offer(self) -> int:
        """The highest number of which anything tells; workers keep output under it. -1: nothing does."""
        live = (row[2] for row in self._tables["live"].values() if isinstance(row[2], int))
        bodies = (rows.decode_finished(_bytes(row[-1])) for row in self._tables["finished"].values())
        return max((*live, *(past.offer for body in bodies for past in body.attempts)), default=-1)

    def _sums(self, read: Aggregates | None, latest_offer: int) -> Aggregates:
        finished = self._tables["finished"].values()
        kinds = [row[1] for row in finished]
        seconds = sum(int(row[3]) for row in finished if isinstance(row[3], float) and row[1] != "canceled")
        counted = {kind: kinds.count(kind) for kind in ("succeeded", "failed", "canceled")}
        offers = sorted({row[2] for row in self._tables["live"].values() if isinstance(row[2], int)})
        jobs = [*self._tables["finished"], *self._tables["done_ids"]]
        jobs += [_int(row[1]) for row in self._tables["ranges"].values()]
        next_node = max(self._tables["nodes"], default=-1) + 1
        if read is not None:
            next_offer = max(read.next_offer, latest_offer + 1)
            return msgspec.structs.replace(
                read,
                **counted,
                run_seconds=seconds,
                next_job=max([read.next_job, *(job + 1 for job in jobs)]),
                next_offer=next_offer,
                next_node=max(read.next_node, next_node),
                never_given=_between(offers, next_offer) if self._is_in_doubt else read.never_given,
            )
        jobs += [job for row in self._tables["events"].values() for job in row[2:4] if isinstance(job, int)]
        next_offer = latest_offer + 1 + OFFERS_SKIPPED
        numbers = Aggregates(
            next_job=max(jobs, default=0) + 1,
            next_offer=next_offer,
            timeout_seconds=LONGEST_TIMEOUT_SECONDS,
            never_given=_between(offers, next_offer),
            next_node=next_node,
        )
        return msgspec.structs.replace(numbers, **counted, run_seconds=seconds)

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, meta: dict[str, str], sums: Aggregates) -> None:
        self._new.execute("BEGIN IMMEDIATE")
        self._new.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
        self._new.execute("UPDATE aggregates SET body = ?", (rows.encode(sums),))
        for table, found in self._tables.items():
            for row in found.values():
                places = ", ".join("?" * len(row))
                self._new.execute(f"INSERT INTO {table} VALUES ({places})", row)  # noqa: S608  a name from TABLES
        self._new.execute("COMMIT")


def _between(offers: list[int], end: int) -> tuple[tuple[int, int], ...]:
    """The numbers below `end` without these, as inclusive ranges.

    An attempt of such a number is not known any more, and may be all that is left of a held job: the server must not
    stop it as one that it gave away.
    """
    begins = [0, *(offer + 1 for offer in offers)]
    ends = [*(offer - 1 for offer in offers), end - 1]
    return tuple((first, last) for first, last in zip(begins, ends, strict=True) if first <= last)


def _twice(histories: Mapping[int, Sequence[tuple[int, AnyFact]]]) -> set[int]:
    """The jobs with an offer that another one has, too."""
    owners: dict[int, set[int]] = {}
    for job, history in histories.items():
        for _, fact in history:
            if isinstance(fact, JobOffered):
                owners.setdefault(fact.offer, set()).add(job)
    return {job for jobs in owners.values() if len(jobs) > 1 for job in jobs}


def _int(value: object) -> int:
    """A column of a row that is sound."""
    assert isinstance(value, int)
    return value


def _bytes(value: object) -> bytes:
    """As `_int`."""
    assert isinstance(value, bytes)
    return value


def _content(value: Place | rows.Settings) -> tuple[bytes, bytes]:
    body = rows.encode(value)
    return rows.digest(body), body
