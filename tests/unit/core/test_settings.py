"""Times that are derived from the time-out."""

from __future__ import annotations

import pytest

from kueue.core.settings import Settings


@pytest.mark.parametrize(("timeout", "margin", "lease"), [(10.0, 2.0, 8.0), (20.0, 2.0, 18.0), (300.0, 30.0, 270.0)])
def test_the_lease_is_shorter_than_the_timeout_by_a_tenth_but_at_least_2_s(timeout, margin, lease):
    settings = Settings(worker_timeout_seconds=timeout)
    assert (settings.margin_seconds, settings.lease_seconds) == (margin, lease)


@pytest.mark.parametrize("timeout", [10.0, 11.0, 20.0, 300.0, 3600.0])
def test_a_lease_ends_before_its_job_is_given_away(timeout):
    """Clocks may differ by 1 % and a pause may take half the margin."""
    settings = Settings(worker_timeout_seconds=timeout)
    assert settings.lease_seconds / 0.99 + settings.margin_seconds / 2 < timeout / 1.01
