"""One directory, one worker: what becomes of a worker whose lock or directory is taken away, and of one in a job."""

from __future__ import annotations

import contextlib
import signal

import pytest

from kueue import places
from tests.support.lab import Lab
from tests.support.removal import remove_tree

SMALL = ("-c", "1", "-r", "1")
MORTAL = {"worker_timeout_seconds": 10}
"""A heartbeat every 1.3 s."""
WAITS = "echo $KUEUE_ATTEMPT >> begun; until [ -e go ]; do sleep 0.1; done; exit 5"


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    lab.start_server(server_settings=MORTAL)
    yield lab
    lab.close()


def begun(lab):
    path = lab.folder / "begun"
    return path.read_text().split() if path.exists() else []


def ends(lab, job):
    lab.until(lambda: lab.job(job)["state"] in {"succeeded", "failed", "canceled"}, f"job {job} is done", seconds=60)
    return lab.job(job)


def test_a_worker_whose_lock_another_has_taken_ends_and_each_job_runs_once(lab):
    first = lab.start_worker("w1")
    job = lab.submit(*SMALL, "sh", "-c", WAITS)
    lab.until(lambda: begun(lab) == ["1"], "it runs")
    lock = lab.folder / "state/workers/w1/lock"
    first.send_signal(signal.SIGSTOP)  # or it may put it back before the other comes
    lock.unlink()
    second = lab.start("kueue.worker.main", "-c", str(lab.folder / "w1.toml"), log="second")
    lab.until(lambda: places.holder(str(lock)) == second.pid, "the other has the lock", process=second)
    first.send_signal(signal.SIGCONT)
    lab.until(lambda: "taken in by the server" in lab.log("second"), "the other is there", process=second)
    more = [lab.submit(*SMALL, "sh", "-c", "echo $KUEUE_JOB_ID >> more; exit 0") for _ in range(5)]
    assert first.wait(60) == 1
    assert "/lock was replaced while the worker w1 ran: it ends, and its jobs go on." in lab.log("w1")
    assert f"(pid {second.pid}) takes them up" in lab.log("w1")
    for one in more:
        assert ends(lab, one)["return_code"] == 0
    (lab.folder / "go").touch()
    assert ends(lab, job)["return_code"] == 5
    assert begun(lab) == ["1"]
    assert sorted((lab.folder / "more").read_text().split()) == sorted(map(str, more))
    assert second.poll() is None


def test_a_lock_that_was_removed_is_put_back_before_anybody_takes_it(lab):
    first = lab.start_worker("w1")
    lock = lab.folder / "state/workers/w1/lock"
    lock.unlink()
    lab.until(lambda: places.holder(str(lock)) == first.pid, "it is put back", process=first)
    second = lab.start("kueue.worker.main", "-c", str(lab.folder / "w1.toml"), log="second")
    assert second.wait(60) == 1
    assert f"is running already (pid {first.pid})" in lab.log("second")
    assert ends(lab, lab.submit(*SMALL, "true"))["return_code"] == 0
    assert "/lock was removed: it is put back" in lab.log("w1")


@pytest.mark.slow
def test_a_worker_whose_directory_was_removed_ends_and_a_new_one_takes_its_name(lab):
    first = lab.start_worker("w1")
    job = lab.submit(*SMALL, "sh", "-c", WAITS)
    lab.until(lambda: begun(lab) == ["1"], "it runs")
    remove_tree(lab.folder / "state/workers")
    assert first.wait(60) == 1
    assert "workers/w1 was removed or replaced while the worker w1 ran: it ends." in lab.log("w1")
    assert not (lab.folder / "state/workers/w1/lock").exists()
    lab.start_worker("w1")
    assert ends(lab, lab.submit(*SMALL, "true"))["return_code"] == 0
    (lab.folder / "go").touch()
    assert ends(lab, job)["return_code"] == 5


def test_a_worker_whose_directory_was_removed_ends_also_while_there_is_no_server(tmp_path):
    with contextlib.closing(Lab(tmp_path)) as lab:
        path = lab.config(worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
        worker = lab.start("kueue.worker.main", "-c", str(path), log="w1")
        lab.until(lambda: "Is kueue_server running there?" in lab.log("w1"), "it has tried", process=worker)
        remove_tree(tmp_path / "state/workers")
        assert worker.wait(60) == 1
        assert "workers/w1 was removed or replaced while the worker w1 ran: it ends." in lab.log("w1")


def test_a_service_is_not_started_inside_of_a_job_with_which_it_would_end(lab):
    worker = lab.start_worker("w1")
    config = lab.config("inner", worker_settings={"worker_name": "inner"})
    python = f"KUEUE_STATE_DIR={lab.folder / 'inner'} {lab.python} -m"
    words = (
        f"{python} kueue.worker.main -c {config} 2>> said; echo $? >> codes; "
        f"{python} kueue.server.main -c {config} 2>> said; echo $? >> codes; "
        f"{python} kueue.cli.main -c {config} up 2>> said; echo $? >> codes; "
        f"{python} kueue_ops.restart_workers -c {config} 2>> said; echo $? >> codes; "
        f"{python} kueue.worker.main -c {config} --status > /dev/null; echo $? >> codes"
    )
    assert ends(lab, lab.submit(*SMALL, "--env", "PYTHONPATH", "sh", "-c", words))["return_code"] == 0
    said = (lab.folder / "said").read_text()
    assert (lab.folder / "codes").read_text().split() == ["1", "1", "1", "1", "3"], said
    assert said.count("cannot be started inside of a job of kueue (job 0): it would be ended with the job.") == 4
    assert worker.poll() is None
