"""The running server's own small decisions."""

from __future__ import annotations

import pytest

from kueue.config import Config
from kueue.server.service import engine_settings, name_remark
from kueue.settings import ServerSettings


@pytest.mark.parametrize(
    ("name", "addresses", "ours", "word"),
    [
        ("localhost", ["127.0.0.1", "::1"], True, ""),
        ("127.0.0.1", ["127.0.0.1"], True, ""),
        ("ralab04", ["127.0.1.1"], True, "/etc/hosts"),
        ("ralab04", ["127.0.1.1", "192.0.2.7"], True, ""),
        ("ralab04", ["192.0.2.7"], True, ""),
        ("ralab04", ["192.0.2.7"], False, "not this host"),
    ],
)
def test_a_name_that_leads_elsewhere_is_remarked_on(name, addresses, ours, word):
    remark = name_remark(name, addresses, lambda _: ours)
    assert (word in remark) if word else remark == ""


def test_minutes_and_seconds_of_the_settings_reach_the_engine():
    settings = engine_settings(
        Config(
            server=ServerSettings(job_cleanup_after_minutes=2, worker_timeout_seconds=40), global_resources={"genus": 3}
        )
    )
    # Whole minutes, strictly more than the setting.
    assert settings.job_cleanup_after_seconds == 180
    assert settings.worker_timeout_seconds == 40
    assert settings.counters == {"genus": 3}
