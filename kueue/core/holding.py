"""Holding waiting jobs and releasing them; of very many a portion in each turn, answered once.

Rules
- A repetition of a question that is being worked on is answered in its place.
- A server that dies in the middle has changed some of the jobs. To the repetition these are held (or not held) already,
  and a released one that has started since is told as started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kueue.core import facts as f
from kueue.core.jobs import Job
from kueue.core.queue import OPERATOR, Holding, Queue, expand, portion, too_many
from kueue.model import JobState, Now
from kueue.protocol import messages as m


def ask(
    queue: Queue, session: int, message: m.HoldJobs | m.ReleaseJobs, past: Mapping[int, f.FinishedJob], now: Now
) -> None:
    """`past`: finished rows of the ids that are not live."""
    for holding in queue.holdings:
        if holding.message.request_id == message.request_id:
            holding.session, holding.message = session, message
            return
    if too_many(queue, session, message.seq, message.ids):
        return
    ids, never = expand(message.ids, queue.state.sums.next_job)
    unknown = frozenset(job for job in ids if job not in queue.state.jobs and job not in past)
    holding = Holding(session, message, deque(ids), unknown, [first for first, _ in never])
    queue.holdings.append(holding)
    _work(queue, holding, now)


def go_on(queue: Queue, now: Now) -> None:
    """A portion of the oldest question."""
    if queue.holdings:
        _work(queue, queue.holdings[0], now)


def _work(queue: Queue, holding: Holding, now: Now) -> None:
    change = _hold if isinstance(holding.message, m.HoldJobs) else _release
    for job_id, job in portion(queue, holding.todo):
        if job is not None:
            holding.results.append(change(queue, job, now))
        elif job_id in holding.unknown:
            holding.results.append(_not_found(job_id))
        else:
            # Also one that has ended since the question came.
            holding.results.append(m.Result(id=job_id, ok=False, text=f"Job ID={job_id} has already finished!"))
    if not holding.todo:
        queue.holdings.remove(holding)
        results = (*holding.results, *map(_not_found, holding.never))
        message = holding.message
        queue.answer(holding.session, message.request_id, m.Results(seq=message.seq, results=results), now)


def _hold(queue: Queue, job: Job, now: Now) -> m.Result:
    if job.state is JobState.PENDING:
        queue.decide(f.JobHeld(job=job.id, principal=OPERATOR, wall=now.wall))
        return m.Result(id=job.id, ok=True, text=f"Held job ID={job.id}!")
    if job.state is JobState.HELD:
        return m.Result(id=job.id, ok=True, text=f"Job ID={job.id} is already held!")
    if job.state is JobState.OFFERED:
        hint = f"`kueue remove-job {job.id}` cancels it unless it starts before."
        return m.Result(id=job.id, ok=False, text=f"Job ID={job.id} is already offered to a worker!", hint=hint)
    return _started(job.id)


def _release(queue: Queue, job: Job, now: Now) -> m.Result:
    if job.state is JobState.HELD:
        queue.decide(f.JobReleased(job=job.id, principal=OPERATOR, wall=now.wall))
        return m.Result(id=job.id, ok=True, text=f"Released job ID={job.id}!")
    if job.state is JobState.PENDING:
        return m.Result(id=job.id, ok=True, text=f"Job ID={job.id} is not held!")
    return _started(job.id)


def _started(job_id: int) -> m.Result:
    return m.Result(id=job_id, ok=False, text=f"Job ID={job_id} has already started!")


def _not_found(job_id: int) -> m.Result:
    return m.Result(id=job_id, ok=False, text=f"Job with ID={job_id} not found!")
