"""Who is found to belong to a job by descent alone, and who is not."""

import os
import subprocess
import sys

import pytest
from runner_bench import boottime, wait_until

from kueue.runner.kin import TICKS, Kin
from kueue.runner.newborn import Newborn
from kueue.runner.tree import Status, status

MAIN, NOW = 100, 50.0
START = 40 * TICKS


def born(parent, session, start=START + 5, state="S"):
    return Status(state=state, parent=parent, session=session, threads=1, start=start)


@pytest.fixture
def kin():
    kin = Kin()
    kin.learn(MAIN, START)
    return kin


def main(**more):
    return {MAIN: born(1, MAIN, START, **more)}


def test_children_and_their_children_belong_also_in_sessions_of_their_own(kin):
    others = {**main(), 101: born(MAIN, MAIN), 102: born(101, 102), 103: born(102, 102), 200: born(1, 200)}
    assert kin.gather({}, others, NOW) == {MAIN, 101, 102, 103}


def test_who_was_seen_once_belongs_when_its_parent_is_gone(kin):
    kin.gather({}, {**main(), 101: born(MAIN, MAIN), 102: born(101, 102)}, NOW)
    assert kin.gather({}, {102: born(1, 102), 103: born(102, 102)}, NOW) == {102, 103}


def test_an_orphan_in_the_session_of_a_main_process_that_lives_belongs(kin):
    assert kin.gather({}, {**main(), 105: born(1, MAIN)}, NOW) == {MAIN, 105}


def test_an_orphan_born_before_the_main_process_was_reaped_belongs_and_with_it_its_session(kin):
    kin.learn(MAIN, START, until=45.0)
    early, late = born(1, MAIN, 44 * TICKS), born(1, MAIN, 46 * TICKS)
    assert kin.gather({}, {105: early, 106: late}, NOW) == {105, 106}


def test_a_session_of_that_number_whose_members_were_all_born_later_may_be_a_strangers(kin):
    kin.learn(MAIN, START, until=45.0)
    assert kin.gather({}, {MAIN: born(1, MAIN, 47 * TICKS), 106: born(MAIN, MAIN, 48 * TICKS)}, NOW) == set()


def test_a_child_that_has_no_session_yet_does_not_bring_the_runner_in(kin):
    runner = 9
    sure = {MAIN: born(10, runner, START)}
    assert kin.gather(sure, {10: born(1, runner, START + 1), 11: born(10, runner)}, NOW) == set()


def test_descendants_of_a_marked_process_belong_without_a_mark(kin):
    assert kin.gather({300: born(1, 300)}, {301: born(300, 300), 302: born(301, 302)}, NOW) == {301, 302}


def test_nobody_is_missed_among_the_numbers_given_out_since():
    newborn = Newborn()
    first = subprocess.Popen([sys.executable, "-c", "pass"])
    begun = boottime()
    found = []
    second = subprocess.Popen(["sleep", "60"])
    try:
        # False also means: not certain. Certain and wrong is what may never be.
        assert not newborn.is_nobody(first.pid, boottime() - begun, lambda pid: pid == second.pid)
    finally:
        second.kill()
        second.wait()
        first.wait()

    def nobody():
        process = subprocess.Popen(["true"])
        begun = boottime()
        process.wait()
        return newborn.is_nobody(process.pid, boottime() - begun, lambda pid: found.append(pid) or False)

    wait_until(nobody)
    assert os.getpid() not in found
    assert status(os.getpid()) is not None


def test_after_a_long_time_the_numbers_may_have_begun_anew():
    assert not Newborn().is_nobody(os.getpid(), 10.0, lambda _: False)


def test_a_container_that_shows_another_last_number_is_not_believed(monkeypatch):
    real = os.stat
    elsewhere = real("/dev/shm")
    monkeypatch.setattr(os, "stat", lambda path: elsewhere if path == "/proc/loadavg" else real(path))
    newborn = Newborn()
    process = subprocess.Popen(["true"])
    process.wait()
    assert not newborn.is_nobody(process.pid, 0.0, lambda _: False)
