"""Nothing acknowledged is lost and no job runs twice at once, whatever ends: server, worker, machine, release."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import kueue
from tests.support.feature_lab import SMALL, FeatureLab

MORTAL = {"worker_timeout_seconds": 10}


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        yield lab


def once(lab, then="sleep 600"):
    """A command that notes its attempt and complains if another attempt of it runs at the same time."""
    script = (
        f"exec 9>>{lab.folder}/lock; flock -n 9 || echo twice >> {lab.folder}/twice; "
        f"echo $KUEUE_WORKER $KUEUE_ATTEMPT >> {lab.folder}/attempts; {then}"
    )
    return ("sh", "-c", script)


def attempts(lab):
    path = lab.folder / "attempts"
    return path.read_text().splitlines() if path.exists() else []


def crash(lab, name, job):
    """The machine of that worker loses power, as far as kueue can tell: worker, runner and job die at once."""
    mark = f"/workers/{name}/"
    victims = {lab.workers[name].pid, *lab.processes_of(job)}
    for pid in lab.runners():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                victims.add(pid)
    assert len(victims) >= 4  # worker, keeper, spawner, job
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def test_the_jobs_of_a_dead_machine_run_again_elsewhere_after_the_time_out(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    job = lab.submit(*SMALL, *once(lab))
    lab.until(lambda: attempts(lab) == ["w1 1"], "it runs on w1")
    lab.start_worker("w2")
    begin = time.monotonic()
    crash(lab, "w1", job)
    lab.until(lambda: len(attempts(lab)) == 2, "it runs again")
    # Counted from the last sign of life, which was at most one heartbeat (a sixth of the lease) before the crash.
    assert 10 - 8 / 6 - 0.2 < time.monotonic() - begin < 15
    assert attempts(lab) == ["w1 1", "w2 2"]
    assert not (lab.folder / "twice").exists()
    found = lab.job(job)
    assert (found["id"], found["worker"], found["attempt"]) == (job, "w2", 2)
    assert re.match(r"lost: .*w1", found["attempts"][0]["end"])
    assert "w1" in lab.kueue("show-job", str(job)).stdout.partition("attempts:")[2]


def test_a_job_whose_workers_die_again_and_again_is_given_up_naming_them(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    job = lab.submit(*SMALL, "--max-attempts", "2", *once(lab))
    for count in (1, 2):
        lab.until(lambda: len(attempts(lab)) == count, f"attempt {count} runs")  # noqa: B023 - called at once
        crash(lab, "w1", job)
        lab.workers["w1"].wait()
        lab.start_worker("w1")  # a worker that comes back proves that nothing is left, so nobody waits
    found = lab.end_of(job, "failed")
    assert found["return_code"] == -47
    assert found["outcome"]["type"] == "lost"
    assert "w1" in found["comment"]
    assert lab.kueue("wait-job", str(job)).returncode == 125


def test_an_unanswered_offer_may_be_running_and_goes_elsewhere_only_after_the_silence(lab):
    lab.start_server(server_settings={**MORTAL, "job_offer_timeout_seconds": 2})
    lab.start_worker("w1")
    lab.workers["w1"].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    job = lab.submit(*SMALL, *once(lab, "true"))
    lab.until_state(job, "offered")
    lab.start_worker("w2")
    lab.until(
        lambda: "does not answer" in lab.kueue("list-jobs", str(job)).stdout, "the lack of an answer is told", seconds=8
    )
    assert 2 < time.monotonic() - begin < 6
    # Others go to the worker that answers, and no further offer is made to the one that does not.
    assert lab.run(*SMALL, "true")["worker"] == "w2"
    assert lab.machines()["w1"]["offered"] in ([], [job])
    assert attempts(lab) == []
    lab.end_of(job)
    assert 10 - 8 / 6 - 0.2 < time.monotonic() - begin < 15
    assert attempts(lab) == ["w2 2"]  # the first may have run, so it has a number
    lab.workers["w1"].send_signal(signal.SIGCONT)
    lab.kueue("node", "offline", "w2")
    lab.until(lambda: lab.worker("w1").get("state") == "online", "w1 is back")
    assert lab.run(*SMALL, "true")["worker"] == "w1"
    assert attempts(lab) == ["w2 2"]


def test_special_ends_have_their_codes_and_say_what_happened(lab):
    lab.start_server()
    lab.start_worker("w1")
    missing = lab.run(*SMALL, "/no/such/program")
    assert missing["return_code"] == -43
    assert re.match(r"Failed to start job: .*/no/such/program", missing["comment"])
    killed = lab.run(*SMALL, "sh", "-c", "kill -SEGV $$")
    assert killed["return_code"] == -44
    assert "11" in killed["comment"]
    assert "SEGV" in killed["comment"]
    listed = lab.kueue("list-jobs", "-f").stdout
    assert "failed with code -43" in listed
    assert "failed with code -44" in listed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_restart_of_the_server_harms_no_job_and_no_waiter(lab, number):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.submit(*SMALL, *once(lab, gate.command[2]))
    waiting = lab.submit("-c", "16", "-r", "1", "true")
    lab.until(lambda: gate.begun, "it runs")
    waiter = lab.popen_kueue("wait-job", str(job), str(waiting))
    lab.until(lambda: "hello" in lab.log("server"), "it is heard")
    lab.server.send_signal(number)
    assert lab.server.wait(20) == (-9 if number == signal.SIGKILL else 0)
    told = waiter.stderr.readline().decode()
    assert f"127.0.0.1:{lab.port}" in told
    lab.start_server()
    lab.until(lambda: lab.worker("w1").get("state") == "online", "the worker is back")
    assert lab.states([job, waiting]) == ["running", "pending"]
    gate.open()
    assert waiter.wait(30) == 0
    assert attempts(lab) == ["w1 1"]
    assert lab.submit(*SMALL, "true") == waiting + 1


def test_every_acknowledged_job_is_there_once_after_a_crash_at_any_moment(lab):
    lab.start_server()
    lab.start_worker("w1")
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    answers: list[tuple[int, str, str]] = []
    left = list(range(40))

    def submit():
        while left:
            with contextlib.suppress(IndexError):
                number = left.pop()
                done = lab.kueue("cmd", *SMALL, "echo", str(number))
                answers.append((done.returncode, done.stdout, str(number)))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = len(answers)
        lab.until(lambda: len(answers) > before + 2 or not left, "some are in")  # noqa: B023 - called at once
        time.sleep(dice.uniform(0, 0.3))
        lab.server.kill()
        lab.server.wait()
        lab.start_server()
    for thread in threads:
        thread.join()
    assert [code for code, _, _ in answers] == [0] * 40, seed
    given = {int(printed): number for _, printed, number in answers}
    assert sorted(given) == sorted({int(printed) for _, printed, _ in answers})
    assert len(given) == 40, seed
    lab.until(lambda: len(lab.rows("succeeded")) >= 40, "all have run")
    jobs = lab.jobs()
    assert {job: row["argv"][1] for job, row in jobs.items()} == given, seed
    for job, number in given.items():
        assert [row["number"] for row in lab.job(job)["attempts"]][-1:] == [1], (seed, job)
        assert number == jobs[job]["argv"][1]
    assert lab.submit(*SMALL, "true") == max(given) + 1


def test_queue_and_running_jobs_survive_an_upgrade(lab):
    """As the manual says: stop the server, install, start the server, then restart the workers."""
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    running = lab.submit(*SMALL, *once(lab, gate.command[2]))
    held = lab.submit(*SMALL, "--hold", "true")
    finished = lab.run(*SMALL, "echo", "old")["id"]
    lab.until(lambda: gate.begun, "it runs")

    lab.server.send_signal(signal.SIGTERM)
    assert lab.server.wait(20) == 0
    new = lab.folder / "site"
    shutil.copytree(Path(kueue.__file__).parent, new / "kueue", ignore=shutil.ignore_patterns("__pycache__"))
    package = new / "kueue" / "__init__.py"
    text = package.read_text()
    assert kueue.__version__ in text
    package.write_text(text.replace(kueue.__version__, "99.0.0"))
    upgraded = {"PYTHONPATH": str(new)}
    lab.server = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), log="server", **upgraded)
    lab.until(lab.answers, "the new server answers", process=lab.server)
    lab.until(lambda: lab.worker("w1").get("state") == "online", "the old worker is served by the new server")
    assert lab.state(running) == "running"
    old = lab.workers["w1"]
    old.send_signal(signal.SIGTERM)
    assert old.wait(20) == 0
    assert attempts(lab) == ["w1 1"]
    lab.workers["w1"] = lab.start("kueue.worker.main", "-c", str(lab.folder / "w1.toml"), log="w1", **upgraded)
    lab.until(lambda: lab.worker("w1").get("version") == "99.0.0", "the new worker is there", process=lab.workers["w1"])
    assert "server 99.0.0" in lab.kueue("version", **upgraded).stdout
    assert lab.states([running, held, finished]) == ["running", "held", "succeeded"]
    assert lab.output(finished) == "old\n"
    assert lab.run(*SMALL, "true")["state"] == "succeeded"  # by a new runner, beside the old one
    gate.open()
    assert lab.end_of(running)["attempt"] == 1
    assert attempts(lab) == ["w1 1"]


def freeze(lab, name):
    """The machine of that worker neither computes nor answers: worker and runner stand still, and so does the job."""
    pids = {lab.workers[name].pid}
    for pid in lab.runners():
        with contextlib.suppress(OSError):
            if f"/workers/{name}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.add(pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def thaw(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_kill_that_cannot_be_proven_says_so_and_holds_when_the_worker_returns(lab):
    lab.start_server()
    lab.start_worker("w1")
    job = lab.submit(*SMALL, *once(lab))
    lab.until(lambda: attempts(lab) == ["w1 1"] and lab.state(job) == "running", "it runs, and the server knows")
    frozen = freeze(lab, "w1")
    begin = time.monotonic()
    done = lab.kueue("remove-job", "--kill", str(job))
    assert time.monotonic() - begin < 12
    assert (done.returncode, done.stdout) == (1, "")
    assert "w1" in done.stderr
    assert lab.state(job) == "running"
    assert "stopping" in lab.kueue("list-jobs", str(job)).stdout
    thaw(frozen)
    lab.end_of(job, "canceled")
    assert lab.processes_of(job) == []


def test_force_ends_the_record_whatever_the_worker_says_and_the_worker_obeys_when_it_returns(lab):
    lab.start_server()
    lab.start_worker("w1")
    job = lab.submit(*SMALL, *once(lab))
    lab.until(lambda: attempts(lab) == ["w1 1"], "it runs")
    frozen = freeze(lab, "w1")
    done = lab.kueue("remove-job", "--force", str(job))
    assert done.returncode == 0, done.stderr
    assert lab.state(job) == "canceled"
    thaw(frozen)
    lab.until(lambda: not lab.processes_of(job), "the worker has stopped it")
    assert lab.state(job) == "canceled"
    assert lab.run(*SMALL, "true")["state"] == "succeeded"


def test_a_job_that_must_not_run_elsewhere_waits_for_its_worker(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    gate = lab.gate()
    waits = lab.submit(*SMALL, "--on-lost", "wait", *once(lab, gate.command[2]))
    fails = lab.submit(*SMALL, "--on-lost", "fail", "sleep", "600")
    lab.until(lambda: gate.begun and lab.state(fails) == "running", "both run")
    lab.start_worker("w2")
    frozen = freeze(lab, "w1")
    lost = lab.end_of(fails, "failed")
    assert (lost["return_code"], lost["outcome"]["type"]) == (-47, "lost")
    assert lab.state(waits) == "running"
    assert re.search("w1 silent since", lab.kueue("list-jobs", str(waits)).stdout)
    thaw(frozen)
    lab.until(lambda: lab.worker("w1").get("state") == "online", "w1 is back")
    lab.until(lambda: not lab.processes_of(fails), "what was given up is stopped")
    gate.open()
    assert lab.end_of(waits)["attempt"] == 1
    assert attempts(lab) == ["w1 1"]


def test_a_machine_declared_dead_gives_its_jobs_away_at_once(lab):
    lab.start_server()
    lab.start_worker("w1")
    job = lab.submit(*SMALL, *once(lab))
    lab.until(lambda: attempts(lab) == ["w1 1"], "it runs")
    lab.start_worker("w2")
    crash(lab, "w1", job)
    assert lab.kueue("node", "dead", "w1").returncode == 0
    lab.until(lambda: attempts(lab) == ["w1 1", "w2 2"], "it runs elsewhere", seconds=5)
    assert not (lab.folder / "twice").exists()


def test_output_is_followed_over_the_death_of_a_worker(lab):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.submit(*SMALL, "sh", "-c", f"echo one; {gate.command[2].removesuffix('; exit 0')}; echo two; exit 4")
    follower = lab.popen_kueue("follow", str(job))
    assert follower.stdout.readline() == b"one\n"
    lab.until(lambda: gate.begun, "it waits")
    os.kill(lab.workers["w1"].pid, signal.SIGKILL)
    # Its runner brings it back.
    connected = lab.ask("ListWorkers")["workers"][0]["connected_wall"]
    lab.until(lambda: lab.worker("w1").get("connected_wall", connected) != connected, "the worker is back")
    gate.open()
    assert follower.stdout.read() == b"two\n"
    assert follower.wait(20) == 4
    assert lab.job(job)["attempt"] == 1
