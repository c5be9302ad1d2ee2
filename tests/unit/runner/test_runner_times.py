"""When a job began and what it used is true, whoever of its runner dies and whoever goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runner_bench import PATIENCE_SECONDS, QUEUE, boottime, is_alive, wait_until

from kueue.runner.mains import boot_id
from kueue.runner.tree import status, tag_of

NEAR_SECONDS = 0.25  # clock ticks, and the moment between fork and note; far less than a job's age in each test
AGE_SECONDS = 0.6

SUCCESSOR = """
import json, socket, sys
from kueue.runner.children import boottime
from kueue.runner.keeper import Keeper, Settings
from kueue.runner.log import Log
from kueue.runner.rundir import Rundir
from kueue.runner.shared import Shared
from kueue.runner.spawner import Spawner
from kueue.runner.spool import Spool
from kueue.runner.succession import take_over
from kueue.runner.wire import Lines

place = Rundir(sys.argv[1], "one")
spawner = Spawner(Lines(socket.socketpair()[0]), Spool(place.spool), Log(place.log), place.path, Shared(boottime()))
keeper = Keeper(Settings(place, "identity", "1"), -1)
take_over(keeper, spawner)
keeper.do(keeper.policy.tick(boottime()))
for offer, care in keeper.cares.items():
    attempt = keeper.policy.attempts[offer]
    print(json.dumps({**care.describe(attempt.state), "started_at": attempt.started_at, "proven": attempt.pause_proven}))
"""
"""A spawner that never got a word from its keeper takes over for it."""


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid))


def age(seconds=AGE_SECONDS):
    """Let the clock go on: what is measured here is a difference of times."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end)


def end_of(desk, offer):
    """Its end record; None if nobody saw its end."""
    for state in desk.attached["attempts"]:
        if state["offer"] == offer and state["state"] in ("ended", "gone"):
            return state["end"]
    while True:
        event = desk._next()
        if event["type"] in ("Ended", "Gone") and event["offer"] == offer:
            return event.get("end")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["keeper", "spawner"])
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 4, 6, 8, 12])
def test_both_killed_within_milliseconds_do_not_make_the_job_younger(desk, bench, first, milliseconds):
    desk.start(1, "sleep", "7060")
    told = desk.expect("Started", 1)
    began = boottime()
    age()
    pair = [bench.keeper(), bench.spawner()]
    if first == "spawner":
        pair.reverse()
    os.kill(pair[0], signal.SIGKILL)
    until = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < until:
        pass
    kill(pair[1])
    wait_until(lambda: not bench.is_locked() or bench.keeper() not in pair)
    again = bench.attach() if bench.is_locked() else bench.start_runner("two")
    (state,) = again.attached["attempts"]
    assert state["started_wall"] == pytest.approx(told["started_wall"], abs=NEAR_SECONDS)
    if is_alive(told["pid"]):
        os.kill(told["pid"], signal.SIGKILL)
    end = end_of(again, 1)
    if end is not None:
        assert end["outcome"] == {"type": "signaled", "signal": 9}
        assert end["started_wall"] == pytest.approx(told["started_wall"], abs=NEAR_SECONDS)
        assert AGE_SECONDS <= end["run_seconds"] <= boottime() - began + NEAR_SECONDS


def succeed(state):
    """What a successor without a mirror makes of the attempts in this state directory, by offer."""
    done = subprocess.run(
        [sys.executable, "-c", SUCCESSOR, str(state)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return {row["offer"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def left(tmp_path):
    """A state directory with what a keeper and a spawner have left: their records, and a process of each offer."""
    place = tmp_path / "runners/one"
    place.mkdir(parents=True)
    processes = []

    def leave(offer, *argv, is_noted=True, **terms):
        folder = tmp_path / "spool" / str(offer)
        folder.mkdir(parents=True)
        tag = tag_of(QUEUE, str(tmp_path), offer)
        record = {"offer": offer, "job": offer, "queue_id": QUEUE, "tag": tag, "runner": "one"}
        (folder / "start.json").write_text(json.dumps({**record, "ordered_wall": time.time(), **terms}))
        mark = f"ulimit -S -x {tag}; " if not is_noted else ""
        process = subprocess.Popen(["bash", "-c", mark + 'exec "$@"', "bash", *argv], start_new_session=True)
        processes.append(process)
        if is_noted:
            with Path(place / f"mains-{1 << 22}").open("ab") as file:
                file.write(boot_id() + b"\n" + b"%d %d %d\n" % (offer, process.pid, status(process.pid).start))
        return process

    yield tmp_path, leave
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_successor_that_was_told_nothing_learns_from_the_process_when_it_began(left, is_noted):
    state, leave = left
    process = leave(1, "sleep", "7061", is_noted=is_noted, on_lost="wait", timeout_seconds=3600)
    wall, at = time.time(), boottime()
    wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    age()
    row = succeed(state)[1]
    assert (row["state"], row["pid"]) == ("running", process.pid)
    assert row["started_wall"] == pytest.approx(wall, abs=NEAR_SECONDS)
    assert row["started_at"] == pytest.approx(at, abs=NEAR_SECONDS)


def test_a_successor_that_was_told_nothing_pauses_what_needs_a_lease_until_there_is_one(left):
    state, leave = left
    process = leave(1, "sleep", "7062")
    leave(2, "sleep", "7063", on_lost="wait")
    rows = succeed(state)
    assert (rows[1]["state"], rows[1]["proven"], rows[2]["state"]) == ("paused", True, "running")
    assert status(process.pid).state == "T"


def test_a_successor_finds_a_process_that_had_to_wait_for_another_one(left):
    state, leave = left
    process = leave(2, "sleep", "7064", line=1, on_lost="wait")
    leave(1, "sleep", "7065", on_lost="wait")
    rows = succeed(state)
    assert (rows[2]["state"], rows[2]["pid"]) == ("running", process.pid)


def test_the_run_time_of_a_job_whose_end_is_finished_by_another_runner_is_its_own(desk, bench):
    os.mkfifo(bench.work / "gate")
    desk.start(1, "sh", "-c", "setsid sh -c 'trap \"\" TERM; touch ready; sleep 7066' & read x < gate; exit 7")
    told = desk.expect("Started", 1)
    wait_until((bench.work / "ready").exists)
    age()
    (bench.work / "gate").write_text("\n")
    main = bench.folder(1) / "main.json"
    wait_until(lambda: main.exists() and main.read_bytes())  # made, and then written at once
    both = (bench.keeper(), bench.spawner())
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    kill(*both)
    end = end_of(bench.start_runner("two"), 1)
    assert end["outcome"] == {"type": "exited", "code": 7}
    assert end["started_wall"] == pytest.approx(told["started_wall"], abs=NEAR_SECONDS)
    assert end["run_seconds"] == pytest.approx(end["ended_wall"] - told["started_wall"], abs=NEAR_SECONDS)
    assert end["run_seconds"] >= AGE_SECONDS


def test_what_a_job_used_that_ended_while_there_was_no_keeper_is_known(desk, bench):
    os.mkfifo(bench.work / "gate")
    desk.start(1, "sh", "-c", "read x < gate; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    desk.expect("Started", 1)
    spawner, keeper = bench.spawner(), bench.keeper()
    os.kill(spawner, signal.SIGSTOP)
    (main,) = bench.tree(1)
    (bench.work / "gate").write_text("\n")
    wait_until(lambda: not is_alive(main))
    kill(keeper)
    os.kill(spawner, signal.SIGCONT)
    end = end_of(bench.attach(), 1)
    assert end["outcome"] == {"type": "exited", "code": 0}
    assert end["cpu_seconds"] > 0
    assert end["max_rss_mb"] > 0


def test_what_the_main_process_used_is_known_though_the_keeper_died_before_the_rest_had_ended(desk, bench):
    desk.start(
        1,
        "sh",
        "-c",
        "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; setsid sh -c 'trap \"\" TERM; touch ready; sleep 7067' &"
        " while [ ! -e ready ]; do :; done",
        grace_seconds=60,
    )
    desk.expect("Changed", 1, state="stopping")
    desk.drain()
    kill(bench.keeper())
    again = bench.attach()
    again.send("StopOrder", offer=1, kill=True)
    end = end_of(again, 1)
    assert end["outcome"] == {"type": "exited", "code": 0}
    assert end["cpu_seconds"] > 0
    assert end["max_rss_mb"] > 0


@pytest.mark.parametrize("who", ["keeper", "spawner"])
def test_a_program_that_cannot_be_started_is_told_so_though_one_of_its_runner_has_died(desk, bench, who):
    os.mkfifo(bench.work / "out")  # to open it waits for a reader
    desk.start(1, "no-such-program", stdout=str(bench.work / "out"))
    wait_until(lambda: len(bench.tree(1)) == 1)
    before = bench.info()
    kill(bench.keeper() if who == "keeper" else bench.spawner())
    wait_until(lambda: bench.info() != before)
    again = bench.attach()
    (bench.work / "out").read_bytes()
    end = end_of(again, 1)
    assert (end["outcome"]["type"], end["outcome"].get("cause")) == ("not_started", "not_found")
    assert end["started_wall"] is None


def test_the_first_offer_of_a_queue_is_mirrored_like_any_other(tmp_path):
    from kueue.runner.keeper import Keeper, Settings
    from kueue.runner.rundir import Rundir

    (tmp_path / "runners" / "one").mkdir(parents=True)
    (tmp_path / "spool").mkdir()
    keeper = Keeper(Settings(Rundir(str(tmp_path), "one"), "identity", "1"), -1)
    assert set(keeper.mirror.of({0, 7})["rows"]) == {"0", "7"}
