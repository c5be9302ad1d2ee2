"""What people are shown of live jobs."""

from __future__ import annotations

import pytest

from kueue.core import queries
from kueue.core.engine import Engine
from kueue.core.jobs import Job
from kueue.core.reasons import READ_ONLY, Sight, reasons
from kueue.core.settings import Settings
from kueue.core.workers import Worker
from kueue.model import EndRecord, Exited, JobRange, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m

NOW = Now(wall=1000.0, steady=0.0)


@pytest.fixture
def engine() -> Engine:
    """Job 0 runs, 1 is offered, 2 is being stopped while offered, 3 while running, 4 and 5 wait, 6 has failed."""
    engine = Engine(Settings(counters={"genus": 1}), queue_id="q")
    engine.opened(NOW)
    totals = MachineTotals(slots=4, cores=8, ram_mb=1000)
    engine.handle(1, m.WorkerHello(identity="i", name="ralab04", machine_id="m", boot_id="b", totals=totals), NOW)
    entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/d"), request=Request(), count=4)
    engine.handle(9, m.Submit(seq=1, request_id="a", ranges=(entry,)), NOW)
    engine.settle(NOW)
    engine.handle(9, m.Submit(seq=1, request_id="b", ranges=(entry,)), NOW)
    for offer in (0, 3):
        engine.handle(1, m.AttemptStarted(offer=offer, started_wall=990.0), NOW)
    engine.handle(9, m.RemoveJobs(seq=1, request_id="c", ids=((2, 3),), kill=True), NOW)
    engine.handle(9, m.RemoveJobs(seq=1, request_id="d", ids=((7, 7),)), NOW)
    return engine


def row_of(engine: Engine, job: Job) -> m.JobRow:
    (row,) = queries.live_rows(engine, [job], NOW)
    return row


def test_a_job_that_is_being_stopped_counts_as_what_it_was(engine):
    counts = dict(queries.counts(engine))
    assert counts == {
        "held": 0, "pending": 3, "offered": 2, "running": 2, "succeeded": 0, "failed": 0, "canceled": 1,
    }  # fmt: skip
    assert sum(counts.values()) == engine.state.sums.next_job


def test_a_row_says_that_the_job_is_being_stopped(engine):
    row = row_of(engine, engine.state.jobs[3])
    assert (row.state, row.stopping, row.note, row.worker) == ("running", True, "stopping", "ralab04")


def test_the_estimates_count_running_and_pending_jobs(engine):
    assert queries.estimates(engine, NOW) == (10, 15)
    end = EndRecord(outcome=Exited(0), started_wall=980.0, ended_wall=1000.0, run_seconds=20.0)
    engine.handle(1, m.AttemptEnded(offer=0, end=end), NOW)
    assert queries.estimates(engine, NOW) == (20, 70)


def test_a_waiting_job_is_explained_per_worker_and_counter(engine):
    verdict, workers, counters = queries.explain(engine, engine.state.jobs[4], NOW)
    assert verdict == "worker ralab04 has 0 job slots free, 1 asked for"
    assert workers == [("ralab04", False, "has 0 job slots free, 1 asked for")]
    assert counters == [("global_max_parallel_jobs", True, "would fit: 4 of 100 used, 1 asked for")]


@pytest.mark.parametrize(
    ("job", "verdict"),
    [
        (0, "it does not wait: it is running"),
        (1, "it is offered to worker ralab04, which has not answered yet"),
        (2, "it is offered to worker ralab04, which has not answered yet (stopping)"),
        (3, "it does not wait: it is running (stopping)"),
    ],
)
def test_a_job_that_has_a_worker_is_explained_in_one_sentence(engine, job, verdict):
    assert queries.explain(engine, engine.state.jobs[job], NOW)[0] == verdict


def test_a_counter_that_a_reload_has_taken_away_is_told_in_a_sentence(engine):
    entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/d"), request=Request(counters=(("genus", 2),)))
    engine.reload(Settings(counters={"genus": 2}), NOW)
    engine.handle(9, m.Submit(seq=1, request_id="e", ranges=(entry,)), NOW)
    job = engine.state.jobs[8]
    engine.reload(Settings(counters={"genus": 0}), NOW)
    assert reasons(Sight(engine.queue, NOW), job)[0] == "waiting for genus: 0 of 0 used, 2 asked for"
    engine.reload(Settings(counters={}), NOW)
    sentence = "the server has no genus any more: [global_resources] of its settings does not name it"
    assert row_of(engine, job).note == sentence
    verdict, _, counters = queries.explain(engine, job, NOW)
    assert verdict == sentence
    assert counters[0] == ("genus", False, sentence)


def test_a_silent_worker_is_named_with_its_jobs(engine):
    engine.session_closed(1, NOW)
    assert row_of(engine, engine.state.jobs[0]).note == "worker ralab04 not connected"
    for steady in (301.0, 301.1):
        engine.tick(Now(wall=1301.0, steady=steady))
    note = row_of(engine, engine.state.jobs[0]).note
    assert note.startswith("worker ralab04 silent since ")
    (row,) = queries.worker_rows(engine, NOW)
    assert (row.state, row.running, row.offered) == ("silent", (0,), (1,))


def test_a_worker_that_answers_while_nothing_can_be_recorded_is_not_shown_as_away(engine):
    engine.session_closed(1, NOW)
    engine.queue.answering = frozenset({"ralab04"})
    (row,) = queries.worker_rows(engine, NOW)
    assert (row.state, row.note) == ("online", READ_ONLY)
    assert row_of(engine, engine.state.jobs[0]).note == ""
    assert reasons(Sight(engine.queue, NOW), engine.state.jobs[4]) == [READ_ONLY]


def test_ids_are_chosen_by_word_alike_with_and_without_attempts(engine):
    every = {job: queries.job_filter_of(found) for job, found in engine.state.jobs.items()}
    for words in ({"offered"}, {"running", "offered"}, {"pending"}, {"running", "pending"}, set(every.values())):
        assert set(queries.live_ids(engine, words)) == {job for job, word in every.items() if word in words}
    assert sorted(queries.live_ids(engine, frozenset())) == sorted(every)


def test_the_use_of_a_counter_is_told(engine):
    assert queries.resource_rows(engine) == [m.ResourceRow(name="genus", used=0, total=1)]


def test_workers_of_one_name_are_explained_with_their_ids(engine):
    totals = MachineTotals(slots=1, cores=1, ram_mb=1)
    engine.handle(2, m.WorkerHello(identity="j", name="ralab04", machine_id="n", boot_id="c", totals=totals), NOW)
    _, workers, _ = queries.explain(engine, engine.state.jobs[4], NOW)
    assert [name for name, _, _ in workers] == ["ralab04", "ralab04"]
    assert [sentence[:7] for _, _, sentence in workers] == ["(id 0) ", "(id 1) "]


def test_each_worker_is_looked_at_once_for_a_whole_listing(engine, monkeypatch):
    for session in range(20, 30):
        name = f"w{session}"
        totals = MachineTotals(slots=1, cores=1, ram_mb=1)
        engine.handle(
            session, m.WorkerHello(identity=name, name=name, machine_id=name, boot_id="b", totals=totals), NOW
        )
    entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/d"), request=Request(slots=4), count=100)
    engine.handle(9, m.Submit(seq=1, request_id="e", ranges=(entry,)), NOW)
    looked: list[int] = []
    room = Worker.room

    def counted(worker, node, now_steady):
        looked.append(worker.id)
        return room(worker, node, now_steady)

    monkeypatch.setattr(Worker, "room", counted)
    jobs = [job for job in engine.state.jobs.values() if job.template.request.slots == 4]
    rows = list(queries.live_rows(engine, jobs, NOW))
    assert [row.note for row in rows] == ["worker ralab04 has 0 job slots free, 4 asked for"] * 100
    assert looked == [0]
    looked.clear()
    assert len(list(queries.live_details(engine, jobs, NOW))) == 100
    assert sorted(looked) == [0]
    looked.clear()
    assert len(list(queries.live_rows(engine, engine.state.jobs.values(), NOW))) == len(engine.state.jobs)
    assert len(looked) == len(set(looked))


def test_a_listing_says_of_each_job_what_is_said_of_it_alone(engine):
    rows = list(queries.live_rows(engine, engine.state.jobs.values(), NOW))
    assert rows == [row_of(engine, job) for job in engine.state.jobs.values()]
    for job in engine.state.jobs.values():
        if job.attempt is None:
            assert row_of(engine, job).note == reasons(Sight(engine.queue, NOW), job)[0]
