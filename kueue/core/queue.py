"""The queue as the engine sees it while it decides: stored state, living workers, settings, and the turn being taken.

Rules
- A decision is made by `Queue.decide(fact)`: it evolves the state at once and goes into the turn for the store.
- What is said goes into the turn too and leaves only after the facts are on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kueue.core import facts as f
from kueue.core.jobs import GLOBAL_SLOTS, Attempt, Job, StopWish
from kueue.core.settings import Settings
from kueue.core.state import Node, State
from kueue.core.wording import outcome_text
from kueue.core.workers import FAST_FAILURE_SECONDS, Worker
from kueue.model import EndRecord, Now, Outcome, Request, exit_code, kind_of, return_code
from kueue.protocol import messages as m

if TYPE_CHECKING:
    from kueue.core.submission import Arrival

OPERATOR = "operator"
IDS_AT_ONCE = 100_000
"""Most jobs that one question may name: each gets a line of about 70 bytes in its answer, which is one frame."""

FREES_NOTHING = (
    f.RequestAnswered,
    f.JobOffered,
    f.JobStarted,
    f.OfferOverdue,
    f.NumbersRaised,
    f.AttemptSuperseded,
    f.TimeoutChanged,
)
"""Facts after which no waiting job fits that did not fit before."""

_encode = msgspec.json.Encoder().encode


@dataclass
class Turn:
    """What came of one call: facts to store, then messages to send and sessions to close, in this order."""

    facts: list[f.AnyFact] = field(default_factory=list)
    finished: list[f.FinishedJob] = field(default_factory=list)
    """One for each `JobDone` among the facts."""
    sends: list[tuple[int, m.Message]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Lines for the log."""


@dataclass
class Removal:
    """A `RemoveJobs` that waits for workers to prove the end of some jobs."""

    session: int
    message: m.RemoveJobs
    principal: str
    order: list[int]
    results: dict[int, m.Result]
    open: set[int]
    """Those that are not proven ended yet."""
    todo: deque[int]
    """Those of which nothing was asked yet."""
    deadline: float = 0.0
    """Steady seconds at which the answer is due; counts when nothing is left to do."""


@dataclass
class Holding:
    """A `HoldJobs` or `ReleaseJobs` that names more jobs than one turn can take."""

    session: int
    message: m.HoldJobs | m.ReleaseJobs
    todo: deque[int]
    unknown: frozenset[int]
    """Those of `todo` that were neither live nor in the record when the question came."""
    never: list[int]
    """First of each range of ids that were never given."""
    results: list[m.Result] = field(default_factory=list)


class OpenLine(NamedTuple):
    """A line that may take more, see `core.chaining`."""

    node: int
    since: float
    """Steady seconds: when its newest start was heard of."""


@dataclass
class Queue:
    """See the module. `Engine` is the only one who calls in; its parts are functions that take a `Queue`."""

    settings: Settings
    queue_id: str
    version: str
    state: State = field(default_factory=State)
    workers: dict[int, Worker] = field(default_factory=dict)
    by_session: dict[int, int] = field(default_factory=dict)
    """Session → node id, for the current session of each worker."""
    watchers: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Job → (session, seq) that want to hear of its end."""
    watched: dict[int, set[int]] = field(default_factory=dict)
    """Session → the jobs that it watches."""
    held_back: dict[tuple[int, int], dict[int, Outcome]] = field(default_factory=dict)
    """(session, seq) that has not been told yet what it watches → how jobs of that ended meanwhile."""
    removals: list[Removal] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    """Those that are being worked on, the oldest first."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Long submissions that are being worked on, the oldest first."""
    offered_at: dict[int, float] = field(default_factory=dict)
    """Offer → steady time it was sent, while unanswered."""
    chained: dict[int, float] = field(default_factory=dict)
    """Offer ahead → steady time since when it waits in its line, oldest first."""
    open_lines: dict[Request, dict[int, OpenLine]] = field(default_factory=dict)
    """Request → line, where jobs of that request are short. Empty in a laboratory of long jobs."""
    line_starts: dict[int, float] = field(default_factory=dict)
    """Line of such jobs → its newest start, UTC seconds on its worker's clock."""
    answered_at: dict[str, float] = field(default_factory=dict)
    """Request id → steady time of its answer, oldest first."""
    opened: float = 0.0
    """Steady time since when silence counts: the listeners stood open and the state was loaded."""
    lowered: list[tuple[float, float]] = field(default_factory=list)
    """(T, until steady): longer time-outs from before a reload or restart that workers may still rely on."""
    turn: Turn = field(default_factory=Turn)
    notes_of_attempts: dict[int, str] = field(default_factory=dict)
    """Offer → remark of its worker (paused, cannot be stopped and why)."""
    answering: frozenset[str] = frozenset()
    """Names of workers that hold a connection of which nothing can be recorded, as the disk is full. Only shown."""
    unsettled: bool = False
    """Something changed that may let a waiting job start."""

    # --- deciding and saying -----------------------------------------------------------------------------------------

    def decide(self, fact: f.AnyFact) -> None:
        self.state.evolve(fact)
        self.turn.facts.append(fact)
        if self.state.finished:
            self.turn.finished.extend(self.state.finished)
            self.state.finished.clear()
        if not isinstance(fact, FREES_NOTHING):
            self.unsettled = True

    def say(self, session: int, message: m.Message) -> None:
        self.turn.sends.append((session, message))

    def close(self, session: int) -> None:
        self.turn.closes.append(session)

    def remark(self, line: str) -> None:
        self.turn.remarks.append(line)

    def tell_worker(self, node: int, message: m.Message) -> bool:
        """Say something to a worker if it is connected; returns whether it is."""
        worker = self.workers.get(node)
        if worker is None or worker.session is None:
            return False
        self.say(worker.session, message)
        return True

    def answer(self, session: int, request_id: str, message: m.Message, now: Now) -> None:
        """Answer a state-changing request and remember the answer for repetitions."""
        self.answered_at[request_id] = now.steady
        self.decide(
            f.RequestAnswered(request_id=request_id, principal=OPERATOR, answer=_encode(message), wall=now.wall)
        )
        self.say(session, message)

    # --- looking -----------------------------------------------------------------------------------------------------

    def worker(self, node: int) -> Worker:
        """The living side of a node; made when first asked for."""
        worker = self.workers.get(node)
        if worker is None:
            worker = self.workers[node] = Worker(node)
        return worker

    def answers(self, worker: Worker) -> bool:
        """Is it connected, as far as people are concerned?"""
        return worker.session is not None or self.name_of(worker.id) in self.answering

    def node(self, node: int) -> Node:
        return self.state.nodes[node]

    def name_of(self, node: int) -> str:
        return self.state.nodes[node].record.name

    def counter_totals(self) -> dict[str, int]:
        return {**self.settings.counters, GLOBAL_SLOTS: self.settings.global_max_parallel_jobs}

    # --- endings -----------------------------------------------------------------------------------------------------

    def finish(
        self,
        job: Job,
        outcome: Outcome,
        now: Now,
        *,
        end: EndRecord | None = None,
        stop: StopWish | None = None,
        decided: bool = True,
    ) -> None:
        """The job is over: store it, tell who watches, free what hangs on it.

        `stop`: the wish that is granted, if a person ended it. `decided`: the live attempt, if any, is what ended; else
        it is left to be stopped as a stale one.
        """
        attempt = job.attempt
        self.decide(
            f.JobDone(
                job=job.id,
                outcome=outcome,
                wall=now.wall,
                offer=attempt.offer if attempt is not None and decided else None,
                end=end,
                by=stop.principal if stop is not None else "",
                request_id=stop.request_ids[-1] if stop is not None else "",
            )
        )
        if attempt is not None:
            self.forget_offer(job, attempt)
            if decided:
                self._count_end(attempt.node, outcome, end, now)
        for session, seq in sorted(self.watchers.pop(job.id, ())):
            held_back = self.held_back.get((session, seq))
            if held_back is None:
                self.say(session, job_ended(seq, job.id, outcome))
            else:
                held_back[job.id] = outcome
            self.watched[session].discard(job.id)

    def watch(self, session: int, seq: int, job: int) -> None:
        """Tell that session of the end of a live job."""
        self.watchers.setdefault(job, set()).add((session, seq))
        self.watched.setdefault(session, set()).add(job)

    def stop_watching(self, session: int) -> None:
        for key in [key for key in self.held_back if key[0] == session]:
            del self.held_back[key]
        for job in self.watched.pop(session, ()):
            left = {(other, seq) for other, seq in self.watchers[job] if other != session}
            if left:
                self.watchers[job] = left
            else:
                del self.watchers[job]

    def forget_offer(self, job: Job, attempt: Attempt) -> None:
        """The engine's own marks of an attempt that is over, however it ended."""
        self.offered_at.pop(attempt.offer, None)
        self.chained.pop(attempt.offer, None)
        self.notes_of_attempts.pop(attempt.offer, None)
        if attempt.line in self.line_starts:
            members = self.state.lines.get(attempt.line)
            if members is None or members.keys() == {attempt.offer}:
                del self.line_starts[attempt.line]
                self.close_line(job.template.request, attempt.line)
        worker = self.workers.get(attempt.node)
        if worker is not None:
            worker.unknown.pop(attempt.offer, None)
            worker.traceless.discard(attempt.offer)
            worker.asked(job.template.directory, attempt.offer)

    def close_line(self, request: Request, line: int) -> None:
        """It takes no more before its next start."""
        lines = self.open_lines.get(request)
        if lines is not None:
            lines.pop(line, None)
            if not lines:
                del self.open_lines[request]

    def _count_end(self, node: int, outcome: Outcome, end: EndRecord | None, now: Now) -> None:
        worker = self.worker(node)
        if end is None or kind_of(outcome) == "canceled":
            return
        failed_fast = kind_of(outcome) == "failed" and end.run_seconds < FAST_FAILURE_SECONDS
        if not worker.ended(now.steady, failed_fast=failed_fast):
            return
        reason = f"{worker.fast_failures} jobs in a row failed within a second, the last one {outcome_text(outcome)}"
        if any(self._takes_jobs(other, now) for other in self.state.nodes if other != node):
            pause = worker.set_aside(now.steady, reason)
            self.remark(f"worker={self.name_of(node)} set aside for {pause:g} s: {reason}")
        else:
            # The last one is never taken away, but never silently kept either.
            worker.set_aside_note = f"{reason}; it goes on because no other worker takes jobs"
            self.remark(f"worker={self.name_of(node)} goes on although {reason}: no other worker takes jobs")

    def _takes_jobs(self, node: int, now: Now) -> bool:
        return node in self.workers and not self.workers[node].closed(self.state.nodes[node], now.steady)


def job_ended(seq: int, job: int, outcome: Outcome) -> m.JobEnded:
    """The message to a watcher."""
    return m.JobEnded(seq=seq, id=job, outcome=outcome, return_code=return_code(outcome), exit_code=exit_code(outcome))


def told_of(ranges: Sequence[tuple[int, int]], next_job: int) -> int:
    """How much the answer to a question about these ids holds: each that was given, each range of those that were not.

    An id that is named twice counts twice.
    """
    given = sum(max(0, min(last + 1, next_job) - max(0, first)) for first, last in ranges)
    return given + sum(last >= max(first, next_job) for first, last in ranges)


def is_too_much(ranges: Sequence[tuple[int, int]], next_job: int) -> bool:
    """Whether a question that names these ids is refused: nothing needs to be looked up for it."""
    return told_of(ranges, next_job) > IDS_AT_ONCE


def too_many(queue: Queue, session: int, seq: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Refuse a question that names more jobs than one answer can tell of. Returns whether it was refused."""
    next_job = queue.state.sums.next_job
    if not is_too_much(ranges, next_job):
        return False
    named = told_of(ranges, next_job)
    error = f"{named} jobs are named; at most {IDS_AT_ONCE} are taken in one question"
    queue.say(session, m.Failed(seq=seq, error=error, hint="name them in smaller ranges"))
    return True


def fold(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ids as inclusive ranges, neighbours together; in the order named."""
    ranges: list[tuple[int, int]] = []
    for job in ids:
        if ranges and ranges[-1][1] == job - 1:
            ranges[-1] = (ranges[-1][0], job)
        else:
            ranges.append((job, job))
    return ranges


PORTION = 2_000
"""Jobs of a question in one turn: some hundredths of a second."""


def portion(queue: Queue, todo: deque[int]) -> Iterator[tuple[int, Job | None]]:
    """The next ids of a question that may name very many, taken off `todo`, and their jobs; none: it lives no more."""
    for _ in range(min(PORTION, len(todo))):
        job = todo.popleft()
        yield job, queue.state.jobs.get(job)


def expand(ranges: Iterable[tuple[int, int]], next_job: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Returns (ids below `next_job` in the order named, each once; the ranges of ids that were never given).

    The bound comes first: a range of a thousand million ids costs nothing.
    """
    known: dict[int, None] = {}
    never: list[tuple[int, int]] = []
    for first, last in ranges:
        known.update(dict.fromkeys(range(max(0, first), min(last + 1, next_job))))
        if last >= next_job and last >= first:
            never.append((max(first, next_job), last))
    return list(known), tuple(never)
