"""Work for many keys side by side, with real threads and short limits."""

from __future__ import annotations

import threading
import time

import pytest

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

    def work(_):
        nonlocal now, most
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
    began = []

    def work(ticket):
        began.append(ticket.key)
        gate.wait()

    lanes.submit("a", work, lambda _: None)
    lanes.submit("b", work, lambda _: None)
    until(lambda: began == ["a"])
    lanes.close()
    assert not lanes.wait_idle(0.05)
    gate.set()
    assert lanes.wait_idle(20)
    assert began == ["a"]


def test_more_lanes_are_used_at_once(gate):
    lanes = Lanes(1, 30)
    began = []

    def work(ticket):
        began.append(ticket.key)
        gate.wait()

    for key in "abc":
        lanes.submit(key, work, lambda _: None)
    until(lambda: began == ["a"])
    lanes.widen(3, 30)
    until(lambda: sorted(began) == ["a", "b", "c"])
