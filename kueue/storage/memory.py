"""A store without a disk, for tests and simulation: what is committed survives a crash, nothing else does."""

from __future__ import annotations

import heapq
import secrets
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from kueue.core.facts import (
    Aggregates,
    AnyFact,
    Fact,
    FinishedJob,
    JobsFolded,
    JobsSubmitted,
    Kind,
    NodeChanged,
    RequestAnswered,
)
from kueue.errors import Bug, StorageError, UserError
from kueue.model import kind_of
from kueue.storage.backup import Copy, Plan
from kueue.storage.limits import EVENTS_KEPT, EVENTS_KEPT_SECONDS, REQUESTS_KEPT_SECONDS
from kueue.storage.plan import NewRange, folded, plan
from kueue.storage.store import PAGE, Batch, Event


class MemoryStore:
    """Keeps the record in plain containers of immutable values.

    Set `fail_with` to an error (`DiskFull`, `StorageError`) and every write raises it until it is None again.
    `wall` gives UTC seconds and decides only what is old enough to be dropped.
    """

    def __init__(self, *, queue_id: str = "", wall: Callable[[], float] = time.time) -> None:
        self.fail_with: StorageError | None = None
        self.commits = 0
        self._queue_id = queue_id or secrets.token_hex(16)
        self._wall = wall
        self._aggregates = Aggregates()
        self._seq = 0
        self._nodes: dict[int, NodeChanged] = {}
        self._requests: list[RequestAnswered] = []
        self._firsts: list[int] = []
        self._ranges: dict[int, tuple[int, NewRange]] = {}
        self._done: dict[int, tuple[int, ...]] = {}
        self._live: dict[int, tuple[tuple[int, int | None, Fact], ...]] = {}
        self._finished_ids: list[int] = []
        self._finished: dict[int, FinishedJob] = {}
        self._events: list[Event] = []
        self._has_ballast = True

    def copy(self) -> MemoryStore:
        """The store as another process finds it after a crash at this moment."""
        twin = MemoryStore(queue_id=self._queue_id, wall=self._wall)
        twin._aggregates = self._aggregates
        twin._seq = self._seq
        twin._nodes = self._nodes.copy()
        twin._requests = self._requests.copy()
        twin._firsts = self._firsts.copy()
        twin._ranges = self._ranges.copy()
        twin._done = self._done.copy()
        twin._live = self._live.copy()
        twin._finished_ids = self._finished_ids.copy()
        twin._finished = self._finished.copy()
        twin._events = self._events.copy()
        twin._has_ballast = self._has_ballast
        return twin

    @property
    def queue_id(self) -> str:
        return self._queue_id

    def aggregates(self) -> Aggregates:
        return self._aggregates

    def replay(self) -> Iterator[AnyFact]:
        yield from self._nodes.values()
        oldest = self._wall() - REQUESTS_KEPT_SECONDS
        yield from (answered for answered in self._requests if answered.wall >= oldest)
        ranges = (self._ranges[first] for first in self._firsts)
        facts = sorted(
            ((seq, fact) for entries in self._live.values() for seq, _, fact in entries), key=lambda entry: entry[0]
        )
        # The submission comes first of what one batch decided about a job, and merge keeps equals in that order.
        for _, item in heapq.merge(ranges, facts, key=lambda entry: entry[0]):
            if not isinstance(item, NewRange):
                yield item  # type: ignore[misc]  # a plan holds nothing but facts of AnyFact
                continue
            yield JobsSubmitted(first_id=item.first, ranges=(item.submitted,), principal=item.principal, wall=item.wall)
            if done := self._done.get(item.first):
                yield JobsFolded(ids=folded(sorted(done)))

    def commit(self, batch: Batch) -> None:
        self._may_write()
        planned = plan(batch)
        for new in planned.ranges:
            if new.first in self._ranges or (self._firsts and new.first <= self._firsts[-1]):
                raise Bug(f"Job {new.first} was submitted before")
            self._ranges[new.first] = (self._seq + new.order, new)
            self._firsts.append(new.first)
        for job, offer in planned.returned:
            self._range_of(job)
            entries = self._live.get(job, ())
            begin = next((seq for seq, made, _ in entries if made == offer), self._seq)
            self._live[job] = tuple(e for e in entries if e[0] < begin or e[1] not in {offer, None})
        for new_fact in planned.live:
            self._range_of(new_fact.job)
            entry = (self._seq + new_fact.order, new_fact.offer, new_fact.fact)
            self._live[new_fact.job] = (*self._live.get(new_fact.job, ()), entry)
        for job in planned.done:
            self._finish(job)
        for row in batch.finished:
            self._finished[row.id] = row
            insort(self._finished_ids, row.id)
        for job in planned.cleaned:
            if self._finished.pop(job, None) is not None:
                self._finished_ids.pop(bisect_left(self._finished_ids, job))
        self._nodes.update(planned.nodes)
        self._requests.extend(planned.requests)
        self._events.extend(planned.events)
        self._aggregates = batch.aggregates
        self._seq += len(batch.facts)
        self.commits += 1

    def _range_of(self, job: int) -> NewRange:
        at = bisect_right(self._firsts, job) - 1
        found = self._ranges[self._firsts[at]][1] if at >= 0 else None
        if found is None or job > found.last or job in self._done.get(found.first, ()):
            raise Bug(f"Job {job} is not live")
        return found

    def _finish(self, job: int) -> None:
        found = self._range_of(job)
        self._live.pop(job, None)
        done = (*self._done.get(found.first, ()), job)
        if len(done) <= found.last - found.first:
            self._done[found.first] = done
            return
        self._done.pop(found.first, None)
        del self._ranges[found.first]
        self._firsts.pop(bisect_left(self._firsts, found.first))

    def finished(
        self,
        *,
        kinds: Sequence[Kind] = (),
        ids: Sequence[tuple[int, int]] = (),
        below: int | None = None,
        limit: int = PAGE,
    ) -> list[FinishedJob]:
        rows = (
            msgspec.structs.replace(row, end=None)
            for row in (self._finished[job] for job in reversed(self._finished_ids))
            if (below is None or row.id < below)
            and (not kinds or kind_of(row.outcome) in kinds)
            and (not ids or any(first <= row.id <= last for first, last in ids))
        )
        return list(islice(rows, limit))

    def finished_job(self, job: int) -> FinishedJob | None:
        return self._finished.get(job)

    def cleanable(self, *, kinds: Sequence[Kind], ended_before: float | None, limit: int = PAGE) -> list[FinishedJob]:
        rows = [
            msgspec.structs.replace(row, end=None)
            for row in self._finished.values()
            if kind_of(row.outcome) in kinds and (ended_before is None or row.ended_wall < ended_before)
        ]
        return sorted(rows, key=lambda row: (row.ended_wall, row.id))[:limit]

    def events(self, *, job: int | None = None, limit: int = PAGE) -> list[Event]:
        if job is None:
            told = self._events
        else:
            told = [e for e in self._events if e.job is not None and e.job <= job <= (e.last or e.job)]
        return told[max(0, len(told) - limit) :]

    def probe(self) -> None:
        self._may_write()

    def release_ballast(self) -> bool:
        had, self._has_ballast = self._has_ballast, False
        return had

    def restore_ballast(self) -> bool:
        self._has_ballast = self.fail_with is None
        return self._has_ballast

    def tidy(self) -> None:
        self._may_write()
        now = self._wall()
        self._requests = [answered for answered in self._requests if answered.wall >= now - REQUESTS_KEPT_SECONDS]
        kept = self._events[-EVENTS_KEPT:]
        fresh = next((at for at, event in enumerate(kept) if event.wall >= now - EVENTS_KEPT_SECONDS), len(kept))
        self._events = kept[fresh:]

    @property
    def path(self) -> Path:
        return Path("/nonexistent")

    def begin_copy(self, plan: Plan) -> Copy:
        raise UserError(f"There is nothing to copy to {plan.target}: this state lies in memory.")

    def close(self) -> None:
        """Nothing to let go of: the record stays, as a file would."""

    def _may_write(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with
