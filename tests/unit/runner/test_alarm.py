"""What wakes a keeper and a spawner counts the time in which the machine is suspended."""

import os
import select
import time

import pytest
from runner_bench import boottime, wait_until

from kueue.runner.kernel import Alarm


@pytest.fixture
def alarm():
    alarm = Alarm()
    yield alarm
    alarm.close()


def rings(alarm, milliseconds):
    poll = select.poll()
    poll.register(alarm, select.POLLIN)
    return bool(poll.poll(milliseconds))


@pytest.mark.parametrize("at", [0.0, -5.0, float("-inf"), 1.0])
def test_a_moment_that_has_passed_rings_at_once(alarm, at):
    alarm.set(at)
    assert rings(alarm, 0)


def test_it_rings_at_its_moment_once_and_not_at_one_that_was_set_before(alarm):
    begun = boottime()
    alarm.set(begun + 0.1)
    alarm.set(begun + 0.3)
    assert rings(alarm, 10_000)
    assert boottime() >= begun + 0.3
    alarm.rang()
    assert not rings(alarm, 0)


@pytest.mark.parametrize("never", [None, float("inf"), 1e30])
def test_it_never_rings_for_nothing(alarm, never):
    alarm.set(boottime() - 1)
    alarm.set(never)
    assert not rings(alarm, 20)
    alarm.rang()


def timers(pid):
    """(clock, seconds until it rings) of the timers of a process, see proc(5)."""
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with open(f"/proc/{pid}/fdinfo/{name}") as file:
            fields = dict(line.split(": ", 1) for line in file.read().splitlines() if ": " in line)
        if "clockid" in fields:
            whole, parts = fields["it_value"].strip("()").split(", ")
            yield int(fields["clockid"]), int(whole) + int(parts) / 1e9


@pytest.mark.slow
def test_keeper_and_spawner_of_a_job_are_woken_by_a_clock_that_counts_suspend(bench, desk):
    """No machine is suspended for a test: the kernel itself says which clock it was asked for."""
    desk.start(1, "sleep", "7091")
    desk.expect("Started", 1)
    deadline = desk.lease(7.0)

    def left(pid):
        return [seconds for clock, seconds in timers(pid) if clock == time.CLOCK_BOOTTIME and seconds > 0]

    for pid, late in ((bench.keeper(), 0.0), (bench.spawner(), 0.5)):
        wait_until(lambda pid=pid, late=late: any(abs(boottime() + one - deadline - late) < 0.2 for one in left(pid)))
