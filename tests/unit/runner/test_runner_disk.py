"""A disk that is full or broken: nobody dies of it, nothing is left behind, and what is told stays true."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess

import pytest
from runner_bench import QUEUE, is_alive, wait_until

from kueue.runner.keeper import Keeper, Settings
from kueue.runner.mirror import OURSELVES
from kueue.runner.rundir import Rundir
from kueue.runner.spool import Spool
from tests.support.small_disk import FILLER, fill, small_disk

pytestmark = pytest.mark.slow

WAIT = "while [ ! -e go ]; do sleep 0.02; done; exit 7"


@pytest.fixture
def full():
    """Calls what it is given while no file of this process can grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def call(what, *arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            return what(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return call


def test_a_start_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, full):
    spool = Spool(str(tmp_path))
    for offer in (1, 2):
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            full(spool.begin, offer, {"offer": offer})
    while spool.vacant:
        spool.tidy()
    assert os.listdir(tmp_path) == []
    spool.begin(1, {"offer": 1})
    assert list(spool.starts()) == [(1, {"offer": 1})]


def test_records_that_cannot_be_dropped_are_no_reason_to_die_and_go_when_they_can(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    desk.run(2, "true")
    obstacle = bench.folder(2) / "main.json"
    obstacle.unlink()
    obstacle.mkdir()
    keeper = bench.keeper()
    for _ in range(2):  # whoever is not sure to have been heard says it again
        desk.send("ForgetAttempts", offers=[2])
        desk.send("Inherit")
        assert [state["offer"] for state in desk.expect("Attached")["attempts"]] == [1]
    wait_until((bench.folder(2) / "start.json").exists)
    obstacle.rmdir()
    wait_until(lambda: not bench.folder(2).exists())
    (bench.work / "go").touch()
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 7}
    assert is_alive(keeper)
    assert (bench.state / "runners" / "one" / "log").read_text().count("attempt 2 cannot be dropped") == 1


def test_whoever_takes_over_where_no_socket_can_be_made_keeps_the_jobs_until_one_can(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    obstacle = bench.state / "runners" / "one" / "socket.new"
    obstacle.mkdir()
    keeper, successor = bench.keeper(), bench.spawner()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    (bench.work / "go").touch()
    wait_until((bench.folder(1) / "exit.json").exists)
    assert bench.is_locked()
    obstacle.rmdir()
    (state,) = bench.attach().attached["attempts"]
    assert state["end"]["outcome"] == {"type": "exited", "code": 7}


@pytest.fixture
def unreadable(bench):
    """Call it, and the spool cannot be read; what it returns undoes it."""
    spool, away = bench.state / "spool", bench.state / "away"

    def hide():
        spool.rename(away)
        spool.touch()
        return restore

    def restore():
        spool.unlink()
        away.rename(spool)

    return hide


def test_whoever_takes_over_where_the_spool_cannot_be_read_keeps_the_jobs_and_tells_of_them_when_it_can(
    desk, bench, unreadable
):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    keeper, successor = bench.keeper(), bench.spawner()
    restore = unreadable()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    (bench.work / "go").touch()
    again = bench.attach()
    (state,) = again.attached["attempts"]
    assert (state["offer"], state["end"]) == (1, None)
    log = bench.state / "runners" / "one" / "log"
    wait_until(lambda: "the record of attempt 1 cannot be written" in log.read_text())
    restore()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}


@pytest.mark.parametrize("lost", ["start.json", "."])
def test_an_attempt_whose_record_is_lost_is_kept_when_its_keeper_dies(desk, bench, lost):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    if lost == ".":
        shutil.rmtree(bench.folder(1))
    else:
        (bench.folder(1) / lost).unlink()
    keeper, successor = bench.keeper(), bench.spawner()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    again = bench.attach()
    (state,) = again.attached["attempts"]
    assert (state["offer"], state["job"], state["queue_id"]) == (1, 1, QUEUE)
    assert json.loads((bench.folder(1) / "start.json").read_text())["runner"] == "one"
    (bench.work / "go").touch()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 7}


def test_a_runner_without_attempts_that_cannot_read_the_spool_is_followed_by_one_successor(desk, bench, unreadable):
    keeper, successor = bench.keeper(), bench.spawner()
    restore = unreadable()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    again = bench.attach()
    restore()
    again.lease()
    assert again.run(1, "sh", "-c", "exit 3")["outcome"] == {"type": "exited", "code": 3}
    assert (bench.state / "runners" / "one" / "log").read_text().count("taking over") == 1


def test_a_runner_that_cannot_begin_leaves_nobody(bench):
    """Its spawner would take over from it, fail as well, and so on."""
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    spool = bench.state / "spool"
    spool.symlink_to(f"/proc/{dead.pid}/net")  # a directory that cannot be listed, by nobody
    try:
        with pytest.raises(AssertionError, match="returncode=3"):
            bench.start_runner("two")
        wait_until(lambda: not bench.is_locked("two"))
    finally:
        spool.unlink()
        dead.wait()
    log = (bench.state / "runners" / "two" / "log").read_text()
    assert ("the keeper failed" in log, "taking over" in log) == (True, False)
    (bench.state / "runners" / "two" / "log").unlink()


def test_forgotten_attempts_do_not_come_back_when_the_keeper_dies_while_it_drops_their_records(desk, bench):
    offers = list(range(1, 101))
    for offer in offers:
        desk.start(offer, "true")
    for offer in offers:
        desk.end(offer)
    keeper, successor = bench.keeper(), bench.spawner()
    desk.send("ForgetAttempts", offers=offers)
    wait_until(lambda: not (bench.folder(1) / "start.json").exists())
    os.kill(keeper, signal.SIGSTOP)
    left = {offer for offer in offers if (bench.folder(offer) / "start.json").exists()}
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: bench.keeper() == successor)
    assert {state["offer"] for state in bench.attach().attached["attempts"]} <= left


def test_an_end_whose_record_is_lost_is_told_as_it_was_by_each_successor(desk, bench):
    desk.run(1, "sh", "-c", "exit 7")
    for _ in range(2):
        shutil.rmtree(bench.folder(1))
        keeper, successor = bench.keeper(), bench.spawner()
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda successor=successor: bench.keeper() == successor)
        (state,) = bench.attach().attached["attempts"]
        assert state["end"]["outcome"] == {"type": "exited", "code": 7}


def test_what_a_dead_runner_has_made_is_ended_also_without_a_record(desk, bench):
    desk.start(1, "sh", "-c", WAIT)
    desk.expect("Started", 1)
    shutil.rmtree(bench.folder(1))
    pids = [bench.keeper(), bench.spawner()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_until(lambda: not bench.is_locked())
    assert bench.tree(1)
    assert bench.start_runner("two").attached["attempts"] == []
    assert bench.tree(1) == []


def test_what_another_runner_left_is_taken_in_once_it_can_be_read(desk, bench, unreadable):
    restore = unreadable()
    desk.send("Inherit")
    assert not [event for event in desk.drain() if event["type"] == "Attached"]
    restore()
    desk.send("Inherit")
    desk.expect("Attached")


@pytest.fixture
def keeper(tmp_path):
    """One that does not turn by itself."""
    place = Rundir(str(tmp_path), "one")
    os.makedirs(place.path)
    keeper = Keeper(Settings(place, "test", "1"), lock=-1)
    yield keeper
    keeper.selector.close()
    for handle in (keeper.wake_read, keeper.wake_write):
        os.close(handle)


def test_only_a_runner_that_begins_ends_where_what_others_left_cannot_be_read(keeper, tmp_path):
    (tmp_path / "spool").touch()
    with pytest.raises(NotADirectoryError):
        keeper.inherit(is_needed=True)
    assert not keeper.inherit()
    (tmp_path / "spool").unlink()
    assert keeper.inherit()


def test_a_socket_that_still_cannot_be_made_ends_no_keeper(keeper):
    os.mkdir(f"{keeper.rundir.path}/socket.new")
    keeper.again, keeper.again_at = {OURSELVES}, 0.0
    keeper._tick()
    assert keeper.again == {OURSELVES}


def test_why_a_program_could_not_be_started_is_told_also_if_it_cannot_be_written_down(desk, bench):
    pipe = bench.work / "pipe"
    os.mkfifo(pipe)
    desk.start(1, "/no/such/program", stdout=str(pipe), stderr="null")
    wait_until(lambda: bench.tree(1))  # it waits for a reader of the pipe
    (bench.folder(1) / "not_started.json").mkdir()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        outcome = desk.end(1)["outcome"]
    finally:
        os.close(reader)
    assert (outcome["type"], outcome["cause"]) == ("not_started", "not_found")
    assert "/no/such/program" in outcome["reason"]


def test_a_runner_whose_lock_cannot_be_looked_at_is_not_taken_for_dead(tmp_path):
    """What the dead leave is killed."""
    place = Rundir(str(tmp_path), "one")
    os.makedirs(place.path)
    assert place.is_dead()  # nothing to hold
    os.symlink(place.lock, place.lock)
    assert not place.is_dead()
    os.unlink(place.lock)
    with open(place.lock, "w"):
        assert place.is_dead()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert not place.is_dead()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (tmp_path / "runners" / "stray").write_bytes(b"")
    assert Rundir(str(tmp_path), "stray").is_dead()


@pytest.mark.parametrize("info", ["", "{}", "[1]"])
def test_a_runner_whose_lock_is_gone_and_whose_note_says_nothing_is_not_dead_while_it_has_the_lock_open(
    desk, bench, info
):
    assert desk.run(1, "true")["outcome"] == {"type": "exited", "code": 0}
    place = Rundir(str(bench.state), "one")
    os.unlink(place.lock)
    with open(place.info, "r+") as file:
        told = file.read()
        file.seek(0)
        file.truncate()
        file.write(info)
        file.flush()
        try:
            assert not place.is_dead()
        finally:
            file.seek(0)
            file.truncate()
            file.write(told)


def test_a_socket_for_which_there_is_no_descriptor_costs_none(tmp_path):
    place = Rundir(str(tmp_path), "one")
    os.makedirs(place.path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/", os.O_PATH)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, hard))
    try:
        os.close(probe)
        for _ in range(2):
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                place.listen()
        os.close(os.open("/", os.O_PATH))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_end_on_a_full_disk_says_that_output_may_be_missing(desk, bench):
    spool = bench.state / "spool"
    with small_disk(spool, 1):
        desk.start(1, "sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; echo result; exit 0")
        desk.expect("Started", 1)
        fill(spool)
        (bench.work / "go").touch()
        log = bench.state / "runners" / "one" / "log"
        wait_until(lambda: "the record of attempt 1 cannot be written" in log.read_text())
        (spool / FILLER).unlink()
        end = desk.end(1)
        assert end["outcome"] == {"type": "exited", "code": 0}
        assert end["notes"] == ["the disk of its worker was full when it ended: output may be missing"]
        assert bench.text(1) == ""
        assert desk.run(2, "sh", "-c", "echo well")["notes"] == []


@pytest.mark.parametrize("free", [1, 2, 3])
def test_a_job_whose_output_has_no_room_in_the_spool_is_put_off_and_not_failed(desk, bench, free):
    """It needs a folder, a record and two files."""
    spool = bench.state / "spool"
    with small_disk(spool, 1, inodes=40):
        taken = []
        with contextlib.suppress(OSError):
            while True:
                (spool / f"taken{len(taken)}").touch()
                taken.append(spool / f"taken{len(taken)}")
        for path in taken[:free]:
            path.unlink()
        desk.start(1, "echo", "well")
        assert "No space left on device" in desk.expect("Refused", 1)["reason"]
        for path in taken[free:]:
            path.unlink()
        assert desk.run(2, "echo", "well")["outcome"] == {"type": "exited", "code": 0}
