"""Where a scope of the user's service manager is worth asking for."""

from kueue.worker.scope import is_below_manager


def test_a_unit_of_the_users_manager_is_known_in_every_layout():
    unit = "/user.slice/user-1000.slice/user@1000.service/app.slice/kueue-worker.service"
    assert is_below_manager(f"0::{unit}\n", 1000)
    assert is_below_manager(f"9:name=systemd:{unit}\n8:pids:/\n0::/\n", 1000)


def test_login_sessions_system_units_and_others_managers_are_not_below_it():
    for where in (
        "/user.slice/user-1000.slice/session-3.scope",
        "/system.slice/kueue-worker.service",
        "/user.slice/user-1001.slice/user@1001.service/app.slice/a.service",
        "/",
    ):
        assert not is_below_manager(f"0::{where}\n", 1000)
    assert not is_below_manager("", 1000)
