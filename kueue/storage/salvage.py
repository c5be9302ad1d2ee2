"""Saves what can be read of a damaged state file into a new one, and tells what was lost.

Rules
- The damaged file is only copied; every attempt works on the copy.
- A job of which it is no longer certain that nothing of it runs or ran is *held*: a person releases it. Nothing that
  was salvaged starts twice by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from kueue.core import lifecycle
from kueue.core.facts import Aggregates, AnyFact, JobHeld, JobOffered
from kueue.errors import IllegalTransition, StorageError
from kueue.model import JobState, Place, Request, Terms
from kueue.storage import rows
from kueue.storage.fragments import TABLES, Row, open_copy, read_table
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
    bench.mkdir(mode=0o700, parents=True)
    try:
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

    def run(self) -> Salvage:
        try:
            self._tables = {table: self._read(table) for table in TABLES}
            meta, sums = self._read_meta(), self._read_sums()
        finally:
            self._old.close()
        self._drop_undecodable()
        self._settle_contents()
        held = self._settle_jobs()
        if not any(self._tables.values()) and sums is None:
            raise StorageError("Nothing at all could be read")
        self._write(meta, self._sums(sums))
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
        except sqlite3.Error:
            self._lose("meta", "the marks of the queue could not be read in full")
        if "queue_id" not in meta:
            self._lose("meta", "the queue has a new identity: attempts that still run on workers do not belong to it")
        return {key: value for key, value in meta.items() if key == "queue_id"}

    def _read_sums(self) -> Aggregates | None:
        with contextlib.suppress(sqlite3.Error, msgspec.DecodeError, TypeError):
            (body,) = self._old.execute("SELECT body FROM aggregates").fetchone()
            return rows.decode_aggregates(body)
        self._lose("aggregates", "the sums over all jobs ever; they begin anew from what is left")
        return None

    # --- judging ----------------------------------------------------------------------------------------------------

    def _drop_undecodable(self) -> None:
        decoders: dict[str, Callable[[bytes], object]] = {
            "nodes": rows.decode_fact,
            "ranges": rows.decode_range,
            "live": rows.decode_fact,
            "finished": rows.decode_finished,
            "outputs": rows.decode_end,
            "requests": rows.decode_fact,
        }
        for table, decode in decoders.items():
            for key, row in list(self._tables[table].items()):
                body = row[-1]
                try:
                    decode(body if isinstance(body, bytes) else b"")
                except msgspec.DecodeError:
                    del self._tables[table][key]
                    self._lose(table, f"{table}: number {key} is spoiled")

    def _settle_contents(self) -> None:
        """Places and settings: live jobs without theirs are lost, finished ones get an empty one."""
        contents = self._tables["blobs"]
        good = {number for number, row in contents.items() if _is_content(row[-1])}
        for number in set(contents) - good:
            del contents[number]
            self._lose("blobs", f"blobs: number {number} is spoiled")
        for first, row in list(self._tables["ranges"].items()):
            if row[6] not in good or row[7] not in good:
                del self._tables["ranges"][first]
                self._lose("ranges", f"jobs {first} to {row[1]!r}: their directory or request is lost, and so are they")
        spare_place, spare_settings = 2**40, 2**40 + 1
        for job, row in list(self._tables["finished"].items()):
            place = row[4] if row[4] in good else spare_place
            settings = row[5] if row[5] in good else spare_settings
            if (place, settings) != row[4:6]:
                self._tables["finished"][job] = (*row[:4], place, settings, *row[6:])
                self._lose("finished", f"job {job}: its directory or request is lost; how it ended is known")
        contents[spare_place] = (spare_place, 0, *_content(Place("/")))
        contents[spare_settings] = (spare_settings, 0, *_content(rows.Settings(Request(), Terms())))
        refs = dict.fromkeys(contents, 0)
        for table, columns in (("ranges", (6, 7)), ("finished", (4, 5))):
            for row in self._tables[table].values():
                for named in (row[column] for column in columns):
                    assert isinstance(named, int)
                    refs[named] += 1
        self._tables["blobs"] = {
            number: (number, refs[number], *row[2:]) for number, row in contents.items() if refs[number]
        }

    def _settle_jobs(self) -> int:
        """Make live facts, ranges and done ids agree. Returns the number of jobs held."""
        done = set(self._tables["done_ids"])
        histories: dict[int, list[tuple[int, AnyFact]]] = {}
        for seq, row in sorted(self._tables["live"].items()):
            body = row[-1]
            assert isinstance(body, bytes)
            assert isinstance(row[1], int)
            histories.setdefault(row[1], []).append((seq, rows.decode_fact(body)))
        # If a fact is missing anywhere, a job that seems untouched may have been the one it was about.
        in_doubt = self._is_in_doubt
        next_seq = max([*self._tables["live"], *(_seq(row) for row in self._tables["ranges"].values()), 0]) + 1
        live: dict[int, Row] = {}
        kept_done: set[int] = set()
        held = 0
        for first, row in list(self._tables["ranges"].items()):
            last, body = row[1], row[-1]
            assert isinstance(last, int)
            assert isinstance(body, bytes)
            begins = JobState.HELD if rows.decode_range(body).held else JobState.PENDING
            over = {job for job in range(first, last + 1) if job in done or job in self._tables["finished"]}
            for job in range(first, last + 1):
                history = histories.pop(job, [])
                if job in over:
                    continue
                state = self._end_of(begins, [fact for _, fact in history])
                if state is None or (in_doubt and state is JobState.PENDING):
                    if state is None:
                        self._lose("live", f"job {job}: what became of it; it is held")
                    history = []
                    if begins is JobState.PENDING:
                        history = [(next_seq, JobHeld(job=job, principal="recovery", wall=self._wall))]
                        next_seq += 1
                    held += 1
                for seq, fact in history:
                    live[seq] = (seq, job, getattr(fact, "offer", None), rows.encode(fact))
            remaining = last - first + 1 - len(over)
            if not remaining:
                del self._tables["ranges"][first]
                continue
            kept_done |= over
            self._tables["ranges"][first] = (*row[:2], remaining, *row[3:])
        orphans = sorted(set(histories) - set(self._tables["finished"]))
        for begin, end in folded(orphans):
            self._lose("ranges", f"jobs {begin} to {end}: their submission is lost, and so are they")
        self._tables["live"] = live
        self._tables["done_ids"] = {job: (job,) for job in kept_done}
        return held

    def _end_of(self, state: JobState, history: list[AnyFact]) -> JobState | None:
        """The state after these facts; none if one of them is missing."""
        offers: set[int] = set()
        for fact in history:
            if isinstance(fact, JobOffered):
                if fact.node not in self._tables["nodes"]:
                    return None
                offers.add(fact.offer)
            elif getattr(fact, "offer", None) not in {*offers, None}:
                return None
            try:
                state = lifecycle.step(state, fact)
            except IllegalTransition:
                return None
        return state

    @property
    def _is_in_doubt(self) -> bool:
        """Something that happened to a live job may be unknown."""
        return bool(self._incomplete & {"live", "done_ids"})

    def _sums(self, read: Aggregates | None) -> Aggregates:
        finished = self._tables["finished"].values()
        kinds = [row[1] for row in finished]
        seconds = sum(int(row[3]) for row in finished if isinstance(row[3], float) and row[1] != "canceled")
        counted = {kind: kinds.count(kind) for kind in ("succeeded", "failed", "canceled")}
        offers = sorted({row[2] for row in self._tables["live"].values() if isinstance(row[2], int)})
        if read is not None:
            strangers = _between(offers, read.next_offer) if self._is_in_doubt else read.never_given
            return msgspec.structs.replace(read, **counted, run_seconds=seconds, never_given=strangers)
        jobs = [*self._tables["finished"], *self._tables["done_ids"]]
        jobs += [row[1] for row in self._tables["ranges"].values() if isinstance(row[1], int)]
        jobs += [job for row in self._tables["events"].values() for job in row[2:4] if isinstance(job, int)]
        next_offer = max(offers, default=0) + OFFERS_SKIPPED
        numbers = Aggregates(
            next_job=max(jobs, default=0) + 1,
            next_offer=next_offer,
            timeout_seconds=LONGEST_TIMEOUT_SECONDS,
            never_given=_between(offers, next_offer),
            next_node=max(self._tables["nodes"], default=0) + 1,
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
                try:
                    self._new.execute(f"INSERT INTO {table} VALUES ({places})", row)  # noqa: S608  # a name from TABLES
                except sqlite3.IntegrityError:
                    self._lose(table, f"{table}: number {row[0]!r} is spoiled")
        self._new.execute("COMMIT")


def _between(offers: list[int], end: int) -> tuple[tuple[int, int], ...]:
    """The numbers below `end` without these, as inclusive ranges.

    An attempt of such a number is not known any more, and may be all that is left of a held job: the server must not
    stop it as one that it gave away.
    """
    begins = [0, *(offer + 1 for offer in offers)]
    ends = [*(offer - 1 for offer in offers), end - 1]
    return tuple((first, last) for first, last in zip(begins, ends, strict=True) if first <= last)


def _seq(row: Row) -> int:
    assert isinstance(row[3], int)
    return row[3]


def _content(value: Place | rows.Settings) -> tuple[bytes, bytes]:
    body = rows.encode(value)
    return rows.digest(body), body


def _is_content(body: object) -> bool:
    decoders: tuple[Callable[[bytes], object], ...] = (rows.decode_place, rows.decode_settings)
    for decode in decoders:
        with contextlib.suppress(msgspec.DecodeError):
            decode(body if isinstance(body, bytes) else b"")
            return True
    return False
