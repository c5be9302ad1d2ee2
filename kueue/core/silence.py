"""When a worker counts as silent, and what that means for what runs there.

Rules (T = `worker_timeout_seconds`, M = max(2 s, T/10), L = T - M)
- The server answers heartbeat n after it noted `heard`; the worker's lease then runs to its own s(n) + L, s(n) having
  been noted before the heartbeat was written. So the lease ends before ``heard + T`` on the server's clock, with M for
  clock drift, the pause itself and the way.
- A worker is declared silent when ``steady - max(heard, opened) > T``, and only when that is seen twice with all mail
  read in between. Declaring closes its session: a closed session answers nothing, so no lease grows after it.
- After a restart, or a stall of the server's own loop, `opened` begins anew: every earlier answer is older than it.
  So it does while, and after, the server's lock is not where runners look for it: each look may have been a lease.
- A lowered T counts for giving away only after the old T has passed once, also over a restart of the server.
- Silence makes attempts revocable, not lost: the job waits for a place again, but the attempt lives on in the record
  until the next offer is stored.
"""

from __future__ import annotations

from kueue.core import chaining, reconcile
from kueue.core import facts as f
from kueue.core.jobs import Attempt, Job
from kueue.core.queue import Queue
from kueue.core.workers import Worker
from kueue.model import Canceled, JobState, Lost, Now
from kueue.protocol import messages as m

SECOND_LOOK_SECONDS = 0.05
"""Between suspicion and declaration; the driver reads all mail in between."""

JUST_NOW_SECONDS = 30.0
"""Three heartbeats: a worker that missed them all may well be on a machine that lost its power."""


def timeout(queue: Queue, steady: float) -> float:
    """The T that counts now: the setting, or a longer one from before that workers may still rely on."""
    queue.lowered = [(seconds, until) for seconds, until in queue.lowered if until > steady]
    return max([queue.settings.worker_timeout_seconds, *(seconds for seconds, _ in queue.lowered)])


def settle_timeout(queue: Queue, now: Now) -> float:
    """`timeout`, and store it if it is another than before. To be called before any lease is granted by it."""
    seconds = timeout(queue, now.steady)
    if seconds != queue.state.sums.timeout_seconds:
        queue.decide(f.TimeoutChanged(seconds=seconds, wall=now.wall))
    return seconds


def lower_timeout(queue: Queue, old: float, now: Now) -> None:
    """Leases granted by the `old` T may still run: it counts until it has passed once."""
    if queue.settings.worker_timeout_seconds < old:
        queue.lowered.append((old, now.steady + old))
    settle_timeout(queue, now)


def heard(worker: Worker, now: Now) -> None:
    worker.heard = now.steady
    worker.suspected = None


def last_sign(queue: Queue, worker: Worker) -> float:
    return queue.opened if worker.heard is None else max(worker.heard, queue.opened)


def look(queue: Queue, now: Now) -> None:
    """Declare workers silent, withdraw overdue offers, give up unknown attempts."""
    limit = settle_timeout(queue, now)
    for node_id, node in queue.state.nodes.items():
        worker = queue.worker(node_id)
        if worker.is_silent or (worker.session is None and not node.attempts):
            continue
        if now.steady - last_sign(queue, worker) <= limit:
            worker.suspected = None
        elif worker.suspected is None:
            worker.suspected = now.steady
        elif now.steady - worker.suspected >= SECOND_LOOK_SECONDS:
            declare(queue, worker, now)
    for worker in queue.workers.values():
        for offer, since in list(worker.unknown.items()):
            if now.steady - max(since, queue.opened) > limit:
                del worker.unknown[offer]
                attempt = queue.state.attempts.get(offer)
                if attempt is not None:
                    _silence(
                        queue, queue.state.jobs[attempt.job], attempt, f"{queue.name_of(worker.id)} cannot find it", now
                    )
    _overdue(queue, now)


def declare(queue: Queue, worker: Worker, now: Now) -> None:
    """The worker is silent: close its session and let its jobs go elsewhere as they allow."""
    reconcile.drop_session(queue, worker)
    worker.is_silent = True
    worker.silent_wall = now.wall - (now.steady - last_sign(queue, worker))
    name = queue.name_of(worker.id)
    queue.remark(f"worker={name} is silent for {now.steady - last_sign(queue, worker):.0f} s")
    for attempt in list(queue.node(worker.id).attempts.values()):
        _silence(queue, queue.state.jobs[attempt.job], attempt, f"{name} is silent", now)


def _silence(queue: Queue, job: Job, attempt: Attempt, reason: str, now: Now) -> None:
    queue.offered_at.pop(attempt.offer, None)
    queue.chained.pop(attempt.offer, None)
    on_lost = job.template.terms.on_lost
    if job.state is JobState.STOPPING and on_lost != "wait":
        assert job.stop is not None
        # Its runner has killed it when the lease ended, or paused it and is told to kill it when it comes back.
        queue.finish(job, Canceled(f"given up: {reason}"), now, stop=job.stop, decided=False)
    elif on_lost == "fail" and job.state is not JobState.UNREACHABLE:
        queue.finish(job, Lost(reason), now, decided=False)
    elif not attempt.silent:
        queue.decide(f.AttemptSilenced(job=job.id, offer=attempt.offer, wall=now.wall))


def is_heard(worker: Worker, now: Now) -> bool:
    """Was something heard from it just now, on a connection that stands?"""
    return worker.session is not None and worker.heard is not None and now.steady - worker.heard < JUST_NOW_SECONDS


def dead(queue: Queue, worker: Worker, now: Now) -> None:
    """A person says that nothing runs there any more: all its attempts are proven gone."""
    # Should it live all the same: now, and not when it comes back. The last of a line first, or it would go on there.
    for offer in sorted(queue.node(worker.id).attempts, reverse=True):
        queue.tell_worker(worker.id, m.StopAttempt(offer=offer, kill=True))
    reconcile.drop_session(queue, worker)
    worker.is_silent = True
    worker.silent_wall = now.wall
    name = queue.name_of(worker.id)
    for attempt in list(queue.node(worker.id).attempts.values()):
        job = queue.state.jobs[attempt.job]
        reconcile.lose(queue, job, attempt, f"{name} was declared dead by a person", now)


def _overdue(queue: Queue, now: Now) -> None:
    limit = queue.settings.job_offer_timeout_seconds
    for offer, since in list(queue.offered_at.items()):
        if now.steady - since <= limit:
            continue
        del queue.offered_at[offer]
        attempt = queue.state.attempts.get(offer)
        if attempt is None:
            continue
        job = queue.state.jobs[attempt.job]
        if job.state in {JobState.OFFERED, JobState.STOPPING} and attempt.started_wall is None and not attempt.overdue:
            queue.chained.pop(offer, None)
            queue.decide(f.OfferOverdue(job=job.id, offer=offer, wall=now.wall))
            queue.tell_worker(attempt.node, m.WithdrawOffer(offer=offer))
            queue.remark(f"job={job.id} worker={queue.name_of(attempt.node)} does not answer offer {offer}")


def next_deadline(queue: Queue, now: Now) -> float | None:
    """Steady time of the next thing that `look` would do; None if nothing is due."""
    times: list[float] = [until for _, until in queue.lowered]
    limit = timeout(queue, now.steady)
    for node_id, node in queue.state.nodes.items():
        worker = queue.workers.get(node_id)
        if worker is None:
            if node.attempts:
                times.append(queue.opened + limit)
            continue
        if not worker.is_silent and (worker.session is not None or node.attempts):
            if worker.suspected is not None:
                times.append(worker.suspected + SECOND_LOOK_SECONDS)
            else:
                times.append(last_sign(queue, worker) + limit)
        times.extend(max(since, queue.opened) + limit for since in worker.unknown.values())
        retry = worker.next_retry()
        if retry is not None:
            times.append(retry)
        if worker.set_aside_until is not None:
            times.append(worker.set_aside_until)
    times.extend(since + queue.settings.job_offer_timeout_seconds for since in queue.offered_at.values())
    times.extend(removal.deadline for removal in queue.removals)
    late = chaining.next_deadline(queue)
    if late is not None:
        times.append(late)
    return min(times, default=None)
