"""What one batch means for the record: rows that come, jobs that go, words for people. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from kueue.core.facts import (
    AttemptLost,
    AttemptReturned,
    AttemptSilenced,
    AttemptSuperseded,
    Fact,
    JobDone,
    JobHeld,
    JobOffered,
    JobReleased,
    JobsCleaned,
    JobsFolded,
    JobsSubmitted,
    JobStarted,
    NodeChanged,
    NumbersRaised,
    OfferOverdue,
    OfferReturned,
    RequestAnswered,
    StopAsked,
    StopDropped,
    TimeoutChanged,
)
from kueue.core.queue import fold
from kueue.core.story import Event, event_of
from kueue.errors import Bug
from kueue.model import JobRange
from kueue.storage.store import Batch


class NewRange(NamedTuple):
    """One range of a submission with the ids that it got."""

    order: int
    """Position of its fact in the batch."""
    first: int
    last: int
    submitted: JobRange
    principal: str
    wall: float


class LiveFact(NamedTuple):
    """A fact about a job that lives on."""

    order: int
    """Its position in the batch."""
    job: int
    offer: int | None
    fact: Fact


class Plan(NamedTuple):
    """A batch sorted by what the record keeps of it."""

    ranges: list[NewRange]
    live: list[LiveFact]
    """Without those of jobs that are done, and of offers that are returned, by the end of this batch."""
    returned: list[tuple[int, int]]
    """(job, offer): nothing since this offer was made is kept of it."""
    done: list[int]
    """Ascending."""
    cleaned: list[int]
    nodes: dict[int, NodeChanged]
    requests: list[RequestAnswered]
    events: list[Event]


def plan(batch: Batch) -> Plan:
    """Sort the facts of a batch. Raises `Bug` if they contradict the finished jobs that come with them."""
    done = {fact.job for fact in batch.facts if type(fact) is JobDone}
    if done != {row.id for row in batch.finished} or len(done) != len(batch.finished):
        raise Bug("A batch must bring exactly one finished job for each job that is done by it")
    planned = Plan([], [], [], sorted(done), [], {}, [], [])
    live: dict[int, list[LiveFact]] = {}
    over: set[int] = set()
    for order, fact in enumerate(batch.facts):
        match fact:
            case (
                JobOffered()
                | JobStarted()
                | OfferOverdue()
                | StopDropped()
                | AttemptSilenced()
                | AttemptReturned()
                | AttemptLost()
                | AttemptSuperseded()
            ):
                _must_live(fact.job, over)
                live.setdefault(fact.job, []).append(LiveFact(order, fact.job, fact.offer, fact))
            case JobHeld() | JobReleased() | StopAsked():
                _must_live(fact.job, over)
                live.setdefault(fact.job, []).append(LiveFact(order, fact.job, None, fact))
            case OfferReturned():
                _must_live(fact.job, over)
                planned.returned.append((fact.job, fact.offer))
                live[fact.job] = _before(fact.offer, live.get(fact.job, []))
            case JobDone():
                _must_live(fact.job, over)
                over.add(fact.job)
            case RequestAnswered():
                planned.requests.append(fact)
            case JobsSubmitted():
                planned.ranges.extend(_ranges(order, fact))
            case NodeChanged():
                planned.nodes[fact.node.id] = fact
            case JobsCleaned():
                planned.cleaned.extend(job for job, _, _ in fact.jobs)
            case NumbersRaised() | TimeoutChanged():
                # The sums that come with the batch hold the numbers.
                pass
            case JobsFolded():
                raise Bug("JobsFolded belongs to replay and is never stored")
        planned.events.extend(event_of(fact))
    # What happened to a job that is done by the end of the batch is told by its finished row.
    kept = (entry for job, entries in live.items() if job not in done for entry in entries)
    return planned._replace(live=sorted(kept, key=attrgetter("order")))


def _before(offer: int, entries: list[LiveFact]) -> list[LiveFact]:
    """The facts of one job as if the offer had never been made.

    A stop that was asked meanwhile goes as well: on replay it would meet a job that nothing was offered of.
    """
    begin = next((at for at, entry in enumerate(entries) if entry.offer == offer), 0)
    return entries[:begin] + [entry for entry in entries[begin:] if entry.offer not in {offer, None}]


def _must_live(job: int, over: set[int]) -> None:
    if job in over:
        raise Bug(f"Job {job} is done, yet the batch goes on about it")


def _ranges(order: int, fact: JobsSubmitted) -> list[NewRange]:
    ranges = []
    first = fact.first_id
    for submitted in fact.ranges:
        last = first + submitted.size - 1
        if last >= first:
            ranges.append(NewRange(order, first, last, submitted, fact.principal, fact.wall))
        first = last + 1
    return ranges


def folded(ids: list[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ids as inclusive ranges."""
    return tuple(fold(ids))
