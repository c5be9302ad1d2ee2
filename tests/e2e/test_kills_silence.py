"""Workers that fall silent: what happens to their jobs, when, and what they find when they come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from kueue import places
from tests.support.kill_lab import FLOCK_PROBE, MORTAL, KillLab, is_stopped, lives, sleepers

T = 10.0
BEAT = 4 / 3
"""Of a lease of 8 s: so long may the last sign of a stopped worker lie back."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        yield lab


@contextlib.contextmanager
def stopped(*pids):
    """SIGSTOP for the length of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_job_of_a_dead_machine_runs_elsewhere_with_its_id_as_attempt_2_and_never_twice_at_once(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    job = lab.shell(f"{FLOCK_PROBE}; echo $KUEUE_ATTEMPT $KUEUE_WORKER >> begun; while [ ! -e go ]; do sleep 0.1; done")
    lab.until(lambda: lab.lines("begun"), "it runs")
    lab.start_worker("w2")
    begin = time.monotonic()
    lab.kill(lab.workers["w1"].pid, *lab.runner_processes("keeper", "w1"), *lab.runner_processes("spawner", "w1"))
    lab.kill(*lab.processes_of(job))
    lab.until(lambda: len(lab.lines("begun")) == 2, "it runs elsewhere", seconds=40)
    took = time.monotonic() - begin
    assert lab.lines("begun") == ["1 w1", "2 w2"]
    assert took > T - BEAT - 0.5
    assert lab.numbers(job) == [1, 2]
    (lab.folder / "go").touch()
    assert lab.end_of(job)["worker"] == "w2"
    assert lab.lines("twice") == []
    print(f"\nmachine dead: its job ran elsewhere {took:.1f} s later, worker_timeout_seconds = 10")


def test_an_unanswered_offer_is_withdrawn_and_goes_elsewhere_only_when_its_worker_is_silent(lab):
    lab.start_server(server_settings={**MORTAL, "job_offer_timeout_seconds": 2})
    w1 = lab.start_worker("w1", worker_max_parallel_jobs=3)
    lab.start_worker("w2")
    gate = lab.gate()
    lab.shell(gate.command[2], cores=8)
    # The job's own word may come before the server has heard of it.
    lab.until(lambda: gate.begun and lab.rows("running"), "one of them is the busier one")
    (busy,) = {row["worker"] for row in lab.rows("running")}
    idle = lab.workers["w2" if busy == "w1" else "w1"]
    name = "w2" if busy == "w1" else "w1"
    del w1
    script = f"{FLOCK_PROBE}; echo $KUEUE_WORKER >> ran"
    with stopped(idle.pid):
        begin = time.monotonic()
        job = lab.shell(script)
        lab.until(lambda: lab.state(job) == "offered", "it is offered")
        lab.until(lambda: "does not answer offer" in lab.log("server"), "it is withdrawn", seconds=10)
        withdrawn = time.monotonic() - begin
        assert withdrawn > 1.9
        other = lab.shell("echo $KUEUE_WORKER >> other")
        assert lab.end_of(other)["worker"] == busy, "no other offer there"
        lab.until(lambda: lab.lines("ran"), "it starts elsewhere", seconds=30)
        took = time.monotonic() - begin
        lab.end_of(job)
        assert lab.lines("ran") == [busy]
        assert T - BEAT - 0.5 < took < 20
    lab.until_online(name, 20)
    gate.open()
    # After it is back it does not run there, and gets jobs again.
    seen = set()

    def tried() -> bool:
        seen.add(lab.end_of(lab.shell("true"))["worker"])
        return name in seen

    lab.until(tried, "it gets jobs again", seconds=40)
    assert lab.lines("ran") == [busy]
    assert lab.lines("twice") == []
    # That the silent worker had started it could no longer be excluded, so that one counts as the first.
    assert lab.numbers(job) == [1, 2]
    lab.no_traceback()
    print(f"\noffer withdrawn after {withdrawn:.1f} s (2 s set), started elsewhere after {took:.1f} s")


def test_a_worker_that_was_stopped_for_twice_the_time_out_is_useful_again(lab):
    lab.start_server(server_settings=MORTAL)
    worker = lab.start_worker("w1")
    mark = f"611.{os.getpid()}"
    job = lab.quick(lab.range_of("sleep", mark))[0]
    lab.until(lambda: sleepers(mark), "it runs")
    (pid,) = sleepers(mark)
    with stopped(worker.pid):
        lab.until(lambda: is_stopped(pid), "the runner pauses the job", seconds=15)
        lab.until(lambda: not lab.is_online(), "the worker is silent", seconds=15)
        lab.remains(lambda: is_stopped(pid), 2 * T - 12)
    begin = time.monotonic()
    lab.until_online(seconds=15)
    lab.until(lambda: not is_stopped(pid), "the job goes on", seconds=15)
    lab.end_of(lab.shell("true"), seconds=15)
    took = time.monotonic() - begin
    assert took < 15
    assert sleepers(mark) == [pid]
    assert lab.numbers(job) == [1]
    assert lab.server.poll() is None
    lab.no_traceback()
    print(f"\nworker stopped for {2 * T:.0f} s: usable {took:.1f} s after it went on, same process of the job")


def test_a_suspend_shorter_than_the_time_out_changes_nothing(lab):
    lab.start_server(server_settings=MORTAL)
    worker = lab.start_worker("w1")
    job = lab.shell("echo $KUEUE_ATTEMPT >> count; while [ ! -e go ]; do sleep 0.1; done")
    lab.until(lambda: lab.lines("count") and lab.state(job) == "running", "it runs, and the server knows")
    with stopped(worker.pid, *lab.runners(), *lab.processes_of(job)):
        lab.remains(lambda: lab.state(job) == "running", 5)
    lab.until_online()
    (lab.folder / "go").touch()
    lab.end_of(job)
    assert lab.lines("count") == ["1"]
    assert lab.numbers(job) == [1]


def test_a_suspend_longer_than_the_time_out_hands_the_job_over_and_kills_the_stale_attempt(lab):
    """Worker, runner and job wake up together, long after the job was given away."""
    lab.start_server(server_settings=MORTAL)
    w1 = lab.start_worker("w1")
    mark = f"612.{os.getpid()}"
    job = lab.quick(lab.range_of("sleep", mark))[0]
    lab.until(lambda: sleepers(mark), "it runs")
    (first,) = sleepers(mark)
    lab.start_worker("w2")
    with stopped(w1.pid, *lab.runner_processes("keeper", "w1"), *lab.runner_processes("spawner", "w1"), first):
        lab.until(lambda: len(sleepers(mark)) == 2, "it runs elsewhere", seconds=30)
        assert is_stopped(first)
    lab.until(lambda: not lives(first), "the stale attempt is killed", seconds=30)
    lab.until_online("w1", 30)
    assert len(sleepers(mark)) == 1
    assert lab.state(job) == "running"
    assert lab.numbers(job) == [1, 2]
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0


def test_a_job_never_runs_twice_at_once_although_the_lock_of_the_server_was_replaced(lab):
    """The runner of a worker that is stopped finds a lock that nobody holds, and would take the server for gone."""
    lab.start_server(server_settings=MORTAL)
    w1 = lab.start_worker("w1")
    job = lab.shell("while [ ! -e go ]; do echo $KUEUE_ATTEMPT >> seen; sleep 0.1; done")
    lab.until(lambda: lab.lines("seen") and lab.rows("running"), "it runs")
    lab.start_worker("w2")
    lock = lab.folder / "state" / "server" / "lock"
    with stopped(w1.pid):
        lock.unlink()
        lock.touch()
        begin = time.monotonic()
        lab.until(lambda: "2" in lab.lines("seen"), "it runs elsewhere", seconds=40)
        took = time.monotonic() - begin
        lab.until(lambda: lab.lines("seen").count("2") > 30, "for a while")
        seen = lab.lines("seen")
        assert seen == sorted(seen), "the first attempt was paused before the second began"
    assert places.holder(str(lock)) == lab.server.pid
    assert lab.log("server").count("it is put back, and silence of workers counts anew") == 1
    (lab.folder / "go").touch()
    assert lab.end_of(job)["worker"] == "w2"
    assert lab.numbers(job) == [1, 2]
    lab.no_traceback()
    print(f"\nserver's lock replaced, worker stopped: its job ran elsewhere {took:.1f} s later")


@pytest.mark.parametrize(("on_lost", "state"), [("wait", "running"), ("fail", "failed")])
def test_a_job_that_must_not_run_elsewhere_is_neither_paused_nor_repeated(lab, on_lost, state):
    lab.start_server(server_settings=MORTAL)
    w1 = lab.start_worker("w1")
    lab.start_worker("w2")
    lab.kueue("node", "offline", "w2")
    mark = f"{613 + len(state)}.{os.getpid()}"
    job = lab.quick(lab.range_of("sleep", mark, on_lost=on_lost))[0]
    lab.until(lambda: sleepers(mark), "it runs")
    lab.kueue("node", "online", "w2")
    (pid,) = sleepers(mark)
    with stopped(w1.pid):
        lab.until(lambda: not lab.is_online("w1"), "it is silent", seconds=20)
        lab.until_state(job, state, seconds=20)
        lab.remains(lambda: sleepers(mark) == [pid] and not is_stopped(pid), 3)
    if on_lost == "wait":
        lab.until_online("w1", 20)
        assert lab.numbers(job) == [1]
        assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    else:
        assert "silent" in lab.job(job)["comment"]
    lab.until(lambda: not sleepers(mark), "it is killed when its worker is back", seconds=30)
