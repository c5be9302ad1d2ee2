"""What a worker declined, and when it is asked again."""

from __future__ import annotations

import pytest

from kueue.core.workers import RETRY_SECONDS, SET_ASIDE_SECONDS, SET_ASIDE_SECONDS_MAX, Worker


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
