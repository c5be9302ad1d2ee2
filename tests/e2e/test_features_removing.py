"""Canceling, killing and forgetting jobs: what is gone afterwards, what is not, and what is said."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.feature_lab import DONE, SMALL, FeatureLab


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("removing")) as lab:
        lab.start_server()
        lab.start_worker("w1", kill_grace_seconds=4)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


def said(done):
    return done.returncode, done.stdout, done.stderr


def test_a_pending_job_is_canceled_and_never_runs(lab, tmp_path):
    big = lab.gate()
    lab.submit("-c", "16", "-r", "1", *big.command)
    job = lab.submit(*SMALL, "touch", str(tmp_path / "ran"))
    assert lab.state(job) == "pending"
    assert said(lab.kueue("remove-job", str(job))) == (0, f"Canceled job ID={job}!\n", "")
    assert lab.state(job) == "canceled"
    lab.until(lambda: big.begun, "the big one runs")
    big.open()
    lab.run(*SMALL, "true")  # a later one has run, so this one would have
    assert not (tmp_path / "ran").exists()
    assert said(lab.kueue("remove-job", str(job))) == (1, "", f"Job ID={job} is already canceled!\n")


def test_a_running_job_is_left_alone_without_kill(lab):
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    code, out, err = said(lab.kueue("remove-job", str(job)))
    assert (code, out) == (1, "")
    assert err.startswith(f"Job ID={job} has already started!\n")
    gate.open()
    lab.end_of(job)
    assert said(lab.kueue("remove-job", "--kill", str(job))) == (1, "", f"Job ID={job} has already finished!\n")
    assert said(lab.kueue("remove-job", "999999")) == (1, "", "Job with ID=999999 not found!\n")


def test_of_several_ids_each_has_its_own_answer(lab):
    held = [lab.submit("--hold", *SMALL, "true") for _ in range(3)]
    done = lab.kueue("remove-job", f"{held[0]}-{held[2]}", "999999")
    assert (done.returncode, done.stderr) == (1, "Job with ID=999999 not found!\n")
    assert done.stdout == "".join(f"Canceled job ID={job}!\n" for job in held)


def test_kill_ends_every_process_of_the_job(lab, tmp_path):
    (tmp_path / "a.sh").write_text("bash b.sh\n")
    (tmp_path / "b.sh").write_text("python3 -c 'import time; time.sleep(600)'\n")
    job = lab.submit("-c", "16", "-r", "1", "bash", "a.sh", cwd=tmp_path)
    lab.until(lambda: len(lab.processes_of(job)) == 3, "three processes live")
    following = lab.submit("-c", "16", "-r", "1", "true")
    begin = time.monotonic()
    assert said(lab.kueue("remove-job", "--kill", str(job))) == (0, f"Canceled job ID={job}!\n", "")
    assert time.monotonic() - begin < 15
    assert lab.processes_of(job) == []
    assert lab.state(job) == "canceled"
    lab.end_of(following)


def test_kill_reaches_a_crowd_of_grandchildren(lab):
    crowd = "for i in $(seq 20); do (sleep 600 & wait) & done; wait"
    job = lab.submit(*SMALL, "sh", "-c", crowd)
    lab.until(lambda: len(lab.processes_of(job)) == 41, "41 processes live")
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    assert lab.processes_of(job) == []


def test_kill_reaches_processes_that_left_session_and_environment(lab, tmp_path):
    mark = f"6{os.getpid()}.5"
    job = lab.submit(*SMALL, "sh", "-c", f"setsid env -i sleep {mark} & echo > {tmp_path}/up; wait")
    lab.until(lambda: sleepers(mark), "it sleeps")
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    assert sleepers(mark) == []


def test_a_job_that_ignores_the_signal_is_killed_after_the_grace_and_says_stopping_until_then(lab):
    job = lab.submit(*SMALL, "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    lab.until(lambda: lab.output(job) == "up\n", "it ignores the signal")
    killer = lab.popen_kueue("remove-job", "--kill", str(job))
    lab.until(lambda: lab.rows("running") and lab.rows("running")[0].get("stopping"), "it is being stopped")
    assert "(stopping" in lab.kueue("list-jobs", str(job)).stdout
    assert killer.wait(20) == 0
    assert lab.processes_of(job) == []


def test_a_job_that_cleans_up_on_the_signal_may_do_so(lab, tmp_path):
    script = f"trap 'echo clean > {tmp_path}/cleaned; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    job = lab.submit(*SMALL, "sh", "-c", script)
    lab.until(lambda: lab.output(job) == "up\n", "its handler is set")
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    assert lab.state(job) == "canceled"
    assert (tmp_path / "cleaned").read_text() == "clean\n"


def test_a_job_canceled_while_it_is_offered_does_not_start_and_the_worker_stays(lab, tmp_path):
    before = lab.machines()["w1"]
    lab.workers["w1"].send_signal(signal.SIGSTOP)
    try:
        job = lab.submit(*SMALL, "touch", str(tmp_path / "ran"))
        lab.until_state(job, "offered")
        remover = lab.popen_kueue("remove-job", str(job))
        lab.remains(lambda: lab.state(job) == "offered", 2)
    finally:
        lab.workers["w1"].send_signal(signal.SIGCONT)
    assert remover.wait(20) == 0
    assert remover.stdout.read().decode() == f"Canceled job ID={job}!\n"
    lab.run(*SMALL, "true")
    assert lab.state(job) == "canceled"
    assert not (tmp_path / "ran").exists()
    after = lab.machines()["w1"]
    assert (after["id"], after["connected_wall"]) == (before["id"], before["connected_wall"])


def test_cancels_that_race_with_starts_and_ends_leave_every_job_final(lab):
    lines = "\n".join(["true"] * 200)
    done = lab.kueue("cmd", *SMALL, "--each-line", "-", stdin=lines)
    assert done.returncode == 0, done.stderr
    jobs = [row["id"] for row in lab.rows()][-200:]
    removers = [lab.popen_kueue("remove-job", "--kill", f"{part[0]}-{part[-1]}") for part in slices(jobs, 50)]
    for remover in removers:
        assert remover.wait(60) in (0, 1)
    lab.until(lambda: all(state in DONE for state in lab.states(jobs)), "all are done")
    assert "failed" not in lab.states(jobs)
    assert lab.run(*SMALL, "true")["state"] == "succeeded"
    for name in ("server", "w1"):
        assert "Traceback" not in lab.log(name)


def test_many_hands_on_one_job_all_get_an_answer(lab):
    job = lab.submit(*SMALL, "sleep", "600")
    verbs = [("remove-job", "--kill", str(job)), ("remove-job", str(job)), ("clean-jobs",)]
    hands = [lab.popen_kueue(*verbs[number % 3]) for number in range(10)]
    assert {hand.wait(60) for hand in hands} <= {0, 1}
    lab.kueue("clean-jobs")
    assert lab.state(job) == "unknown"
    assert lab.run(*SMALL, "true")["state"] == "succeeded"


def test_a_main_process_killed_by_a_stranger_fails_the_job_and_the_next_one_starts(lab):
    job = lab.submit("-c", "16", "-r", "1", "sleep", "600")
    lab.until(lambda: len(lab.processes_of(job)) == 1, "it sleeps")
    following = lab.submit("-c", "16", "-r", "1", "true")
    os.kill(lab.processes_of(job)[0], signal.SIGKILL)
    found = lab.end_of(job, "failed", seconds=5)
    assert "signal 9" in found["comment"]
    assert found["return_code"] == -44
    lab.end_of(following, seconds=5)


def test_what_a_job_leaves_in_the_background_is_stopped_and_told(lab):
    mark = f"7{os.getpid()}.5"
    job = lab.run(*SMALL, "sh", "-c", f"(sleep {mark} &) & sleep 0.2; true")
    assert job["state"] == "succeeded"
    assert sleepers(mark) == []
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert "comment: Job finished orderly. 1 background process left behind and stopped.\n" in shown


def test_what_a_job_leaves_in_the_background_is_kept_on_request(lab):
    mark = f"8{os.getpid()}.5"
    job = lab.run(*SMALL, "--keep-background", "sh", "-c", f"(sleep {mark} &) & sleep 0.2; true")
    assert job["state"] == "succeeded"
    try:
        assert len(sleepers(mark)) == 1
    finally:
        for pid in sleepers(mark):
            os.kill(pid, signal.SIGKILL)


def test_clean_up_forgets_what_it_says_and_leaves_the_rest(lab):
    lab.kueue("clean-jobs", "--all")
    good = lab.run(*SMALL, "true")["id"]
    bad = lab.run(*SMALL, "false")["id"]
    held = lab.submit(*SMALL, "--hold", "true")
    canceled = lab.submit(*SMALL, "--hold", "true")
    lab.kueue("remove-job", str(canceled))
    gate = lab.gate()
    running = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    assert said(lab.kueue("clean-jobs")) == (0, "Removed finished and canceled jobs!\n", "")
    assert sorted(lab.jobs()) == [bad, held, running]
    assert lab.kueue("show-job", str(good)).returncode == 1
    assert lab.kueue("clean-jobs", "--all").returncode == 0
    assert sorted(lab.jobs()) == [held, running]


def test_jobs_and_clean_up_touch_nothing_of_the_user(lab, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("x")
    before = tree(tmp_path)
    lab.run(*SMALL, "true", cwd=tmp_path)
    lab.run(*SMALL, "-o", "/nosuch/x", "true", cwd=tmp_path)
    job = lab.submit(*SMALL, "sleep", "600", cwd=tmp_path)
    lab.until(lambda: lab.processes_of(job), "it runs")
    lab.kueue("remove-job", "--kill", str(job))
    lab.kueue("clean-jobs", "--all")
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_finished_jobs_are_forgotten_when_they_are_older_than_the_setting(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server(server_settings={"job_cleanup_after_minutes": 0, "maintenance_interval_seconds": 1})
        lab.start_worker("w1")
        held = lab.submit(*SMALL, "--hold", "true")
        job = lab.run(*SMALL, "echo", "here")["id"]
        ended = time.monotonic()
        # Whole minutes, strictly more than the setting: there is always time to look at a job.
        lab.remains(lambda: lab.state(job) == "succeeded" or time.monotonic() - ended > 59, 58)
        lab.until(lambda: lab.state(job) == "unknown", "it is forgotten")
        assert list(lab.jobs()) == [held]


def sleepers(mark):
    """Pids of `sleep MARK`."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", mark.encode()]:
                found.append(int(entry.name))
    return found


def tree(folder):
    return sorted((str(path.relative_to(folder)), path.stat().st_mode) for path in folder.rglob("*"))


def slices(values, size):
    return [values[at : at + size] for at in range(0, len(values), size)]
