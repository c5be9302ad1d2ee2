"""Average run time and remaining time, by the documented figures."""

from __future__ import annotations

import pytest

from kueue.core.estimates import average, remaining


@pytest.mark.parametrize(
    ("finished", "running", "pending", "expected_average", "expected_remaining"),
    [
        ([], [], 3, 0, 0),
        ([10, 20], [30], 1, 20, 20),
        ([10, 20], [30], 5, 20, 100),
        ([], [7, 12], 1, 12, 17),
        ([100], [10], 0, 100, 90),
        ([60], [], 4, 60, 240),
    ],
)
def test_the_documented_figures(finished, running, pending, expected_average, expected_remaining):
    found = average(len(finished), sum(finished), running)
    assert found == expected_average
    assert remaining(found, running, pending) == expected_remaining


def test_a_job_that_runs_longer_than_the_average_leaves_nothing_to_wait_for():
    assert remaining(10, [50], 0) == 0
