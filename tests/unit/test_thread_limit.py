"""What a program does when its account may start no more threads."""

from __future__ import annotations

import logging
import threading

import pytest

from kueue import threads

pytestmark = pytest.mark.trio


@pytest.fixture
def refusals(monkeypatch):
    """So many starts of a thread are refused from now on, as Python does it."""
    real, left = threading.Thread.start, [0]

    def start(thread):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    # What trio keeps from before would be taken instead.
    monkeypatch.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
    monkeypatch.setattr(threading.Thread, "start", start)
    return left


async def test_a_call_waits_until_there_is_a_thread_for_it_and_says_so_once(refusals, monkeypatch, caplog):
    monkeypatch.setattr(threads, "RETRY_SECONDS", 0.01)
    refusals[0] = 3
    with caplog.at_level(logging.WARNING, logger="kueue"):
        assert await threads.patiently(divmod, 7, 2) == (3, 1)
    assert refusals == [0]
    assert [record.getMessage() for record in caplog.records] == [
        "no thread can be made: the account is at its limit of processes; trying again"
    ]


async def test_only_the_want_of_a_thread_is_waited_for():
    def bug():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        await threads.patiently(bug)
    with pytest.raises(RuntimeError, match="something else"), threads.wanted("look-up"):
        bug()
