"""What the server says while its disk takes nothing: leases go on, all else waits.

Rules
- While it is read-only the server stores nothing, so it offers nothing and gives nothing away: a lease that it grants
  here is safe. When it is back all silence counts from that moment on, as after a start.
- A worker that the record knows is welcomed provisionally, so that its heartbeats have a session and none of its
  jobs is paused. All its other messages are dropped: when the disk is back every worker is asked for a new hello,
  and that repeats whatever was not acknowledged.
- A worker that would first have to be written down is told to come again; so is one with an attempt that was given away
  or may be: a lease would let it run on beside the next attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kueue import __version__
from kueue.core.engine import Engine
from kueue.core.reconcile import may_go_on_unrecorded
from kueue.core.settings import Settings
from kueue.protocol.messages import (
    PROTOCOL,
    Failed,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    Sorry,
    WorkerHello,
    WorkerWelcome,
)
from kueue.server.worker_session import WorkerSession

if TYPE_CHECKING:
    from kueue.server.driver import Driver

NOTHING_ACCEPTED = "disk full: nothing was accepted"
HINT = "Free space on the server's disk; it comes back by itself, and `kueue clean-jobs` works meanwhile."

NO_SPARE_HINT = "Free space on the server's disk; it comes back by itself. Not even to forget jobs there is room."
"""Where the ballast is spent, or there was never room for it."""


def show_answering(driver: Driver) -> None:
    """Let what is shown next say that workers are connected, which the record, rebuilt since, cannot know."""
    names = (
        session.name
        for session in driver.sessions.values()
        if isinstance(session, WorkerSession) and session.is_welcomed and not session.is_ending
    )
    driver.engine.queue.answering = frozenset(names) if driver.read_only else frozenset()


def refusal(seq: int) -> Failed:
    """For a question that would change something."""
    return Failed(seq=seq, error=NOTHING_ACCEPTED, hint=HINT)


def answer(message: Message, engine: Engine, settings: Settings, queue_id: str) -> Message | None:
    """What a worker hears to `message` at such a time; None: nothing."""
    match message:
        case Heartbeat(number=number):
            return HeartbeatAnswer(number=number, lease_seconds=settings.lease_seconds)
        case WorkerHello():
            return _welcome(message, engine, settings, queue_id)
        case _:
            return None


def _welcome(hello: WorkerHello, engine: Engine, settings: Settings, queue_id: str) -> WorkerWelcome | Sorry:
    number = engine.state.node_by_identity.get(hello.identity)
    known = None if number is None else engine.state.nodes[number].record
    if known is None or known.machine_id != hello.machine_id:
        return Sorry(reason="The server's disk is full; it takes no new workers until that has passed.", lasting=False)
    if not may_go_on_unrecorded(engine.queue, hello):
        reason = "The server's disk is full; it cannot note down which of your attempts go on until that has passed."
        return Sorry(reason=reason, lasting=False)
    return WorkerWelcome(
        protocol=PROTOCOL,
        version=__version__,
        queue_id=queue_id,
        worker=known.id,
        worker_timeout_seconds=settings.worker_timeout_seconds,
        lease_seconds=settings.lease_seconds,
        cleanup_after_seconds=settings.job_cleanup_after_seconds,
    )
