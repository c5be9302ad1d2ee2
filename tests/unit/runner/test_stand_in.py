"""When the lease ends and the keeper, which somebody has stopped, does nothing, its spawner pauses the jobs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from runner_bench import QUEUE, boottime, is_alive, wait_until

from kueue.runner.attempt import Attempt, Terms
from kueue.runner.revocable import Revocable
from kueue.runner.shared import Shared
from kueue.runner.stand_in import ABSENT_SECONDS, LOOK_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, StandIn
from kueue.runner.tree import Scanner, status, tag_of

TICKS = "while :; do date +%s.%N > {0}.new; mv {0}.new {0}; sleep 0.02; done"
FAMILY = f"setsid sh -c '{TICKS.format('child')}' & {TICKS.format('main')}"


def shared_with(deadline, *, lapsed=False, written=50.0):
    shared = Shared(written)
    shared.write(written, deadline, lapsed=lapsed)
    return shared


def test_nobody_is_woken_where_nothing_must_stop_or_the_lease_is_good():
    assert StandIn(shared_with(100.0)).due(is_needed=False) is None
    assert StandIn(shared_with(100.0, lapsed=True)).due(is_needed=False) is None
    assert StandIn(shared_with(100.0)).due(is_needed=True) == 100.0 + PATIENCE_SECONDS


def test_a_keeper_that_has_paused_its_jobs_and_is_at_work_is_left_alone_and_one_that_is_not_is_helped():
    shared = shared_with(100.0, lapsed=True, written=100.1)
    stand_in = StandIn(shared)
    assert stand_in.due(is_needed=True) == 100.1 + ABSENT_SECONDS
    shared.write(101.1, 100.0, lapsed=True)
    assert stand_in.look(102.0, is_needed=True) is None
    assert stand_in.look(101.1 + ABSENT_SECONDS, is_needed=True) == "stop"
    stand_in.stopped(104.0, running=0)
    shared.write(104.5, 100.0, lapsed=True)
    assert [stand_in.look(105.0, is_needed=True) for _ in range(2)] == ["say", None]
    assert stand_in.due(is_needed=True) == 104.5 + ABSENT_SECONDS


def test_it_stops_the_trees_again_and_again_until_the_keeper_is_back_and_says_so_once():
    shared = shared_with(100.0)
    stand_in = StandIn(shared)
    late = 100.0 + PATIENCE_SECONDS
    assert stand_in.look(late - 0.01, is_needed=True) is None
    assert (stand_in.look(late, is_needed=True), stand_in.is_new) == ("stop", True)
    assert shared.stood_in_since == late
    stand_in.stopped(late, running=1)
    assert stand_in.due(is_needed=True) == late + SOON_SECONDS
    assert stand_in.look(late + 0.01, is_needed=True) is None
    assert (stand_in.look(late + SOON_SECONDS, is_needed=True), stand_in.is_new) == ("stop", False)
    stand_in.stopped(late + SOON_SECONDS, running=0)
    assert stand_in.due(is_needed=True) == late + SOON_SECONDS + LOOK_SECONDS
    assert shared.stood_in_since == late
    shared.write(late + 1, 100.0, lapsed=True)
    assert [stand_in.look(late + 1, is_needed=True) for _ in range(2)] == ["say", None]


def test_a_lease_that_is_prolonged_meanwhile_ends_it_and_one_that_ends_again_begins_it_anew():
    shared = shared_with(100.0)
    stand_in = StandIn(shared)
    assert stand_in.look(101.0, is_needed=True) == "stop"
    stand_in.stopped(101.0, running=0)
    shared.write(101.1, 200.0, lapsed=False)
    assert stand_in.look(101.1, is_needed=True) == "say"
    assert stand_in.due(is_needed=True) == 200.0 + PATIENCE_SECONDS
    assert (stand_in.look(201.0, is_needed=True), stand_in.is_new) == ("stop", True)


def test_what_one_process_writes_the_other_reads():
    shared = shared_with(12.5)
    pid = os.fork()
    if pid == 0:
        shared.stands_in(shared.deadline * 2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (shared.stood_in_since, shared.lapsed) == (25.0, False)


def test_of_two_times_that_it_stood_in_the_keeper_notes_the_one_that_it_was_told_of():
    shared = shared_with(100.0)
    assert shared.stood_in_since is None
    shared.stands_in(101.0)
    shared.stands_in(201.0)  # before the keeper has read that the first is over
    shared.noted(101.0)
    assert shared.stood_in_since == 201.0
    shared.noted(201.0)
    assert shared.stood_in_since is None


def test_it_does_not_turn_without_rest_when_nothing_must_stop_any_more_and_the_keeper_is_still_away():
    stand_in = StandIn(shared_with(100.0))
    assert stand_in.look(101.0, is_needed=True) == "stop"
    stand_in.stopped(101.0, running=0)
    assert stand_in.look(102.0, is_needed=False) is None
    assert stand_in.due(is_needed=False) == 102.0 + LOOK_SECONDS
    assert stand_in.look(103.0, is_needed=True) == "stop"


def row(**changed):
    attempt = Attempt(1, Terms(on_lost=changed.pop("on_lost", "rerun"), keep_background=changed.pop("keep", False)))
    policy = {**vars(attempt), "phase": "running", **changed, "terms": vars(attempt.terms)}
    return {"policy": policy, "care": {"tag": 77, "cgroup": ""}}


@pytest.mark.parametrize(
    ("order", "is_bound"),
    [({}, True), ({"on_lost": "rerun"}, True), ({"on_lost": "wait"}, False), ({"on_lost": "fail"}, False)],
)
def test_a_process_is_stopped_by_its_order_as_long_as_no_row_has_come(order, is_bound):
    revocable = Revocable()
    revocable.made(1, 77, "", order)
    assert bool(revocable) == is_bound
    revocable.told(1, row(on_lost="wait"))
    assert not revocable
    revocable.told(1, row())
    assert revocable
    revocable.told(1, None)
    assert not revocable


def test_background_processes_that_may_stay_are_not_stopped_though_the_keeper_has_not_heard_of_the_end():
    revocable = Revocable()
    revocable.made(1, 77, "", {"keep_background": True})
    revocable.main_ended(1)
    assert not revocable
    revocable.told(1, row(keep=True))  # written before the end was read
    assert not revocable
    revocable.told(1, row(keep=True, stop="canceled"))
    assert revocable
    revocable.told(1, row(keep=True, main_ended=True))
    assert not revocable
    revocable.told(2, row(keep=True))
    revocable.main_ended(2)
    assert not revocable


# --- a real runner


@pytest.fixture
def keeper(bench, desk):
    """Its keeper's number; it is let go on at the end, so that the bench can end it."""
    pid = bench.keeper()
    yield pid
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: status(pid).is_stopped)


def is_still(bench, offer=1):
    tag = tag_of(QUEUE, bench.identity, offer)
    seen = Scanner().look([tag])[tag]
    return seen.living > 0 and seen.running == 0


def begin(bench, desk, *, seconds=1.0, **more):
    """A family runs, with a lease of so many seconds."""
    desk.start(1, "sh", "-c", FAMILY, **more)
    for name in ("child", "main"):
        wait_until((bench.work / name).exists)
    return desk.lease(seconds)


def goes_on(bench):
    for name in ("child", "main"):
        before = (bench.work / name).read_text()
        wait_until(lambda name=name, before=before: (bench.work / name).read_text() != before, f"{name} goes on")


def let_lapse(bench, desk, keeper):
    """The keeper is stopped, and its spawner has paused the job."""
    deadline = begin(bench, desk)
    desk.drain()
    stop(keeper)
    wait_until(lambda: is_still(bench))
    assert boottime() >= deadline


@pytest.mark.slow
def test_a_job_of_a_stopped_keeper_stands_still_and_goes_on_with_the_next_lease(bench, desk, keeper):
    let_lapse(bench, desk, keeper)
    spawner = bench.spawner()
    child = next(pid for pid in bench.tree(1) if status(pid).session == pid and pid != bench.tree(1)[0])
    os.kill(child, signal.SIGCONT)  # as the kernel does to a group that becomes orphaned
    wait_until(lambda: is_still(bench))
    os.kill(keeper, signal.SIGCONT)
    desk.expect("Changed", 1, state="paused")
    desk.expect("PauseDone")
    assert is_still(bench)
    desk.lease()
    desk.expect("Changed", 1, state="running")
    goes_on(bench)
    assert (bench.keeper(), bench.spawner()) == (keeper, spawner)
    log = (bench.state / "runners" / "one" / "log").read_text()
    assert log.count("the keeper does not answer") == 1


@pytest.mark.slow
def test_a_keeper_that_is_stopped_after_it_has_paused_its_jobs_has_them_kept_still(bench, desk, keeper):
    begin(bench, desk, seconds=0.2)
    desk.expect("PauseDone")
    stop(keeper)
    one = bench.tree(1)[0]
    os.kill(one, signal.SIGCONT)
    wait_until(lambda: not is_still(bench))
    wait_until(lambda: is_still(bench))
    os.kill(keeper, signal.SIGCONT)
    desk.lease()
    desk.expect("Changed", 1, state="running")
    goes_on(bench)


@pytest.mark.slow
def test_a_lease_that_the_keeper_finds_when_it_is_back_lets_the_job_go_on(bench, desk, keeper):
    let_lapse(bench, desk, keeper)
    desk.lease()
    os.kill(keeper, signal.SIGCONT)
    desk.expect("Changed", 1, state="running")
    goes_on(bench)


@pytest.mark.slow
def test_a_spawner_that_takes_over_while_it_stands_in_keeps_the_job_still_until_there_is_a_lease(bench, desk, keeper):
    let_lapse(bench, desk, keeper)
    os.kill(keeper, signal.SIGKILL)
    again = bench.attach()
    assert [state["state"] for state in again.attached["attempts"]] == ["paused"]
    assert is_still(bench)
    again.lease()
    again.expect("Changed", 1, state="running")
    goes_on(bench)


@pytest.mark.slow
def test_a_spawner_that_dies_while_it_stands_in_leaves_no_job_stopped(bench, desk, keeper):
    let_lapse(bench, desk, keeper)
    os.kill(bench.spawner(), signal.SIGKILL)
    os.kill(keeper, signal.SIGCONT)
    desk.lease()
    desk.expect("Changed", 1, state="running")
    goes_on(bench)


@pytest.mark.slow
def test_the_time_out_of_a_job_does_not_count_while_its_spawner_has_paused_it(bench, desk, keeper):
    desk.start(1, "sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 7", timeout_seconds=6.0)
    desk.expect("Started", 1)
    desk.lease(0.3)
    desk.drain()
    stop(keeper)
    wait_until(lambda: is_still(bench))
    end = time.monotonic() + 6.0  # its time-out
    wait_until(lambda: time.monotonic() >= end)
    (bench.work / "go").touch()
    os.kill(keeper, signal.SIGCONT)
    desk.expect("Changed", 1, state="paused")
    desk.lease()
    ended = desk.end(1)
    assert ended["outcome"] == {"type": "exited", "code": 7}
    assert "paused for" in ended["notes"][0]


@pytest.mark.slow
def test_what_may_run_without_a_lease_runs_on(bench, desk, keeper):
    begin(bench, desk, on_lost="wait", seconds=0.5)
    desk.start(2, "sh", "-c", "sleep 7075")
    desk.expect("Started", 2)
    desk.lease(0.5)
    desk.drain()
    stop(keeper)
    wait_until(lambda: is_still(bench, 2))
    goes_on(bench)


@pytest.mark.slow
def test_a_stopped_keeper_whose_lease_is_good_has_its_jobs_run_on(bench, desk, keeper):
    begin(bench, desk, seconds=0.5)
    desk.lease()
    desk.drain()
    stop(keeper)
    end = boottime() + 0.5 + 2 * PATIENCE_SECONDS
    wait_until(lambda: boottime() >= end)
    assert not is_still(bench)
    goes_on(bench)
    assert "does not answer" not in (bench.state / "runners" / "one" / "log").read_text()
    assert json.loads((bench.state / "runners" / "one" / "info.json").read_text())["keeper"][0] == keeper


DIES_UNMIRRORED = """
import os, signal, sys
from kueue.runner.keeper import Keeper, Settings
from kueue.runner.kernel import lock_file
from kueue.runner.mirror import Mirror
from kueue.runner.rundir import Rundir

if os.fork():
    os._exit(0)
place, flips = Rundir(sys.argv[1], "one"), ["lapsed", "renewed"].index(sys.argv[3]) + 1
ours, send, seen = os.getpid(), Mirror.send, [False]

def die(mirror):
    lapsed = mirror._keeper.policy.lapsed
    if mirror._keeper.policy.open and lapsed != seen[-1]:
        seen.append(lapsed)
        if len(seen) > flips and os.getpid() == ours:
            os.kill(ours, signal.SIGKILL)
    send(mirror)

Mirror.send = die
for folder in (place.spool, place.path):
    os.makedirs(folder)
Keeper(Settings(place, sys.argv[2], "1", linger_seconds=30.0), lock_file(place.lock)).run()
"""
"""A keeper that is killed when it has paused its jobs, or let them go on, and before it has told its spawner so."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["lapsed", "renewed"])
def test_a_job_goes_on_whose_keeper_died_before_it_had_told_of_the_end_of_the_lease_or_of_the_next(bench, moment):
    command = [sys.executable, "-c", DIES_UNMIRRORED, str(bench.state), bench.identity, moment]
    subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL)
    desk = bench.attach()
    keeper = bench.keeper()
    desk.lease()
    begin(bench, desk, seconds=0.5)
    if moment == "renewed":
        desk.expect("PauseDone")
        desk.lease()
    wait_until(lambda: not is_alive(keeper))
    again = bench.attach()
    for _ in range(2):
        again.lease()
        again.drain()
    goes_on(bench)
