"""Short jobs wait in lines while server, worker and keeper are killed under them: each runs once, and one at a time."""

from __future__ import annotations

import contextlib

import pytest

from kueue import errors
from tests.support.kill_lab import KillLab

pytestmark = pytest.mark.slow

JOBS = 300
SLOTS = 2
SHORT = (
    # As many as there are slots hold one of the locks; one more would find none.
    "exec 8>lock.0 9>lock.1; flock -n 8 || flock -n 9 || echo $KUEUE_JOB_ID >> crowded; "
    "sleep 0.02; echo $KUEUE_JOB_ID >> made"
)


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        lab.start_server()
        lab.start_worker("w1", worker_max_parallel_jobs=SLOTS)
        yield lab


def waiting_in_lines(lab):
    """Jobs that were offered beyond what can run."""
    with contextlib.suppress(errors.KueueError):
        (worker,) = lab.ask("ListWorkers")["workers"]
        return len(worker["offered"]) + len(worker["running"]) - SLOTS
    return 0


def until_lines_stand(lab, made):
    """So many have run, and others wait in lines: now."""
    lab.until(lambda: len(lab.lines("made")) >= made, f"{made} have run", seconds=60)
    lab.until(lambda: waiting_in_lines(lab) > SLOTS, "jobs wait in lines", seconds=60)


def each_has_run_once(lab, jobs):
    lab.until_all(jobs, "succeeded", "failed", "canceled", seconds=120)
    assert {row["state"] for row in lab.rows() if row["id"] in jobs} == {"succeeded"}
    assert sorted(map(int, lab.lines("made"))) == sorted(jobs)
    assert lab.lines("crowded") == []
    assert {
        job: [one["number"] for one in found["attempts"] if one["number"]] for job, found in lab.details(jobs).items()
    } == {job: [1] for job in jobs}
    lab.no_traceback()


def test_three_hundred_short_jobs_run_once_whoever_of_the_programs_is_killed(lab):
    jobs = lab.quick(lab.range_of("sh", "-c", SHORT, count=JOBS))
    until_lines_stand(lab, 20)
    lab.kill_server()
    lab.start_server()
    until_lines_stand(lab, 80)
    worker = lab.workers["w1"].pid
    lab.kill(worker)
    lab.until(lambda: lab.pid_of_worker() not in (0, worker), "its runner has brought it back", seconds=60)
    lab.until_online()
    until_lines_stand(lab, 150)
    (keeper,) = lab.runner_processes("keeper")
    (spawner,) = lab.runner_processes("spawner")
    lab.kill(keeper)
    lab.until(lambda: lab.runner_processes("keeper") == [spawner], "the spawner is the keeper now")
    each_has_run_once(lab, jobs)


def test_short_jobs_behind_one_that_turns_out_long_go_elsewhere(lab):
    first = lab.quick(lab.range_of("sh", "-c", SHORT, count=20))
    lab.until_all(first, "succeeded")
    long = "mkdir long 2> /dev/null && while [ ! -e go ]; do sleep 0.05; done; "
    jobs = lab.quick(lab.range_of("sh", "-c", long + "echo $KUEUE_JOB_ID >> made.2", count=40))
    # One slot is taken by the one that waits for us; all others have to pass by the other slot.
    lab.until(lambda: len(lab.lines("made.2")) == len(jobs) - 1, "all others have run", seconds=60)
    (lab.folder / "go").touch()
    lab.until_all(jobs, "succeeded", seconds=60)
    assert sorted(map(int, lab.lines("made.2"))) == sorted(jobs)
