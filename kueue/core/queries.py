"""What people ask, answered from the live state; the same rows from finished jobs. Nothing here changes anything.

Rules
- A row of a live job and a row of a finished one are the same type, so that a listing is one list.
- The reason a job waits comes from the filter that places jobs (`placement.obstacle`, `placement.short_counter`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime

from kueue.core import estimates as estimate
from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.core.jobs import GLOBAL_SLOTS, Attempt, Job, payload_of
from kueue.core.placement import held_by
from kueue.core.queue import Queue
from kueue.core.reasons import READ_ONLY, Sight, first_reason, gone, next_in_line, on_worker, reasons
from kueue.core.room import free_room
from kueue.core.wording import comment
from kueue.core.workers import Worker
from kueue.model import JobState, Now, Outcome, kind_of, return_code
from kueue.protocol import messages as m

WORDS: dict[JobState, m.JobFilter] = {
    JobState.HELD: "held",
    JobState.PENDING: "pending",
    JobState.OFFERED: "offered",
    JobState.RUNNING: "running",
    JobState.UNREACHABLE: "running",
}


def job_filter_of(job: Job) -> m.JobFilter:
    """The word under which listings count a live job. A job that is being stopped counts as what it was."""
    word = WORDS.get(job.state)
    if word is not None:
        return word
    return "running" if job.attempt is not None and job.attempt.started_wall is not None else "offered"


def counts(engine: Engine) -> tuple[tuple[m.JobFilter, int], ...]:
    """(word, number) over all jobs in the record, in the order of the summary line."""
    state = engine.state
    by_word: dict[m.JobFilter, int] = {"held": 0, "pending": 0, "offered": 0, "running": 0}
    for job_state, word in WORDS.items():
        by_word[word] += state.by_state[job_state]
    for attempt in state.attempts.values() if state.by_state[JobState.STOPPING] else ():
        job = state.jobs[attempt.job]
        if job.state is JobState.STOPPING:
            by_word[job_filter_of(job)] += 1
    return (
        *by_word.items(),
        ("succeeded", state.sums.succeeded),
        ("failed", state.sums.failed),
        ("canceled", state.sums.canceled),
    )


def live_ids(engine: Engine, words: AbstractSet[str]) -> list[int]:
    """Ids of the live jobs that count under one of these words (none: under any), in no order."""
    state = engine.state
    if not words:
        return list(state.jobs)
    if words <= {"offered", "running"}:
        # All of them have an attempt; a million that wait need not be looked at.
        with_attempt = (state.jobs[attempt.job] for attempt in state.attempts.values())
        return [job.id for job in with_attempt if job_filter_of(job) in words]
    return [job.id for job in state.jobs.values() if job_filter_of(job) in words]


def estimates(engine: Engine, now: Now) -> tuple[int, int]:
    """(average run time, remaining time), whole seconds, over all jobs."""
    state = engine.state
    running = [
        max(0, int(now.wall - attempt.started_wall))
        for attempt in state.attempts.values()
        if attempt.started_wall is not None
    ]
    average = estimate.average(state.sums.succeeded + state.sums.failed, state.sums.run_seconds, running)
    return average, estimate.remaining(average, running, state.by_state[JobState.PENDING])


# --- jobs ------------------------------------------------------------------------------------------------------------


def live_rows(engine: Engine, jobs: Iterable[Job], now: Now) -> Iterator[m.JobRow]:
    """Live jobs in a listing; to be taken before anything changes."""
    sight = Sight(engine.queue, now)
    return (_live_row(sight, job) for job in jobs)


def _live_row(sight: Sight, job: Job) -> m.JobRow:
    attempt = job.attempt
    return m.JobRow(
        id=job.id,
        state=job_filter_of(job),
        payload=payload_of(job.payload),
        cwd=job.template.place.cwd,
        request=job.template.request,
        taken_cores=attempt.share.cores if attempt else None,
        taken_ram_mb=attempt.share.ram_mb if attempt else None,
        worker=sight.queue.name_of(attempt.node) if attempt else None,
        issued_wall=job.template.issued_wall,
        offered_wall=attempt.offered_wall if attempt else None,
        started_wall=attempt.started_wall if attempt else None,
        attempt=_number(job),
        note=_note(sight, job, attempt),
        stopping=job.state is JobState.STOPPING,
    )


def _number(job: Job) -> int:
    if job.attempt is not None and job.attempt.number is not None:
        return job.attempt.number
    return job.numbered


def _note(sight: Sight, job: Job, attempt: Attempt | None) -> str:
    queue = sight.queue
    if attempt is None:
        return first_reason(sight, job) if job.state is JobState.PENDING else ""
    words: list[str] = []
    if job.state is JobState.STOPPING:
        words.append("stopping")
    name = queue.name_of(attempt.node)
    worker = queue.worker(attempt.node)
    if attempt.silent:
        since = f" since {clock(worker.silent_wall)}" if worker.silent_wall is not None else ""
        words.append(f"worker {name} silent{since}")
    elif not queue.answers(worker):
        words.append(f"worker {name} not connected")
    if attempt.overdue:
        words.append(f"worker {name} does not answer")
    elif attempt.waits_in_line(job.state):
        words.append(next_in_line(name))
    remark = queue.notes_of_attempts.get(attempt.offer)
    if remark:
        words.append(remark)
    return ", ".join(words)


def clock(wall: float | None) -> str:
    """Hour and minute, local time."""
    return "" if wall is None else datetime.fromtimestamp(wall).strftime("%H:%M")  # noqa: DTZ006 - shown to people here


def live_details(engine: Engine, jobs: Iterable[Job], now: Now) -> Iterator[m.JobDetail]:
    """All about live jobs; to be taken before anything changes."""
    sight = Sight(engine.queue, now)
    return (_live_detail(sight, job) for job in jobs)


def _live_detail(sight: Sight, job: Job) -> m.JobDetail:
    attempts = [_past_row(past) for past in job.past]
    if job.attempt is not None:
        attempts.append(
            m.AttemptRow(
                number=job.attempt.number,
                offer=job.attempt.offer,
                worker=sight.queue.name_of(job.attempt.node),
                offered_wall=job.attempt.offered_wall,
                started_wall=job.attempt.started_wall,
            )
        )
    return m.JobDetail(
        row=_live_row(sight, job),
        place=job.template.place,
        terms=job.template.terms,
        principal=job.template.principal,
        attempts=tuple(attempts),
        waits=tuple(_waits(sight, job)),
    )


def _waits(sight: Sight, job: Job) -> list[str]:
    if job.attempt is None or job.may_be_given_away:
        return reasons(sight, job)
    if job.attempt.waits_in_line(job.state):
        return [next_in_line(sight.queue.name_of(job.attempt.node))]
    return []


def _past_row(past: f.AttemptPast) -> m.AttemptRow:
    return m.AttemptRow(
        number=past.number,
        offer=past.offer,
        worker=past.worker,
        offered_wall=past.offered_wall,
        started_wall=past.started_wall,
        ended_wall=past.ended_wall,
        end=past.end,
    )


def finished_row(row: f.FinishedJob) -> m.JobRow:
    """A finished job in a listing."""
    outcome: Outcome = row.outcome
    return m.JobRow(
        id=row.id,
        state=kind_of(outcome),
        payload=payload_of(row.payload),
        cwd=row.place.cwd,
        request=row.request,
        taken_cores=row.taken_cores,
        taken_ram_mb=row.taken_ram_mb,
        worker=row.worker,
        issued_wall=row.issued_wall,
        started_wall=row.started_wall,
        ended_wall=row.ended_wall,
        run_seconds=row.run_seconds,
        return_code=return_code(outcome),
        outcome=outcome,
        attempt=max((past.number or 0 for past in row.attempts), default=0),
    )


def finished_detail(row: f.FinishedJob, events: Sequence[tuple[float, str, str]] = ()) -> m.JobDetail:
    """All about a finished job."""
    return m.JobDetail(
        row=finished_row(row),
        place=row.place,
        terms=row.terms,
        principal=row.principal,
        comment=comment(row.outcome, row.end),
        attempts=tuple(_past_row(past) for past in row.attempts),
        end=row.end,
        events=tuple(events),
    )


# --- why a job waits -------------------------------------------------------------------------------------------------


def explain(engine: Engine, job: Job, now: Now) -> tuple[str, list[tuple[str, bool, str]], list[tuple[str, bool, str]]]:
    """(verdict, workers, counters): one (name, would fit, sentence) per worker and per counter the job touches."""
    queue = engine.queue
    request = job.template.request
    called = Counter(node.record.name for node in queue.state.nodes.values())
    sight = Sight(queue, now)
    workers: list[tuple[str, bool, str]] = []
    for number, node in sorted(queue.state.nodes.items()):
        name = node.record.name
        fits, sentence = on_worker(sight, job, node)
        # The name stays what other commands take; of several that have it the id tells which.
        workers.append((name, fits, f"(id {number}) {sentence}" if called[name] > 1 else sentence))
    totals = sight.counters
    own = held_by(queue.state, job)
    counters: list[tuple[str, bool, str]] = []
    for name, amount in (*request.counters, (GLOBAL_SLOTS, request.slots)):
        total = totals.get(name, 0)
        used = queue.state.used.get(name, 0) - own.get(name, 0)
        shown = "global_max_parallel_jobs" if name == GLOBAL_SLOTS else name
        fits = used + amount <= total
        sentence = f"{used} of {total} used, {amount} asked for" if name in totals else gone(name)
        counters.append((shown, fits, f"would fit: {sentence}" if fits else sentence))
    if job.state in {JobState.HELD, JobState.PENDING} or job.may_be_given_away:
        verdict = first_reason(sight, job)
    elif job.attempt is not None and job.attempt.waits_in_line(job.state):
        verdict = next_in_line(queue.name_of(job.attempt.node))
    else:
        note = _note(sight, job, job.attempt)
        verdict = _how_it_goes(queue, job) + (f" ({note})" if note else "")
    return verdict, workers, counters


def _how_it_goes(queue: Queue, job: Job) -> str:
    word = job_filter_of(job)
    if word != "offered" or job.attempt is None:
        return f"it does not wait: it is {word}"
    return f"it is offered to worker {queue.name_of(job.attempt.node)}, which has not answered yet"


# --- workers and counters --------------------------------------------------------------------------------------------


def worker_rows(engine: Engine, now: Now, ids: Iterable[int] | None = None) -> list[m.WorkerRow]:
    """Workers in ascending id, all or those named. Long gone ones without attempts are left out of the whole list."""
    queue = engine.queue
    wanted = sorted(queue.state.nodes) if ids is None else sorted(set(ids) & set(queue.state.nodes))
    rows = [_worker_row(queue, queue.worker(node), now) for node in wanted]
    return [row for row in rows if ids is not None or row.state != "away" or row.running or row.offered]


def _worker_row(queue: Queue, worker: Worker, now: Now) -> m.WorkerRow:
    node = queue.node(worker.id)
    record = node.record
    slots, cores, ram_mb = free_room(record.totals, worker.load, node.slots, node.cores, node.ram_mb)
    room = worker.room(node, now.steady)
    running = sorted(a.job for a in node.attempts.values() if a.started_wall is not None)
    offered = sorted(a.job for a in node.attempts.values() if a.started_wall is None)
    state, note = worker_state(queue, worker, now)
    return m.WorkerRow(
        id=worker.id,
        name=record.name,
        state=state,
        note=note,
        version=worker.version,
        connected_wall=worker.connected_wall if worker.session is not None else None,
        updated_wall=worker.updated_wall,
        info=worker.info,
        totals=record.totals,
        load=worker.load,
        free_slots=slots,
        free_cores=cores,
        free_ram_mb=ram_mb,
        occupation=room.occupation_with(0, 0, 0),
        offered=tuple(offered),
        running=tuple(running),
        boot_id=record.boot_id,
    )


def worker_state(queue: Queue, worker: Worker, now: Now) -> tuple[m.WorkerState, str]:
    """The word for how a worker stands, and a remark for people."""
    node = queue.node(worker.id)
    if worker.session is None and queue.answers(worker):
        return ("offline" if node.record.offline else "online"), READ_ONLY
    closed = worker.closed(node, now.steady)
    if worker.is_silent:
        since = f"since {clock(worker.silent_wall)}" if worker.silent_wall is not None else ""
        return ("silent", since) if node.attempts else ("away", since)
    if worker.session is None:
        return ("silent", "not connected") if node.attempts else ("away", "not connected")
    if node.record.offline:
        return "offline", "taken out by hand"
    if worker.set_aside_until is not None and now.steady < worker.set_aside_until:
        return "set aside", f"{worker.set_aside_note}; for {worker.set_aside_until - now.steady:.0f} s more"
    return "online", closed or worker.note or worker.set_aside_note


def resource_rows(engine: Engine) -> list[m.ResourceRow]:
    """The configured counters, sorted by name."""
    settings = engine.settings
    return [
        m.ResourceRow(name=name, used=engine.state.used.get(name, 0), total=total)
        for name, total in sorted(settings.counters.items())
    ]
