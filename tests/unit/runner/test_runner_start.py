"""What a job finds when it starts, and what becomes of it: real processes."""

import json
import os
import signal
import sys

import pytest
from runner_bench import wait_until


def test_the_exit_code_is_the_jobs_own(desk):
    end = desk.run(1, "sh", "-c", "exit 3")
    assert end["outcome"] == {"type": "exited", "code": 3}
    assert end["started_wall"] <= end["ended_wall"]
    assert end["run_seconds"] > 0
    assert end["max_rss_mb"] >= 1


def test_a_signal_from_elsewhere_is_told_as_such(desk):
    assert desk.run(1, "sh", "-c", "kill -9 $$")["outcome"] == {"type": "signaled", "signal": 9}


def test_started_is_told_before_the_end(desk):
    desk.start(1, "true")
    started = desk.expect("Started", 1)
    assert started["pid"] > 0
    assert desk.end(1)["started_wall"] == pytest.approx(started["started_wall"])


def test_cpu_time_is_counted(desk):
    end = desk.run(1, "sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
    assert 0 < end["cpu_seconds"] < 30


@pytest.mark.parametrize(
    ("argv", "cause", "words"),
    [
        (["/no/such"], "not_found", "/no/such"),
        (["no-such-command"], "not_found", "no-such-command: command not found"),
        ([""], "not_found", "empty"),
        ([], "not_found", "empty"),
        (["/etc/passwd"], "not_executable", "Permission denied"),
        (["/etc"], "not_executable", "is a directory"),
        (["./binary"], "not_executable", "Exec format error"),
        (["./lost"], "not_executable", "interpreter"),
    ],
)
def test_what_cannot_be_executed_is_explained(desk, bench, argv, cause, words):
    (bench.work / "binary").write_bytes(b"\x7fELF\0\0not really\0")
    (bench.work / "lost").write_text("#!/no/such/interpreter\n")
    for name in ("binary", "lost"):
        (bench.work / name).chmod(0o755)
    end = desk.run(1, *argv)
    assert end["outcome"]["type"] == "not_started"
    assert end["outcome"]["cause"] == cause
    assert words in end["outcome"]["reason"]
    assert end["started_wall"] is None
    assert end["run_seconds"] == 0
    assert not [event for event in desk.drain() if event["type"] == "Started"]
    assert desk.run(2, "true")["outcome"] == {"type": "exited", "code": 0}


def test_a_script_without_an_interpreter_line_is_run_by_the_shell(desk, bench):
    (bench.work / "script").write_text('echo "it runs: $1"\n')
    (bench.work / "script").chmod(0o755)
    assert desk.run(1, "./script", "yes")["outcome"]["code"] == 0
    assert bench.text(1) == "it runs: yes\n"


def test_the_command_is_looked_for_along_the_jobs_own_path(desk, bench):
    (bench.work / "bin").mkdir()
    (bench.work / "bin" / "mine").write_text("#!/bin/sh\necho mine\n")
    (bench.work / "bin" / "mine").chmod(0o755)
    assert desk.run(1, "mine", env={"PATH": "bin:/bin"})["outcome"]["code"] == 0
    assert bench.text(1) == "mine\n"


def test_arguments_that_are_too_long_are_refused_with_their_size(desk):
    end = desk.run(1, "echo", *["x" * 100_000] * 70)
    assert end["outcome"]["cause"] == "limit"
    assert "7000" in end["outcome"]["reason"]


def test_a_very_long_argument_that_fits_arrives_whole(desk, bench):
    assert desk.run(1, "echo", "y" * 120_000)["outcome"]["code"] == 0
    assert bench.text(1) == "y" * 120_000 + "\n"


def test_bytes_that_are_no_text_travel_in_arguments_environment_and_output(desk, bench):
    raw = {"b64": "b2v/b2s="}  # ok\xffok
    env = {"PATH": "/bin:/usr/bin"}
    desk.start(1, "sh", "-c", 'printf %s "$0$V"', raw, env=env)
    desk.end(1)
    assert (bench.folder(1) / "stdout").read_bytes() == b"ok\xffok"
    desk.send(
        "StartAttempt", offer=2, job=2, queue_id="queue", argv=["printenv", "V"], env=[["V", raw]], cwd=str(bench.work)
    )
    desk.end(2)
    assert (bench.folder(2) / "stdout").read_bytes() == b"ok\xffok\n"


def test_lines_of_two_queues_that_have_one_number_never_wait_for_each_other(desk):
    desk.start(6, "sleep", "7071", line=5)
    desk.expect("Started", 6)
    for fields in ({}, {"line": 5}):
        desk.start(5 + len(fields) * 2, "true", queue_id="another", **fields)
        assert "another queue" in desk.expect("Refused", 5 + len(fields) * 2)["reason"]
    desk.send("StopOrder", offer=6, kill=True)
    desk.end(6)


def test_both_streams_are_captured_apart(desk, bench):
    desk.run(1, "sh", "-c", "echo o; echo e >&2")
    assert (bench.text(1), bench.text(1, "stderr")) == ("o\n", "e\n")


def test_an_output_path_is_relative_to_the_directory_and_truncated(desk, bench):
    (bench.work / "out").write_text("an older and longer text")
    end = desk.run(1, "sh", "-c", "echo new; echo gone >&2", stdout="out", stderr="null")
    assert end["outcome"]["code"] == 0
    assert (bench.work / "out").read_text() == "new\n"
    assert not (bench.folder(1) / "stdout").exists()
    assert not (bench.work / "null").exists()


@pytest.mark.parametrize("other", ["both", "./both", "link"])
def test_one_file_for_both_streams_keeps_the_order_of_what_is_written(desk, bench, other):
    (bench.work / "both").touch()
    (bench.work / "link").symlink_to("both")
    desk.run(1, "sh", "-c", "echo 1; echo 2 >&2; echo 3; echo 4 >&2", stdout="both", stderr=other)
    assert (bench.work / "both").read_text() == "1\n2\n3\n4\n"


@pytest.mark.parametrize("path", ["/", "/no/such/x", "sub"])
def test_an_output_path_that_cannot_be_made_is_named(desk, bench, path):
    (bench.work / "sub").mkdir()
    end = desk.run(1, "true", stdout=path)
    assert end["outcome"]["type"] == "not_started"
    assert end["outcome"]["cause"] == "output"
    assert f"output file {path}:" in end["outcome"]["reason"]


def test_a_directory_that_is_missing_is_named(desk, bench):
    end = desk.run(1, "true", cwd="/no/such/dir")
    assert end["outcome"]["cause"] == "directory"
    assert "/no/such/dir" in end["outcome"]["reason"]


def test_files_are_made_under_the_umask_of_the_submitter(desk, bench):
    desk.run(1, "touch", "made", umask=0o027, stdout="out")
    assert (bench.work / "made").stat().st_mode & 0o777 == 0o640
    assert (bench.work / "out").stat().st_mode & 0o777 == 0o640
    assert bench.folder(1).stat().st_mode & 0o077 == 0


def test_the_directory_is_spelled_as_the_user_wrote_it_if_it_is_the_same(desk, bench):
    link = bench.work.parent / "link"
    link.symlink_to(bench.work)
    desk.run(1, "printenv", "PWD", pwd=str(link))
    desk.run(2, "printenv", "PWD", pwd="/etc")
    desk.run(3, "printenv", "PWD", pwd="/no/such")
    assert bench.text(1) == f"{link}\n"
    assert bench.text(2) == bench.text(3) == f"{bench.work}\n"


def test_standard_input_is_at_its_end(desk, bench):
    assert desk.run(1, "cat")["outcome"]["code"] == 0
    desk.run(2, "sh", "-c", "read x || echo eof")
    assert bench.text(2) == "eof\n"


def test_the_job_gets_three_descriptors_and_no_more(desk, bench):
    desk.run(1, sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))")
    assert bench.text(1) == "['0', '1', '2', '3']\n"  # 3 is the directory being listed


def test_no_signal_is_blocked_or_ignored(desk, bench):
    desk.run(1, "sh", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status")
    # 32 and 33 belong to the C library, which ignores them in whatever its posix_spawn starts; nobody can send them.
    of_the_library = 0b11 << 31
    masks = [int(line.split()[1], 16) & ~of_the_library for line in bench.text(1).splitlines()]
    assert masks == [0, 0]


def test_the_job_leads_a_session_of_its_own(desk, bench):
    desk.run(1, "sh", "-c", "read -r stat < /proc/self/stat; echo $stat")
    fields = bench.text(1).rsplit(")", 1)[1].split()
    pid = int(bench.text(1).split()[0])
    assert (int(fields[2]), int(fields[3])) == (pid, pid)


def test_the_kernel_prefers_the_job_to_its_guard_when_memory_is_out(desk, bench):
    desk.run(1, "cat", "/proc/self/oom_score_adj")
    for pid in (bench.keeper(), bench.spawner()):
        with open(f"/proc/{pid}/oom_score_adj") as file:
            assert int(bench.text(1)) > int(file.read())


def test_the_nice_value_is_added(desk, bench):
    desk.run(1, "nice", nice=7)
    assert int(bench.text(1)) == os.nice(0) + 7


def test_the_environment_is_the_one_given(desk, bench):
    desk.run(1, "/usr/bin/env", env={"A": "1"})
    assert sorted(bench.text(1).splitlines()) == ["A=1", f"PWD={bench.work}"]


def test_the_record_on_disk_is_what_was_told_and_goes_when_forgotten(desk, bench):
    end = desk.run(1, "sh", "-c", "echo kept")
    assert json.loads((bench.folder(1) / "exit.json").read_text()) == end
    desk.send("ForgetAttempts", offers=[1])
    wait_until(lambda: not (bench.folder(1) / "start.json").exists())
    assert bench.text(1) == "kept\n"
    assert not (bench.folder(1) / "exit.json").exists()


def test_an_order_that_is_not_understood_is_refused_and_harms_nobody(desk):
    desk.start(1, "true", env={"A": {"b64": "not base64"}})
    assert "not understood" in desk.expect("Refused", 1)["reason"]
    desk.sock.sendall(b'junk\n{"type": 5}\n[]\n')
    assert desk.run(2, "true")["outcome"]["code"] == 0


def test_a_second_order_for_an_offer_starts_nothing(desk, bench):
    desk.start(1, "sh", "-c", "echo once >> log; sleep 60")
    desk.expect("Started", 1)
    desk.start(1, "sh", "-c", "echo twice >> log")
    assert desk.expect("Started", 1)
    wait_until((bench.work / "log").exists)
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    desk.start(1, "sh", "-c", "echo twice >> log")
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert (bench.work / "log").read_text() == "once\n"


def test_an_offer_withdrawn_before_it_came_is_not_started_when_it_comes(desk):
    desk.send("WithdrawOrder", offer=5)
    desk.expect("Withdrawn", 5)
    desk.start(5, "true")
    desk.expect("Withdrawn", 5)
    assert not [event for event in desk.drain() if event.get("offer") == 5]


def test_a_queued_attempt_starts_when_the_one_before_it_is_over(desk, bench):
    desk.start(1, "sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; echo first >> log")
    desk.start(2, "sh", "-c", "echo second >> log", line=1)
    desk.expect("Queued", 2)
    (bench.work / "go").touch()
    desk.end(2)
    assert (bench.work / "log").read_text() == "first\nsecond\n"


def test_a_queued_attempt_can_be_withdrawn(desk):
    desk.start(1, "sleep", "60")
    desk.start(2, "true", line=1)
    desk.expect("Queued", 2)
    desk.send("WithdrawOrder", offer=2)
    desk.expect("Withdrawn", 2)
    desk.send("StopOrder", offer=1, kill=True)
    desk.end(1)
    assert not [event for event in desk.drain() if event.get("offer") == 2]


def test_a_queued_attempt_is_given_back_by_a_runner_that_was_told_to_end(desk, bench):
    desk.start(1, "sleep", "60")
    desk.start(2, "touch", "made", line=1)
    desk.expect("Queued", 2)
    os.kill(bench.keeper(), signal.SIGTERM)
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.expect("Refused", 2)["leaving"]
    wait_until(lambda: not bench.folder(2).exists())
    assert not (bench.work / "made").exists()


def test_an_output_that_hangs_does_not_hold_up_others_and_can_be_stopped(desk, bench):
    os.mkfifo(bench.work / "fifo")
    desk.start(1, "true", stdout="fifo")
    assert desk.run(2, "true")["outcome"]["code"] == 0
    assert not [event for event in desk.kept if event.get("offer") == 1]
    wait_until(lambda: bench.tree(1))
    desk.send("StopOrder", offer=1)
    assert desk.end(1)["outcome"]["type"] == "canceled"


def test_an_output_that_hung_goes_on_when_somebody_reads(desk, bench):
    os.mkfifo(bench.work / "fifo")
    desk.start(1, "echo", "through", stdout="fifo")
    with open(bench.work / "fifo") as reader:
        assert reader.read() == "through\n"
    assert desk.end(1)["outcome"]["code"] == 0


def test_three_hundred_short_jobs_leave_no_zombies_and_no_descriptors(desk, bench):
    def descriptors():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (bench.keeper(), bench.spawner())]

    desk.run(1, "true")
    before = descriptors()
    for offer in range(2, 302):
        desk.start(offer, "true")
    for offer in range(2, 302):
        assert desk.end(offer)["outcome"]["code"] == 0
    assert descriptors() == before
    for pid in (bench.keeper(), bench.spawner()):
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            assert [int(child) for child in file.read().split()] in ([], [bench.spawner()])


def test_a_job_that_floods_its_output_does_not_delay_orders(desk, bench):
    desk.start(1, "yes", stdout="null")
    desk.expect("Started", 1)
    assert desk.run(2, "true")["outcome"]["code"] == 0
    desk.send("StopOrder", offer=1)
    assert desk.end(1)["outcome"]["type"] == "canceled"


def test_a_job_killed_from_outside_is_seen(desk):
    desk.start(1, "sleep", "60")
    os.kill(desk.expect("Started", 1)["pid"], signal.SIGKILL)
    assert desk.end(1)["outcome"] == {"type": "signaled", "signal": 9}
