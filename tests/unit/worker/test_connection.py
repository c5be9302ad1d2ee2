"""The pauses between two tries to reach the server."""

from __future__ import annotations

from kueue.worker.connection import LONGEST_PAUSE_SECONDS, Pauses


def test_pauses_grow_to_at_most_ten_tries_a_minute():
    pauses = Pauses(scatter=lambda: 0.0)
    passed, tries = 0.0, 1
    while passed < 60.0:
        passed += pauses.after(held=False)
        tries += 1
    assert 5 <= tries <= 10


def test_no_pause_is_longer_than_half_a_minute():
    pauses = Pauses(scatter=lambda: 1.0)
    assert max(pauses.after(held=False) for _ in range(20)) <= LONGEST_PAUSE_SECONDS < 30.0


def test_a_session_that_held_makes_the_next_pause_short():
    pauses = Pauses(scatter=lambda: 1.0)
    for _ in range(10):
        pauses.after(held=False)
    assert pauses.after(held=True) == 0.5
    assert pauses.after(held=False) == 1.0


def test_a_lasting_refusal_is_not_asked_again_soon():
    assert Pauses(scatter=lambda: 1.0).after(held=False, lasting=True) == LONGEST_PAUSE_SECONDS


def test_pauses_are_scattered():
    low, high = Pauses(scatter=lambda: 0.0), Pauses(scatter=lambda: 1.0)
    for _ in range(5):
        one, other = low.after(held=False), high.after(held=False)
        assert one < other


def test_a_server_that_is_back_is_found_before_it_gives_the_jobs_away():
    """A restarted server waits `worker_timeout_seconds` and not longer."""
    pauses = Pauses(scatter=lambda: 1.0)
    for _ in range(20):
        pause = pauses.after(held=False, timeout_seconds=10.0)
    assert pause == 2.5
    assert pauses.after(held=False, lasting=True, timeout_seconds=10.0) == LONGEST_PAUSE_SECONDS
    assert pauses.after(held=False, timeout_seconds=10.0) == 2.5
    assert pauses.after(held=False, timeout_seconds=300.0) == 2.5
