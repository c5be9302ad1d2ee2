"""A job that takes its own mark away is still known by its main process: it is stopped, paused and proven gone."""

import os
import signal
import sys

import pytest
from runner_bench import is_alive, wait_until

from kueue.runner.tree import Scanner, status

pytestmark = pytest.mark.slow

# What has no mark any more: the main process, its child, a grandchild with a session of its own.
UNMARKED = """
import os, resource, subprocess, sys, time
resource.setrlimit(10, (7, resource.getrlimit(10)[1]))
child = subprocess.Popen(["sh", "-c", "setsid sleep 7090 & echo $! > deep; wait"])
while not os.path.exists("deep") or not open("deep").read().strip():
    time.sleep(0.01)
open("pids.new", "w").write(f"{os.getpid()} {child.pid} " + open("deep").read())
os.rename("pids.new", "pids")
number = 0
while True:
    number += 1
    open("n", "w").write(str(number))
    time.sleep(0.02)
"""


def start_unmarked(desk, bench, offer=1, **more):
    """Returns the numbers of its three processes."""
    desk.start(offer, sys.executable, "-c", UNMARKED, **more)
    wait_until((bench.work / "pids").exists)
    desk.expect("Started", offer)
    pids = [int(word) for word in (bench.work / "pids").read_text().split()]
    assert bench.tree(offer) == []
    return pids


def kill(*pids):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def gone(pids):
    return not any(is_alive(pid) for pid in pids)


def test_a_job_without_its_mark_is_killed_with_all_it_has_started(desk, bench):
    pids = start_unmarked(desk, bench)
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert gone(pids)


def test_a_job_without_its_mark_is_terminated(desk, bench):
    pids = start_unmarked(desk, bench)
    desk.send("StopOrder", offer=1, grace_seconds=60)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert gone(pids)


def test_a_job_without_its_mark_is_paused_and_continued(desk, bench):
    pids = start_unmarked(desk, bench)
    desk.lease(0.1)
    desk.expect("PauseDone")
    assert all(status(pid).is_stopped for pid in pids)
    before = (bench.work / "n").read_text()
    desk.drain()
    assert (bench.work / "n").read_text() == before
    desk.lease()
    wait_until(lambda: (bench.work / "n").read_text() not in ("", before))
    assert not any(status(pid).is_stopped for pid in pids)
    desk.send("StopOrder", offer=1, kill=True)
    desk.end(1)
    assert gone(pids)


def test_a_time_limit_holds_for_a_job_without_its_mark(desk, bench):
    pids = start_unmarked(desk, bench, timeout_seconds=1.5)
    assert desk.end(1)["outcome"]["type"] == "timed_out"
    assert gone(pids)


def test_what_a_job_without_its_mark_leaves_behind_in_its_session_is_stopped(desk, bench):
    script = "import resource, os\nresource.setrlimit(10, (7, -1))\nos.execvp('sh', ['sh', '-c', 'sleep 7091 & echo $! > left'])"
    assert desk.run(1, sys.executable, "-c", script)["leftovers_stopped"] == 1
    assert gone([int((bench.work / "left").read_text())])


def test_a_stranger_that_ran_in_the_number_of_a_main_process_is_not_taken_for_it(bench):
    """Another start time is another process."""
    number = os.getpid()
    scanner = Scanner()
    scanner.know_main(11, number, status(number).start - 1)
    assert scanner.signal_tree(11, signal.SIGTERM).pids == []
    scanner.know_main(12, number, status(number).start)
    assert number in scanner.look([12])[12].pids


def test_a_job_without_its_mark_is_known_to_the_spawner_that_takes_over(desk, bench):
    pids = start_unmarked(desk, bench)
    kill(bench.keeper())
    again = bench.attach()
    again.send("StopOrder", offer=1, kill=True)
    assert again.end(1)["outcome"]["type"] == "canceled"
    assert gone(pids)


def test_a_job_without_its_mark_is_known_when_its_spawner_has_died(desk, bench):
    pids = start_unmarked(desk, bench)
    old = bench.spawner()
    kill(old)
    wait_until(lambda: bench.spawner() != old)
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert gone(pids)


def test_a_job_without_its_mark_is_known_to_the_third_keeper(desk, bench):
    pids = start_unmarked(desk, bench)
    for _ in range(2):
        kill(bench.keeper())
        desk = bench.attach()
    desk.send("StopOrder", offer=1, kill=True)
    event = next(e for e in iter(desk._next, None) if e["type"] in ("Ended", "Gone"))
    assert event["offer"] == 1
    assert gone(pids)


def test_what_a_dead_runner_left_without_a_mark_is_killed_by_the_next(desk, bench):
    pids = start_unmarked(desk, bench)
    kill(bench.keeper(), bench.spawner())
    assert not gone(pids)
    second = bench.start_runner("two")
    if [state["state"] for state in second.attached["attempts"]] != ["gone"]:
        second.expect("Gone", 1)
    assert gone(pids)
