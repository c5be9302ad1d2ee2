"""Server and worker agree on what runs: the hello, and every report after it.

Rules
- A hello is the whole truth of a worker. An offer that it does not name was never handed to a runner and never will be.
- Three things prove an attempt gone: its end record; the worker's word ``gone`` (runner's lock free, no process left);
  another boot id of the same machine while nothing answers on an older session.
- An attempt that was started and is now missing or ``unknown`` proves nothing: it waits for the time-out.
- A report about an offer that is not a live attempt is stale: an end is acknowledged and decides nothing, anything that
  may run is killed. Attempts of another queue, or numbered above what this server ever gave, are never killed by order.
- Handling a report twice changes nothing.
"""

from __future__ import annotations

import msgspec

from kueue.core import chaining, removal
from kueue.core import facts as f
from kueue.core.jobs import Attempt, Job
from kueue.core.queue import Queue
from kueue.core.state import Node
from kueue.core.wording import outcome_text
from kueue.core.workers import Worker
from kueue.model import Canceled, EndRecord, JobState, Lost, NodeRecord, Now
from kueue.protocol import messages as m

ANSWERS_WITHIN_SECONDS = 11.0
"""A worker sends a heartbeat at least every 10 s; an older session heard of more recently still answers."""


def hello(queue: Queue, session: int, message: m.WorkerHello, now: Now) -> None:
    """Take a worker in, or refuse it."""
    if session in queue.by_session:
        # The driver takes a hello as the first message only; a second one would leave two workers on one session.
        drop_session(queue, queue.workers[queue.by_session[session]])
        return
    node, refusal = _node_for(queue, message, now)
    if refusal is not None:
        queue.say(session, refusal)
        queue.close(session)
        return
    worker = queue.worker(node.record.id)
    if worker.session is not None:
        drop_session(queue, worker)
    booted = bool(node.record.boot_id) and node.record.boot_id != message.boot_id
    _remember(queue, node, message, now)
    _open_session(queue, worker, session, message, now)
    queue.say(
        session,
        m.WorkerWelcome(
            protocol=m.PROTOCOL,
            version=queue.version,
            queue_id=queue.queue_id,
            worker=node.record.id,
            worker_timeout_seconds=queue.settings.worker_timeout_seconds,
            lease_seconds=queue.settings.lease_seconds,
            cleanup_after_seconds=queue.settings.job_cleanup_after_seconds,
        ),
    )
    _reconcile(queue, worker, node, message, now, booted=booted)


def _node_for(queue: Queue, message: m.WorkerHello, now: Now) -> tuple[Node, None] | tuple[Node, m.Sorry]:
    state = queue.state
    node_id = state.node_by_identity.get(message.identity)
    if node_id is None:
        record = NodeRecord(id=state.sums.next_node, identity=message.identity, name=message.name)
        queue.decide(f.NodeChanged(node=record, wall=now.wall))
        return state.nodes[record.id], None
    node = state.nodes[node_id]
    record = node.record
    if record.machine_id and record.machine_id != message.machine_id:
        return node, m.Sorry(
            reason=f"worker {record.name} is known from another machine: this disk or state directory was copied",
            hint="delete the file `identity` in the worker's state directory and start it again",
        )
    worker = queue.workers.get(node_id)
    answers = (
        worker is not None
        and worker.session is not None
        and worker.heard is not None
        and now.steady - worker.heard <= ANSWERS_WITHIN_SECONDS
    )
    if worker is not None and record.boot_id == message.boot_id and 0 < message.made_boottime < worker.hello_boottime:
        return node, m.Sorry(
            reason=f"worker {record.name} has said hello anew since this one was under way",
            lasting=False,
        )
    if answers and record.boot_id != message.boot_id:
        # On one boot the worker's own lock keeps a second one away; across boots only one of two can be the copy.
        return node, m.Sorry(
            reason=f"another worker with the identity of {record.name} is connected and answers",
            hint="if this disk was copied, delete the file `identity` in the worker's state directory",
            lasting=False,
        )
    return node, None


def drop_session(queue: Queue, worker: Worker) -> None:
    """Close the session of a worker; what it says there from now on is not heard."""
    if worker.session is not None:
        queue.by_session.pop(worker.session, None)
        queue.close(worker.session)
        worker.hung_up()


def _remember(queue: Queue, node: Node, message: m.WorkerHello, now: Now) -> None:
    record = msgspec.structs.replace(
        node.record,
        name=message.name,
        machine_id=message.machine_id,
        boot_id=message.boot_id,
        totals=message.totals,
    )
    if record != node.record:
        queue.decide(f.NodeChanged(node=record, wall=now.wall))


def _open_session(queue: Queue, worker: Worker, session: int, message: m.WorkerHello, now: Now) -> None:
    queue.by_session[session] = worker.id
    worker.session = session
    worker.heard = now.steady
    worker.hello_boottime = message.made_boottime
    worker.suspected = None
    worker.is_silent = False
    worker.silent_wall = None
    worker.stopping = False
    worker.note = ""
    worker.version = message.version
    worker.info = message.info
    worker.load = message.load
    worker.knows_lines = message.lines
    worker.connected_wall = worker.updated_wall = now.wall
    worker.declined.clear()
    worker.probing.clear()
    worker.asking.clear()
    worker.deferred.clear()
    worker.unchained.clear()
    worker.unknown.clear()
    worker.traceless.clear()
    queue.unsettled = True


def _reconcile(queue: Queue, worker: Worker, node: Node, message: m.WorkerHello, now: Now, *, booted: bool) -> None:
    reports = {report.offer: report for report in message.attempts if _is_known(queue, report)}
    _raise_numbers(queue, reports, now)
    for attempt in list(node.attempts.values()):
        report = reports.pop(attempt.offer, None)
        job = queue.state.jobs[attempt.job]
        if booted and (attempt.started_wall is not None if report is None else report.state == "unknown"):
            lose(queue, job, attempt, f"{node.record.name} was restarted", now)
        elif report is not None:
            _compare(queue, worker, job, attempt, report, now)
        elif attempt.started_wall is None:
            _returned(queue, job, attempt, "never received", "the worker came back without it", now)
        else:
            worker.unknown[attempt.offer] = now.steady
            worker.traceless.add(attempt.offer)
            queue.remark(f"job={job.id} worker={node.record.name} came back without a trace of the running attempt")
    for report in reports.values():
        _stale_report(queue, worker, report, now)


def _is_known(queue: Queue, report: m.AttemptReport) -> bool:
    """Whether the number means here what it means there: not in another queue, nor in another life of this one."""
    if report.queue_id != queue.queue_id:
        return False
    attempt = queue.state.attempts.get(report.offer)
    if attempt is None or attempt.job == report.job:
        return True
    queue.remark(f"offer={report.offer} is job={report.job} there and job={attempt.job} here; it is left alone there")
    return False


def may_go_on_unrecorded(queue: Queue, message: m.WorkerHello) -> bool:
    """Whether a lease does no harm while nothing can be stored, so that this hello cannot be taken down.

    Not to a worker with an attempt that was given away (it has to be killed before any lease), or that may be given
    away as soon as the disk has room again (its return has to be recorded first).
    """
    for report in message.attempts:
        if report.queue_id == queue.queue_id and report.state not in {"ended", "gone"}:
            attempt = queue.state.attempts.get(report.offer)
            if attempt is None or attempt.job != report.job or attempt.silent:
                return False
    return True


def _raise_numbers(queue: Queue, reports: dict[int, m.AttemptReport], now: Now) -> None:
    """After a restored backup: never give a number that a worker knows already. Those attempts are left alone."""
    sums = queue.state.sums
    beyond = [report for report in reports.values() if report.offer >= sums.next_offer]
    if not beyond:
        return
    next_offer = max(report.offer for report in beyond) + 1
    next_job = max(max(report.job for report in beyond) + 1, sums.next_job)
    queue.decide(f.NumbersRaised(next_job=next_job, next_offer=next_offer, wall=now.wall))
    for report in beyond:
        queue.remark(f"offer={report.offer} job={report.job} is unknown here (a restored backup?) and is left alone")


def _compare(queue: Queue, worker: Worker, job: Job, attempt: Attempt, report: m.AttemptReport, now: Now) -> None:
    # Answered; and what waits in a line there says so anew.
    queue.offered_at.pop(attempt.offer, None)
    queue.chained.pop(attempt.offer, None)
    match report.state:
        case "ended" if report.end is not None:
            ended(queue, worker, attempt.offer, report.end, now)
        case "gone":
            gone(queue, worker, attempt.offer, f"{queue.name_of(worker.id)} has no process of it left", now)
        case "ended":
            # Its record follows right after the welcome and decides the job: until then nobody else gets it.
            if attempt.silent:
                queue.decide(
                    f.AttemptReturned(job=job.id, offer=attempt.offer, started_wall=report.started_wall, wall=now.wall)
                )
            worker.unknown[attempt.offer] = now.steady
        case "unknown":
            worker.unknown[attempt.offer] = now.steady
        case "queued" if report.started_wall is None and attempt.started_wall is None:
            _waits(queue, job, attempt, now)
        case "queued" | "running" | "paused" | "stopping":
            _lives(queue, job, attempt, _first_of(report.started_wall, attempt.started_wall, now.wall), now)


def _first_of(*times: float | None) -> float:
    return next(time for time in times if time is not None)


def _waits(queue: Queue, job: Job, attempt: Attempt, now: Now) -> None:
    """The runner has it but has not started it yet, and may give it back."""
    if attempt.silent:
        queue.decide(f.AttemptReturned(job=job.id, offer=attempt.offer, started_wall=None, wall=now.wall))
    chaining.waits_again(queue, attempt, now)
    if job.stop is not None:
        removal.send_stop_again(queue, job)
    elif attempt.overdue:
        queue.tell_worker(attempt.node, m.WithdrawOffer(offer=attempt.offer))


def _lives(queue: Queue, job: Job, attempt: Attempt, started_wall: float, now: Now) -> None:
    """The attempt certainly runs there."""
    if attempt.started_wall is None:
        chaining.started(queue, job, attempt, started_wall, now)
    match job.state:
        case JobState.RUNNING if attempt.started_wall is not None:
            pass
        case JobState.OFFERED | JobState.RUNNING:
            queue.decide(f.JobStarted(job=job.id, offer=attempt.offer, started_wall=started_wall, wall=now.wall))
        case JobState.UNREACHABLE:
            queue.decide(f.AttemptReturned(job=job.id, offer=attempt.offer, started_wall=started_wall, wall=now.wall))
        case JobState.STOPPING:
            if attempt.silent:
                queue.decide(
                    f.AttemptReturned(job=job.id, offer=attempt.offer, started_wall=started_wall, wall=now.wall)
                )
            assert job.stop is not None
            if not job.stop.kill:
                queue.decide(f.StopDropped(job=job.id, offer=attempt.offer, started_wall=started_wall, wall=now.wall))
                removal.went_on(queue, job.id)
            else:
                if attempt.started_wall is None:
                    queue.decide(
                        f.JobStarted(job=job.id, offer=attempt.offer, started_wall=started_wall, wall=now.wall)
                    )
                removal.send_stop_again(queue, job)
        case JobState.HELD | JobState.PENDING | JobState.DONE:
            raise AssertionError("a job with a live attempt is in none of these states")


def _stale_report(queue: Queue, worker: Worker, report: m.AttemptReport, now: Now) -> None:
    assert worker.session is not None
    match report.state:
        case "ended" if report.end is not None:
            stale_end(queue, worker, report.offer, report.end, now)
        case "gone":
            queue.say(worker.session, m.Acknowledge(offers=(report.offer,)))
        case _:
            _kill_stale(queue, worker, report.offer)


def _kill_stale(queue: Queue, worker: Worker, offer: int) -> None:
    """It was given away, or its job was ended without it. What this server never gave is left alone."""
    assert worker.session is not None
    sums = queue.state.sums
    if offer < sums.next_offer and not any(first <= offer <= last for first, last in sums.never_given):
        queue.say(worker.session, m.StopAttempt(offer=offer, kill=True))


# --- single reports --------------------------------------------------------------------------------------------------


def started(queue: Queue, worker: Worker, offer: int, started_wall: float, now: Now) -> None:
    found = _live(queue, worker, offer)
    if found is None:
        _kill_stale(queue, worker, offer)
        return
    job, attempt = found
    worker.sees(job.template.directory)
    _lives(queue, job, attempt, started_wall, now)


def queued(queue: Queue, worker: Worker, offer: int) -> None:
    """It is with the runner: answered, though not started."""
    _live(queue, worker, offer)


def changed(queue: Queue, worker: Worker, message: m.AttemptChanged) -> None:
    if _live(queue, worker, message.offer) is not None:
        queue.notes_of_attempts[message.offer] = message.note


def deferred(queue: Queue, worker: Worker, message: m.OfferDeferred, now: Now) -> None:
    worker.load = message.load
    worker.updated_wall = now.wall
    found = _not_started(queue, worker, message.offer, now)
    if found is None:
        return
    job, attempt = found
    if attempt.is_chained:
        # It says nothing of the room that is there for an offer of its own.
        worker.unchained.add(job.template.request)
    else:
        worker.deferred[job.template.request] = message.reason
    _returned(queue, job, attempt, "deferred", message.reason, now)


def rejected(queue: Queue, worker: Worker, message: m.OfferRejected, now: Now) -> None:
    found = _not_started(queue, worker, message.offer, now)
    if found is None:
        return
    job, attempt = found
    worker.decline_place(job.template.directory, message.reason, now.steady)
    _returned(queue, job, attempt, "rejected", message.reason, now)


def withdrawn(queue: Queue, worker: Worker, offer: int, now: Now) -> None:
    found = _not_started(queue, worker, offer, now)
    if found is None:
        return
    job, attempt = found
    _returned(queue, job, attempt, "withdrawn", "", now)


def ended(queue: Queue, worker: Worker, offer: int, end: EndRecord, now: Now) -> None:
    """The end record of an attempt: it decides the job if the attempt is live, and is acknowledged in any case."""
    found = _live(queue, worker, offer)
    if found is None:
        stale_end(queue, worker, offer, end, now)
        return
    job, attempt = found
    if worker.session is not None:
        queue.say(worker.session, m.Acknowledge(offers=(offer,)))
    if end.started_wall is not None:
        worker.sees(job.template.directory)
        chaining.ended(worker, job.template.request, end)
    if isinstance(end.outcome, Canceled) and job.stop is None:
        # Stopped there although nobody here wants it ended: an order for another life of this job. It runs again.
        lose(queue, job, attempt, f"it was stopped on {queue.name_of(worker.id)}", now)
        return
    queue.finish(job, end.outcome, now, end=end, stop=job.stop if isinstance(end.outcome, Canceled) else None)
    if worker.is_set_aside(now.steady):
        chaining.take_back_all(queue, worker.id, now)


def gone(queue: Queue, worker: Worker, offer: int, reason: str, now: Now) -> None:
    """Proven: nothing of the attempt is left and nothing tells how it ended."""
    if worker.session is not None:
        queue.say(worker.session, m.Acknowledge(offers=(offer,)))
    found = _live(queue, worker, offer)
    if found is not None:
        lose(queue, *found, reason, now)


def stale_end(queue: Queue, worker: Worker, offer: int, end: EndRecord, now: Now) -> None:
    """An attempt that was given away brings its end: history, no decision."""
    if worker.session is not None:
        queue.say(worker.session, m.Acknowledge(offers=(offer,)))
    job = queue.state.given_away.get(offer)
    if job is not None:
        text = f"superseded, {outcome_text(end.outcome)}"
        queue.decide(f.AttemptSuperseded(job=job, offer=offer, text=text, wall=now.wall))
        queue.remark(f"offer={offer} worker={queue.name_of(worker.id)} {text}")


def _live(queue: Queue, worker: Worker, offer: int) -> tuple[Job, Attempt] | None:
    """The live attempt of that number on that worker, with its job."""
    attempt = queue.state.attempts.get(offer)
    if attempt is None or attempt.node != worker.id:
        return None
    queue.offered_at.pop(offer, None)
    worker.unknown.pop(offer, None)
    worker.traceless.discard(offer)
    return queue.state.jobs[attempt.job], attempt


def _not_started(queue: Queue, worker: Worker, offer: int, now: Now) -> tuple[Job, Attempt] | None:
    """The live attempt that a worker gives back, unless it is known to have started."""
    since = worker.unknown.get(offer, now.steady)
    found = _live(queue, worker, offer)
    if found is None or found[1].started_wall is None:
        return found
    # It has no trace of what it said to run, as after a restored backup. That proves nothing; the time-out decides.
    worker.unknown[offer] = since
    worker.traceless.add(offer)
    return None


def _returned(queue: Queue, job: Job, attempt: Attempt, how: f.HowReturned, reason: str, now: Now) -> None:
    """Certain: this offer never started. The job waits again, or is canceled if that was wanted."""
    queue.forget_offer(job, attempt)
    queue.decide(f.OfferReturned(job=job.id, offer=attempt.offer, how=how, reason=reason, wall=now.wall))
    if job.stop is not None:
        queue.finish(job, Canceled(), now, stop=job.stop)


def lose(queue: Queue, job: Job, attempt: Attempt, reason: str, now: Now) -> None:
    """The attempt is gone or given away; the job waits again, is canceled, or has used up its attempts."""
    queue.forget_offer(job, attempt)
    queue.decide(f.AttemptLost(job=job.id, offer=attempt.offer, reason=reason, wall=now.wall))
    if job.stop is not None:
        queue.finish(job, Canceled(f"its attempt was lost: {reason}"), now, stop=job.stop)
    elif job.template.terms.on_lost == "fail" or job.lost >= job.template.terms.max_attempts:
        workers = ", ".join(job.lost_workers)
        times = "once" if job.lost == 1 else f"{job.lost} times"
        queue.finish(job, Lost(f"{times}, on {workers}; the last time because {reason}"), now)
