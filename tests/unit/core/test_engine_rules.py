"""Rules of the engine that a transcript cannot show: what is forgotten, bounded, or must not be answered."""

from __future__ import annotations

import pytest

from kueue.core import facts as f
from kueue.core.engine import REQUESTS_KEPT_SECONDS, Engine
from kueue.core.queue import IDS_AT_ONCE
from kueue.core.settings import Settings
from kueue.model import EndRecord, Exited, JobRange, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m

TOTALS = MachineTotals(slots=4, cores=4, ram_mb=4000)
NOW = Now(wall=1000.0, steady=0.0)
END = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=2.0, run_seconds=1.0)


def hello(name: str = "w") -> m.WorkerHello:
    return m.WorkerHello(identity=name, name=name, machine_id="m", boot_id="b", totals=TOTALS)


def submit(request_id: str = "r", seq: int = 1, count: int = 1) -> m.Submit:
    entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/d"), request=Request(), count=count)
    return m.Submit(seq=seq, request_id=request_id, ranges=(entry,))


@pytest.fixture
def engine() -> Engine:
    engine = Engine(Settings(), queue_id="q")
    engine.opened(NOW)
    return engine


def test_a_repeated_request_is_answered_under_the_number_of_the_repetition(engine):
    engine.handle(1, submit(seq=1), NOW)
    turn = engine.handle(2, submit(seq=8), NOW)
    assert [(session, answer.seq, answer.ids) for session, answer in turn.sends] == [(2, 8, ((0, 0),))]
    assert not turn.facts


def test_answers_are_forgotten_after_an_hour(engine):
    engine.handle(1, submit(), NOW)
    engine.tick(Now(wall=1000.0, steady=REQUESTS_KEPT_SECONDS))
    assert "r" in engine.state.answers
    engine.tick(Now(wall=1000.0, steady=REQUESTS_KEPT_SECONDS + 1))
    assert not engine.state.answers


def test_a_wall_clock_that_is_set_does_not_forget_an_answer(engine):
    engine.handle(1, submit(), NOW)
    engine.tick(Now(wall=1e9, steady=1.0))
    assert "r" in engine.state.answers


def test_a_refused_submission_may_be_repeated_and_taken(engine):
    bad = m.Submit(seq=1, request_id="r", ranges=())
    assert isinstance(engine.handle(1, bad, NOW).sends[0][1], m.Failed)
    assert isinstance(engine.handle(1, submit(), NOW).sends[0][1], m.Submitted)


def test_a_second_hello_on_one_session_ends_it(engine):
    engine.handle(1, hello("w"), NOW)
    turn = engine.handle(1, hello("x"), NOW)
    assert turn.closes == [1]
    assert not turn.sends
    assert not engine.queue.by_session
    assert all(worker.session is None for worker in engine.queue.workers.values())


def test_a_closed_session_is_not_answered(engine):
    engine.handle(1, hello(), NOW)
    engine.session_closed(1, NOW)
    assert engine.handle(1, m.Heartbeat(number=1), NOW).sends == []


def test_no_mark_of_an_attempt_outlives_it(engine):
    engine.handle(1, hello(), NOW)
    engine.handle(9, submit(count=3), NOW)
    engine.settle(NOW)
    for offer in (0, 1, 2):
        engine.handle(1, m.AttemptChanged(offer=offer, note="paused"), NOW)
    engine.handle(1, m.AttemptEnded(offer=0, end=END), NOW)
    engine.handle(1, m.AttemptGone(offer=1, reason="x"), NOW)
    engine.handle(1, m.OfferRejected(offer=2, reason="x"), NOW)
    for offer in (0, 1, 2, 77):
        engine.handle(1, m.AttemptChanged(offer=offer, note="late"), NOW)
    assert not engine.queue.notes_of_attempts
    assert not engine.queue.offered_at
    engine.handle(9, m.WatchJobs(seq=5, ids=((0, 9),)), NOW)
    engine.session_closed(9, NOW)
    assert not engine.queue.watchers


def test_parts_of_a_client_that_hung_up_are_forgotten(engine):
    entry = submit().ranges
    engine.handle(1, m.Submit(seq=1, request_id="r", ranges=entry, part=0, last=False), NOW)
    engine.session_closed(1, NOW)
    assert not engine._parts


@pytest.mark.parametrize("question", [m.RemoveJobs, m.HoldJobs, m.ReleaseJobs])
def test_a_question_about_more_jobs_than_one_answer_holds_is_refused_and_changes_nothing(engine, question):
    engine.handle(1, submit(count=IDS_AT_ONCE + 1), NOW)
    while engine.queue.arrivals:
        engine.tick(NOW)
    turn = engine.handle(1, question(seq=3, request_id="x", ids=((0, 10**9),)), NOW)
    ((_, answer),) = turn.sends
    assert isinstance(answer, m.Failed)
    assert not turn.facts
    assert len(engine.state.jobs) == IDS_AT_ONCE + 1


def test_many_missing_jobs_are_told_as_one_range(engine):
    engine.queue.decide(f.NumbersRaised(next_job=100_000, next_offer=0, wall=0.0))
    ((_, answer),) = engine.handle(1, m.WatchJobs(seq=1, ids=((0, 99_999),)), NOW).sends
    assert answer.missing == ((0, 99_999),)


def test_the_next_deadline_is_never_missed(engine):
    """Whoever sleeps until it, and then ticks twice, has declared a silent worker silent within the time-out."""
    engine.handle(1, hello(), NOW)
    steady = 0.0
    for _ in range(10):
        engine.settle(Now(1000.0 + steady, steady))
        due = engine.next_deadline(Now(1000.0 + steady, steady))
        if due is None:
            break
        steady = max(due, steady + 0.005)
        engine.tick(Now(1000.0 + steady, steady))
    assert engine.queue.workers[0].is_silent
    assert steady == pytest.approx(Settings().worker_timeout_seconds, abs=0.2)


def test_a_timeout_is_stored_before_a_lease_is_granted_by_it():
    engine = Engine(Settings(worker_timeout_seconds=20.0), queue_id="q")
    engine.opened(NOW)
    turn = engine.handle(1, hello(), NOW)
    assert turn.facts[0] == f.TimeoutChanged(seconds=20.0, wall=NOW.wall)
    longer = engine.reload(Settings(worker_timeout_seconds=60.0), NOW)
    assert longer.facts == [f.TimeoutChanged(seconds=60.0, wall=NOW.wall)]
    shorter = engine.reload(Settings(worker_timeout_seconds=10.0), NOW)
    assert shorter.facts == []
    assert engine.next_deadline(Now(1000.0, 0.0)) == 0.0  # something is to be settled first
    engine.settle(NOW)
    passed = Now(wall=1061.0, steady=60.1)
    assert f.TimeoutChanged(seconds=10.0, wall=1061.0) in engine.tick(passed).facts
