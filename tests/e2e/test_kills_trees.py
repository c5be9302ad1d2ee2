"""Jobs are stopped with all that they have started, wherever it hides; until then nothing of theirs is free."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.kill_lab import DONE, SMALL, KillLab, is_stopped, lives, sleepers


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with KillLab(tmp_path_factory.mktemp("trees")) as lab:
        lab.start_server(global_resources={"genus": 1})
        lab.start_worker("w1")
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


HIDING = """
import os, signal, subprocess, sys, time
mark = sys.argv[1]
subprocess.Popen(["setsid", "sleep", mark])
subprocess.Popen(["env", "-i", "sleep", mark])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", mark])
    os._exit(0)
os.wait()
group = subprocess.Popen(["sh", "-c", f"sleep {mark} & sleep {mark} & wait"], preexec_fn=os.setpgrp)
time.sleep(0.3)
os.killpg(group.pid, signal.SIGSTOP)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "ignore" else signal.SIG_DFL)
time.sleep(600)
"""


@pytest.mark.parametrize("manner", ["obeys", "ignore"])
def test_kill_finds_every_hidden_process_and_frees_the_room_only_then(lab, manner):
    mark = f"{600 + len(manner)}.{os.getpid()}"
    script = lab.folder / "hide.py"
    script.write_text(HIDING)
    job = lab.quick(lab.range_of(lab.python, str(script), mark, manner, cores=16, counters=[("genus", 1)]))[0]

    def hidden():
        return [pid for pid in sleepers(mark) if pid]

    lab.until(lambda: len(hidden()) == 5, "setsid, env -i, double fork and a group of two live")
    lab.until(lambda: sum(is_stopped(pid) for pid in hidden()) == 2, "the group is stopped")
    main = lab.processes_of(job)
    look = f"for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p; echo; done 2> /dev/null | grep -c '^[^ ]*sleep {mark} ' > left; true"
    following = lab.quick(lab.range_of("sh", "-c", look, cores=16, counters=[("genus", 1)]))[0]
    begin = time.monotonic()
    killer = lab.popen_kueue("remove-job", "--kill", str(job))
    seen = set()
    while killer.poll() is None:
        living = [pid for pid in [*hidden(), *main] if lives(pid)]
        state = lab.state(job)
        seen.add(state)
        if living and state in DONE:
            # Looked at in this order, a living one may have ended in between: look again.
            assert not [pid for pid in [*hidden(), *main] if lives(pid)]
        assert time.monotonic() - begin < 15
        time.sleep(0.02)
    took = time.monotonic() - begin
    assert killer.returncode in (0, 1)
    lab.until(lambda: not hidden() and not any(lives(pid) for pid in main), "none is left", seconds=max(0.1, 15 - took))
    lab.until_state(job, "canceled")
    lab.end_of(following)
    assert lab.lines("left") == ["0"], "the room was free only when all were gone"
    print(f"\n{manner}: all gone and the room free after {took:.1f} s")


UNMARKED = """
import resource, subprocess, sys, time
resource.setrlimit(10, (7, resource.getrlimit(10)[1]))
subprocess.Popen(["setsid", "sleep", sys.argv[1]])
subprocess.Popen(["sh", "-c", f"sleep {sys.argv[1]} & wait"])
time.sleep(600)
"""


def test_a_job_that_changes_the_limit_by_which_it_is_known_is_killed_with_all_it_has_started(lab):
    mark = f"609.{os.getpid()}"
    job = lab.quick(lab.range_of(lab.python, "-c", UNMARKED, mark, cores=16))[0]
    lab.until(lambda: len(sleepers(mark)) == 2, "its children live")
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    lab.until_state(job, "canceled")
    assert sleepers(mark) == []


def test_a_job_that_needs_long_to_die_says_stopping_and_keeps_its_room_and_licence(lab):
    script = "trap 'sleep 5; exit 0' TERM; echo up > up; while :; do sleep 0.1; done"
    job = lab.quick(lab.range_of("sh", "-c", script, cores=9, counters=[("genus", 1)]))[0]
    lab.until(lambda: lab.lines("up"), "it runs")
    same_licence = lab.quick(lab.range_of("true", counters=[("genus", 1)]))[0]
    same_cores = lab.quick(lab.range_of("true", cores=9))[0]
    killer = lab.popen_kueue("remove-job", "--kill", str(job))
    lab.until(lambda: lab.job(job).get("stopping"), "it is being stopped")
    begin = time.monotonic()
    while time.monotonic() - begin < 3:
        found = lab.job(job)
        assert found["state"] == "running"
        assert found["stopping"]
        assert lab.states([same_licence, same_cores]) == ["pending", "pending"]
        assert lab.machines()["w1"]["free_cores"] <= 16 - 9
    assert killer.wait(20) == 0
    lab.until_state(job, "canceled")
    lab.end_of(same_licence)
    lab.end_of(same_cores)


def test_two_hundred_jobs_removed_the_moment_they_are_submitted_all_become_final(lab):
    jobs = []
    for number in range(200):
        (job,) = lab.quick(lab.range_of("true"))
        lab.ask("RemoveJobs", request_id=f"{number:032x}", ids=[[job, job]], kill=True)
        jobs.append(job)
    lab.until_all(jobs, *DONE)
    assert set(lab.states(jobs)) <= {"succeeded", "canceled"}
    assert lab.run(*SMALL, "true")["state"] == "succeeded"
    assert lab.server.poll() is None
    assert lab.workers["w1"].poll() is None
    lab.no_traceback()


def test_a_main_process_killed_from_outside_is_noticed_at_once(lab):
    job = lab.shell("echo $$ > main; exec sleep 600", cores=16)
    following = lab.shell("true", cores=16)
    lab.until(lambda: lab.lines("main"), "it runs")
    begin = time.monotonic()
    lab.kill(int(lab.lines("main")[0]))
    found = lab.end_of(job, "failed", seconds=5)
    assert "signal 9" in found["comment"]
    lab.end_of(following, seconds=5)
    assert time.monotonic() - begin < 5


def test_a_heavy_writer_delays_neither_listing_nor_kill(lab):
    job = lab.quick(lab.range_of("yes"))[0]
    lab.until_state(job, "running")
    out = lab.spool()
    lab.until(lambda: any(path.stat().st_size > 50e6 for path in out.glob("*/stdout")), "it writes")
    listing = []
    for _ in range(5):
        begin = time.monotonic()
        assert lab.kueue("list-jobs", "-n", "10").returncode == 0
        listing.append(time.monotonic() - begin)
    begin = time.monotonic()
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0
    killing = time.monotonic() - begin
    assert min(listing) < 2
    assert killing < 2
    lab.until_state(job, "canceled")
    lab.kueue("clean-jobs", "--all")
    print(f"\nlist-jobs {min(listing):.2f}-{max(listing):.2f} s, remove-job --kill {killing:.2f} s beside `yes`")
