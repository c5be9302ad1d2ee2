"""The limits that the restart tool derives from its settings hold each other."""

from __future__ import annotations

import pytest

from kueue.config import Config, RestartWorkers
from kueue.errors import ConfigError
from kueue.worker.presence import STOP_SECONDS
from kueue_ops.remote import RENEW_LIMIT_SECONDS, START_LIMIT_SECONDS, STOP_LIMIT_SECONDS
from kueue_ops.remote_steps import SERVICE_STOP_SECONDS, START_SECONDS
from kueue_ops.restart_settings import Laboratory
from kueue_ops.server_view import ANSWER_SECONDS


def lab(**settings):
    section = RestartWorkers(ssh_user="ada", hostnames="ralab01", **settings)
    return Laboratory(Config("/nowhere.toml", exists=True, restart_workers=section))


@pytest.mark.parametrize(("connect", "command"), [(10.0, 30.0), (0.1, 0.1), (60.0, 600.0)])
def test_a_look_with_all_that_may_follow_is_not_taken_to_hang(connect, command):
    """A login through another host, a look, a renewal of a worker that must be killed, the server's word."""
    renewal = max(RENEW_LIMIT_SECONDS, command)
    logins = 6 * connect + 1 + connect + 3 * connect + 1
    whole = logins + command + 1 + renewal + 1 + ANSWER_SECONDS
    assert lab(connect_timeout_seconds=connect, command_timeout_seconds=command).look_seconds > whole


def test_the_limits_of_a_host_are_longer_than_what_is_waited_for_there():
    # An orderly stop, then a kill, each with the limit; a unit is given its own.
    assert STOP_LIMIT_SECONDS > 45 + 2 * STOP_SECONDS + 10
    assert START_LIMIT_SECONDS > 2 * START_SECONDS + 20
    assert RENEW_LIMIT_SECONDS > SERVICE_STOP_SECONDS + START_SECONDS


def test_a_turn_lasts_longer_than_a_renewal():
    assert lab().limits.turn_seconds > RENEW_LIMIT_SECONDS + lab().limits.unseen_seconds


def test_a_login_is_no_place_for_options():
    with pytest.raises(ConfigError):
        Laboratory(
            Config("/n.toml", exists=True, restart_workers=RestartWorkers(ssh_user="-oProxyCommand=x", hostnames="a"))
        )
