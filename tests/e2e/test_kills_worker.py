"""Worker, keeper and spawner are killed and stopped under running jobs: each job ends once, with its own code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.kill_lab import FLOCK_PROBE, SMALL, KillLab, ends_of, lives

JOBS = 20
CHATTY = (
    'i=0; while [ $i -lt 200 ]; do echo "$KUEUE_JOB_ID before $i"; i=$((i+1)); done; echo $$ >> begun; '
    "while [ ! -e go ]; do sleep 0.1; done; "
    'i=0; while [ $i -lt 200 ]; do echo "$KUEUE_JOB_ID after $i"; i=$((i+1)); done; echo end >&2; exit {code}'
)


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        yield lab


@pytest.fixture
def running(lab):
    """Twenty jobs that run; each will exit with a code of its own."""
    lab.start_server()
    lab.start_worker("w1", worker_max_parallel_jobs=JOBS + 1, cores=64)
    jobs = lab.quick(*[lab.range_of("sh", "-c", CHATTY.format(code=number)) for number in range(JOBS)])
    lab.until(lambda: len(lab.lines("begun")) == JOBS, "all run", seconds=60)
    return jobs


def all_end_truly(lab, jobs):
    """Every job has its true code, its whole output and one attempt."""
    (lab.folder / "go").touch()
    lab.until_all(jobs, "succeeded", "failed", "canceled", seconds=90)
    ends = ends_of([row for row in lab.rows() if row["id"] in jobs])
    assert ends == {job: ("failed" if code else "succeeded", code) for code, job in enumerate(jobs)}
    assert len(lab.lines("begun")) == JOBS, "no job began twice"
    for job, found in lab.details(jobs).items():
        assert [one["number"] for one in found["attempts"] if one["number"]] == [1]
        expected = [f"{job} {part} {number}" for part in ("before", "after") for number in range(200)]
        assert lab.output(job).splitlines() == expected
        assert lab.output(job, "stderr") == "end\n"
    lab.no_traceback()


def test_twenty_jobs_outlive_kill_9_of_their_worker(lab, running):
    worker = lab.workers["w1"].pid
    lab.kill(worker)
    lab.until(lambda: lab.pid_of_worker() not in (0, worker), "its runner has brought it back", seconds=30)
    lab.until_online()
    all_end_truly(lab, running)


def test_twenty_jobs_that_end_while_there_is_no_worker_are_told_by_the_next(lab, running):
    lab.workers["w1"].send_signal(signal.SIGSTOP)  # so that its runner brings no other one while they end
    (lab.folder / "go").touch()
    lab.until(lambda: not any(lives(int(pid)) for pid in lab.lines("begun")), "all have ended", seconds=60)
    lab.kill(lab.workers["w1"].pid)
    all_end_truly(lab, running)


def test_twenty_jobs_outlive_kill_9_of_the_keeper(lab, running):
    (keeper,) = lab.runner_processes("keeper")
    (spawner,) = lab.runner_processes("spawner")
    lab.kill(keeper)
    # The process stays, its part changes: it makes a spawner for what comes.
    lab.until(lambda: lab.runner_processes("keeper") == [spawner], "the spawner is the keeper now")
    assert lab.end_of(lab.shell("exit 0"))["state"] == "succeeded"
    all_end_truly(lab, running)


def test_twenty_jobs_outlive_kill_9_of_the_spawner(lab, running):
    (spawner,) = lab.runner_processes("spawner")
    lab.kill(spawner)
    lab.until(lambda: lab.runner_processes("spawner") not in ([], [spawner]), "there is another")
    assert lab.end_of(lab.shell("exit 0"))["state"] == "succeeded"
    all_end_truly(lab, running)


@pytest.mark.slow
def test_twenty_jobs_outlive_all_of_these_deaths_one_after_the_other(lab, running):
    for kill in range(9):
        victim = ("worker", "spawner", "server")[kill % 3]
        if victim == "worker":
            before = lab.pid_of_worker()
            lab.kill(before)
            lab.until(lambda before=before: lab.pid_of_worker() not in (0, before), "a worker", seconds=60)
        elif victim == "spawner":
            lab.kill(lab.runner_processes("spawner")[0])
        else:
            lab.kill_server()
            lab.start_server()
        lab.until(lambda: lab.runner_processes("spawner") and lab.runner_processes("keeper"), "the pair is complete")
    lab.until_online(seconds=60)
    all_end_truly(lab, running)


def test_a_job_of_a_killed_worker_is_taken_over_within_ten_seconds_and_never_runs_twice(lab):
    lab.start_server()
    worker = lab.start_worker("w1").pid
    job = lab.shell(f"{FLOCK_PROBE}; echo $$ >> begun; while [ ! -e go ]; do sleep 0.1; done")
    lab.until(lambda: lab.lines("begun"), "it runs")
    pid = int(lab.lines("begun")[0])
    lab.kill(worker)
    begin = time.monotonic()
    lab.until(lambda: lab.pid_of_worker() not in (0, worker) and lab.is_online(), "it is taken over", seconds=30)
    took = time.monotonic() - begin
    assert lives(pid)
    assert took < 10
    (lab.folder / "go").touch()
    lab.end_of(job)
    assert lab.lines("twice") == []
    assert lab.numbers(job) == [1]


def test_output_of_a_job_whose_worker_dies_twice_is_there_once(lab):
    lab.start_server()
    lab.start_worker("w1")
    script = "echo one line; while [ ! -e go ]; do sleep 0.1; done"
    job = lab.shell(f"{script}; echo $KUEUE_JOB_ID >> begun")
    to_file = lab.submit(*SMALL, "-o", "out.txt", "sh", "-c", f"{script}; echo $KUEUE_JOB_ID >> begun")
    lab.until_all([job, to_file], "running")
    for _ in range(2):
        before = lab.pid_of_worker()
        lab.kill(before)
        lab.until(lambda before=before: lab.pid_of_worker() not in (0, before), "it is back", seconds=40)
        lab.until_online()
    (lab.folder / "go").touch()
    lab.end_of(job)
    lab.end_of(to_file)
    assert lab.output(job) == "one line\n"
    assert (lab.folder / "out.txt").read_text() == "one line\n"
    assert lab.numbers(job) == lab.numbers(to_file) == [1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_output_of_an_attempt_that_was_lost_is_apart_from_that_of_the_next(lab):
    lab.start_server()
    lab.start_worker("w1")
    job = lab.shell("echo attempt $KUEUE_ATTEMPT; while [ ! -e go ]; do sleep 0.1; done")
    out = lab.submit(
        *SMALL, "-o", "out.txt", "sh", "-c", "echo attempt $KUEUE_ATTEMPT; while [ ! -e go ]; do sleep 0.1; done"
    )
    for attempt in (1, 2):
        lab.until_all([job, out], "running")
        lab.until(lambda attempt=attempt: lab.numbers(job)[-1] == attempt, f"attempt {attempt}")
        # Keeper and spawner at once: nobody is left to see the jobs end, so they are killed and proven gone.
        lab.kill(*lab.runner_processes("keeper"), *lab.runner_processes("spawner"))
        lab.until(lambda attempt=attempt: lab.numbers(job)[-1:] == [attempt + 1], "the next", seconds=60)
    (lab.folder / "go").touch()
    for one in (job, out):
        lab.end_of(one, seconds=60)
        assert lab.numbers(one) == [1, 2, 3]
    assert lab.output(job) == "attempt 3\n"
    assert (lab.folder / "out.txt").read_text() == "attempt 3\n"


def test_two_workers_of_one_host_are_both_used_and_a_killed_one_may_come_back_at_once(lab):
    lab.start_server()
    for name in ("w1", "w2"):
        lab.start_worker(name, cores=1)
    gate = lab.gate()
    jobs = lab.quick(lab.range_of(*gate.command), lab.range_of(*gate.command))
    lab.until(lambda: {row["worker"] for row in lab.rows("running")} == {"w1", "w2"}, "both run")
    old = lab.machines()["w1"]
    # Whole: with its runner, so that nobody else brings it back.
    lab.kill(lab.workers["w1"].pid)
    begin = time.monotonic()
    lab.start_worker("w1", cores=1)
    assert time.monotonic() - begin < 10
    assert lab.machines()["w1"]["id"] == old["id"], "the same entry, not a second one"
    gate.open()
    for job in jobs:
        lab.end_of(job)
        assert lab.numbers(job) == [1]


@pytest.mark.slow
def test_a_worker_killed_with_all_it_runs_takes_jobs_at_once_when_it_is_back(lab):
    lab.start_server(server_settings={"worker_timeout_seconds": 10})
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.shell(gate.command[2])
    lab.until(lambda: gate.begun, "it runs")
    lab.kill(lab.workers["w1"].pid, *lab.runners(), *lab.processes_of(job))
    lab.until(lambda: lab.machines().get("w1", {}).get("state") != "online", "it is not shown as alive", seconds=12)
    begin = time.monotonic()
    lab.start_worker("w1")
    lab.until(lambda: len(gate.begun) == 2, "the lost job runs again", seconds=15)
    assert lab.end_of(lab.shell("true"))["worker"] == "w1"
    took = time.monotonic() - begin
    gate.open()
    lab.end_of(job)
    assert lab.numbers(job) == [1, 2]
    assert took < 15


def test_a_job_that_ends_while_its_worker_stops_in_order_counts_once(lab):
    lab.start_server()
    worker = lab.start_worker("w1")
    lab.start_worker("w2", cores=1)
    lab.kueue("node", "offline", "w2")
    job = lab.shell("echo begun >> count; sleep 3; exit 5")
    lab.until_state(job, "running")
    worker.send_signal(signal.SIGTERM)
    after = lab.shell("echo $KUEUE_WORKER >> after")
    assert worker.wait(10) == 0
    # If it was offered the very moment in which its worker left, it was handed back.
    lab.until_state(after, "pending", seconds=5)
    lab.remains(lambda: lab.state(after) == "pending", 0.5)
    lab.kueue("node", "online", "w2")
    assert lab.end_of(after)["worker"] == "w2"
    lab.until(lambda: not lab.processes_of(job), "it has ended under its runner")
    assert lab.state(job) == "running"
    lab.start_worker("w1")
    assert lab.end_of(job, "failed")["return_code"] == 5
    assert lab.lines("count") == ["begun"]


@pytest.mark.slow
def test_three_hundred_short_jobs_leave_no_zombie_and_no_descriptor_anywhere(lab):
    lab.start_server()
    lab.start_worker("w1")
    lab.end_of(lab.shell("true"))
    pids = [lab.workers["w1"].pid, lab.server.pid, *lab.runners()]
    assert len(pids) == 4
    before = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}
    jobs = lab.quick(lab.range_of(argvs=[("true",)] * 300))
    lab.until_all(jobs, "succeeded", seconds=120)
    lab.until(
        lambda: all(abs(len(os.listdir(f"/proc/{pid}/fd")) - before[pid]) <= 5 for pid in pids),
        "descriptors are closed",
    )
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert all(lives(int(child)) for child in children), "no defunct child"
