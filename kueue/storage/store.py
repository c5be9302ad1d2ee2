"""What the server asks of durable storage: one narrow interface, two implementations, one test suite.

Rules
- `commit` is one transaction: either all of a batch is on disk when it returns, or nothing is and it raises.
- `load` gives back what a fresh `State` must evolve to be the one that committed last.
- Methods may block; the server calls them in a worker thread, never two at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from kueue.core.facts import Aggregates, AnyFact, FinishedJob, Kind
from kueue.core.story import Event
from kueue.storage.backup import Copy, Plan

__all__ = ["PAGE", "Batch", "Event", "Store"]

PAGE = 500
"""Most finished rows that one question reads."""


class Batch(Struct, frozen=True, kw_only=True):
    """One group commit: facts in the order they were decided, the jobs that are done by them, the sums after them."""

    facts: tuple[AnyFact, ...]
    finished: tuple[FinishedJob, ...] = ()
    """One for each `JobDone` among the facts."""
    aggregates: Aggregates
    wall: float


class Store(Protocol):
    """Durable state of one queue."""

    @property
    def queue_id(self) -> str:
        """128 random bits in hex, made with the store; attempts carry it."""

    def aggregates(self) -> Aggregates:
        """The sums as of the last commit."""

    def replay(self) -> Iterator[AnyFact]:
        """Facts that rebuild the live state: nodes, answered requests of the last hour, then live jobs' facts in order.

        There is one `JobsSubmitted` for each range that still has live jobs; it is followed at once by a `JobsFolded`
        with its ids that are done or cleaned, if any. Of an offer that was returned there is nothing. The sums of
        `aggregates` are those after all of this: replay must not add to them. Read to the end before the next commit.
        """

    def commit(self, batch: Batch) -> None:
        """Store the batch, or raise `DiskFull` (retry later) or `StorageError` (do not) and leave all as it was."""

    def finished(
        self,
        *,
        kinds: Sequence[Kind] = (),
        ids: Sequence[tuple[int, int]] = (),
        below: int | None = None,
        limit: int = PAGE,
    ) -> list[FinishedJob]:
        """Finished jobs in *descending* id order, without excerpts; `below` continues where the last page ended."""

    def finished_job(self, job: int) -> FinishedJob | None:
        """One finished job with its excerpts."""

    def cleanable(self, *, kinds: Sequence[Kind], ended_before: float | None, limit: int = PAGE) -> list[FinishedJob]:
        """Finished jobs that may be dropped, oldest end first, without excerpts."""

    def events(self, *, job: int | None = None, limit: int = PAGE) -> list[Event]:
        """The most recent events, oldest first; with `job` also the submission that made it along with others."""

    def probe(self) -> None:
        """A tiny write that tells whether the disk takes anything again; raises as `commit` does."""

    def release_ballast(self) -> bool:
        """Give up the room kept aside on the disk, so that clean-up can run while it is full. True if there was any."""

    def restore_ballast(self) -> bool:
        """Keep that room aside again. False while the disk does not have it."""

    def tidy(self) -> None:
        """Upkeep for idle moments, in portions: checkpoint, old events and answers, room given back to the disk."""

    @property
    def path(self) -> Path:
        """The file that holds it all."""

    def begin_copy(self, plan: Plan) -> Copy:
        """A backup in the making; its `step` is a call to the store like any other. Raises `UserError`."""

    def close(self) -> None: ...
