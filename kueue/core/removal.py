"""Ending jobs: at once where nothing runs, with proof where something may.

Rules
- A stop is stored before anything is sent to a worker, so that no crash starts the job again.
- The question is answered when each job it names is proven ended (or proven to go on), or after `PATIENCE_SECONDS`.
- Room and counters of a job that is being stopped stay taken until its end is proven.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from kueue.core import facts as f
from kueue.core.jobs import Job, StopWish
from kueue.core.queue import OPERATOR, Queue, Removal, expand, portion, too_many
from kueue.model import Canceled, JobState, Now, kind_of
from kueue.protocol import messages as m

ASKERS_MAX = 16
"""Questions that are remembered of a job that is being stopped: one that cannot be reached for days must not grow."""
PATIENCE_SECONDS = 9.5
"""Within the promised 10 s, with room for the way; counted from when the last of very many was asked to end."""


def remove(queue: Queue, session: int, message: m.RemoveJobs, past: Mapping[int, f.FinishedJob], now: Now) -> None:
    for removal in queue.removals:
        if removal.message.request_id == message.request_id:
            # The same question from a client that lost its connection: answer there when the time comes.
            removal.session, removal.message = session, message
            return
    if too_many(queue, session, message.seq, message.ids):
        return
    ids, never = expand(message.ids, queue.state.sums.next_job)
    todo = deque(job for job in ids if job in queue.state.jobs)
    results = {job: _gone(job, past, message) for job in ids if job not in queue.state.jobs}
    for first, _ in never:
        ids.append(first)
        results[first] = _gone(first, {}, message)
    removal = Removal(session, message, OPERATOR, ids, results, set(todo), todo)
    queue.removals.append(removal)
    _work(queue, removal, now)
    review(queue, now)


def go_on(queue: Queue, now: Now) -> None:
    """A portion of the oldest question that names very many jobs."""
    removal = next((one for one in queue.removals if one.todo), None)
    if removal is not None:
        _work(queue, removal, now)


def _work(queue: Queue, removal: Removal, now: Now) -> None:
    for job_id, job in portion(queue, removal.todo):
        # One that has ended since is resolved by `review`.
        result = None if job is None else _remove_one(queue, job, removal.message, now)
        if result is not None:
            removal.results[job_id] = result
            removal.open.discard(job_id)
    removal.deadline = now.steady + PATIENCE_SECONDS


def _gone(job_id: int, past: Mapping[int, f.FinishedJob], message: m.RemoveJobs) -> m.Result:
    finished = past.get(job_id)
    if finished is None:
        return m.Result(id=job_id, ok=False, text=f"Job with ID={job_id} not found!")
    if kind_of(finished.outcome) == "canceled":
        if message.request_id in (finished.ended_by_request, *finished.also_asked_by):
            # The same question in another life of the server: it died before the last of the jobs was proven ended.
            return _canceled(job_id)
        return m.Result(id=job_id, ok=False, text=f"Job ID={job_id} is already canceled!")
    return m.Result(id=job_id, ok=False, text=f"Job ID={job_id} has already finished!")


def _canceled(job_id: int) -> m.Result:
    return m.Result(id=job_id, ok=True, text=f"Canceled job ID={job_id}!")


def _remove_one(queue: Queue, job: Job, message: m.RemoveJobs, now: Now) -> m.Result | None:
    """Start ending one live job. Returns the result if it is known already, None if a worker must prove it."""
    wish = StopWish(OPERATOR, message.kill, now.wall, (message.request_id,))
    if message.force:
        return _force(queue, job, wish, now)
    kill = message.kill
    attempt = job.attempt
    match job.state:
        case JobState.HELD | JobState.PENDING:
            queue.finish(job, Canceled(), now, stop=wish)
            return _canceled(job.id)
        case JobState.RUNNING | JobState.UNREACHABLE if not kill and _has_started(job):
            return _started(job.id)
        case JobState.UNREACHABLE if job.may_be_given_away:
            # Its lease ran out: what is left there is paused, and is killed when its worker comes back.
            worker = queue.name_of(attempt.node) if attempt is not None else "its worker"
            queue.finish(job, Canceled(f"while {worker} was silent"), now, stop=wish, decided=False)
            return _canceled(job.id)
        case JobState.OFFERED | JobState.RUNNING | JobState.UNREACHABLE:
            _ask_to_stop(queue, job, message, now)
            return None
        case JobState.STOPPING:
            assert job.stop is not None
            grows = kill and not job.stop.kill
            if grows or (message.request_id not in job.stop.request_ids and len(job.stop.request_ids) < ASKERS_MAX):
                _ask_to_stop(queue, job, message, now, tell=grows)
            return None
        case JobState.DONE:
            raise AssertionError("a done job does not live")


def _has_started(job: Job) -> bool:
    return job.attempt is not None and job.attempt.started_wall is not None


def _started(job_id: int) -> m.Result:
    return m.Result(
        id=job_id,
        ok=False,
        text=f"Job ID={job_id} has already started!",
        hint=f"`kueue remove-job --kill {job_id}` ends it.",
    )


def _ask_to_stop(queue: Queue, job: Job, message: m.RemoveJobs, now: Now, *, tell: bool = True) -> None:
    """`tell`: not if its worker knows already."""
    request_id = message.request_id
    queue.decide(f.StopAsked(job=job.id, principal=OPERATOR, kill=message.kill, wall=now.wall, request_id=request_id))
    if tell:
        _send_stop(queue, job)


def _force(queue: Queue, job: Job, wish: StopWish, now: Now) -> m.Result:
    attempt = job.attempt
    queue.finish(job, Canceled("by force; not proven" if attempt else ""), now, stop=wish, decided=False)
    if attempt is not None:
        queue.tell_worker(attempt.node, m.StopAttempt(offer=attempt.offer, kill=True))
    return _canceled(job.id)


def _send_stop(queue: Queue, job: Job) -> None:
    attempt = job.attempt
    assert attempt is not None
    assert job.stop is not None
    if job.stop.kill:
        queue.tell_worker(attempt.node, m.StopAttempt(offer=attempt.offer))
    else:
        queue.tell_worker(attempt.node, m.WithdrawOffer(offer=attempt.offer))


def send_stop_again(queue: Queue, job: Job) -> None:
    """After a worker came back: what is being stopped there is told again."""
    if job.stop is not None and job.attempt is not None:
        _send_stop(queue, job)


def _resolve(removals: Iterable[Removal], result: m.Result) -> None:
    """Something that these may wait for is known now."""
    for removal in removals:
        if result.id in removal.open:
            removal.open.discard(result.id)
            removal.results[result.id] = result


def went_on(queue: Queue, job_id: int) -> None:
    """A stop without kill came after the start. Whoever wants more than that has yet to get to this job."""
    _resolve((one for one in queue.removals if not (one.message.kill or one.message.force)), _started(job_id))


def review(queue: Queue, now: Now) -> None:
    """Note which awaited jobs are over, and answer the removals that are complete or out of patience."""
    if not queue.removals:
        return
    for done in queue.turn.finished:
        if kind_of(done.outcome) == "canceled":
            _resolve(queue.removals, _canceled(done.id))
        else:
            text = f"Job ID={done.id} has already finished!"
            _resolve(queue.removals, m.Result(id=done.id, ok=False, text=text))
    for removal in list(queue.removals):
        if removal.todo or (removal.open and now.steady < removal.deadline):
            continue
        for job_id in removal.open:
            removal.results[job_id] = _out_of_patience(queue, job_id)
        queue.removals.remove(removal)
        results = tuple(removal.results[job_id] for job_id in dict.fromkeys(removal.order))
        answer = m.Results(seq=removal.message.seq, results=results)
        queue.answer(removal.session, removal.message.request_id, answer, now)


def _out_of_patience(queue: Queue, job_id: int) -> m.Result:
    job = queue.state.jobs.get(job_id)
    sentence = f"Job ID={job_id} is still stopping; it will not be started again."
    if job is not None and job.stop is not None and not job.stop.kill:
        sentence = f"Job ID={job_id} is being taken back; its worker has not said yet whether it has started."
    hint = f"`kueue wait-job {job_id}` waits for the proof, `kueue remove-job --force {job_id}` ends it in the record."
    if job is not None and job.attempt is not None:
        name = queue.name_of(job.attempt.node)
        worker = queue.worker(job.attempt.node)
        if worker.session is None:
            given_up = (
                "is not given up before"
                if job.template.terms.on_lost == "wait"
                else f"is given up after {queue.settings.worker_timeout_seconds:g} s of silence"
            )
            sentence += f" Worker {name} does not answer: the job is stopped there when {name} returns, and {given_up}."
        elif job.stop is not None and job.stop.kill:
            sentence += f" Worker {name} has not told its end yet."
    return m.Result(id=job_id, ok=False, text=sentence, hint=hint)
