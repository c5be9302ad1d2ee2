"""Facts told in words for people: who did what to which job, when.

Rules
- One fact gives at most one event, so that a submission of 100,000 jobs costs one row.
- The words are for reading only: nothing is decided by them, and they may change with any release.
"""

from __future__ import annotations

from msgspec import Struct

from kueue.core.facts import (
    AnyFact,
    AttemptLost,
    AttemptReturned,
    AttemptSilenced,
    AttemptSuperseded,
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
from kueue.core.wording import outcome_text
from kueue.model import Canceled

SERVER = "server"
WORKER = "worker"


class Event(Struct, frozen=True, kw_only=True):
    """Who did what, when; for people."""

    wall: float
    who: str
    what: str
    job: int | None = None
    last: int | None = None
    """The event tells of all jobs from `job` to this one; none: of `job` alone."""


def event_of(fact: AnyFact) -> tuple[Event, ...]:
    """The fact in words; empty for those that tell people nothing."""
    match fact:
        case JobOffered():
            ahead = "" if fact.line is None else " ahead, behind a short job"
            return (Event(wall=fact.wall, who=SERVER, what=f"offered to worker {fact.node}{ahead}", job=fact.job),)
        case JobStarted():
            return (Event(wall=fact.wall, who=WORKER, what="started", job=fact.job),)
        case JobDone():
            return (_end(fact),)
        case JobsSubmitted():
            return _submission(fact)
        case JobHeld():
            return (Event(wall=fact.wall, who=fact.principal, what=f"held by {fact.principal}", job=fact.job),)
        case JobReleased():
            return (Event(wall=fact.wall, who=fact.principal, what=f"released by {fact.principal}", job=fact.job),)
        case OfferReturned():
            what = f"given back: {fact.how}" + (f": {fact.reason}" if fact.reason else "")
            return (Event(wall=fact.wall, who=WORKER, what=what, job=fact.job),)
        case OfferOverdue():
            return (Event(wall=fact.wall, who=SERVER, what="withdrawn: the worker does not answer", job=fact.job),)
        case StopAsked():
            what = f"asked to be {'killed' if fact.kill else 'removed'} by {fact.principal}"
            return (Event(wall=fact.wall, who=fact.principal, what=what, job=fact.job),)
        case StopDropped():
            return (Event(wall=fact.wall, who=SERVER, what="not removed: it runs already", job=fact.job),)
        case AttemptSilenced():
            return (Event(wall=fact.wall, who=SERVER, what="its worker is silent", job=fact.job),)
        case AttemptReturned():
            runs = fact.started_wall is not None
            what = "its worker is back: it runs on" if runs else "its worker is back: it has yet to start"
            return (Event(wall=fact.wall, who=WORKER, what=what, job=fact.job),)
        case AttemptLost():
            return (Event(wall=fact.wall, who=SERVER, what=f"attempt lost: {fact.reason}", job=fact.job),)
        case AttemptSuperseded():
            return (Event(wall=fact.wall, who=WORKER, what=f"an attempt given away before: {fact.text}", job=fact.job),)
        case NumbersRaised():
            what = f"numbering goes on at job {fact.next_job}: a worker knows more than this record"
            return (Event(wall=fact.wall, who=SERVER, what=what),)
        case JobsCleaned():
            count = len(fact.jobs)
            what = f"{count} finished {'job' if count == 1 else 'jobs'} dropped from the record"
            return (Event(wall=fact.wall, who=fact.by or SERVER, what=what),)
        case NodeChanged():
            node = fact.node
            by_hand = ", taken out by hand" if node.offline else ", taken in again" if fact.by else ""
            return (Event(wall=fact.wall, who=fact.by or WORKER, what=f"worker {node.id} is {node.name}{by_hand}"),)
        case JobsFolded() | RequestAnswered() | TimeoutChanged():
            return ()


def _submission(fact: JobsSubmitted) -> tuple[Event, ...]:
    count = sum(submitted.size for submitted in fact.ranges)
    if not count:
        return ()
    what = f"submitted by {fact.principal}"
    if count == 1:
        return (Event(wall=fact.wall, who=fact.principal, what=what, job=fact.first_id),)
    last = fact.first_id + count - 1
    what = f"{what} with {count} jobs, {fact.first_id} to {last}"
    return (Event(wall=fact.wall, who=fact.principal, what=what, job=fact.first_id, last=last),)


def _end(fact: JobDone) -> Event:
    if isinstance(fact.outcome, Canceled) and fact.by:
        what = f"canceled by {fact.by}" + (f": {fact.outcome.reason}" if fact.outcome.reason else "")
    else:
        what = f"ended: {outcome_text(fact.outcome)}"
    return Event(wall=fact.wall, who=fact.by or (SERVER if fact.end is None else WORKER), what=what, job=fact.job)
