"""The state of the queue: live jobs, their attempts, the room they take. Changed by `State.evolve` alone.

Rules
- `evolve` applies one fact, live and on replay alike; nothing else writes.
- Sums ("used") are kept incrementally from allocations; `invariants.check` counts them afresh.
- A job that is done leaves at once, as a `FinishedJob` in `State.finished`, for the store to take.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import msgspec

from kueue.core import facts as f
from kueue.core import lifecycle
from kueue.core.jobs import Attempt, Job, Newcomers, StopWish
from kueue.core.waiting import Waiting
from kueue.core.wording import outcome_text
from kueue.errors import Bug
from kueue.model import (
    Canceled,
    Exited,
    JobRange,
    JobState,
    Lost,
    NodeRecord,
    NotStarted,
    Outcome,
    Share,
    Signaled,
    TimedOut,
    kind_of,
)

T = TypeVar("T", bound=Hashable)


class Node:
    """What is remembered of a worker and what is taken on it."""

    __slots__ = ("attempts", "cores", "named", "ram_mb", "record", "slots")

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.slots = 0
        self.cores = 0
        self.ram_mb = 0
        self.named: dict[str, set[int]] = {}
        self.attempts: dict[int, Attempt] = {}


@dataclass(frozen=True)
class Answer:
    """A stored answer, for repeated requests."""

    principal: str
    message: bytes
    wall: float


@dataclass
class Sums:
    """`facts.Aggregates`, while it changes."""

    next_job: int = 0
    next_offer: int = 0
    next_node: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    run_seconds: int = 0
    submitted_total: int = 0
    succeeded_total: int = 0
    failed_total: int = 0
    canceled_total: int = 0
    lost_attempts_total: int = 0
    signaled_total: int = 0
    timed_out_total: int = 0
    not_started_total: int = 0
    lost_total: int = 0
    timeout_seconds: float = 0.0
    never_given: tuple[tuple[int, int], ...] = ()

    def count_failure(self, outcome: Outcome) -> None:
        """Beside `failed_total`, by what it was."""
        match outcome:
            case Signaled():
                self.signaled_total += 1
            case TimedOut():
                self.timed_out_total += 1
            case NotStarted():
                self.not_started_total += 1
            case Lost():
                self.lost_total += 1
            case Exited() | Canceled():
                pass

    def frozen(self) -> f.Aggregates:
        return f.Aggregates(**vars(self))


@dataclass
class State:
    """All that a restart brings back. See the module for who may write."""

    sums: Sums = field(default_factory=Sums)
    jobs: dict[int, Job] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    lines: dict[int, dict[int, Attempt]] = field(default_factory=dict)
    """Line → its live attempts by offer, never none. Their allocation counts once in all sums."""
    nodes: dict[int, Node] = field(default_factory=dict)
    node_by_identity: dict[str, int] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    revocable: set[int] = field(default_factory=set)
    """Unreachable jobs that may be given away."""
    used: dict[str, int] = field(default_factory=dict)
    """Counter → amount held by allocations."""
    by_state: dict[JobState, int] = field(default_factory=lambda: dict.fromkeys(JobState, 0))
    given_away: dict[int, int] = field(default_factory=dict)
    """Offer → job, for lost attempts of jobs that live."""
    answers: dict[str, Answer] = field(default_factory=dict)
    finished: list[f.FinishedJob] = field(default_factory=list)
    """Jobs that became done since the engine last took them from here."""
    newcomers: Newcomers | None = None
    """Made already, for the very submission that is decided next; what is missing of them is made then."""
    _interned: MutableMapping[Any, ReferenceType[Any]] = field(default_factory=WeakKeyDictionary)
    """What templates have in common, each once, for as long as a job or anybody else refers to it."""

    def evolve(self, fact: f.AnyFact) -> None:
        """Apply one fact. Raises `IllegalTransition` or `Bug` if it cannot have happened."""
        match fact:
            case f.JobsSubmitted():
                self._submitted(fact)
            case f.JobsFolded(ids=ids):
                self._folded(ids)
            case f.JobHeld() | f.JobReleased() | f.StopAsked() | f.OfferOverdue() | f.JobOffered() | f.JobStarted():
                self._met(fact)
            case f.OfferReturned() | f.StopDropped() | f.AttemptSilenced() | f.AttemptReturned():
                self._met(fact)
            case f.AttemptLost() | f.AttemptSuperseded() | f.JobDone():
                self._met(fact)
            case f.JobsCleaned(jobs=jobs):
                for _, kind, run_seconds in jobs:
                    setattr(self.sums, kind, getattr(self.sums, kind) - 1)
                    if kind != "canceled":
                        self.sums.run_seconds -= int(run_seconds)
            case f.NodeChanged(node=record):
                self._node_changed(record)
            case f.NumbersRaised(next_job=next_job, next_offer=next_offer):
                self.sums.next_job = max(self.sums.next_job, next_job)
                if next_offer > self.sums.next_offer:
                    self.sums.never_given = (*self.sums.never_given, (self.sums.next_offer, next_offer - 1))
                    self.sums.next_offer = next_offer
            case f.TimeoutChanged(seconds=seconds):
                self.sums.timeout_seconds = seconds
            case f.RequestAnswered(request_id=request_id, principal=principal, answer=answer, wall=wall):
                self.answers[request_id] = Answer(principal, answer, wall)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _intern(self, value: T) -> T:
        found = self._interned.get(value)
        kept: T | None = None if found is None else found()
        if kept is None:
            self._interned[value] = ref(value)
            return value
        return kept

    def making(self, ranges: tuple[JobRange, ...], principal: str, wall: float) -> Newcomers:
        """The jobs of a submission before it is decided. Nothing changes yet."""
        return Newcomers(ranges, self.sums.next_job, principal, wall, self._intern)

    def _submitted(self, fact: f.JobsSubmitted) -> None:
        made, self.newcomers = self.newcomers, None
        if made is None or (made.ranges, made.principal, made.wall) != (fact.ranges, fact.principal, fact.wall):
            made = self.making(fact.ranges, fact.principal, fact.wall)
        made.grow()
        made.begin_at(fact.first_id)
        ids = range(fact.first_id, fact.first_id + len(made.jobs))
        self.jobs.update(zip(ids, made.jobs, strict=True))
        begin = 0
        for template, state, number in made.rows:
            if state is JobState.PENDING:
                self.waiting.add_row(ids[begin : begin + number], template.request, template.directory)
            self.by_state[state] += number
            begin += number
        self.sums.submitted_total += len(ids)
        self.sums.next_job = max(self.sums.next_job, ids.stop)

    def _folded(self, ids: tuple[tuple[int, int], ...]) -> None:
        for first, last in ids:
            for job_id in range(first, last + 1):
                job = self.jobs.get(job_id)
                if job is not None:
                    self._leave(job, job.state)
                    del self.jobs[job_id]

    def _met(
        self,
        fact: f.JobHeld
        | f.JobReleased
        | f.StopAsked
        | f.OfferOverdue
        | f.JobOffered
        | f.JobStarted
        | f.OfferReturned
        | f.StopDropped
        | f.AttemptSilenced
        | f.AttemptReturned
        | f.AttemptLost
        | f.AttemptSuperseded
        | f.JobDone,
    ) -> None:
        job = self.jobs.get(fact.job)
        if job is None:
            raise Bug(f"no live job for {fact!r}")
        old = job.state
        new = lifecycle.step(old, fact)
        self._leave(job, old)
        match fact:
            case f.JobHeld() | f.JobReleased():
                pass
            case f.StopAsked():
                before = job.stop or StopWish(fact.principal, kill=False, wall=fact.wall, request_ids=())
                asked = (*before.request_ids, fact.request_id)
                job.stop = StopWish(fact.principal, fact.kill or before.kill, fact.wall, asked)
            case f.StopDropped():
                job.stop = None
                self._started(job, fact.offer, fact.started_wall)
            case f.OfferOverdue():
                self._attempt_of(job, fact.offer).overdue = True
            case f.JobOffered():
                self._offered(job, fact)
            case f.JobStarted():
                self._started(job, fact.offer, fact.started_wall)
            case f.OfferReturned():
                self._release(self._attempt_of(job, fact.offer))
                job.attempt = None
            case f.AttemptSilenced():
                self._attempt_of(job, fact.offer).silent = True
            case f.AttemptReturned():
                self._attempt_of(job, fact.offer).silent = False
                if fact.started_wall is not None:
                    self._started(job, fact.offer, fact.started_wall)
            case f.AttemptLost():
                self._lost(job, fact)
            case f.AttemptSuperseded():
                job.past = tuple(
                    msgspec.structs.replace(past, end=f"{past.end}; {fact.text}") if past.offer == fact.offer else past
                    for past in job.past
                )
                self.given_away.pop(fact.offer, None)
            case f.JobDone():
                self._done(job, fact)
        job.state = new
        self._enter(job, new)

    def _leave(self, job: Job, state: JobState) -> None:
        self.by_state[state] -= 1
        if state is JobState.PENDING:
            self.waiting.discard(job.id, job.template.request, job.template.directory)
        elif state is JobState.UNREACHABLE:
            self.revocable.discard(job.id)

    def _enter(self, job: Job, state: JobState) -> None:
        if state is JobState.DONE:
            del self.jobs[job.id]
            return
        self.by_state[state] += 1
        if state is JobState.PENDING:
            self.waiting.add(job.id, job.template.request, job.template.directory)
        elif state is JobState.UNREACHABLE and job.template.terms.on_lost == "rerun":
            self.revocable.add(job.id)

    def _done(self, job: Job, fact: f.JobDone) -> None:
        attempt = job.attempt
        past = job.past
        worker: str | None = None
        started: float | None = None
        share: Share | None = None
        if attempt is not None:
            decided = fact.offer == attempt.offer
            if decided:
                self._number(job, attempt)
            end = outcome_text(fact.outcome) if decided else "left when the job was ended"
            past = (*past, self._past(attempt, end, fact.wall))
            share = attempt.share
            self._release(attempt)
            job.attempt = None
            worker = self.nodes[attempt.node].record.name
            started = attempt.started_wall
        if fact.end is not None and fact.end.started_wall is not None:
            started = fact.end.started_wall
        run_seconds = fact.end.run_seconds if fact.end is not None else 0.0
        kind = kind_of(fact.outcome)
        self.finished.append(
            f.FinishedJob(
                id=job.id,
                principal=job.template.principal,
                payload=job.payload,
                place=job.template.place,
                request=job.template.request,
                terms=job.template.terms,
                outcome=fact.outcome,
                issued_wall=job.template.issued_wall,
                started_wall=started,
                ended_wall=fact.end.ended_wall if fact.end is not None else fact.wall,
                run_seconds=run_seconds,
                worker=worker,
                taken_cores=share.cores if share else None,
                taken_ram_mb=share.ram_mb if share else None,
                ended_by=fact.by,
                ended_by_request=fact.request_id,
                also_asked_by=_others(job.stop, fact),
                attempts=past,
                end=fact.end,
            )
        )
        for entry in job.past:
            self.given_away.pop(entry.offer, None)
        sums = self.sums
        match kind:
            case "succeeded":
                sums.succeeded += 1
                sums.succeeded_total += 1
                sums.run_seconds += int(run_seconds)
            case "failed":
                sums.failed += 1
                sums.failed_total += 1
                sums.count_failure(fact.outcome)
                sums.run_seconds += int(run_seconds)
            case "canceled":
                sums.canceled += 1
                sums.canceled_total += 1

    # --- attempts and room -------------------------------------------------------------------------------------------

    def may_free(self, attempt: Attempt) -> bool:
        """Whether its allocation is free when it is given up: all others of its line may be given up with it."""
        others = (other for other in self.lines[attempt.line].values() if other is not attempt)
        return all(self.jobs[other.job].may_be_given_away for other in others)

    def _attempt_of(self, job: Job, offer: int) -> Attempt:
        if job.attempt is None or job.attempt.offer != offer:
            raise Bug(f"offer {offer} is not the live attempt of job {job.id}")
        return job.attempt

    def _offered(self, job: Job, fact: f.JobOffered) -> None:
        if job.attempt is not None:
            raise Bug(f"job {job.id} is offered while offer {job.attempt.offer} may run")
        attempt = Attempt(fact)
        job.attempt = attempt
        self.attempts[fact.offer] = attempt
        self.sums.next_offer = max(self.sums.next_offer, fact.offer + 1)
        for share in fact.allocation.shares:
            self.nodes[share.node].attempts[fact.offer] = attempt
        members = self.lines.get(attempt.line)
        if members is not None:
            members[fact.offer] = attempt
            return
        # Also on replay, when those before it in the line are done and their facts are gone.
        self.lines[attempt.line] = {fact.offer: attempt}
        for share in fact.allocation.shares:
            node = self.nodes[share.node]
            node.slots += share.slots
            node.cores += share.cores
            node.ram_mb += share.ram_mb
            for name, units in share.named:
                node.named.setdefault(name, set()).update(units)
        for name, amount in fact.allocation.counters:
            self.used[name] = self.used.get(name, 0) + amount

    def _release(self, attempt: Attempt) -> None:
        del self.attempts[attempt.offer]
        for share in attempt.allocation.shares:
            del self.nodes[share.node].attempts[attempt.offer]
        members = self.lines[attempt.line]
        del members[attempt.offer]
        if members:
            return
        del self.lines[attempt.line]
        for share in attempt.allocation.shares:
            node = self.nodes[share.node]
            node.slots -= share.slots
            node.cores -= share.cores
            node.ram_mb -= share.ram_mb
            for name, units in share.named:
                node.named[name].difference_update(units)
        for name, amount in attempt.allocation.counters:
            self.used[name] -= amount

    def _number(self, job: Job, attempt: Attempt) -> None:
        if attempt.number is None:
            job.numbered += 1
            attempt.number = job.numbered

    def _started(self, job: Job, offer: int, started_wall: float) -> None:
        attempt = self._attempt_of(job, offer)
        self._number(job, attempt)
        attempt.started_wall = started_wall
        attempt.overdue = False

    def _lost(self, job: Job, fact: f.AttemptLost) -> None:
        attempt = self._attempt_of(job, fact.offer)
        self._number(job, attempt)
        job.past = (*job.past, self._past(attempt, f"lost: {fact.reason}", fact.wall))
        job.lost += 1
        job.lost_workers = (*job.lost_workers, self.nodes[attempt.node].record.name)
        self.sums.lost_attempts_total += 1
        self.given_away[attempt.offer] = job.id
        self._release(attempt)
        job.attempt = None

    def _past(self, attempt: Attempt, end: str, wall: float) -> f.AttemptPast:
        return f.AttemptPast(
            offer=attempt.offer,
            number=attempt.number,
            node=attempt.node,
            worker=self.nodes[attempt.node].record.name,
            offered_wall=attempt.offered_wall,
            started_wall=attempt.started_wall,
            ended_wall=wall,
            end=end,
        )

    def _node_changed(self, record: NodeRecord) -> None:
        node = self.nodes.get(record.id)
        if node is None:
            self.nodes[record.id] = Node(record)
        else:
            self.node_by_identity.pop(node.record.identity, None)
            node.record = record
        self.node_by_identity[record.identity] = record.id
        self.sums.next_node = max(self.sums.next_node, record.id + 1)


def _others(stop: StopWish | None, fact: f.JobDone) -> tuple[str, ...]:
    """The questions that a cancellation answers beside its own."""
    if stop is None or not fact.by:
        return ()
    return tuple(one for one in stop.request_ids if one != fact.request_id)
