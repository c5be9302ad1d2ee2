"""Rounds with the real APScheduler, real threads and real, short times; only the clocks are turned by hand."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from datetime import datetime, timedelta

import pytest
from apscheduler.schedulers import base

from kueue import clock
from kueue_ops.rounds import LEAST_INTERVAL_SECONDS, WAKING_SECONDS, Rounds

pytestmark = pytest.mark.slow


class Looks:
    """A check that notes when it was called, and hangs, raises or answers as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.hung: list[str] = []
        self.failed: list[str] = []
        self.again: dict[str, float] = {}
        self.raises: dict[str, BaseException] = {}
        self.hangs: set[str] = set()
        self.gate = threading.Event()
        self.rounds: Rounds | None = None

    def make(self, interval_seconds, parallel=4, limit_seconds=30.0) -> Rounds:
        self.rounds = Rounds(
            self,
            interval_seconds=interval_seconds,
            parallel=parallel,
            limit_seconds=limit_seconds,
            hung=self.hung.append,
            failed=lambda host, _: self.failed.append(host),
        )
        return self.rounds

    def __call__(self, host, ticket):
        self.calls.append((host, time.monotonic()))
        if host in self.hangs:
            self.gate.wait()
        if host in self.raises:
            raise self.raises[host]
        return self.again.pop(host, None)

    def count(self, host):
        return Counter(name for name, _ in self.calls)[host]

    def moments(self, host):
        return [moment for name, moment in self.calls if name == host]


@pytest.fixture
def looks():
    made = Looks()
    yield made
    made.gate.set()
    if made.rounds is not None:
        made.rounds.stop(5)


def until(holds, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_host_is_looked_at_at_once_and_then_at_the_pace(looks):
    looks.make(1.0).start(["a", "b"])
    until(lambda: looks.count("a") >= 3 and looks.count("b") >= 3)
    for host in "ab":
        gaps = [later - earlier for earlier, later in itertools.pairwise(looks.moments(host))]
        assert all(gap > 0.9 for gap in gaps)


def test_a_check_that_never_returns_is_reported_and_has_its_next_rounds_all_the_same(looks):
    looks.hangs = {"bad"}
    looks.make(1.0, parallel=1, limit_seconds=0.2).start(["bad", "good"])
    until(lambda: looks.count("bad") >= 3 and looks.count("good") >= 3 and len(looks.hung) >= 3)
    assert set(looks.hung) == {"bad"}


def test_a_host_that_hung_is_looked_at_as_ever_when_it_is_well_again(looks):
    looks.hangs = {"a"}
    looks.make(1.0, limit_seconds=0.2).start(["a"])
    until(lambda: len(looks.hung) >= 2)
    looks.hangs = set()
    looks.gate.set()
    seen = looks.count("a")
    until(lambda: looks.count("a") >= seen + 2)


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("no"), MemoryError()])
def test_what_a_check_raises_ends_neither_its_rounds_nor_the_others(looks, error):
    looks.raises = {"bad": error}
    looks.make(1.0).start(["bad", "good"])
    until(lambda: looks.count("bad") >= 2 and looks.count("good") >= 2)
    assert set(looks.failed) == {"bad"}


def test_a_host_can_ask_for_a_look_sooner_than_the_round(looks):
    looks.again = {"a": 0.2}
    looks.make(3600.0).start(["a", "b"])
    until(lambda: looks.count("a") == 2)
    assert looks.count("b") == 1


def test_a_wish_for_a_later_look_than_the_round_changes_nothing(looks):
    looks.again = {"a": 3600.0}
    looks.make(1.0).start(["a"])
    until(lambda: looks.count("a") >= 2)


@pytest.mark.parametrize("minutes", [100_000, 1e6])
def test_a_very_long_interval_is_accepted(looks, minutes):
    rounds = looks.make(minutes * 60)
    rounds.start(["a"])
    until(lambda: looks.count("a") == 1)
    until(lambda: rounds.due_in("a") > minutes * 59)
    assert rounds.tick()


def test_an_interval_of_nothing_does_not_flood_the_hosts(looks):
    assert looks.make(0.0).interval_seconds == LEAST_INTERVAL_SECONDS


def test_hosts_come_and_go_and_those_that_stay_are_looked_at_at_once(looks):
    rounds = looks.make(3600.0)
    rounds.start(["a", "b"])
    until(lambda: looks.count("a") == looks.count("b") == 1)
    # Asked for at the very moment at which one ends, there would be one look more.
    until(lambda: not rounds._active)
    rounds.set_hosts(["b", "c"])
    until(lambda: looks.count("b") == 2 and looks.count("c") == 1)
    assert looks.count("a") == 1
    assert rounds.due_in("a") is None
    rounds.look_again("a", 0)


def test_a_look_that_is_wanted_while_one_runs_comes_right_after_it(looks):
    looks.hangs = {"a", "b"}
    rounds = looks.make(3600.0)
    rounds.start(["a", "b"])
    until(lambda: looks.count("a") == looks.count("b") == 1)
    rounds.set_hosts(["a"])
    rounds.set_hosts(["a", "b"])  # one stays, one is out and in again
    until(lambda: rounds.due_in("a") > 3000 and rounds.due_in("b") > 3000)  # passed over
    looks.hangs = set()
    looks.gate.set()
    until(lambda: looks.count("a") == looks.count("b") == 2)
    until(lambda: rounds.due_in("a") > 3000 and rounds.due_in("b") > 3000)
    assert looks.count("a") == looks.count("b") == 2


def test_a_look_that_is_wanted_while_one_hangs_comes_when_that_is_given_up(looks):
    looks.hangs = {"a"}
    rounds = looks.make(3600.0, limit_seconds=1.0)
    rounds.start(["a"])
    until(lambda: looks.count("a") == 1)
    rounds.look_again("a", 0)
    until(lambda: looks.count("a") == 2)
    assert looks.hung[0] == "a"


def test_stopping_waits_a_little_for_what_runs_and_no_longer(looks):
    looks.hangs = {"a"}
    rounds = looks.make(3600.0)
    rounds.start(["a"])
    until(lambda: looks.count("a") == 1)
    begun = time.monotonic()
    assert rounds.stop(0.3) is False
    assert time.monotonic() - begun < 5
    looks.rounds = None


def test_a_scheduler_that_stands_still_is_noticed_and_woken(looks, monkeypatch):
    monkeypatch.setattr("kueue_ops.rounds.OVERDUE_SECONDS", 0.2)
    rounds = looks.make(1.0)
    rounds.start(["a"])
    until(lambda: looks.count("a") == 1)
    assert rounds.tick()
    rounds._scheduler.pause()
    until(lambda: rounds.due_in("a") < -0.3)
    assert not rounds.tick()
    rounds._scheduler.resume()
    until(lambda: looks.count("a") >= 2)


def rests(rounds, least):
    """Waits until the first look at "a" is over, the next one due after `least` seconds, and the scheduler asleep."""
    until(lambda: (rounds.due_in("a") or 0) > least)
    with rounds._scheduler._jobstores_lock:  # the pass that began it has ended
        pass
    until(lambda: not rounds._active)


class Clocks:
    """The wall clock of this process and of APScheduler, and the suspended time, shifted by hand."""

    def __init__(self, monkeypatch) -> None:
        self.wall = 0.0
        self.slept = 0.0
        real_wall, real_boottime = clock.wall, clock.boottime
        clocks = self

        class Shifted(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(seconds=clocks.wall + clocks.slept)

        monkeypatch.setattr(clock, "wall", lambda: real_wall() + self.wall + self.slept)
        monkeypatch.setattr(clock, "boottime", lambda: real_boottime() + self.slept)
        monkeypatch.setattr(base, "datetime", Shifted)
        monkeypatch.setattr("kueue_ops.rounds.datetime", Shifted)


@pytest.mark.parametrize("jump", [-86400.0, -3600.0, 3600.0, 86400.0])
def test_a_changed_clock_neither_stops_nor_hurries_the_rounds(looks, monkeypatch, jump):
    clocks = Clocks(monkeypatch)
    rounds = looks.make(3.0)
    rounds.start(["a"])
    rests(rounds, 1)
    clocks.wall += jump
    assert rounds.tick()
    until(lambda: looks.count("a") >= 3, seconds=20)
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks.moments("a"))]
    assert all(gap > 2.5 for gap in gaps)


def test_a_changed_clock_is_no_reason_to_look_at_a_host_early(looks, monkeypatch):
    clocks = Clocks(monkeypatch)
    rounds = looks.make(3600.0)
    rounds.start(["a"])
    rests(rounds, 3000)
    clocks.wall += 7 * 86400.0
    assert rounds.tick()
    time.sleep(0.3)
    assert looks.count("a") == 1
    assert 3000 < rounds.due_in("a") < 3800


def test_after_a_suspend_the_hosts_that_are_due_are_looked_at_as_soon_as_there_is_a_network(looks, monkeypatch):
    monkeypatch.setattr("kueue_ops.rounds.WAKING_SECONDS", 0.3)
    clocks = Clocks(monkeypatch)
    rounds = looks.make(3600.0)
    rounds.start(["a"])
    rests(rounds, 3000)
    clocks.slept += 8 * 3600.0
    assert rounds.tick()
    until(lambda: looks.count("a") == 2)
    assert 0 < WAKING_SECONDS < 60


def test_after_a_short_suspend_a_host_keeps_what_is_left_of_its_time(looks, monkeypatch):
    clocks = Clocks(monkeypatch)
    rounds = looks.make(3600.0)
    rounds.start(["a"])
    rests(rounds, 3000)
    clocks.slept += 600.0
    assert rounds.tick()
    assert 2900 < rounds.due_in("a") < 3200
    assert looks.count("a") == 1


def test_a_host_that_is_taken_out_while_its_next_look_is_planned_is_not_missed_for_ever(looks):
    rounds = looks.make(60.0)
    rounds.start(["a"])
    until(lambda: looks.count("a") == 1)
    rounds.set_hosts([])
    rounds._note_due("a", 5.0)  # a thread that was just planning it
    assert rounds.due_in("a") is None
