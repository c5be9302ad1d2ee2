"""Offers ahead: a short job waits at the worker, behind one of its own request, and starts the moment that one ends.

Theory of operation
    line        attempts of one request on one worker that share one allocation, named by the offer that began it. One
                of them runs, the others wait in their order. The allocation counts in all sums while one of them lives.
    who         only when nothing more can be placed: the waiting jobs in their order, as far as each can be put into a
                line. The first that cannot ends it, so that no later one is given room that it waits for.
    where       behind an attempt that has started just now, on a worker on which jobs of that request were short. A
                line takes what fills `AHEAD_SECONDS`, no more: what waits in it cannot go elsewhere meanwhile.
    not         a job that runs nowhere else when its worker is lost, or whose last attempt it would be: should the
                machine be lost, it may have started, and nobody could tell that it had only waited.
    lowered     where more is taken of a counter or a machine than a reload or a report left of it, lines take nothing
                more: what waits in them is soon over, and then the placement decides by what there is now.
    late        one that has not started within `PATIENCE_SECONDS` is taken back and placed like any other. So a job
                behind one that turns out long loses half a second, and that one counts as long before it has ended.

Why lines and not predecessors
    One that waits in the middle may leave, and what is known of one that is done is folded away: on replay the next
    would name nobody, and its allocation would count twice. The name of a line stays.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kueue.core.jobs import Attempt, Job
from kueue.core.placement import short_counter, too_small
from kueue.core.queue import OpenLine, Queue
from kueue.core.waiting import Group
from kueue.core.workers import Worker
from kueue.model import Allocation, EndRecord, JobState, MachineTotals, Now, Request, kind_of
from kueue.protocol import messages as m

SHORT_SECONDS = 0.25
"""Jobs that run longer on average are not chained: half of `PATIENCE_SECONDS`, or those that wait would be late as a
rule. For them the way to the server and back is two hundredths of their time at most."""
AHEAD_SECONDS = 0.2
"""Work that may wait in a line."""
WAITING_MAX = 32
PATIENCE_SECONDS = 0.5
PACES_KEPT = 64
"""Requests of which a worker's run time is remembered; it forgets the one that it has not run for the longest time."""
NEWEST_COUNTS = 0.25
"""Weight of the newest run time in the mean."""
LEAST_SECONDS = 0.001


class Link(NamedTuple):
    """The next thing to do: offer this job ahead, in this line."""

    job: int
    node: int
    allocation: Allocation
    line: int


def depth(pace: float) -> int:
    """How many may wait in a line of jobs that run `pace` seconds."""
    return min(math.ceil(AHEAD_SECONDS / max(pace, LEAST_SECONDS)), WAITING_MAX)


# --- what is learned -------------------------------------------------------------------------------------------------


def started(queue: Queue, job: Job, attempt: Attempt, started_wall: float, now: Now) -> None:
    """An attempt runs: its line may take more, if jobs of its request are short there.

    From one start to the next in a line a job takes more than it runs: a process is made, and proven gone.
    """
    queue.chained.pop(attempt.offer, None)
    worker = queue.worker(attempt.node)
    request = job.template.request
    if request not in worker.paces:
        return
    before = queue.line_starts.get(attempt.line)
    if before is not None and attempt.is_chained:
        _learn(worker, request, max(0.0, started_wall - before))
    queue.line_starts[attempt.line] = started_wall
    queue.open_lines.setdefault(request, {})[attempt.line] = OpenLine(attempt.node, now.steady)
    queue.unsettled |= bool(queue.state.waiting.groups)


def ended(worker: Worker, request: Request, end: EndRecord) -> None:
    """Learn from an end how long jobs of this request run there. One that failed takes all trust away."""
    if kind_of(end.outcome) != "succeeded":
        worker.paces.pop(request, None)
    else:
        _learn(worker, request, max(end.run_seconds, worker.paces.get(request, 0.0)))


def _learn(worker: Worker, request: Request, seconds: float) -> None:
    paces = worker.paces
    known = paces.pop(request, None)
    pace = seconds if known is None else known + (seconds - known) * NEWEST_COUNTS
    if pace < SHORT_SECONDS:
        paces[request] = pace
        if len(paces) > PACES_KEPT:
            del paces[next(iter(paces))]


# --- who is offered ahead --------------------------------------------------------------------------------------------


class Links:
    """Picks what to offer ahead until nothing more may be. After each link the caller evolves the state."""

    def __init__(self, queue: Queue, now: Now) -> None:
        self.queue = queue
        self.now = now
        self._lines: dict[Request, list[tuple[int, float, int]]] = {}
        """Heap of (waiting, pace, line), the lines of a request that take more."""
        self._takes: dict[int, bool] = {}
        """By node."""
        self._impossible: set[Request] = set()
        self._totals: set[MachineTotals] | None = None
        self._front: list[tuple[int, int, Group]] = []
        """Heap of the groups by the turn that is theirs at the earliest."""
        state = queue.state
        totals = queue.counter_totals()
        self._overdrawn = {name for name, used in state.used.items() if used > totals.get(name, 0)}
        for group in state.waiting.groups.values():
            self._push(group)
        revocable = (state.jobs[job].template.request.priority for job in state.revocable)
        self._before = min(zip((-priority for priority in revocable), state.revocable, strict=True), default=None)
        """The first of the jobs that may be given away: they wait for a place as well."""

    def next(self) -> Link | None:
        """The first waiting job, if a line takes it."""
        while self._front:
            minus_priority, job, group = self._front[0]
            if self._before is not None and self._before < (minus_priority, job):
                return None
            turn = group.first(math.inf, self._impossible) if group.blocks else None
            if turn is None or turn[:2] != (minus_priority, job):
                heappop(self._front)
                if turn is not None:
                    heappush(self._front, (turn.minus_priority, turn.job, group))
                continue
            request = turn.shape.request
            link = self._behind(request, job)
            if link is not None:
                return link
            if not self._is_impossible(request):
                return None
            self._impossible.add(request)
        return None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _push(self, group: Group) -> None:
        turn = group.first(math.inf, self._impossible)
        if turn is not None:
            heappush(self._front, (turn.minus_priority, turn.job, group))

    def _is_impossible(self, request: Request) -> bool:
        """No worker that is here could ever run it, or no counter ever has so much: it waits for another machine or for
        other settings, and nobody takes that from it.
        """
        if short_counter(request, {}, self.queue.counter_totals(), {}) is not None:
            return True
        if self._totals is None:
            queue = self.queue
            here = (worker.id for worker in queue.workers.values() if worker.session is not None)
            self._totals = {queue.node(node).record.totals for node in here}
        return all(too_small(request, totals) is not None for totals in self._totals)

    def _behind(self, request: Request, job_id: int) -> Link | None:
        job = self.queue.state.jobs[job_id]
        if job.template.terms.on_lost != "rerun" or job.lost + 1 >= job.template.terms.max_attempts:
            return None
        lines = self._lines.get(request)
        if lines is None:
            lines = self._lines[request] = self._that_take(request)
        directory = job.template.directory
        passed_over: list[tuple[int, float, int]] = []
        link: Link | None = None
        while lines and link is None:
            waiting, pace, line = heappop(lines)
            members = self.queue.state.lines[line]
            running = next(iter(members.values()))
            worker = self.queue.workers[running.node]
            if directory in worker.declined or directory in worker.probing:
                passed_over.append((waiting, pace, line))
                continue
            link = Link(job_id, running.node, running.allocation, line)
            if waiting + 1 < depth(pace):
                heappush(lines, (waiting + 1, pace, line))
            else:
                self.queue.close_line(request, line)
        for entry in passed_over:
            heappush(lines, entry)
        return link

    def _that_take(self, request: Request) -> list[tuple[int, float, int]]:
        """Those that do not are closed: they are opened again with the next start in them."""
        found = []
        for line, opened in list(self.queue.open_lines.get(request, {}).items()):
            pace = self.queue.worker(opened.node).paces.get(request)
            members = self.queue.state.lines.get(line, {})
            # The news of a start may overtake that of the end before it.
            waiting = sum(member.started_wall is None for member in members.values())
            if pace is not None and waiting < depth(pace) and self._takes_more(request, line, opened):
                found.append((waiting, pace, line))
            else:
                self.queue.close_line(request, line)
        heapify(found)
        return found

    def _takes_more(self, request: Request, line: int, opened: OpenLine) -> bool:
        queue = self.queue
        members = queue.state.lines.get(line)
        if members is None or self.now.steady - opened.since >= PATIENCE_SECONDS:
            return False
        running = next(iter(members.values()))
        worker = queue.worker(opened.node)
        return (
            running.started_wall is not None
            and not running.silent
            and running.offer not in worker.unknown
            and queue.state.jobs[running.job].state is JobState.RUNNING
            and request not in worker.deferred
            and request not in worker.unchained
            and self._takes_jobs(worker)
            and self._is_there(running.allocation)
        )

    def _is_there(self, allocation: Allocation) -> bool:
        """Whether nothing of what it takes was lowered below all that is taken of it."""
        if any(name in self._overdrawn for name, _ in allocation.counters):
            return False
        for share in allocation.shares:
            node = self.queue.node(share.node)
            totals = node.record.totals
            named = dict(totals.named)
            if (
                (share.slots and node.slots > totals.slots)
                or (share.cores and node.cores > totals.cores)
                or (share.ram_mb and node.ram_mb > totals.ram_mb)
                or any(unit >= named.get(name, 0) for name, units in share.named for unit in units)
            ):
                return False
        return True

    def _takes_jobs(self, worker: Worker) -> bool:
        takes = self._takes.get(worker.id)
        if takes is None:
            is_open = not worker.closed(self.queue.node(worker.id), self.now.steady)
            takes = self._takes[worker.id] = worker.knows_lines and is_open
        return takes


# --- who comes back --------------------------------------------------------------------------------------------------


def look(queue: Queue, now: Now) -> None:
    """Take back what is late."""
    chained = queue.chained
    while chained:
        offer, since = next(iter(chained.items()))
        if now.steady - since < PATIENCE_SECONDS:
            return
        attempt = _take_back(queue, offer, now)
        if attempt is not None:
            # What it waits for has run for that long: it need not end to be known as no short one.
            request = queue.state.jobs[attempt.job].template.request
            _learn(queue.worker(attempt.node), request, PATIENCE_SECONDS)


def take_back_all(queue: Queue, node: int, now: Now) -> None:
    """A worker that shall get no more jobs: what waits there in lines goes elsewhere."""
    for offer in [offer for offer in queue.node(node).attempts if offer in queue.chained]:
        _take_back(queue, offer, now)


def _take_back(queue: Queue, offer: int, now: Now) -> Attempt | None:
    """Returns the attempt that was asked back; None: it does not wait there, or is being taken back already."""
    del queue.chained[offer]
    attempt = queue.state.attempts.get(offer)
    if attempt is None or attempt.overdue or not attempt.waits_in_line(queue.state.jobs[attempt.job].state):
        return None
    if not queue.tell_worker(attempt.node, m.WithdrawOffer(offer=offer)):
        return None
    queue.offered_at[offer] = now.steady
    return attempt


def waits_again(queue: Queue, attempt: Attempt, now: Now) -> None:
    """A worker that came back has it in a line still."""
    if attempt.is_chained:
        queue.chained[attempt.offer] = now.steady


def next_deadline(queue: Queue) -> float | None:
    """Steady time at which `look` has something to do; None: nothing waits in a line."""
    return next(iter(queue.chained.values())) + PATIENCE_SECONDS if queue.chained else None
