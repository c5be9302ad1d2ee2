"""The smallest form of what the simulation, or the thinking for it, has found."""

from __future__ import annotations

import msgspec

from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.core.reconcile import may_go_on_unrecorded
from kueue.core.settings import Settings
from kueue.model import JobRange, JobState, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m
from kueue.server import restore
from kueue.worker import orders as o
from kueue.worker.actions import Close, ContinueTrees, PauseTrees
from kueue.worker.agent import Agent, AgentSettings
from kueue.worker.known import Memo, write_memo

QUEUE = "q" * 32
TOTALS = MachineTotals(slots=4, cores=4, ram_mb=1000)
HELLO = m.WorkerHello(identity="i", name="w", machine_id="machine", boot_id="boot", totals=TOTALS, made_boottime=100.0)


def at(steady: float) -> Now:
    return Now(1_700_000_000.0 + steady, steady)


def engine_with_an_offer() -> Engine:
    engine = Engine(Settings(worker_timeout_seconds=10.0), queue_id=QUEUE)
    engine.opened(at(0.0))
    engine.handle(1, HELLO, at(1.0))
    job = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/"), request=Request())
    engine.handle(9, m.Submit(seq=1, request_id="r", ranges=(job,)), at(2.0))
    engine.settle(at(2.0))
    return engine


def report(state="running") -> m.AttemptReport:
    return m.AttemptReport(offer=0, job=0, queue_id=QUEUE, state=state)


def welcome(**changes) -> m.WorkerWelcome:
    return m.WorkerWelcome(
        protocol=m.PROTOCOL,
        version="",
        queue_id=QUEUE,
        worker=0,
        worker_timeout_seconds=10.0,
        lease_seconds=8.0,
        cleanup_after_seconds=1.0,
        **changes,
    )


def agent() -> Agent:
    return Agent(AgentSettings(identity="i", name="w", machine_id="machine", boot_id="boot"), TOTALS)


def attempt(state) -> o.AttemptState:
    return o.AttemptState(offer=0, job=0, queue_id=QUEUE, state=state, started_wall=1.0, memo=write_memo(Memo()))


def test_a_hello_that_a_newer_one_has_overtaken_is_refused():
    engine = engine_with_an_offer()
    late = engine.handle(2, msgspec.structs.replace(HELLO, made_boottime=60.0), at(3.0))
    assert isinstance(late.sends[0][1], m.Sorry)
    assert late.closes == [2]
    assert engine.state.jobs[0].state is JobState.OFFERED  # it may have started: nobody else gets it


def test_a_hello_of_a_newer_boot_is_taken_in_although_its_clock_shows_less():
    engine = engine_with_an_offer()
    engine.session_closed(1, at(3.0))
    taken = engine.handle(2, msgspec.structs.replace(HELLO, boot_id="next", made_boottime=5.0), at(4.0))
    assert isinstance(taken.sends[0][1], m.WorkerWelcome)


def test_while_nothing_can_be_stored_only_a_worker_whose_attempts_are_its_own_goes_on():
    engine = engine_with_an_offer()
    hello = msgspec.structs.replace(HELLO, attempts=(report(),))
    assert may_go_on_unrecorded(engine.queue, hello)
    for steady in (13.0, 13.1):
        engine.tick(at(steady))
    assert engine.state.jobs[0].state is JobState.UNREACHABLE
    assert not may_go_on_unrecorded(engine.queue, hello)


def test_while_nothing_can_be_stored_an_attempt_of_a_job_that_is_over_gets_no_lease():
    engine = engine_with_an_offer()
    engine.handle(9, m.RemoveJobs(seq=2, request_id="s", ids=((0, 0),), force=True), at(3.0))
    assert not may_go_on_unrecorded(engine.queue, msgspec.structs.replace(HELLO, attempts=(report(),)))


def test_an_attempt_that_was_unknown_at_the_hello_may_be_over_at_the_welcome():
    worker = agent()
    worker.runners_stand([attempt("unknown")])
    worker.hello(10.0)
    worker.runner_event(o.Refused(offer=0, reason="it never got there"), 11.0)
    actions = worker.hears(welcome(), 12.0)
    assert not [action for action in actions if isinstance(action, Close)]


def test_an_answer_that_comes_after_its_own_deadline_lets_nothing_go():
    worker = agent()
    worker.runners_stand([attempt("running")])
    worker.hello(10.0)
    worker.hears(welcome(), 10.0)
    worker.hears(m.HeartbeatAnswer(number=1, lease_seconds=8.0), 10.1)
    worker.tick(11.5)  # the second heartbeat; then the machine sleeps
    stopped = worker.tick(30.0)
    assert [action for action in stopped if isinstance(action, PauseTrees)]
    late = worker.hears(m.HeartbeatAnswer(number=2, lease_seconds=8.0), 30.1)
    assert not [action for action in late if isinstance(action, ContinueTrees)]


def test_a_restored_state_lets_the_longest_time_out_pass_that_workers_may_rely_on():
    engine = engine_with_an_offer()
    backup = Engine(engine.settings, queue_id=QUEUE)
    backup.replay(engine.aggregates(), [])
    restore.decided(backup, f.Aggregates(next_job=1, next_offer=1, timeout_seconds=60.0), 0.0)
    backup.opened(at(100.0))
    assert backup.state.sums.timeout_seconds == 60.0
    backup.tick(at(161.0))
    assert backup.state.sums.timeout_seconds == 10.0
