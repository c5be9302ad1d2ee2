"""Somebody removes or replaces a runner's files while it lives: nobody takes it for dead, and they come back."""

import contextlib
import json
import os
import signal

import pytest
from runner_bench import QUEUE, boottime, is_alive, wait_until

from kueue.runner.keeper import Keeper, Settings
from kueue.runner.kernel import lock_file
from kueue.runner.mains import boot_id
from kueue.runner.rundir import Rundir
from kueue.runner.tree import status
from tests.support.removal import remove_tree

pytestmark = pytest.mark.slow

WAIT = "while [ ! -e go ]; do sleep 0.02; done; exit 7"
LOST = {
    "lock": ["lock"],
    "socket": ["socket"],
    "info": ["info.json"],
    "log": ["log"],
    "lock and info": ["lock", "info.json"],
    "directory": ["."],
}


def folder(bench, name="one"):
    return bench.state / "runners" / name


def lose(bench, names):
    for name in names:
        if name == ".":
            remove_tree(folder(bench))
        else:
            (folder(bench) / name).unlink()


def replace(bench, name):
    """By an empty file, which has another number."""
    (folder(bench) / "stranger").touch()
    (folder(bench) / "stranger").rename(folder(bench) / name)


@pytest.fixture
def running(desk):
    """An attachment with attempt 1, which ends with code 7 when there is a file `go`."""
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    return desk


def goes_on(bench, keeper):
    """The runner is found by the next worker, and what it runs ends as it should."""
    again = bench.attach()
    assert again.attached["pid"] == keeper
    assert [state["offer"] for state in again.attached["attempts"]] == [1]
    wait_until(bench.is_locked)
    wait_until((folder(bench) / "info.json").exists)
    assert bench.keeper() == keeper
    (bench.work / "go").touch()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}


@pytest.mark.parametrize("names", LOST.values(), ids=LOST.keys())
def test_files_that_were_removed_are_there_for_the_next_worker(running, bench, names):
    keeper = bench.keeper()
    lose(bench, names)
    running.close()
    goes_on(bench, keeper)


@pytest.mark.parametrize("name", ["lock", "socket", "info.json"])
def test_files_that_were_replaced_are_there_for_the_next_worker(running, bench, name):
    keeper = bench.keeper()
    replace(bench, name)
    running.close()
    goes_on(bench, keeper)


def test_files_that_were_removed_come_back_also_while_nothing_happens(running, bench):
    keeper = bench.keeper()
    lose(bench, ["lock", "socket", "info.json"])
    wait_until(bench.is_locked)
    goes_on(bench, keeper)


def test_no_process_is_made_before_the_lock_is_put_back(desk, bench):
    lose(bench, ["."])
    desk.start(1, "sh", "-c", "ls $0 > seen; exit 3", str(folder(bench) / "lock"))
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 3}
    assert bench.is_locked()
    assert (bench.work / "seen").read_text().strip() == str(folder(bench) / "lock")


def test_where_the_lock_cannot_be_put_back_nothing_is_begun_and_what_runs_goes_on(running, bench):
    lose(bench, ["lock"])
    (folder(bench) / "lock").mkdir()
    for offer in (2, 3):
        running.start(offer, "true")
        assert str(folder(bench) / "lock") in running.expect("Refused", offer)["reason"]
    assert (folder(bench) / "log").read_text().count("cannot be put back") == 1
    (folder(bench) / "lock").rmdir()
    assert running.run(4, "sh", "-c", "exit 4")["outcome"] == {"type": "exited", "code": 4}
    (bench.work / "go").touch()
    assert running.end(1)["outcome"] == {"type": "exited", "code": 7}


def test_whoever_takes_over_where_the_lock_cannot_be_put_back_keeps_the_jobs(running, bench):
    lose(bench, ["lock"])
    (folder(bench) / "lock").mkdir()
    keeper, successor = bench.keeper(), bench.spawner()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    (bench.work / "go").touch()
    again = bench.attach()
    (state,) = again.attached["attempts"]
    assert (state["end"] or again.end(1))["outcome"] == {"type": "exited", "code": 7}
    (folder(bench) / "lock").rmdir()


def test_a_lock_that_was_moved_away_and_comes_back_is_ours_still(running, bench):
    """The spawner holds it all the time, so that it could not be taken again."""
    lock = folder(bench) / "lock"
    for number in (2, 3):
        lock.rename(folder(bench) / "moved")
        assert running.run(number, "true")["outcome"] == {"type": "exited", "code": 0}
        (folder(bench) / "moved").rename(lock)
        assert running.run(number + 10, "true")["outcome"] == {"type": "exited", "code": 0}
        assert bench.is_locked()
    (bench.work / "go").touch()
    assert running.end(1)["outcome"] == {"type": "exited", "code": 7}


def test_a_lock_that_somebody_else_holds_is_not_ours(running, bench):
    lose(bench, ["lock"])
    other = lock_file(str(folder(bench) / "lock"))
    running.start(2, "true")
    assert "somebody else holds it" in running.expect("Refused", 2)["reason"]
    os.close(other)
    assert running.run(3, "true")["outcome"] == {"type": "exited", "code": 0}


def test_whoever_takes_over_holds_a_lock_that_was_put_back(running, bench):
    lose(bench, ["lock"])
    running.run(2, "true")
    assert bench.is_locked()
    keeper, successor = bench.keeper(), bench.spawner()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    assert bench.is_locked()
    goes_on_after(bench, successor)


def goes_on_after(bench, keeper):
    again = bench.attach()
    assert again.attached["pid"] == keeper
    (bench.work / "go").touch()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}


def test_a_runner_that_is_done_does_not_make_its_directory_anew(bench):
    desk = bench.start_runner(linger=3.0)
    keeper = bench.keeper()
    desk.send("Detach")
    remove_tree(bench.state / "runners")
    wait_until(lambda: not is_alive(keeper))
    assert not (bench.state / "runners").exists()


def test_a_worker_of_another_identity_prolongs_nothing_and_has_nothing_begun(running, bench):
    keeper, spawner = bench.keeper(), bench.spawner()
    deadline = running.lease(7000.0)
    running.drain()
    running.close()
    identity = bench.state / "identity"
    identity.write_text(json.dumps({"identity": bench.identity}))
    again = bench.attach()
    assert not again.attached["leaving"]
    identity.write_text(json.dumps({"identity": "another"}))
    for pid in (keeper, spawner):
        stranger = bench.attach()
        assert (stranger.attached["pid"], stranger.attached["leaving"]) == (pid, True)
        stranger.lease(9000.0)
        stranger.start(2, "true")
        assert stranger.expect("Refused", 2)["leaving"]
        assert bench.attach().attached["lease_deadline_boottime"] == deadline
        if pid == keeper:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: bench.keeper() == spawner)
    last = bench.attach()
    last.send("StopOrder", offer=1, kill=True)
    assert last.end(1)["outcome"]["type"] == "canceled"
    wait_until(lambda: not is_alive(spawner))


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", chr(0)])
def test_an_identity_that_cannot_be_read_is_nobodys(running, bench, text):
    (bench.state / "identity").write_text(text)
    assert not bench.attach().attached["leaving"]


@pytest.fixture
def stopped(running, bench):
    """Keeper and spawner of the running one, which stand still and can put nothing back."""
    both = (bench.keeper(), bench.spawner())
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    for pid in both:
        wait_until(lambda pid=pid: status(pid).is_stopped)
    yield both
    for pid in both:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
    wait_until(bench.is_locked)


@pytest.mark.parametrize("names", LOST.values(), ids=LOST.keys())
def test_a_living_runner_is_not_taken_for_dead_without_its_files(running, bench, stopped, names):
    lose(bench, names)
    other = bench.start_runner("two")
    assert other.attached["attempts"] == []
    other.send("Inherit")
    assert other.expect("Attached")["attempts"] == []
    assert bench.tree(1)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    running.close()
    goes_on(bench, stopped[0])


def test_a_spawner_that_is_to_take_over_is_proof_enough_without_a_lock(running, bench, stopped):
    keeper, spawner = stopped
    replace(bench, "lock")
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_alive(keeper))
    assert bench.start_runner("two").attached["attempts"] == []
    os.kill(spawner, signal.SIGCONT)
    goes_on(bench, spawner)


@pytest.mark.parametrize("names", [["lock"], ["lock", "info.json"], ["."]])
def test_a_dead_runner_is_dead_without_its_files(running, bench, names):
    both = (bench.keeper(), bench.spawner())
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in both:
            os.kill(pid, number)
    for pid in both:
        wait_until(lambda pid=pid: not is_alive(pid))
    lose(bench, names)
    again = bench.start_runner("two")
    assert [state["offer"] for state in again.attached["attempts"]] == [1]
    again.drain()
    wait_until(lambda: bench.tree(1) == [])


def test_a_process_of_another_boot_is_no_proof_of_life(tmp_path):
    place = Rundir(str(tmp_path), "one")
    (tmp_path / "runners" / "one").mkdir(parents=True)
    own = [os.getpid(), status(os.getpid()).start]
    nobody = [1 << 22, 1]
    here = boot_id().decode()
    for info, is_dead in [
        ({"keeper": own, "spawners": [], "boot": here}, False),
        ({"keeper": nobody, "spawners": [nobody, own], "boot": here}, False),
        ({"keeper": nobody, "spawners": [own]}, False),  # of a release before
        ({"keeper": own, "spawners": [], "boot": "another"}, True),
        ({"keeper": [own[0], own[1] + 1], "spawners": [nobody], "boot": here}, True),
        ({"keeper": 7}, True),
        ([], True),
    ]:
        with open(place.info, "w") as file:
            json.dump(info, file)
        assert place.is_dead() == is_dead, info


def test_where_a_look_may_hang_none_is_made(tmp_path):
    place = Rundir(str(tmp_path), "one")
    (tmp_path / "runners" / "one").mkdir(parents=True)
    for is_local in (True, False):
        keeper = Keeper(Settings(place, "test", "1", is_local=is_local), lock_file(place.lock))
        os.unlink(place.lock)
        keeper.clerk.lost()
        keeper._tick()
        assert os.path.exists(place.lock) == is_local
        keeper.desk.close()
        keeper.selector.close()
        for handle in (keeper.premises.lock, keeper.wake_read, keeper.wake_write):
            os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place.lock)


def test_a_record_that_names_no_runner_is_one_that_was_left(bench):
    spool = bench.state / "spool"
    for offer, runner in ((1, "../gone"), (2, "a\0b"), (3, None)):
        (spool / str(offer)).mkdir(parents=True)
        record = {"offer": offer, "job": offer, "queue_id": QUEUE, "tag": 1 << 40 | offer, "runner": runner}
        (spool / str(offer) / "start.json").write_text(json.dumps(record))
    attempts = bench.start_runner().attached["attempts"]
    assert sorted(state["offer"] for state in attempts) == [1, 2, 3]


def test_a_worker_is_not_started_while_another_one_runs(bench):
    script = f"echo came >> {bench.work}/came"
    bench.start_runner().close()
    worker = lock_file(str(bench.state / "lock"))
    desk = bench.attach(restart_command=["/bin/sh", "-c", script], restart_env=[["PATH", "/bin:/usr/bin"]])
    desk.close()
    log = folder(bench) / "log"
    told = "another one runs and has not attached yet"
    wait_until(lambda: told in log.read_text())
    since = boottime()
    wait_until(lambda: boottime() - since > 2.5)  # it was looked at once more
    assert not (bench.work / "came").exists()
    os.close(worker)
    wait_until((bench.work / "came").exists)
    assert log.read_text().count(told) == 1
