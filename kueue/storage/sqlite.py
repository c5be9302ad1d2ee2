"""The durable store: one SQLite file, one writer, one transaction for each batch.

Rules
- What a job went through stands in `live` until the batch that ends it, which deletes it and writes the finished row.
- A write that fails is rolled back whole. "Full" in any of its forms is `DiskFull`; everything else is `StorageError`,
  after which the process stops: what the disk holds is then known only to the next start.
- Nothing here opens the database file besides SQLite: closing another descriptor of it would drop SQLite's lock
  (fcntl(2), "Advisory record locking").
"""

from __future__ import annotations

import contextlib
import heapq
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import ClassVar

from kueue import log
from kueue.core.facts import Aggregates, AnyFact, FinishedJob, JobsFolded, JobsSubmitted, Kind
from kueue.errors import Bug, DiskFull, StorageError
from kueue.model import kind_of
from kueue.storage import backup, rows, schema
from kueue.storage.blobs import Blobs
from kueue.storage.damage import DAMAGE
from kueue.storage.history import History
from kueue.storage.limits import BALLAST_BYTES, EVENTS_KEPT, EVENTS_KEPT_SECONDS, REQUESTS_KEPT_SECONDS
from kueue.storage.opening import Host, Wanted, connect, this_host
from kueue.storage.own_files import Cut, File, OwnFiles, file_at
from kueue.storage.plan import NewRange, Plan, folded, plan
from kueue.storage.rescue import Rescue
from kueue.storage.room import Ballast, has_room
from kueue.storage.sentences import damaged, full, in_use, sentence
from kueue.storage.store import PAGE, Batch, Event

RETURN = """
DELETE FROM live WHERE job = ? AND seq >= (SELECT min(seq) FROM live WHERE job = ? AND offer = ?)
    AND (offer = ? OR offer IS NULL)
"""
"""As if the offer had never been made, see `plan`."""

VACUUM_PAGES = 2000
"""Given back to the disk in one tidying: 8 MB, some 20 ms."""

TIDY_ROWS = 20_000
"""Old events dropped in one tidying."""

_log = log.logger("storage")


class SqliteStore:
    """The state of a queue in the file at `path`, made if it is missing; ``path.ballast`` lies beside it.

    `is_network`: the file lies on a network file system. `take_over`: this host takes a file that another host used.
    `wall` gives UTC seconds and decides only what is old enough to be dropped.
    Raises `StorageError` if the file cannot be used, and then leaves it as it is.
    """

    _open: ClassVar[set[File]] = set()
    """Those that this process has open: SQLite's lock keeps out other processes only as long as this one opens the file
    just once."""

    def __init__(
        self,
        path: Path | str,
        *,
        is_network: bool = False,
        take_over: bool = False,
        host: Host | None = None,
        wall: Callable[[], float] = time.time,
        target: int = schema.FORMAT,
        steps: Mapping[int, schema.Step] = schema.STEPS,
        ballast_bytes: int = BALLAST_BYTES,
    ) -> None:
        path = Path(path)
        self._path = path
        self._wall = wall
        self._is_closed = False
        self._is_open = False
        self._sums: Aggregates | None = None
        """As of the last commit."""
        self._copy: backup.Copy | None = None
        self._wanted = Wanted(path, is_network, host or this_host(), take_over, target, steps)
        with self._translated():
            if path.exists() and file_at(path) in self._open:
                raise in_use(path)
            self._connection = connect(self._wanted)
        self._file: File = (0, 0)
        try:
            with self._translated():
                self._begin()
                self._queue_id = str(self._one("SELECT value FROM meta WHERE key = 'queue_id'"))
                newest = "SELECT max((SELECT ifnull(max(seq), 0) FROM live), (SELECT ifnull(max(seq), 0) FROM ranges))"
                self._seq = int(self._one(newest)) + 1
                self._ballast = Ballast(path, size=ballast_bytes)
                self._rescue = Rescue(path, self._queue_id, self._ballast, wall)
                self._is_open = True
            self.restore_ballast()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """With the connection that was just made."""
        self._files = OwnFiles(self._connection, self._path, is_network=self._wanted.is_network)
        self._file = self._files.state
        self._open.add(self._file)
        self._blobs = Blobs(self._connection)
        self._history = History(self._connection, self._blobs)

    def _one(self, query: str) -> int | str | bytes:
        row = self._connection.execute(query).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"malformed: nothing answers {query}")
        value: int | str | bytes = row[0]
        return value

    @property
    def path(self) -> Path:
        return self._path

    @property
    def queue_id(self) -> str:
        return self._queue_id

    def aggregates(self) -> Aggregates:
        with self._translated():
            self._sums = rows.aggregates(self._connection)
            return self._sums

    # --- replay ---------------------------------------------------------------------------------------------------

    def replay(self) -> Iterator[AnyFact]:
        with self._translated():
            for (body,) in self._connection.execute("SELECT body FROM nodes ORDER BY id"):
                yield rows.decode_fact(body)
            oldest = (self._wall() - REQUESTS_KEPT_SECONDS,)
            for (body,) in self._connection.execute("SELECT body FROM requests WHERE wall >= ? ORDER BY seq", oldest):
                yield rows.decode_fact(body)
            # Equals keep this order: a submission stands before what its own batch decided about its jobs.
            for _, facts in heapq.merge(self._replay_ranges(), self._replay_live(), key=itemgetter(0)):
                yield from facts

    def _replay_ranges(self) -> Iterator[tuple[int, tuple[AnyFact, ...]]]:
        query = "SELECT seq, first, last, remaining, principal, wall, place, settings, body FROM ranges ORDER BY first"
        for seq, first, last, remaining, principal, wall, place, settings, body in self._connection.execute(query):
            submitted = rows.job_range(
                rows.decode_range(body), self._blobs.place(place), self._blobs.settings(settings)
            )
            fact = JobsSubmitted(first_id=first, ranges=(submitted,), principal=principal, wall=wall)
            if remaining == last - first + 1:
                yield seq, (fact,)
                continue
            done = self._connection.execute(
                "SELECT id FROM done_ids WHERE id BETWEEN ? AND ? ORDER BY id", (first, last)
            )
            yield seq, (fact, JobsFolded(ids=folded([job for (job,) in done])))

    def _replay_live(self) -> Iterator[tuple[int, tuple[AnyFact, ...]]]:
        for seq, body in self._connection.execute("SELECT seq, body FROM live ORDER BY seq"):
            yield seq, (rows.decode_fact(body),)

    # --- commit ---------------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        planned = plan(batch)
        with self._transaction():
            self._store_ranges(planned.ranges)
            self._connection.executemany(RETURN, [(job, job, offer, offer) for job, offer in planned.returned])
            self._connection.executemany(
                "INSERT INTO live (seq, job, offer, body) VALUES (?, ?, ?, ?)",
                [(self._seq + order, job, offer, rows.encode(fact)) for order, job, offer, fact in planned.live],
            )
            self._finish(planned.done)
            self._store_finished(batch.finished)
            self._clean(planned.cleaned)
            self._store_rest(planned)
            self._blobs.settle()
            self._connection.execute("UPDATE aggregates SET body = ?", (rows.encode(batch.aggregates),))
        self._seq += len(batch.facts)
        self._sums = batch.aggregates

    def _store_ranges(self, ranges: list[NewRange]) -> None:
        take = self._blobs.take
        self._connection.executemany(
            "INSERT INTO ranges (first, last, remaining, seq, principal, wall, place, settings, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    new.first,
                    new.last,
                    new.last - new.first + 1,
                    self._seq + new.order,
                    new.principal,
                    new.wall,
                    take(new.submitted.place),
                    take(rows.Settings(new.submitted.request, new.submitted.terms)),
                    rows.encode(rows.range_body(new.submitted)),
                )
                for new in ranges
            ],
        )

    def _finish(self, done: list[int]) -> None:
        """Fold jobs away: their facts go, and their ranges when nothing of them is live. `done`: ascending ids."""
        self._connection.executemany("DELETE FROM live WHERE job = ?", [(job,) for job in done])
        at = 0
        while at < len(done):
            found = self._connection.execute(
                "SELECT first, last, remaining, place, settings FROM ranges "
                "WHERE first <= ? ORDER BY first DESC LIMIT 1",
                (done[at],),
            ).fetchone()
            if found is None or found[1] < done[at]:
                raise Bug(f"Job {done[at]} is done, but it is not live")
            first, last, remaining, place, settings = found
            begin = at
            while at < len(done) and done[at] <= last:
                at += 1
            remaining -= at - begin
            if remaining < 0:
                raise Bug(f"More jobs of {first} to {last} are done than there are")
            if remaining:
                self._connection.execute("UPDATE ranges SET remaining = ? WHERE first = ?", (remaining, first))
                self._connection.executemany("INSERT INTO done_ids VALUES (?)", [(job,) for job in done[begin:at]])
                continue
            self._connection.execute("DELETE FROM ranges WHERE first = ?", (first,))
            if last > first:
                self._connection.execute("DELETE FROM done_ids WHERE id BETWEEN ? AND ?", (first, last))
            self._blobs.drop(place)
            self._blobs.drop(settings)

    def _store_finished(self, finished: Sequence[FinishedJob]) -> None:
        take = self._blobs.take
        self._connection.executemany(
            "INSERT INTO finished (id, kind, ended, run_seconds, place, settings, payload, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    row.id,
                    kind_of(row.outcome),
                    row.ended_wall,
                    row.run_seconds,
                    take(row.place),
                    take(rows.Settings(row.request, row.terms)),
                    row.payload,
                    rows.encode(rows.finished_body(row)),
                )
                for row in finished
            ],
        )
        self._connection.executemany(
            "INSERT INTO outputs (id, body) VALUES (?, ?)",
            [(row.id, rows.encode(row.end)) for row in finished if row.end is not None],
        )

    def _clean(self, cleaned: list[int]) -> None:
        named: Counter[int] = Counter()
        for job in cleaned:
            found = self._connection.execute("SELECT place, settings FROM finished WHERE id = ?", (job,)).fetchone()
            named.update(found or ())
        for number, times in named.items():
            self._blobs.drop(number, times)
        jobs = [(job,) for job in cleaned]
        self._connection.executemany("DELETE FROM finished WHERE id = ?", jobs)
        self._connection.executemany("DELETE FROM outputs WHERE id = ?", jobs)

    def _store_rest(self, planned: Plan) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO nodes (id, body) VALUES (?, ?)",
            [(node, rows.encode(fact)) for node, fact in planned.nodes.items()],
        )
        self._connection.executemany(
            "INSERT INTO requests (wall, body) VALUES (?, ?)",
            [(fact.wall, rows.encode(fact)) for fact in planned.requests],
        )
        self._connection.executemany(
            "INSERT INTO events (wall, job, last, who, what) VALUES (?, ?, ?, ?, ?)",
            [(event.wall, event.job, event.last, event.who, event.what) for event in planned.events],
        )

    # --- questions ------------------------------------------------------------------------------------------------

    def finished(
        self,
        *,
        kinds: Sequence[Kind] = (),
        ids: Sequence[tuple[int, int]] = (),
        below: int | None = None,
        limit: int = PAGE,
    ) -> list[FinishedJob]:
        with self._translated():
            return self._history.finished(kinds, ids, below, limit)

    def finished_job(self, job: int) -> FinishedJob | None:
        with self._translated():
            return self._history.finished_job(job)

    def cleanable(self, *, kinds: Sequence[Kind], ended_before: float | None, limit: int = PAGE) -> list[FinishedJob]:
        with self._translated():
            return self._history.cleanable(kinds, ended_before, limit)

    def events(self, *, job: int | None = None, limit: int = PAGE) -> list[Event]:
        with self._translated():
            return self._history.events(job, limit)

    # --- upkeep ---------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('probed', ?)", (str(self._wall()),))
        # The log may have had a page to spare; a real batch needs more. The ballast is not asked for: it may just have
        # been given up for a clean-up that is still on its way.
        with self._translated():
            if not has_room(self._path):
                raise full(self._path)

    def release_ballast(self) -> bool:
        with self._translated():
            return self._ballast.release()

    def restore_ballast(self) -> bool:
        with self._translated():
            return self._ballast.restore()

    def tidy(self) -> None:
        now = self._wall()
        with self._transaction():
            self._drop_until("requests", now - REQUESTS_KEPT_SECONDS)
            self._drop_until("events", now - EVENTS_KEPT_SECONDS)
            (surplus,) = self._connection.execute(
                "SELECT ifnull(max(seq), 0) - ? FROM events", (EVENTS_KEPT,)
            ).fetchone()
            self._drop_below("events", surplus + 1)
        with self._translated(is_write=True):
            try:
                self._give_back()
            finally:
                self._files.tidied()

    def _give_back(self) -> None:
        free, pages = int(self._one("PRAGMA freelist_count")), int(self._one("PRAGMA page_count"))
        # Some free pages serve the next jobs; a file that is mostly empty gives room back, a portion at a time.
        if free > VACUUM_PAGES and free > pages // 4:
            # As a script: execute() stops after the first page, because the statement gives rows without columns.
            self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        # The log keeps its size to be written over, unless the disk was full lately and has better use for it.
        mode = "PASSIVE" if self._ballast.is_there else "TRUNCATE"
        self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    def _drop_until(self, table: str, oldest: float) -> None:
        """Drop rows from the front until one is young enough: they came in the order of time."""
        query = f"SELECT min(seq) FROM (SELECT seq FROM {table} WHERE wall >= ? ORDER BY seq LIMIT 1)"  # noqa: S608  # only constants are put in
        (young,) = self._connection.execute(query, (oldest,)).fetchone()
        self._drop_below(table, 2**62 if young is None else young)

    def _drop_below(self, table: str, seq: int) -> None:
        query = f"DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table} WHERE seq < ? ORDER BY seq LIMIT ?)"  # noqa: S608  # only constants are put in
        self._connection.execute(query, (seq, TIDY_ROWS))

    def begin_copy(self, plan: backup.Plan) -> backup.Copy:
        with self._translated():
            self._copy = backup.Copy(self._connection, self._path, plan)
            return self._copy

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._save_before_the_end()
        # The log goes into the file and away. If the disk refuses, the log stays, and the next start reads it.
        try:
            with contextlib.closing(self._connection), contextlib.suppress(*DAMAGE):
                if not self._is_open or self._rescue.lost is None:
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._open.discard(self._file)
            if self._file != (0, 0):
                self._files.close()

    # --- files that were cut ------------------------------------------------------------------------------------------

    def _assure(self) -> None:
        self._rescue.refuse()
        try:
            self._files.assure()
        except Cut as found:
            self._save(found)

    def _save(self, found: Cut) -> None:
        """Go on with a state that is written anew. Raises `StorageError`; `DiskFull`: to be tried again."""
        if self._copy is not None:
            self._copy.lose_source()
            self._copy = None
        self._rescue.save(self._connection, self._files, found, self._sums)
        try:
            self._is_open = False
            self._open.discard(self._file)
            self._files.close()
            # Its log is empty: nothing goes into the old file, which has no name any more.
            self._connection.close()
            self._rescue.is_saved()
            self._connection = connect(self._wanted)
            self._begin()
            self._is_open = True
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"{self._path} was saved, but it cannot be opened again: {error}", hint="Start the server again."
            ) from error

    def _save_before_the_end(self) -> None:
        """No part of a log that was cut may go into the state when SQLite closes it."""
        if not self._is_open or self._rescue.lost is not None:
            return
        try:
            self._files.refuse_cut()
        except Cut as found:
            try:
                self._save(found)
            except StorageError as error:
                told = (
                    self._rescue.lose(self._files, found, self._sums, error) if isinstance(error, DiskFull) else error
                )
                _log.error("%s. %s", told, told.hint)

    def _read_in_vain(self) -> None:
        """Raises `StorageError` if what could not be read was cut away."""
        if not self._is_open or self._is_closed:
            return
        self._rescue.refuse()
        try:
            self._files.refuse_cut()
        except Cut as found:
            self._save(found)
            raise StorageError(
                f"{self._path} could not be read: {found.path} was made shorter", hint="Nothing is lost. Try again."
            ) from None

    # --- errors ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translated(is_write=True):
            self._assure()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._blobs.forget()
                # SQLite has rolled back by itself after some errors.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._files.note()

    @contextlib.contextmanager
    def _translated(self, *, is_write: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise Bug(f"A batch contradicts the record in {self._path}: {error}") from error
        except sqlite3.Error as error:
            self._read_in_vain()
            raise sentence(self._path, error, is_write=is_write) from error
        except DAMAGE as error:  # those that are not SQLite's
            self._read_in_vain()
            raise damaged(self._path, error) from error
        except OSError as error:
            raise StorageError(f"{self._path} cannot be used: {error}") from error
        except (OverflowError, TypeError, ValueError) as error:
            if not is_write:
                raise damaged(self._path, error) from error
            # A value without a stored form: not the disk's fault, and no reason to stop the service.
            raise Bug(f"What was decided cannot be written to {self._path}: {error}") from error
