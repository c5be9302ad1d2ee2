"""What a worker declined, and when it is asked again."""

from __future__ import annotations

import pytest

from kueue.core.declines import Declines
from kueue.core.workers import (
    REMEMBERED_SECONDS,
    RETRY_SECONDS,
    SET_ASIDE_SECONDS,
    SET_ASIDE_SECONDS_MAX,
    Worker,
)


def test_a_declined_directory_is_asked_for_again_by_one_offer_at_a_time():
    worker = Worker(0)
    worker.decline_place("/d", "no such directory", 0.0)
    worker.retry(RETRY_SECONDS - 0.1)
    assert "/d" in worker.declined
    worker.retry(RETRY_SECONDS)
    assert "/d" not in worker.declined
    worker.offered("/d", 7)
    assert worker.declined["/d"].reason == "no such directory"
    assert worker.next_retry() is None
    # Another offer of that directory, made before it was declined, tells nothing of the probe.
    worker.asked("/d", 6)
    assert "/d" in worker.declined
    worker.asked("/d", 7)
    assert "/d" not in worker.declined
    worker.offered("/d", 8)
    assert "/d" in worker.declined


def test_a_start_in_a_declined_directory_opens_it():
    worker = Worker(0)
    worker.decline_place("/d", "no such directory", 0.0)
    worker.sees("/d")
    worker.offered("/d", 1)
    worker.offered("/d", 2)
    assert not worker.declined


def test_many_missing_directories_are_asked_for_more_seldom():
    worker = Worker(0)
    for number in range(1000):
        worker.decline_place(f"/{number}", "gone", 0.0)
    assert worker.declined["/999"].retry_at == pytest.approx(20.0, abs=0.1)


def test_a_directory_that_no_job_asks_for_again_is_forgotten_after_a_while():
    worker = Worker(0)
    for number in range(100):
        worker.decline_place(f"/{number}", "gone", float(number))
    worker.retry(200.0)
    assert len(worker.probing) == 100
    worker.decline_place("/7", "still gone", 3000.0)
    worker.retry(200.0 + REMEMBERED_SECONDS)
    worker.offered("/7", 1)
    assert "/7" in worker.declined
    worker.retry(201.0 + REMEMBERED_SECONDS)
    assert list(worker.probing) == ["/7"]
    worker.offered("/8", 2)
    assert "/8" not in worker.declined


class NotWalked(Declines):
    """May be asked for single directories only."""

    def __iter__(self):
        raise AssertionError("somebody walks all declined directories")

    items = values = keys = __iter__


def test_very_many_declined_directories_are_not_walked():
    worker = Worker(0, declined=NotWalked())
    many = 50_000
    for number in range(many):
        worker.decline_place(f"/{number}", "gone", 0.0)
    for steady in (0.0, RETRY_SECONDS - 0.1):
        assert not worker.retry(steady)
        assert worker.next_retry() == RETRY_SECONDS
    assert worker.retry(RETRY_SECONDS)
    assert set(worker.probing) == {f"/{number}" for number in range(len(worker.probing))}
    assert len(worker.declined) == many - len(worker.probing)
    assert RETRY_SECONDS < worker.next_retry() < RETRY_SECONDS + 0.1
    # What has started there meanwhile is asked for no more.
    worker.sees(f"/{len(worker.probing)}")
    worker.retry(float(many))
    assert not worker.declined
    assert worker.next_retry() is None


def test_a_pause_doubles_each_time_up_to_its_limit():
    worker = Worker(0)
    pauses = [worker.set_aside(0.0, "three in a row") for _ in range(7)]
    assert pauses[:3] == [SET_ASIDE_SECONDS, 2 * SET_ASIDE_SECONDS, 4 * SET_ASIDE_SECONDS]
    assert pauses[-1] == SET_ASIDE_SECONDS_MAX


def test_what_ends_during_a_pause_counts_for_nothing():
    worker = Worker(0)
    pause = worker.set_aside(0.0, "three in a row")
    assert not any(worker.ended(1.0, failed_fast=True) for _ in range(9))
    assert not worker.ended(1.0, failed_fast=False)
    assert worker.set_aside_note
    assert worker.ended(pause, failed_fast=True)
