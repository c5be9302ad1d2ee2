"""What a job writes: kept, shown, followed, sent to files or thrown away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import pytest

from tests.support.feature_lab import SMALL, FeatureLab


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("output")) as lab:
        lab.start_server()
        lab.start_worker("w1", output_limit_mb=4, kill_grace_seconds=2)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


def test_both_streams_go_to_files_in_the_submitters_directory(lab, tmp_path):
    job = lab.run(*SMALL, "-o", "out.txt", "-e", "err.txt", "sh", "-c", "echo a; echo b>&2", cwd=tmp_path)
    assert (tmp_path / "out.txt").read_text() == "a\n"
    assert (tmp_path / "err.txt").read_text() == "b\n"
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert f"=== stdout ===\nRedirected to {tmp_path}/out.txt\n" in shown
    assert f"=== stderr ===\nRedirected to {tmp_path}/err.txt\n" in shown


def test_an_older_file_is_replaced(lab, tmp_path):
    (tmp_path / "out.txt").write_text("old and long\n")
    lab.run(*SMALL, "--stdout", str(tmp_path / "out.txt"), "echo", "new")
    assert (tmp_path / "out.txt").read_text() == "new\n"


def test_null_throws_a_stream_away(lab, tmp_path):
    words = ("-o", "null", "-e", " NULL ", "sh", "-c", "echo a; echo b>&2")
    job = lab.run(*SMALL, *words, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert "=== stdout ===" not in shown
    assert "=== stderr ===" not in shown


@pytest.mark.parametrize("second", ["x", "./x", "link"])
def test_one_file_for_both_streams_holds_all_lines_in_the_order_they_were_written(lab, tmp_path, second):
    (tmp_path / "link").symlink_to("x")
    script = "for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done"
    lab.run(*SMALL, "-o", "x", "-e", second, "sh", "-c", script, cwd=tmp_path)
    lines = [f"{stream} {number}" for number in range(1, 6) for stream in ("out", "err")]
    assert (tmp_path / "x").read_text().splitlines() == lines


def test_captured_streams_are_kept_apart_and_shown_after_the_end(lab):
    job = lab.run(*SMALL, "sh", "-c", "echo o; echo e >&2")
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert shown.endswith("\n=== stdout ===\no\n\n=== stderr ===\ne\n")


def test_a_running_job_shows_what_there_is_so_far(lab):
    gate = lab.gate()
    job = lab.submit(*SMALL, "sh", "-c", f"echo first; echo trouble >&2; {gate.command[2]}; echo second")
    lab.until(lambda: gate.begun, "it has written")
    shown = lab.kueue("show-job", str(job)).stdout
    assert "job status: running" in shown
    assert shown.endswith("\n=== stdout ===\nfirst\n\n=== stderr ===\ntrouble\n")


def test_the_output_of_a_killed_job_is_kept(lab):
    job = lab.submit(*SMALL, "sh", "-c", "echo before; sleep 600")
    lab.until(lambda: lab.output(job) == "before\n", "it has written")
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    lab.end_of(job, "canceled")
    assert "=== stdout ===\nbefore\n" in lab.kueue("show-job", str(job)).stdout


def test_bytes_that_are_no_text_are_kept_and_shown_with_a_replacement(lab):
    job = lab.run(*SMALL, "printf", r"ok\377ok\n")
    assert job["state"] == "succeeded"
    assert lab.kueue("show-job", str(job["id"])).stdout.endswith("=== stdout ===\nok\ufffdok\n")
    assert os.fsencode(lab.kueue("log", "--raw", str(job["id"])).stdout) == b"ok\xffok\n"


def test_a_job_that_writes_without_end_delays_nobody(lab):
    job = lab.submit(*SMALL, "yes", "much of the same")
    lab.until_state(job, "running")
    spent = {}
    for verb in (("list-jobs",), ("remove-job", "--kill", str(job))):
        begin = time.monotonic()
        assert lab.kueue(*verb).returncode == 0
        spent[verb[0]] = time.monotonic() - begin
    lab.end_of(job, "canceled")
    assert max(spent.values()) < 2, spent


def test_follow_waits_for_the_start_streams_and_exits_like_the_job(lab):
    gate, second = lab.gate(), lab.gate()
    job = lab.submit(
        *SMALL, "--hold", "sh", "-c", f"echo one; {gate.command[2].removesuffix('; exit 0')}; echo two >&2; "
        f"{second.command[2].removesuffix('; exit 0')}; exit 7",
    )  # fmt: skip
    follower = lab.popen_kueue("follow", str(job))
    lab.kueue("release", str(job))
    assert read_line(follower.stdout) == b"one\n"
    lab.until(lambda: gate.begun, "it waits")
    begin = time.monotonic()
    gate.open()
    assert (
        read_line(follower.stderr, but=b"the job") == b"two\n"
    )  # remarks, such as that the job is held, stand there too
    assert time.monotonic() - begin < 2
    lab.until(lambda: second.begun, "it waits again")
    second.open()
    assert follower.wait(20) == 7
    again = lab.kueue("follow", str(job))
    assert (again.returncode, again.stdout, again.stderr) == (7, "one\n", "two\n")


def test_follow_of_a_job_that_does_not_exist_fails_at_once(lab):
    done = lab.kueue("follow", "999999", timeout=10)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Job not found!" in done.stderr


def test_several_jobs_are_followed_one_after_the_other_and_the_worst_code_counts(lab):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    first = lab.submit(*SMALL, "sh", "-c", f"echo one; echo bad >&2; {gate.command[2]}")
    second = lab.submit(*SMALL, "sh", "-c", "echo two; exit 3")
    lab.until(lambda: gate.begun, "the first one waits")
    lab.end_of(second, "failed")
    follower = lab.popen_kueue("follow", f"{first}-{second}", "999999")
    gate.open()
    out, err = follower.communicate(timeout=30)
    assert out == b"one\ntwo\n"
    assert err.decode() == f"job {first}:\nbad\njob {second}:\njob 999999:\nJob not found!\n"
    assert follower.returncode == 3


@pytest.mark.parametrize("options", [(), ("-o", "log.txt")])
def test_follow_goes_on_when_the_file_is_rotated(lab, options):
    gate, last = lab.gate(), lab.gate()
    words = [f"echo a long first line; {gate.command[2]}; echo two; {last.command[2]}; echo three"]
    job = lab.submit(*SMALL, *options, "sh", "-c", words[0].replace("; exit 0", ""))
    follower = lab.popen_kueue("follow", str(job))
    assert read_line(follower.stdout) == b"a long first line\n"
    lab.until(lambda: gate.begun, "it waits")
    files = [
        path
        for path in ([lab.folder / "log.txt"] if options else (lab.folder / "state").rglob("stdout"))
        if path.read_bytes() == b"a long first line\n"
    ]
    assert len(files) == 1
    os.truncate(files[0], 0)
    gate.open()
    assert read_line(follower.stdout) == b"two\n"
    lab.until(lambda: last.begun, "it waits again")
    last.open()
    assert read_line(follower.stdout) == b"three\n"
    assert follower.wait(20) == 0


def test_an_interrupted_follower_leaves_the_job_alone(lab):
    job = lab.submit(*SMALL, "sh", "-c", "echo up; sleep 600")
    follower = lab.popen_kueue("follow", str(job))
    assert read_line(follower.stdout) == b"up\n"
    follower.send_signal(signal.SIGINT)
    assert follower.wait(20) == -signal.SIGINT
    assert lab.state(job) == "running"


@pytest.mark.parametrize("path", ["/", "/nosuch/x", "{shut}/x"])
def test_an_output_file_that_cannot_be_opened_fails_the_job_and_names_the_path(lab, tmp_path, path):
    shut = tmp_path / "shut"
    shut.write_text("a file is no directory, not even for root")
    path = path.format(shut=shut)
    job = lab.run(*SMALL, "-o", path, "true")
    assert (job["state"], job["return_code"]) == ("failed", -43)
    assert path in job["comment"]
    assert lab.run(*SMALL, "true")["state"] == "succeeded"


def test_a_second_attempt_begins_its_output_anew(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        lab.start_worker("w1")
        captured = lab.submit(*SMALL, "sh", "-c", "echo line; sleep 600")
        to_file = lab.submit(*SMALL, "-o", "out.txt", "sh", "-c", "echo line; exec sleep 600")
        for attempt in (1, 2, 3):
            lab.until(
                lambda: [row["attempt"] for row in lab.rows("running")] == [attempt, attempt],  # noqa: B023 - called at once
                f"attempt {attempt} runs",
            )
            lab.until(lambda: lab.output(captured) == "line\n", "the line is there")
            lab.until(lambda: (tmp_path / "out.txt").read_text() == "line\n", "the line is in the file")
            if attempt < 3:
                crash(lab)
        assert "=== stdout ===\nline\n" in lab.kueue("show-job", str(captured)).stdout
        assert lab.kueue("remove-job", "--kill", str(captured), str(to_file)).returncode == 0


def crash(lab):
    """All of the worker dies, as when its machine loses power, and it starts anew at once."""
    server = lab.server.pid
    victims = [pid for pid in [*lab.runners(), *lab.members()] if pid != server]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    lab.workers["w1"].wait()
    lab.start_worker("w1")


def read_line(stream, but=b"\0"):
    """The next line that does not begin with `but`."""
    while (line := stream.readline()).startswith(but):
        continue
    return line


def test_a_reader_that_leaves_early_is_no_error(lab):
    job = lab.run(*SMALL, "seq", "100000")
    done = subprocess.run(
        f"{lab.python} -m kueue.cli.main -c {lab.folder}/lab.toml log {job['id']} | head -1",
        shell=True, capture_output=True, text=True, env=lab.environment(), check=False,
    )  # fmt: skip
    assert done.stdout == "1\n"
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_the_whole_output_of_any_size_below_the_limit_can_be_had(lab):
    job = lab.run(*SMALL, "seq", "300000")
    assert lab.output(job["id"]) == "".join(f"{number}\n" for number in range(1, 300001))
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert "bytes are left out here" in shown
    assert "\n300000\n" in shown
