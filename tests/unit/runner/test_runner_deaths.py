"""Keeper, spawner and worker die at any moment: no end is lost, nothing runs twice, nothing runs unguarded."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from runner_bench import QUEUE, is_alive, wait_until

pytestmark = pytest.mark.slow

WAIT = "while [ ! -e go ]; do sleep 0.02; done; exit 7"


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_when_the_spawner_is_killed_the_exit_codes_are_true(desk, bench):
    for offer in (1, 2):
        desk.start(offer, "sh", "-c", WAIT)
        desk.expect("Started", offer)
    old = bench.spawner()
    kill(old)
    wait_until(lambda: bench.spawner() != old)
    assert desk.run(3, "sh", "-c", "exit 5")["outcome"] == {"type": "exited", "code": 5}
    (bench.work / "go").touch()
    for offer in (1, 2):
        end = desk.end(offer)
        assert end["outcome"] == {"type": "exited", "code": 7}
        assert end["cpu_seconds"] > 0


def test_a_stream_of_jobs_survives_the_death_of_spawners(desk, bench):
    for offer in range(1, 41):
        desk.start(offer, "sh", "-c", f"echo {offer} >> log; exit {offer % 3}")
        if offer in (10, 20, 30):
            old = bench.spawner()
            os.kill(old, signal.SIGKILL)
            wait_until(lambda old=old: bench.spawner() != old)
    for offer in range(1, 41):
        event = next((e for e in desk.kept if e["type"] == "Refused" and e["offer"] == offer), None)
        if event is None:
            assert desk.end(offer)["outcome"] == {"type": "exited", "code": offer % 3}
    lines = (bench.work / "log").read_text().split()
    assert len(lines) == len(set(lines))


def test_when_the_keeper_is_killed_the_spawner_goes_on_with_codes_and_lease(desk, bench):
    deadline = desk.lease()
    desk.start(1, "sh", "-c", WAIT)
    desk.start(2, "sleep", "60")
    for offer in (1, 2):
        desk.expect("Started", offer)
    spawner = bench.spawner()
    kill(bench.keeper())
    again = bench.attach()
    assert again.attached["pid"] == spawner
    assert again.attached["lease_deadline_boottime"] == deadline
    states = {state["offer"]: state for state in again.attached["attempts"]}
    assert states[1]["state"] == states[2]["state"] == "running"
    assert states[1]["started_wall"]
    again.send("StopOrder", offer=2)
    assert again.end(2)["outcome"]["type"] == "canceled"
    (bench.work / "go").touch()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}
    assert again.run(3, "sh", "-c", "exit 4")["outcome"] == {"type": "exited", "code": 4}


def test_a_lease_renewed_while_nothing_else_happens_is_known_to_the_next_keeper(desk, bench):
    desk.start(1, "sleep", "7034")
    desk.expect("Started", 1)
    desk.drain()
    deadline = desk.lease(7200)
    desk.drain()
    kill(bench.keeper())
    assert bench.attach().attached["lease_deadline_boottime"] == deadline


def test_a_queued_attempt_is_not_started_by_a_keeper_that_has_not_seen_the_order(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.start(2, "touch", "made", line=1)
    desk.expect("Queued", 2)
    kill(bench.keeper())
    again = bench.attach()
    assert [state["offer"] for state in again.attached["attempts"]] == [1]
    (bench.work / "go").touch()
    again.end(1)
    again.drain()
    assert not (bench.work / "made").exists()
    wait_until(lambda: not bench.folder(2).exists())


def test_keepers_may_die_again_and_again(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    for _ in range(3):
        kill(bench.keeper())
        desk = bench.attach()
        assert [state["state"] for state in desk.attached["attempts"]] == ["running"]
    # The first spawner is the job's parent and died with its second life: the end is seen, its code may not be.
    (bench.work / "go").touch()
    event = next(e for e in iter(desk._next, None) if e["type"] in ("Ended", "Gone"))
    assert event["type"] == "Gone" or event["end"]["outcome"] == {"type": "exited", "code": 7}
    assert desk.run(2, "true")["outcome"]["code"] == 0


def the_kernel_tells_how_strangers_end():
    """Linux does since 6.15."""
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1].split("-")[0])) >= (6, 15)


@pytest.mark.skipif(not the_kernel_tells_how_strangers_end(), reason="this kernel forgets how other's children ended")
def test_jobs_that_lost_their_spawner_and_then_their_keeper_still_end_with_true_codes(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.start(2, "sleep", "7035")
    for offer in (1, 2):
        desk.expect("Started", offer)
    old = bench.spawner()
    kill(old)
    wait_until(lambda: bench.spawner() != old)
    # Killed before it has told the new spawner of the lease, the keeper would leave a successor that pauses them.
    assert desk.run(3, "true")["outcome"]["code"] == 0
    kill(bench.keeper())
    again = bench.attach()
    states = {state["offer"]: state["state"] for state in again.attached["attempts"] if state["offer"] != 3}
    assert states == {1: "running", 2: "running"}
    (bench.work / "go").touch()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}
    again.send("StopOrder", offer=2)
    assert again.end(2)["outcome"]["type"] == "canceled"


def test_what_ended_while_there_was_no_keeper_is_known(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    spawner = bench.spawner()
    os.kill(spawner, signal.SIGSTOP)
    (bench.work / "go").touch()
    kill(bench.keeper())
    os.kill(spawner, signal.SIGCONT)
    again = bench.attach()
    states = {state["offer"]: state for state in again.attached["attempts"]}
    end = states[1]["end"] or again.end(1)
    assert end["outcome"] == {"type": "exited", "code": 7}


def test_an_attempt_paused_by_a_keeper_that_died_is_continued_by_the_next(desk, bench):
    desk.start(1, "sh", "-c", "while :; do date +%N > n; sleep 0.02; done")
    wait_until((bench.work / "n").exists)
    desk.lease(0.1)
    desk.expect("PauseDone")
    kill(bench.keeper())
    again = bench.attach()
    assert [state["state"] for state in again.attached["attempts"]] == ["paused"]
    before = (bench.work / "n").read_text()
    again.lease()
    again.expect("Changed", 1, state="running")
    wait_until(lambda: (bench.work / "n").read_text() != before)


def test_a_cancel_in_its_grace_is_still_a_cancel_after_the_keepers_death(desk, bench):
    desk.start(1, "sh", "-c", "trap '' TERM; touch ready; while :; do sleep 0.05; done")
    wait_until((bench.work / "ready").exists)
    desk.send("StopOrder", offer=1, grace_seconds=1.5)
    desk.expect("Changed", 1, state="stopping")
    kill(bench.keeper())
    again = bench.attach()
    states = {state["offer"]: state for state in again.attached["attempts"]}
    end = states[1]["end"] or again.end(1)
    assert end["outcome"]["type"] == "canceled"


def kill_both(bench, name="one"):
    """Stopped first, so that none sees the other die."""
    both = (bench.keeper(name), bench.spawner(name))
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    for pid in both:
        wait_until(lambda pid=pid: not is_alive(pid))


def test_when_both_are_killed_the_next_runner_kills_what_they_left_and_says_gone(desk, bench):
    desk.start(1, "sh", "-c", "setsid sleep 7030 & sleep 7031")
    desk.start(2, "sh", "-c", "exit 6")
    desk.end(2)
    wait_until(lambda: len(bench.tree(1)) == 3)
    kill_both(bench)
    assert not bench.is_locked()
    assert len(bench.tree(1)) == 3
    again = bench.start_runner("two")
    states = {state["offer"]: state for state in again.attached["attempts"]}
    assert states[2]["state"] == "ended"
    assert states[2]["end"]["outcome"] == {"type": "exited", "code": 6}
    if states[1]["state"] != "gone":
        again.expect("Gone", 1)
    assert bench.tree(1) == []
    assert not (bench.state / "runners" / "one").exists()
    again.send("ForgetAttempts", offers=[1, 2])
    wait_until(lambda: not (bench.folder(1) / "start.json").exists())


def test_background_processes_of_an_ended_attempt_survive_the_next_runner(desk, bench):
    desk.run(1, "sh", "-c", "sleep 7032 & true", keep_background=True)
    kill_both(bench)
    again = bench.start_runner("two")
    assert [state["state"] for state in again.attached["attempts"]] == ["ended"]
    assert len(bench.tree(1)) == 1


def test_a_living_runner_takes_in_what_a_dead_one_left_when_told(desk, bench):
    other = bench.start_runner("two")
    other.lease()
    desk.start(1, "sleep", "7033")
    desk.expect("Started", 1)
    other.send("Inherit")
    assert other.expect("Attached")["attempts"] == []
    assert bench.tree(1)
    kill_both(bench)
    other.send("Inherit")
    assert [state["offer"] for state in other.expect("Attached")["attempts"]] == [1]
    other.drain()
    wait_until(lambda: bench.tree(1) == [])


def test_what_a_dead_runner_left_is_ended_also_when_its_records_were_removed(desk, bench):
    other = bench.start_runner("two")
    other.lease()
    desk.start(1, "sh", "-c", "setsid sleep 7034 & sleep 7035")
    desk.start(2, "true")
    desk.end(2)
    wait_until(lambda: len(bench.tree(1)) == 3)
    states = [{"offer": offer, "job": offer, "queue_id": QUEUE, "state": "unknown", "memo": "m"} for offer in (1, 2, 3)]
    other.send("Inherit", attempts=states)
    assert other.expect("Attached")["attempts"] == []  # its runner lives
    for offer in (1, 2):
        shutil.rmtree(bench.folder(offer))
    for path in (bench.state / "runners" / "one").glob("mains-*"):
        path.unlink()
    kill_both(bench)
    assert len(bench.tree(1)) == 3
    other.send("Inherit", attempts=states)
    (named,) = other.expect("Attached")["attempts"]
    assert (named["offer"], named["job"], named["memo"]) == (1, 1, "m")
    assert other.expect("Gone", 1)["reason"]
    assert bench.tree(1) == []


def test_an_end_survives_a_worker_that_is_away_and_is_told_to_the_next(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    desk.send("Detach")
    (bench.work / "go").touch()
    wait_until((bench.folder(1) / "exit.json").exists)
    again = bench.attach()
    (state,) = again.attached["attempts"]
    assert state["state"] == "ended"
    assert state["end"]["outcome"] == {"type": "exited", "code": 7}


def test_the_newest_attachment_counts(desk, bench):
    newer = bench.attach()
    assert newer.run(1, "true")["outcome"]["code"] == 0
    try:
        rest = desk._next()
    except EOFError:
        rest = None
    assert rest is None


def restart(bench):
    script = f"echo came >> {bench.work}/came; sleep 0.1"
    return {"restart_command": ["/bin/sh", "-c", script], "restart_env": [["PATH", "/bin:/usr/bin"]]}


def test_a_worker_that_died_is_started_again_and_again(bench):
    bench.start_runner().close()
    desk = bench.attach(**restart(bench))
    desk.close()
    wait_until(lambda: (bench.work / "came").exists() and len((bench.work / "came").read_text().split()) >= 2)


def test_the_next_keeper_too_brings_a_dead_worker_back(bench):
    bench.start_runner().close()
    desk = bench.attach(worker_pid=1 << 22, **restart(bench))
    desk.lease()
    desk.start(1, "sleep", "7035")
    desk.expect("Started", 1)
    kill(bench.keeper())
    desk.close()
    wait_until((bench.work / "came").exists)


def test_a_worker_that_left_in_order_is_not_started_again(bench):
    bench.start_runner(linger=3.0)
    desk = bench.attach(**restart(bench))
    desk.send("Detach")
    wait_until(lambda: not (bench.state / "runners" / "one").exists(), "the runner leaves")
    assert not (bench.work / "came").exists()


def test_a_worker_that_lives_is_not_started_again(bench):
    bench.start_runner()
    desk = bench.attach(worker_pid=os.getpid(), **restart(bench))
    spawner = bench.spawner()
    kill(bench.keeper())
    desk = bench.attach(worker_pid=os.getpid(), **restart(bench))
    assert desk.attached["pid"] == spawner
    desk.drain()
    assert not (bench.work / "came").exists()


def test_a_runner_with_nothing_to_keep_leaves_and_cleans_up(bench):
    desk = bench.start_runner(linger=3.0)
    desk.lease()
    desk.run(1, "true")
    desk.send("ForgetAttempts", offers=[1])
    keeper, spawner = bench.keeper(), bench.spawner()
    desk.send("Detach")
    wait_until(lambda: not is_alive(keeper) and not is_alive(spawner))
    assert list((bench.state / "runners").iterdir()) == []
    assert list((bench.state / "spool").iterdir()) == []


def test_a_runner_asked_to_end_stays_while_a_job_lives_and_takes_no_other(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    keeper = bench.keeper()
    os.kill(keeper, signal.SIGTERM)
    desk.start(2, "true")
    assert desk.expect("Refused", 2)["leaving"]
    assert is_alive(keeper)
    (bench.work / "go").touch()
    wait_until(lambda: not is_alive(keeper))
    assert json.loads((bench.folder(1) / "exit.json").read_text())["outcome"] == {"type": "exited", "code": 7}


def test_whoever_takes_over_from_a_runner_asked_to_end_ends_as_well(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    successor = bench.spawner()
    os.kill(bench.keeper(), signal.SIGTERM)
    desk.start(2, "true")
    assert desk.expect("Refused", 2)["leaving"]
    kill(bench.keeper())
    again = bench.attach()
    assert again.attached["leaving"]
    again.start(3, "true")
    assert again.expect("Refused", 3)["leaving"]
    (bench.work / "go").touch()
    wait_until(lambda: not is_alive(successor))
    assert json.loads((bench.folder(1) / "exit.json").read_text())["outcome"] == {"type": "exited", "code": 7}


def test_a_job_that_a_shutdown_ends_after_the_death_of_its_keeper_is_gone(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    os.kill(bench.keeper(), signal.SIGTERM)
    desk.drain()
    kill(bench.keeper())
    again = bench.attach()
    (main,) = [state["pid"] for state in again.attached["attempts"]]
    os.kill(main, signal.SIGTERM)
    assert again.expect("Gone", 1)["reason"] == "it was ended with its machine or session"


def test_a_spawner_that_does_not_answer_is_replaced_and_its_jobs_go_on(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    mute = bench.spawner()
    os.kill(mute, signal.SIGSTOP)
    desk.start(2, "true")
    wait_until(lambda: bench.spawner() != mute)
    assert desk.run(3, "sh", "-c", "exit 2")["outcome"] == {"type": "exited", "code": 2}
    wait_until(lambda: not is_alive(mute))
    assert desk.end(2)["outcome"]["code"] == 0
    (bench.work / "go").touch()
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 7}


def test_an_order_left_unread_by_a_dead_worker_starts_nothing(desk, bench):
    desk.lease()
    desk.run(1, "true")
    keeper = bench.keeper()
    os.kill(keeper, signal.SIGSTOP)
    try:
        desk.start(2, "sh", "-c", "touch started")
        desk.close()
    finally:
        os.kill(keeper, signal.SIGCONT)
    again = bench.attach()
    again.lease()
    assert again.run(3, "true")["outcome"] == {"type": "exited", "code": 0}
    assert not (bench.work / "started").exists()
    assert not (bench.folder(2) / "start.json").exists()


DIES_AFTER_THE_FORK = """
import os, signal, sys
from kueue.runner.children import boottime
from kueue.runner.keeper import Keeper, Settings
from kueue.runner.kernel import lock_file
from kueue.runner.rundir import Rundir

class Dying(Keeper):
    def _met_spawner(self):
        os.kill(os.getpid(), signal.SIGKILL)

place = Rundir(sys.argv[1], "one")
for folder in (place.spool, place.path):
    os.makedirs(folder)
keeper = Dying(Settings(place, "test", "1"), lock_file(place.lock))
keeper.reviver.attached({"restart_command": ["/bin/sh", "-c", "echo > " + sys.argv[2]]}, boottime())
keeper.run()
"""


def test_a_spawner_whose_keeper_dies_right_after_the_fork_knows_how_the_worker_is_brought_back(bench):
    back = bench.work / "back"
    command = [sys.executable, "-c", DIES_AFTER_THE_FORK, str(bench.state), str(back)]
    assert subprocess.run(command, check=False, timeout=30).returncode == -signal.SIGKILL
    wait_until(back.exists)
    bench.attach().send("Detach")
