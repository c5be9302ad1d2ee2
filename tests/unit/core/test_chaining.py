"""What is learned of short jobs, and whom it lets be offered ahead; the dialogues are in tests/scenarios/chain*.txt."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from kueue.core import chaining, invariants
from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.core.workers import Worker
from kueue.model import (
    EndRecord,
    Exited,
    JobRange,
    MachineLoad,
    MachineTotals,
    NotStarted,
    Now,
    Payload,
    Place,
    Request,
    Terms,
)
from kueue.protocol import messages as m

REQUEST = Request(slots=1, cores=1)
GOOD = Exited(0)


def end(seconds, outcome=GOOD):
    return EndRecord(outcome=outcome, started_wall=1.0, ended_wall=1.0 + seconds, run_seconds=seconds)


def learns(worker, *seconds, request=REQUEST):
    for one in seconds:
        chaining.ended(worker, request, end(one))
    return worker.paces.get(request)


# --- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pace", "waiting"), [(0.0, 32), (0.002, 32), (0.01, 20), (0.05, 4), (0.15, 2), (0.24, 1)])
def test_a_line_takes_what_fills_a_fifth_of_a_second(pace, waiting):
    assert chaining.depth(pace) == waiting


def test_whoever_waits_in_a_line_is_not_late_as_a_rule():
    paces = [number / 1000 for number in range(1, round(1000 * chaining.SHORT_SECONDS))]
    assert max(pace * chaining.depth(pace) for pace in paces) < chaining.PATIENCE_SECONDS


def test_the_pace_is_a_mean_in_which_the_newest_counts_most():
    assert learns(Worker(0), 0.1) == 0.1
    assert learns(Worker(0), 0.1, 0.2) == pytest.approx(0.125)


def test_from_start_to_start_in_a_line_a_job_takes_more_than_it_runs():
    lab, _ = known(1, jobs=4)
    (first, second, *_) = sorted(lab.engine.state.attempts)
    lab.end(0, first, seconds=0.01)
    assert lab.engine.queue.workers[0].paces[REQUEST] == 0.1
    lab.steady += 0.06
    lab.start(0, second)
    assert lab.engine.queue.workers[0].paces[REQUEST] == pytest.approx(0.09)


def test_long_jobs_are_not_remembered():
    worker = Worker(0)
    assert learns(worker, 10.0) is None
    assert learns(worker, 0.2) == 0.2
    assert learns(worker, 10.0) is None


def test_a_failed_job_takes_all_trust_away():
    worker = Worker(0)
    learns(worker, 0.01)
    chaining.ended(worker, REQUEST, end(0.01, Exited(1)))
    assert worker.paces == {}
    chaining.ended(worker, REQUEST, end(0.0, NotStarted("no", "other")))
    assert worker.paces == {}


def test_the_requests_that_are_remembered_are_bounded_and_the_oldest_go_first():
    worker = Worker(0)
    requests = [replace(REQUEST, ram_mb=number) for number in range(chaining.PACES_KEPT + 1)]
    for request in requests[:-1]:
        learns(worker, 0.01, request=request)
    learns(worker, 0.01, request=requests[0])
    learns(worker, 0.01, request=requests[-1])
    assert len(worker.paces) == chaining.PACES_KEPT
    assert requests[0] in worker.paces
    assert requests[1] not in worker.paces


# --- who is offered ahead --------------------------------------------------------------------------------------------


class Lab:
    """An engine with workers of so many slots, numbered as their sessions; clients have session 99."""

    def __init__(self, *slots):
        self.steady = 100.0
        self.engine = Engine(Settings(global_max_parallel_jobs=100, counters={"lic": 2}), queue_id="q")
        self.engine.opened(self.now)
        for number, count in enumerate(slots):
            hello = m.WorkerHello(
                identity=f"i{number}",
                name=f"w{number}",
                machine_id=f"m{number}",
                boot_id="b",
                totals=MachineTotals(slots=count, cores=16, ram_mb=1000, named=(("gpu", 2),)),
                lines=True,
            )
            self.does(number, hello)

    @property
    def now(self):
        return Now(wall=self.steady, steady=self.steady)

    def does(self, session, message):
        """Returns the offers ahead that came of it: (worker, job, line)."""
        turns = [self.engine.handle(session, message, self.now), self.engine.settle(self.now)]
        invariants.check(self.engine.state)
        sends = [send for turn in turns for send in turn.sends]
        return [(to, one.job, one.line) for to, one in sends if isinstance(one, m.Offer) and one.line is not None]

    def submit(self, count, *, cwd="/d", request=REQUEST, **terms):
        payload, place = Payload(argv=("true",)), Place(cwd=cwd)
        entry = JobRange(payload=payload, place=place, request=request, terms=Terms(**terms), count=count)
        return self.does(99, m.Submit(seq=1, request_id=f"r{self.engine.state.sums.next_job}", ranges=(entry,)))

    def start(self, session, offer):
        return self.does(session, m.AttemptStarted(offer=offer, started_wall=self.steady))

    def end(self, session, offer, seconds=0.1):
        return self.does(session, m.AttemptEnded(offer=offer, end=end(seconds)))


def known(*slots, jobs=0, request=REQUEST):
    """Every slot has run one short job, and runs the next; nothing waits but `jobs` more."""
    lab = Lab(*slots)
    lab.submit(2 * sum(slots), request=request)
    by_offer = {offer: attempt.node for offer, attempt in lab.engine.state.attempts.items()}
    for offer, session in by_offer.items():
        lab.start(session, offer)
    for offer, session in by_offer.items():
        lab.end(session, offer)
    for offer, attempt in list(lab.engine.state.attempts.items()):
        lab.start(attempt.node, offer)
    return lab, lab.submit(jobs, request=request)


def test_lines_fill_evenly_and_the_least_is_first():
    lab, ahead = known(2, 1, jobs=7)
    lines = [line for _, _, line in ahead]
    assert sorted(lines[:3]) == sorted(lines[3:]) == sorted(lab.engine.state.lines)
    assert [job for _, job, _ in ahead] == list(range(6, 12))
    assert lab.engine.state.nodes[0].slots == 2


def test_jobs_of_a_directory_that_the_worker_does_not_see_are_not_offered_ahead_to_it():
    lab, _ = known(1, 1, jobs=0)
    lab.engine.queue.workers[0].decline_place("/d", "no such directory", lab.steady)
    assert {session for session, _, _ in lab.submit(4)} == {1}


def test_no_line_grows_behind_an_attempt_that_runs_for_long_already():
    lab, _ = known(1, jobs=0)
    lab.steady += 0.6
    assert lab.submit(2) == []


def test_no_line_grows_behind_an_attempt_that_is_being_ended():
    lab, _ = known(1, jobs=0)
    (job,) = lab.engine.state.jobs
    lab.does(99, m.RemoveJobs(seq=2, request_id="x", ids=((job, job),), kill=True))
    assert lab.submit(2) == []


def test_no_line_grows_on_a_worker_that_says_goodbye():
    lab, _ = known(1, jobs=0)
    lab.does(0, m.Goodbye())
    assert lab.submit(2) == []


def test_a_job_of_another_request_is_not_offered_ahead_and_ends_it():
    lab, _ = known(1, jobs=0)
    assert lab.submit(1, request=replace(REQUEST, ram_mb=5)) == []
    assert lab.submit(1) == []


def test_a_job_that_asks_for_more_than_a_counter_has_holds_nobody_up():
    lab, _ = known(1, jobs=0)
    queue = lab.engine.queue
    queue.settings = dataclasses.replace(queue.settings, counters={"licences": 5})
    lab.submit(1, request=replace(REQUEST, counters=(("licences", 5),)))
    assert lab.submit(1) == []
    queue.settings = dataclasses.replace(queue.settings, counters={"licences": 4})
    assert len(lab.submit(1)) == 2


@pytest.mark.parametrize("counter", ["lic", "@slots"])
def test_no_line_grows_while_a_counter_of_it_is_overdrawn(counter):
    request = replace(REQUEST, counters=(("lic", 1),))
    lab, _ = known(2, request=request)
    lowered = {"counters": {"lic": 1}} if counter == "lic" else {"global_max_parallel_jobs": 1}
    lab.engine.reload(dataclasses.replace(lab.engine.settings, **lowered), lab.now)
    assert lab.submit(4, request=request) == []
    first, second = sorted(lab.engine.state.attempts)
    assert lab.end(0, first) == []
    assert lab.engine.state.used[counter] == 1
    lab.end(0, second)
    (attempt,) = lab.engine.state.attempts.values()
    assert lab.start(0, attempt.offer)
    assert lab.engine.state.used[counter] == 1


@pytest.mark.parametrize("lowered", [{"slots": 1}, {"cores": 1}, {"ram_mb": 5}, {"named": (("gpu", 1),)}])
def test_no_line_grows_in_room_that_its_worker_has_no_more(lowered):
    request = replace(REQUEST, ram_mb=5, named=(("gpu", 1),))
    lab, _ = known(2, request=request)
    totals = lab.engine.state.nodes[0].record.totals
    lab.does(0, m.Report(load=MachineLoad(), totals=replace(totals, **lowered)))
    units = {line: attempts[line].share.named for line, attempts in lab.engine.state.lines.items()}
    lines = {line for _, _, line in lab.submit(8, request=request)}
    # The unit that is left may be used on.
    assert lines == ({line for line in units if units[line] == (("gpu", (0,)),)} if "named" in lowered else set())


def test_lines_that_take_nothing_of_what_was_lowered_grow_on():
    request = replace(REQUEST, cores=0)
    lab, _ = known(2, request=request)
    lab.end(0, min(lab.engine.state.attempts))
    lab.submit(1)
    totals = lab.engine.state.nodes[0].record.totals
    lab.does(0, m.Report(load=MachineLoad(), totals=replace(totals, cores=0)))
    assert lab.engine.state.nodes[0].cores == 1
    assert len(lab.submit(1, request=request)) == 1


@pytest.mark.parametrize("terms", [{"on_lost": "fail"}, {"on_lost": "wait"}, {"max_attempts": 1}])
def test_a_job_that_a_lost_machine_would_cost_dearly_is_not_offered_ahead(terms):
    lab, _ = known(1, jobs=0)
    assert lab.submit(1, **terms) == []


def test_a_laboratory_of_long_jobs_keeps_nothing():
    lab = Lab(1)
    lab.submit(3)
    lab.start(0, 0)
    lab.end(0, 0, seconds=60.0)
    lab.start(0, 1)
    assert lab.engine.queue.open_lines == {}
    assert lab.engine.queue.chained == {}
    assert lab.engine.queue.workers[0].paces == {}


def test_nothing_is_kept_of_lines_that_are_over():
    lab, ahead = known(2, jobs=3)
    for _ in range(20):
        attempts = lab.engine.state.attempts
        for offer in sorted(attempts):
            lab.start(0, offer)
            lab.end(0, offer)
    assert ahead
    assert lab.engine.state.lines == {}
    assert lab.engine.queue.open_lines == {}
    assert lab.engine.queue.chained == {}
    assert lab.engine.queue.line_starts == {}
    assert lab.engine.state.nodes[0].slots == 0


def test_an_attempt_that_is_lost_from_a_line_leaves_the_room_to_the_others():
    lab, ahead = known(1, jobs=2)
    (_, _, line), *_ = ahead
    lab.does(0, m.AttemptGone(offer=line, reason="vanished"))
    assert lab.engine.state.nodes[0].slots == 1
    assert len(lab.engine.state.lines[line]) == 2
