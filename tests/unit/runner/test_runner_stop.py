"""How a job's tree is stopped, paused and continued, always with proof."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runner_bench import boottime, is_alive, wait_until

from kueue.runner.tree import status

pytestmark = pytest.mark.slow

# Everything a job may do to get out of sight: its own session, an empty environment, a double fork, a stopped group.
HIDERS = """
setsid sleep 7001 &
env -i /bin/sleep 7002 &
(setsid sh -c 'sleep 7003 & sleep 7004' &)
sh -c 'kill -STOP $$; sleep 7005' &
touch ready
sleep 7006
"""


def test_every_process_of_the_tree_is_stopped(desk, bench):
    desk.start(1, "sh", "-c", HIDERS)
    wait_until(lambda: (bench.work / "ready").exists() and len(bench.tree(1)) >= 7)
    pids = bench.tree(1)
    desk.send("StopOrder", offer=1, grace_seconds=1.0)
    desk.expect("Changed", 1, state="stopping")
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert not [pid for pid in pids if is_alive(pid)]
    assert bench.tree(1) == []


def test_twenty_children_with_a_child_each_are_stopped(desk, bench):
    desk.start(1, "sh", "-c", "for i in $(seq 20); do sh -c 'sleep 7010 & wait' & done; wait")
    wait_until(lambda: len(bench.tree(1)) == 41)
    desk.send("StopOrder", offer=1)
    desk.end(1)
    assert bench.tree(1) == []


def test_a_job_that_ignores_the_first_signal_is_killed_after_the_grace(desk, bench):
    desk.start(1, "sh", "-c", "trap '' TERM; touch ready; while :; do sleep 0.1; done")
    wait_until((bench.work / "ready").exists)
    asked = boottime()
    desk.send("StopOrder", offer=1, grace_seconds=0.5)
    end = desk.end(1)
    assert end["outcome"]["type"] == "canceled"
    assert boottime() - asked >= 0.5
    assert end["run_seconds"] > 0.5


def test_a_job_may_use_the_grace_to_clean_up(desk, bench):
    desk.start(1, "sh", "-c", "trap 'echo cleaned; exit 0' TERM; touch ready; while :; do sleep 0.05; done")
    wait_until((bench.work / "ready").exists)
    desk.send("StopOrder", offer=1)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert bench.text(1) == "cleaned\n"


HEADLESS = """
import ctypes, platform, threading, time
def count():
    number = 0
    while True:
        number += 1
        open("n", "w").write(str(number))
        time.sleep(0.02)
threading.Thread(target=count).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends the first thread alone
"""


def test_a_process_whose_first_thread_has_ended_is_neither_dead_nor_paused_by_that(desk, bench):
    desk.start(1, sys.executable, "-c", HEADLESS)
    goes_on(bench, "n")
    (pid,) = bench.tree(1)
    wait_until(lambda: status(pid).state == "Z", "its first thread has ended")
    desk.lease(0.1)
    desk.expect("PauseDone")
    before = count(bench, "n")
    desk.drain()
    assert count(bench, "n") == before
    desk.send("StopOrder", offer=1)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert bench.tree(1) == []


def test_a_stop_with_kill_does_not_wait(desk, bench):
    desk.start(1, "sh", "-c", "trap 'echo cleaned; exit 0' TERM; touch ready; while :; do sleep 0.05; done")
    wait_until((bench.work / "ready").exists)
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert bench.text(1) == ""


def test_a_stop_that_comes_after_the_end_changes_nothing(desk):
    assert desk.run(1, "true")["outcome"] == {"type": "exited", "code": 0}
    desk.send("StopOrder", offer=1, kill=True)
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 0}


def test_a_stop_races_with_the_end_and_both_are_survived(desk):
    for offer in range(1, 60):
        desk.start(offer, "true")
        desk.send("StopOrder", offer=offer, kill=True)
    for offer in range(1, 60):
        assert desk.end(offer)["outcome"]["type"] in ("exited", "canceled")


def test_a_stop_of_an_unknown_offer_is_answered(desk):
    desk.send("StopOrder", offer=9)
    desk.expect("Unknown", 9)


def test_leftovers_are_stopped_and_counted(desk, bench):
    end = desk.run(1, "sh", "-c", "(setsid sleep 7020 &) & sleep 7021 & true")
    assert end["outcome"] == {"type": "exited", "code": 0}
    assert end["leftovers_stopped"] == 2
    assert end["notes"] == []
    assert bench.tree(1) == []


def test_leftovers_that_ignore_the_first_signal_are_killed(desk, bench):
    end = desk.run(1, "sh", "-c", "(trap '' TERM; sleep 7022) & sleep 0.1", grace_seconds=0.3)
    assert end["leftovers_stopped"] >= 1
    assert bench.tree(1) == []


def test_what_ends_by_itself_right_after_the_main_process_is_no_leftover(desk, bench):
    end = desk.run(1, "sh", "-c", "(sleep 0.15; echo drained) & true")
    assert end["leftovers_stopped"] == 0
    assert bench.text(1) == "drained\n"


def test_background_processes_stay_where_that_is_wanted(desk, bench):
    end = desk.run(1, "sh", "-c", "sleep 7023 & true", keep_background=True)
    assert end["outcome"]["code"] == 0
    assert end["leftovers_stopped"] == 0
    assert len(bench.tree(1)) == 1


def test_a_job_that_takes_too_long_is_stopped(desk):
    end = desk.run(1, "sleep", "60", timeout_seconds=0.3)
    assert end["outcome"] == {"type": "timed_out", "after_seconds": 0.3}
    assert end["run_seconds"] >= 0.3


def test_a_job_within_its_time_is_left_alone(desk):
    assert desk.run(1, "sleep", "0.1", timeout_seconds=20)["outcome"]["code"] == 0


def test_nothing_starts_without_a_lease(bench):
    desk = bench.start_runner()
    desk.start(1, "touch", "made")
    assert "lease" in desk.expect("Refused", 1)["reason"]
    desk.lease(-1)
    desk.start(2, "touch", "made")
    desk.expect("Refused", 2)
    assert not (bench.work / "made").exists()
    assert not bench.folder(1).exists()


COUNTER = "i=0; while :; do i=$((i+1)); echo $i > {0}.new; mv {0}.new {0}; sleep 0.02; done"


def count(bench, name):
    try:
        return int((bench.work / name).read_text())
    except (OSError, ValueError):
        return 0


def goes_on(bench, name):
    before = count(bench, name)
    wait_until(lambda: count(bench, name) > before, f"{name} goes on")


def is_still(bench, offer):
    return all(is_stopped(pid) for pid in bench.tree(offer))


def is_stopped(pid):
    """Stopped, or (a shell that waits for the exec of a child that is stopped) about to be before it does anything."""
    state = status(pid).state
    if state != "D":
        return state in "Tt"
    pending = (Path("/proc") / str(pid) / "status").read_text().partition("ShdPnd:")[2].split()[0]
    return bool(int(pending, 16) >> (signal.SIGSTOP - 1) & 1)


def test_at_the_end_of_the_lease_only_what_may_be_given_away_is_paused(desk, bench):
    for offer, on_lost in ((1, "rerun"), (2, "wait"), (3, "fail")):
        desk.start(offer, "sh", "-c", COUNTER.format(on_lost), on_lost=on_lost)
    for name in ("rerun", "wait", "fail"):
        goes_on(bench, name)
    deadline = desk.lease(0.3)
    desk.expect("Changed", 1, state="paused")
    done = desk.expect("PauseDone")
    assert done["deadline_boottime"] == deadline
    assert boottime() >= deadline
    assert is_still(bench, 1)
    still = count(bench, "rerun")
    goes_on(bench, "wait")
    goes_on(bench, "fail")
    assert count(bench, "rerun") == still
    desk.lease()
    desk.expect("Changed", 1, state="running")
    goes_on(bench, "rerun")


def test_a_paused_job_that_has_made_sessions_is_paused_whole(desk, bench):
    script = f"({COUNTER.format('inner')}) & setsid sh -c '{COUNTER.format('outer')}' & wait"
    desk.start(1, "bash", "-mc", script)
    goes_on(bench, "inner")
    goes_on(bench, "outer")
    desk.lease(0.1)
    desk.expect("PauseDone")
    assert is_still(bench, 1)
    assert len(bench.tree(1)) >= 3


VFORK = """
import os
open("ready", "w").close()
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)])
"""


def test_a_process_that_waits_in_the_kernel_for_a_stopped_child_counts_as_paused(desk, bench):
    os.mkfifo(bench.work / "fifo")
    desk.start(1, sys.executable, "-c", VFORK)
    wait_until(lambda: sorted(status(pid).state for pid in bench.tree(1)) == ["D", "S"])
    desk.lease(0.0)
    desk.expect("PauseDone")
    assert sorted(status(pid).state for pid in bench.tree(1)) == ["D", "T"]
    desk.lease()
    desk.expect("Changed", 1, state="running")
    with open(bench.work / "fifo", "w"):
        pass
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 0}


def test_what_is_continued_by_others_is_paused_again(desk, bench):
    desk.start(1, "sh", "-c", COUNTER.format("n"))
    goes_on(bench, "n")
    desk.lease(0.1)
    desk.expect("PauseDone")
    before = count(bench, "n")

    def has_run_again():
        for pid in bench.tree(1):  # again and again: the keeper may look before the job has had its turn
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return count(bench, "n") > before

    wait_until(has_run_again)
    wait_until(lambda: is_still(bench, 1))


def test_the_time_out_does_not_run_while_paused(desk, bench):
    desk.start(1, "sh", "-c", COUNTER.format("n"), timeout_seconds=2.0)
    goes_on(bench, "n")
    desk.lease(0.0)
    desk.expect("PauseDone")
    paused_at = boottime()
    wait_until(lambda: boottime() > paused_at + 2.2)
    assert not [event for event in desk.drain() if event["type"] == "Ended"]
    desk.lease()
    end = desk.end(1)
    assert end["outcome"] == {"type": "timed_out", "after_seconds": 2.0}
    assert end["run_seconds"] > 4.0
    assert "paused for 2 s" in end["notes"][0]


def test_the_stop_of_a_paused_job_never_lets_it_run_again(desk, bench):
    desk.start(1, "sh", "-c", "trap 'echo ran >> ran; exit 0' TERM CONT; touch ready; while :; do sleep 0.02; done")
    wait_until((bench.work / "ready").exists)
    desk.lease(0.0)
    desk.expect("PauseDone")
    desk.send("StopOrder", offer=1)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    assert not (bench.work / "ran").exists()


def test_what_is_being_stopped_when_the_lease_ends_is_killed(desk, bench):
    desk.start(1, "sh", "-c", "trap '' TERM; touch ready; while :; do sleep 0.05; done", on_lost="wait")
    wait_until((bench.work / "ready").exists)
    desk.send("StopOrder", offer=1, grace_seconds=3600)
    desk.expect("Changed", 1, state="stopping")
    desk.lease(0.2)
    assert desk.end(1)["outcome"]["type"] == "canceled"
    desk.expect("PauseDone")


def test_while_nobody_holds_the_servers_lock_the_lease_does_not_end(desk, bench):
    lock = bench.state / "server.lock"
    lock.touch()
    desk = bench.attach(server_lock_path=str(lock), server_lock_seconds=0.5)
    desk.start(1, "sh", "-c", COUNTER.format("n"))
    first = desk.lease(0.5)
    wait_until(lambda: boottime() > first + 1.0)
    assert not [event for event in desk.drain() if event["type"] == "PauseDone"]
    goes_on(bench, "n")
    holder = """
import fcntl, struct, sys, os
file = open(sys.argv[1], "r+")
fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        desk.expect("PauseDone")
        process.stdin.close()


def test_an_idle_runner_uses_no_processor_time(desk, bench):
    desk.run(1, "true")

    def ticks():
        with open(f"/proc/{bench.keeper()}/stat") as file:
            return sum(int(word) for word in file.read().rsplit(")", 1)[1].split()[11:13])

    before = ticks()
    time.sleep(1.0)  # the measure itself, nothing is waited for
    assert ticks() - before <= 1
