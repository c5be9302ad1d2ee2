"""Work for many keys side by side, with real threads and short limits."""

from __future__ import annotations

import threading
import time

import pytest

from kueue.errors import KueueError
from kueue_ops.lanes import LINGERING, Abandoned, Lanes


@pytest.fixture
def gate():
    """Something to hang on; opened at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_a_thread_for_the_limits_nothing_begins(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KueueError, match="no more threads"):
            Lanes(1, 30)
    (result,) = Lanes(1, 30).each(["a"], lambda _: "well")
    assert result.value == "well"


def test_results_and_errors_come_back_with_their_key():
    def work(ticket):
        if ticket.key == "bad":
            raise ValueError("no")
        return ticket.key.upper()

    results = {one.key: one for one in Lanes(2, 30).each(["a", "bad", "b"], work)}
    assert (results["a"].value, results["b"].value) == ("A", "B")
    assert isinstance(results["bad"].error, ValueError)
    assert not results["bad"].is_hung


def test_no_more_run_at_once_than_there_are_lanes():
    lock, now, most = threading.Lock(), 0, 0

    def work(ticket):
        nonlocal now, most
        ticket.enter()
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    assert len(list(Lanes(3, 30).each(map(str, range(12)), work))) == 12
    assert most == 3


def test_what_hangs_is_given_up_and_delays_nobody(gate):
    def work(ticket):
        ticket.enter()
        if ticket.key.startswith("hung"):
            gate.wait()
        return ticket.key

    results = {one.key: one for one in Lanes(1, 0.2).each(["hung", "good"], work)}
    assert results["hung"].is_hung
    assert results["good"].value == "good"


def test_what_was_given_up_may_not_change_anything_when_it_goes_on(gate):
    refused = threading.Event()

    def work(ticket):
        gate.wait()
        try:
            ticket.check()
        except Abandoned:
            refused.set()

    (result,) = Lanes(1, 0.1).each(["a"], work)
    assert result.is_hung
    gate.set()
    assert refused.wait(20)


def test_a_key_that_hangs_again_and_again_does_not_pile_up_threads(gate):
    lanes = Lanes(2, 0.05)
    began = []

    def work(ticket):
        began.append(ticket.key)
        gate.wait()

    for _ in range(LINGERING + 4):
        (result,) = lanes.each(["a"], work)
        assert result.is_hung
    assert len(began) == LINGERING == lanes.lingering
    gate.set()
    until(lambda: lanes.lingering == 0)
    (result,) = lanes.each(["a"], lambda _: "well")
    assert result.value == "well"


def test_after_closing_nothing_begins_and_what_runs_may_end(gate):
    lanes = Lanes(1, 30)
    began, refused = [], threading.Event()

    def work(ticket):
        try:
            ticket.enter()
        except Abandoned:
            refused.set()
            raise
        began.append(ticket.key)
        gate.wait()

    lanes.submit("a", work, lambda _: None)
    until(lambda: began == ["a"])
    lanes.submit("b", work, lambda _: None)
    lanes.close()
    lanes.submit("c", work, lambda _: None)
    assert refused.wait(20)
    assert not lanes.wait_idle(0.05)
    gate.set()
    assert lanes.wait_idle(20)
    assert began == ["a"]


def test_more_lanes_are_used_at_once(gate):
    lanes = Lanes(1, 30)
    began = []

    def work(ticket):
        ticket.enter()
        began.append(ticket.key)
        gate.wait()

    for key in "abc":
        lanes.submit(key, work, lambda _: None)
    until(lambda: len(began) == 1)
    lanes.widen(3, 30)
    until(lambda: sorted(began) == ["a", "b", "c"])


def test_those_that_wait_outside_hold_no_lane_and_their_limit_counts_anew_inside(gate):
    """Nine that are silent, one lane: the tenth has it at once; who waits for the lane is not taken to hang."""
    lanes = Lanes(1, 2.0)
    slow = threading.Event()

    def work(ticket):
        if ticket.key.startswith("mute"):
            gate.wait(30)
        ticket.enter()
        if ticket.key.startswith("slow"):
            time.sleep(1.0)  # three of them are longer than the limit, and one is far from it
        slow.set()
        return ticket.key

    silent, results = [f"mute{number}" for number in range(9)], {}
    for key in [*silent, "slow1", "slow2", "slow3", "good"]:
        lanes.submit(key, work, lambda result: results.setdefault(result.key, result))
    until(lambda: len(results) == 13)
    assert {key for key, one in results.items() if one.is_hung} == set(silent)
    assert results["good"].value == "good"


def test_a_lane_that_was_left_is_free_for_the_next_and_is_entered_again_in_turn(gate):
    lanes = Lanes(1, 30)
    order = []

    def work(ticket):
        ticket.enter()
        ticket.enter()  # who is in stays in
        order.append(ticket.key)
        if ticket.key == "a":
            ticket.leave()
            gate.wait(30)
            ticket.enter()
            order.append("a again")

    results = {}
    lanes.submit("a", work, lambda result: results.setdefault("a", result))
    until(lambda: order == ["a"])
    lanes.submit("b", work, lambda result: results.setdefault("b", result))
    until(lambda: "b" in results)
    gate.set()
    until(lambda: "a" in results)
    assert order == ["a", "b", "a again"]


def test_more_than_a_crowd_wait_for_their_thread():
    lanes = Lanes(1, 30, crowd=2)
    lock, now, most = threading.Lock(), 0, 0

    def work(_):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    assert len(list(lanes.each(map(str, range(12)), work))) == 12
    assert most == 3


def test_a_fault_in_who_is_told_costs_neither_the_lane_nor_the_limits_of_the_others(gate):
    lanes = Lanes(1, 0.1)
    told = []

    def done(result):
        told.append(result.key)
        raise ValueError("a fault")

    for key in ("hung", "hung too"):
        lanes.submit(key, lambda _: gate.wait(60), done)
    until(lambda: set(told) == {"hung", "hung too"})
    lanes.submit("good", lambda ticket: ticket.enter(), done)
    until(lambda: "good" in told)
    until(lambda: lanes.busy == 0)
    (result,) = lanes.each(["hung again"], lambda _: gate.wait(60))
    assert result.is_hung
