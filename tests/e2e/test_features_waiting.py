"""Waiting for jobs: what is printed, when it returns, and what it exits with."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.feature_lab import SMALL, FeatureLab


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("waiting")) as lab:
        lab.start_server()
        lab.start_worker("w1", kill_grace_seconds=2)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


@pytest.mark.parametrize(
    ("command", "printed", "code"),
    [
        (("true",), "0\n", 0),
        (("sh", "-c", "exit 3"), "3\n", 3),
        (("sh", "-c", "exit 255"), "255\n", 255),
        (("sh", "-c", "kill -9 $$"), "-44\n", 137),
        (("/no/such/program",), "-43\n", 127),
        (("no-such-program-on-the-path",), "-43\n", 127),
        (("/etc/passwd",), "-43\n", 126),
    ],
)
def test_cmd_wait_prints_the_return_code_alone_and_exits_like_the_job(lab, command, printed, code):
    done = lab.kueue("cmd", "--wait", *SMALL, *command)
    assert (done.stdout, done.returncode) == (printed, code)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("./nosuch.sh",), "could not start: ./nosuch.sh: No such file or directory."),
        (("echo hi there",), "Hint: 'echo hi there' was taken as one word; use a shell: sh -c 'echo hi there'"),
        (("sh", "-c", "kill -9 $$"), "was ended by signal 9 (SIGKILL)."),
        (("sh", "-c", "exit 3"), "exited with code 3."),
    ],
)
def test_a_waiter_is_told_on_stderr_why_it_did_not_end_well(lab, command, said):
    done = lab.kueue("cmd", "--wait", *SMALL, *command)
    assert said in done.stderr
    quiet = lab.kueue("cmd", "--wait", "-q", *SMALL, *command)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    followed = lab.kueue("follow", str(lab.rows()[-1]["id"]))
    assert followed.returncode == done.returncode
    assert (said in followed.stderr) is ("exited" not in said)


def test_wait_job_exits_like_the_job_and_prints_nothing(lab):
    job = lab.submit(*SMALL, "sh", "-c", "exit 5")
    done = lab.kueue("wait-job", str(job))
    assert (done.stdout, done.returncode) == ("", 5)
    again = lab.kueue("wait-job", str(job))
    assert (again.stdout, again.returncode) == ("", 5)


def test_of_several_jobs_the_highest_code_counts(lab):
    jobs = [lab.submit(*SMALL, "sh", "-c", f"exit {code}") for code in (0, 9, 4)]
    assert lab.kueue("wait-job", f"{jobs[0]}-{jobs[1]}", str(jobs[2])).returncode == 9


def test_the_wait_ends_within_a_second_of_the_end(lab):
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    waiter = lab.popen_kueue("wait-job", str(job))
    lab.until(lambda: gate.begun, "it runs")
    assert waiter.poll() is None
    gate.open()
    lab.until_state(job, "succeeded")
    begin = time.monotonic()
    assert waiter.wait(20) == 0
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("verb", ["cmd", "wait-job"])
def test_a_job_canceled_while_it_waits_ends_the_wait(lab, verb):
    if verb == "cmd":
        waiter = lab.popen_kueue("cmd", "--wait", "--hold", *SMALL, "true")
        lab.until(lambda: lab.rows("held"), "it is there")
        job = lab.rows("held")[0]["id"]
    else:
        job = lab.submit("--hold", *SMALL, "true")
        waiter = lab.popen_kueue("wait-job", str(job))
    assert lab.kueue("remove-job", str(job)).returncode == 0
    assert waiter.wait(20) == 130
    assert waiter.stdout.read() == b""


def test_output_is_there_when_the_wait_ends(lab):
    for _ in range(10):
        done = lab.kueue("cmd", "--wait", *SMALL, "sh", "-c", "echo all of it")
        assert done.returncode == 0
        job = lab.rows()[-1]["id"]
        assert "=== stdout ===\nall of it\n" in lab.kueue("show-job", str(job)).stdout


def test_an_interrupted_waiter_leaves_the_job_running_and_dies_of_the_signal(lab):
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    waiter = lab.popen_kueue("wait-job", str(job))
    lab.until(lambda: gate.begun, "it runs")
    lab.remains(lambda: waiter.poll() is None, 0.3)  # its handler is in place by then
    waiter.send_signal(signal.SIGINT)
    assert waiter.wait(20) == -signal.SIGINT
    assert b"Traceback" not in waiter.stderr.read()
    assert lab.state(job) == "running"


@pytest.mark.parametrize("verb", ["wait-job", "show-job", "remove-job", "log", "explain", "hold", "release"])
def test_a_job_that_does_not_exist_is_an_error_with_a_sentence(lab, verb):
    done = lab.kueue(verb, "999999")
    assert (done.returncode, done.stdout) == (1, "")
    assert "not found!" in done.stderr


@pytest.mark.parametrize("verb", ["wait-job", "show-job", "remove-job", "show-worker"])
@pytest.mark.parametrize("word", ["x", "-1", "1.5", ""])
def test_what_is_no_id_is_a_usage_error(lab, verb, word):
    done = lab.kueue(verb, word)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def test_a_waiter_is_told_why_its_job_does_not_start(lab):
    gate = lab.gate()
    first = lab.submit("-c", "16", "-r", "1", *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    waiter = lab.popen_kueue("cmd", "--wait", *SMALL, "true")
    said = waiter.stderr.readline().decode()
    job = lab.rows("pending")[0]["id"]
    assert said == f"Job {job} waits: worker w1 has 0 cpus free, 1 asked for. `kueue explain {job}` says more.\n"
    gate.open()
    assert waiter.wait(30) == 0
    assert waiter.stderr.read() == b""
    assert lab.end_of(first)
