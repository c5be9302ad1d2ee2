"""Stalls of the program and sleeps of the machine are noticed where they count, and an idle server sleeps."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kueue.model import Now
from kueue.server.timekeeper import Timekeeper

pytestmark = pytest.mark.trio

TOLERANCE, HORIZON = 7.5, 225.0


class Hall:
    """A timekeeper in a time that can be moved on behind its back."""

    def __init__(self, clock):
        self.clock = clock
        self.asleep = 0.0
        self.stalls = []
        self.looks = 0
        self.deadline = None
        self.keeper = Timekeeper(
            self.stalls.append, lambda: TOLERANCE, lambda: HORIZON, lambda: self.deadline, self.now, lambda: self.asleep
        )

    def expects(self, seconds):
        self.deadline = trio.current_time() + seconds
        self.keeper.expects(self.deadline)

    def now(self):
        self.looks += 1
        return Now(wall=0.0, steady=trio.current_time())


@pytest.fixture
async def hall(autojump_clock, nursery):
    hall = Hall(autojump_clock)
    nursery.start_soon(hall.keeper.run)
    return hall


def stand_still(hall, seconds):
    hall.clock.jump(seconds)


async def test_a_stall_is_noticed_while_a_deadline_is_near(autojump_clock, hall):
    hall.expects(100.0)
    await trio.sleep(10.1)
    assert hall.stalls == []
    stand_still(hall, 12.0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(hall.stalls) == 1
    assert "stood still" in hall.stalls[0]


async def test_without_a_deadline_nobody_wakes(autojump_clock, hall):
    await trio.sleep(10.0)
    hall.looks = 0
    await trio.sleep(3600.0)
    assert hall.looks == 0


async def test_a_deadline_that_moves_on_with_every_sign_of_life_is_seldom_looked_at(autojump_clock, hall):
    for _ in range(60):
        hall.deadline = trio.current_time() + 300.0  # nobody tells of what only moves away
        await trio.sleep(10.0)
    assert hall.looks < 60
    assert hall.stalls == []


async def test_a_deadline_that_comes_near_by_surprise_is_watched_from_then_on(autojump_clock, hall):
    await trio.sleep(1000.0)
    hall.expects(2.0)
    stand_still(hall, 30.0)
    hall.keeper.check()
    assert len(hall.stalls) == 1
    await trio.sleep(100.0)
    assert len(hall.stalls) == 1


async def test_a_stall_right_after_a_deadline_came_near_is_noticed_whoever_looks_first(autojump_clock, hall):
    await trio.sleep(1000.0)
    hall.expects(2.0)
    stand_still(hall, 30.0)
    await trio.testing.wait_all_tasks_blocked()
    hall.keeper.check()
    assert len(hall.stalls) == 1


async def test_a_stall_over_the_end_of_a_nap_is_noticed(autojump_clock, hall):
    hall.expects(HORIZON + 60.0)
    await trio.sleep(50.0)
    stand_still(hall, 30.0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(hall.stalls) == 1


async def test_a_machine_that_slept_while_nothing_was_near_is_noticed_before_the_decision(autojump_clock, hall):
    await trio.sleep(1000.0)
    hall.asleep = 3600.0
    hall.expects(2.0)
    hall.keeper.check()
    assert hall.stalls == ["this machine slept for 3600 s"]
