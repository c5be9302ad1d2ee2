"""What names very many jobs is worked on a portion a turn, and still stored, answered and refused as one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kueue.core import facts as f
from kueue.core import queue, removal, submission
from kueue.core.engine import Engine
from kueue.core.queue import Turn
from kueue.core.settings import Settings
from kueue.model import Canceled, EndRecord, JobRange, JobState, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m
from tests.sim.snapshot import snapshot

NOW = Now(wall=1000.0, steady=0.0)
HELLO = m.WorkerHello(
    identity="w", name="w", machine_id="m", boot_id="b", totals=MachineTotals(slots=4, cores=4, ram_mb=4000)
)
MANY = 2 * submission.PORTION + 5


def jobs(count: int = 1, cwd: str = "/d", *, held: bool = False) -> JobRange:
    return JobRange(payload=Payload(argv=("true",)), place=Place(cwd=cwd), request=Request(), count=count, held=held)


def lines(count: int, last: tuple[str, ...] = ("true",)) -> JobRange:
    return JobRange(
        payload=Payload(argv=()),
        place=Place(cwd="/d"),
        request=Request(),
        argvs=(*(("echo", str(number)) for number in range(count - 1)), last),
    )


def submit(*ranges: JobRange, request_id: str = "long", seq: int = 1) -> m.Submit:
    return m.Submit(seq=seq, request_id=request_id, ranges=ranges)


@pytest.fixture
def engine() -> Engine:
    engine = Engine(Settings(global_max_parallel_jobs=100), queue_id="q")
    engine.opened(NOW)
    engine.settle(NOW)
    return engine


def turns(engine: Engine) -> list[Turn]:
    """The turns that the engine asks for, until nothing is under way."""
    taken = []
    while engine.queue.arrivals or engine.queue.holdings or any(one.todo for one in engine.queue.removals):
        assert engine.next_deadline(NOW) == NOW.steady
        taken.append(engine.tick(NOW))
    return taken


@pytest.mark.parametrize("entry", [jobs(MANY), lines(MANY)], ids=["a count", "a list of commands"])
def test_a_long_submission_is_decided_and_answered_in_its_last_turn_alone(engine, entry):
    first = engine.handle(9, submit(entry), NOW)
    *others, last = [first, *turns(engine)]
    assert len(others) >= 2
    assert not any(turn.facts or turn.sends for turn in others)
    assert last.sends == [(9, m.Submitted(seq=1, ids=((0, MANY - 1),), remarks=last.sends[0][1].remarks))]
    assert [type(fact) for fact in last.facts] == [f.JobsSubmitted, f.RequestAnswered]
    assert len(engine.state.jobs) == MANY


@pytest.mark.parametrize("ranges", [(jobs(submission.PORTION),), (jobs(),) * submission.PORTION], ids=["one", "many"])
def test_a_submission_of_one_portion_is_answered_at_once(engine, ranges):
    assert len(engine.handle(9, submit(*ranges), NOW).facts) == 2


def test_nothing_is_to_be_seen_of_a_long_submission_before_it_is_decided(engine):
    engine.handle(9, submit(jobs(MANY)), NOW)
    before = snapshot(engine)
    while engine.queue.arrivals:
        assert snapshot(engine) == before
        engine.tick(NOW)
    assert len(engine.state.jobs) == MANY


def test_what_a_long_submission_makes_is_what_a_restart_makes_of_it(engine):
    entries = (lines(MANY), jobs(3, held=True), jobs(2, "/e"))
    engine.handle(9, submit(*entries), NOW)
    facts = [fact for turn in turns(engine) for fact in turn.facts]
    again = Engine(engine.settings, queue_id="q")
    again.replay(engine.aggregates(), facts)
    assert snapshot(again) == snapshot(engine)
    assert engine.state.jobs[MANY].state is JobState.HELD
    assert len(again.state.waiting) == MANY + 2


def test_no_stored_range_of_a_long_list_is_longer_than_a_portion(engine):
    engine.handle(9, submit(lines(MANY)), NOW)
    ((fact, _),) = [turn.facts for turn in turns(engine) if turn.facts]
    assert [entry.size for entry in fact.ranges] == [submission.PORTION, submission.PORTION, 5]


def test_a_short_submission_does_not_wait_for_a_long_one(engine):
    engine.handle(9, submit(jobs(MANY)), NOW)
    engine.tick(NOW)
    short = engine.handle(8, submit(jobs(2), request_id="short"), NOW)
    assert short.sends[0][1].ids == ((0, 1),)
    assert turns(engine)[-1].sends[0][1].ids == ((2, MANY + 1),)
    assert all(job.id == number for number, job in engine.state.jobs.items())


def test_a_fault_in_the_last_line_of_a_long_list_refuses_it_whole(engine):
    engine.handle(9, submit(lines(MANY, last=("echo", "zero \0 byte"))), NOW)
    taken = turns(engine)
    assert [type(message) for turn in taken for _, message in turn.sends] == [m.Failed]
    assert not any(turn.facts for turn in taken)
    assert not engine.state.jobs


def test_a_repetition_of_a_long_submission_under_way_takes_its_place(engine):
    engine.handle(9, submit(jobs(MANY)), NOW)
    engine.tick(NOW)
    engine.handle(10, submit(jobs(MANY), seq=4), NOW)
    sends = [send for turn in turns(engine) for send in turn.sends]
    assert [(session, message.seq, message.ids) for session, message in sends] == [(10, 4, ((0, MANY - 1),))]


def test_a_long_submission_of_a_client_that_hung_up_is_forgotten(engine):
    engine.handle(9, submit(jobs(MANY)), NOW)
    engine.session_closed(9, NOW)
    assert not engine.queue.arrivals
    assert not engine.state.jobs


def test_parts_that_come_to_too_many_jobs_are_not_kept(engine):
    half = submission.MAX_JOBS_AT_ONCE // 2 + 1
    engine.handle(9, m.Submit(seq=1, request_id="r", ranges=(jobs(half),), part=0, last=False), NOW)
    engine.handle(9, m.Submit(seq=1, request_id="r", ranges=(jobs(half),), part=1, last=False), NOW)
    assert [parts.ranges for parts in engine._parts.values()] == [[]]
    turn = engine.handle(9, m.Submit(seq=1, request_id="r", ranges=(jobs(1),), part=2, last=True), NOW)
    ((_, answer),) = turn.sends
    assert answer.error.endswith(f"at most {submission.MAX_JOBS_AT_ONCE} are taken at once")
    assert not engine.queue.arrivals


def test_a_removal_of_very_many_jobs_takes_a_portion_a_turn_and_is_answered_once(engine):
    count = 2 * queue.PORTION + 5
    engine.handle(9, submit(jobs(count)), NOW)
    question = m.RemoveJobs(seq=2, request_id="x", ids=((0, count),))
    taken = [engine.handle(9, question, NOW), *turns(engine)]
    assert [len(turn.finished) for turn in taken] == [queue.PORTION, queue.PORTION, 5]
    ((_, answer),) = [send for turn in taken for send in turn.sends]
    assert [result.id for result in answer.results] == list(range(count + 1))
    assert [result.ok for result in answer.results] == [True] * count + [False]


def test_a_job_that_ends_before_its_turn_to_be_removed_is_told_as_over(engine):
    count = queue.PORTION + 1
    engine.handle(9, submit(jobs(count)), NOW)
    engine.handle(9, m.RemoveJobs(seq=2, request_id="x", ids=((0, count - 1),)), NOW)
    engine.handle(8, m.RemoveJobs(seq=3, request_id="y", ids=((count - 1, count - 1),)), NOW)
    sends = [send for turn in turns(engine) for send in turn.sends]
    ((_, answer),) = [send for send in sends if send[0] == 9]
    assert answer.results[-1].text == f"Canceled job ID={count - 1}!"


def test_a_removal_that_a_dead_server_had_half_done_is_answered_to_its_repetition_as_if_whole(engine):
    count = queue.PORTION + 5
    facts = [*engine.handle(1, HELLO, NOW).facts, *engine.handle(9, submit(jobs(count)), NOW).facts]
    facts += engine.settle(NOW).facts
    facts += engine.handle(1, m.AttemptStarted(offer=0, started_wall=1.0), NOW).facts
    question = m.RemoveJobs(seq=2, request_id="x", ids=((0, count - 1),), kill=True)
    stored = engine.handle(9, question, NOW)  # then it is killed: four jobs are being stopped, most are not asked yet
    again = Engine(engine.settings, queue_id="q")
    again.replay(engine.aggregates(), [*facts, *stored.facts])
    again.opened(NOW)
    past = {row.id: row for row in stored.finished}
    past |= {row.id: row for row in again.handle(1, HELLO, NOW).finished}
    again.handle(9, question, NOW, past)
    taken = [*turns(again), again.tick(Now(NOW.wall, 9.0))]
    end = EndRecord(outcome=Canceled(), started_wall=1.0, ended_wall=2.0)
    taken += [again.handle(1, m.AttemptEnded(offer=offer, end=end), NOW) for offer in list(again.state.attempts)]
    ((_, answer),) = [send for turn in taken for send in turn.sends if isinstance(send[1], m.Results)]
    assert {result.text for result in answer.results} == {f"Canceled job ID={job}!" for job in range(count)}
    other = again.handle(9, m.RemoveJobs(seq=3, request_id="y", ids=((count - 1, count - 1),)), NOW, past)
    assert not other.sends[0][1].results[0].ok


@pytest.mark.parametrize("more", [{"kill": True}, {"force": True}], ids=str)
def test_a_job_that_starts_before_its_turn_to_be_killed_is_killed_and_told_as_that(engine, more):
    count = queue.PORTION + 1
    engine.handle(9, submit(jobs(count - 1, held=True), jobs()), NOW)
    engine.handle(1, HELLO, NOW)
    engine.settle(NOW)
    engine.handle(8, m.RemoveJobs(seq=2, request_id="x", ids=((count - 1, count - 1),)), NOW)
    engine.handle(9, m.RemoveJobs(seq=3, request_id="y", ids=((0, count - 1),), **more), NOW)
    started = engine.handle(1, m.AttemptStarted(offer=0, started_wall=1.0), NOW)
    assert [answer.results[0].ok for session, answer in started.sends if session == 8] == [False]
    end = EndRecord(outcome=Canceled(), started_wall=1.0, ended_wall=2.0)
    taken = [*turns(engine), engine.handle(1, m.AttemptEnded(offer=0, end=end), NOW)]
    ((_, answer),) = [send for turn in taken for send in turn.sends if send[0] == 9]
    assert answer.results[-1] == m.Result(id=count - 1, ok=True, text=f"Canceled job ID={count - 1}!")


def test_all_who_asked_for_an_end_are_answered_alike_after_the_server_died(engine):
    facts = [*engine.handle(1, HELLO, NOW).facts, *engine.handle(9, submit(jobs()), NOW).facts]
    facts += engine.settle(NOW).facts
    facts += engine.handle(1, m.AttemptStarted(offer=0, started_wall=1.0), NOW).facts
    first, second = (m.RemoveJobs(seq=2, request_id=one, ids=((0, 0),), kill=True) for one in "xy")
    facts += engine.handle(8, first, NOW).facts
    facts += engine.handle(9, second, NOW).facts
    again = Engine(engine.settings, queue_id="q")
    again.replay(engine.aggregates(), facts)
    again.opened(NOW)
    end = EndRecord(outcome=Canceled(), started_wall=1.0, ended_wall=2.0)
    report = m.AttemptReport(offer=0, job=0, queue_id="q", state="ended", started_wall=1.0, end=end)
    past = {row.id: row for row in again.handle(1, replace(HELLO, attempts=(report,)), NOW).finished}
    third = replace(first, request_id="z")
    told = [again.handle(9, one, NOW, past).sends[0][1].results[0].ok for one in (first, second, third)]
    assert told == [True, True, False]


def test_a_job_that_is_asked_to_end_again_and_again_does_not_grow(engine):
    engine.handle(1, HELLO, NOW)
    engine.handle(9, submit(jobs()), NOW)
    engine.settle(NOW)
    asked = [m.RemoveJobs(seq=2, request_id=f"r{number}", ids=((0, 0),), kill=True) for number in range(50)]
    facts = [fact for one in asked for fact in engine.handle(9, one, NOW).facts]
    assert [type(fact) for fact in facts] == [f.StopAsked] * removal.ASKERS_MAX
    assert len(engine.state.jobs[0].stop.request_ids) == removal.ASKERS_MAX


def test_a_worker_is_heard_while_a_long_submission_is_under_way(engine):
    engine.handle(1, HELLO, NOW)
    engine.settle(NOW)
    engine.handle(9, submit(jobs(MANY)), NOW)
    assert engine.handle(1, m.Heartbeat(number=3), NOW).sends[0][1].number == 3


def test_a_client_that_hangs_up_costs_the_jobs_that_it_watched_and_no_others(engine):
    engine.handle(9, submit(jobs(5)), NOW)
    engine.handle(1, m.WatchJobs(seq=1, ids=((0, 3),)), NOW)
    engine.handle(2, m.WatchJobs(seq=1, ids=((3, 4),)), NOW)
    assert engine.queue.watched == {1: {0, 1, 2, 3}, 2: {3, 4}}
    engine.handle(9, m.RemoveJobs(seq=2, request_id="x", ids=((0, 0),)), NOW)
    engine.session_closed(1, NOW)
    assert engine.queue.watched == {2: {3, 4}}
    assert engine.queue.watchers == {3: {(2, 1)}, 4: {(2, 1)}}


def test_very_many_jobs_are_held_and_released_a_portion_a_turn_and_told_of_once(engine):
    count = 2 * queue.PORTION + 5
    engine.handle(9, submit(jobs(count)), NOW)
    for kind, state in ((m.HoldJobs, JobState.HELD), (m.ReleaseJobs, JobState.PENDING)):
        question = kind(seq=2, request_id=kind.__name__, ids=((0, count),))
        taken = [engine.handle(9, question, NOW), *turns(engine)]
        assert [len(turn.facts) for turn in taken] == [queue.PORTION, queue.PORTION, 5 + 1]
        ((_, answer),) = [send for turn in taken for send in turn.sends]
        assert [result.id for result in answer.results] == list(range(count + 1))
        assert [result.ok for result in answer.results] == [True] * count + [False]
        assert {job.state for job in engine.state.jobs.values()} == {state}


def test_a_job_that_ends_before_its_turn_to_be_held_is_told_as_over(engine):
    count = queue.PORTION + 1
    engine.handle(9, submit(jobs(count)), NOW)
    engine.handle(9, m.HoldJobs(seq=2, request_id="x", ids=((0, count - 1),)), NOW)
    engine.handle(8, m.RemoveJobs(seq=3, request_id="y", ids=((count - 1, count - 1),)), NOW)
    ((_, answer),) = [send for turn in turns(engine) for send in turn.sends]
    assert answer.results[-1] == m.Result(id=count - 1, ok=False, text=f"Job ID={count - 1} has already finished!")


def test_a_repetition_of_a_long_hold_under_way_takes_its_place(engine):
    count = queue.PORTION + 1
    engine.handle(9, submit(jobs(count)), NOW)
    engine.handle(9, m.HoldJobs(seq=2, request_id="x", ids=((0, count - 1),)), NOW)
    engine.handle(10, m.HoldJobs(seq=4, request_id="x", ids=((0, count - 1),)), NOW)
    sends = [send for turn in turns(engine) for send in turn.sends]
    assert [(session, answer.seq, len(answer.results)) for session, answer in sends] == [(10, 4, count)]
