"""``kueue doctor`` on a host with a real systemd: what it says of units, linger and scopes is what systemd says."""

import json
import shlex
import sys

import pytest

from tests.lab.host import GUEST, GUEST_UID, REPOSITORY, UID, USER, Host, NoHost, install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("one host")]

UNIT = "[Service]\nExecStart={command}\n[Install]\nWantedBy=default.target\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    try:
        install()
        host = Host(tmp_path_factory.mktemp("host"))
    except NoHost as reason:
        pytest.skip(f"no host of its own with systemd: {reason}")
    yield host
    host.close()


def command():
    words = ["env", f"PYTHONPATH={REPOSITORY}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-m", "kueue.cli.main"]
    return shlex.join([*words, "doctor", "--json"]) + " || :"  # without settings there is a problem


def findings(said):
    return {one["name"]: one for one in json.loads(said)["findings"]}


def test_a_user_who_lingers_is_told_of_their_units_one_after_the_other(host):
    def look():
        return findings(host.user("sh", "-c", command()))

    found = look()
    assert found["linger"]["state"] == "ok"
    assert found["linger"]["value"]["enabled"] is True
    assert found["systemd"]["text"] == "The user's service manager runs; no unit of kueue is installed."
    assert found["limits"]["value"]["scope"] is True
    units = host.shared / ".config/systemd/user"
    units.mkdir(parents=True)
    (units / "kueue-worker.service").write_text(UNIT.format(command="/bin/sleep 1000"))
    (units / "kueue-server.service").write_text(UNIT.format(command="/bin/false"))
    host.root("chown", "-R", f"{USER}:", f"/home/{USER}")
    host.user("systemctl", "--user", "daemon-reload")
    host.user("systemctl", "--user", "enable", "kueue-worker")
    found = look()["systemd"]
    assert found["state"] == "note"
    assert "Enabled, but not running here: kueue-worker." in found["text"]
    host.user("systemctl", "--user", "start", "kueue-worker")
    found = look()["systemd"]
    assert found["state"] == "ok"
    assert "kueue-worker active" in found["text"]
    host.user("systemctl", "--user", "start", "kueue-server")
    host.until(lambda: look()["systemd"]["state"] == "problem", "the failure is told")
    found = look()["systemd"]
    assert found["text"] == "Failed: kueue-server."
    assert "journalctl --user -u kueue-server" in found["hint"]
    host.user("systemctl", "--user", "stop", "kueue-worker")


def test_without_xdg_runtime_dir_the_manager_is_found_and_the_variable_is_named(host):
    found = findings(host.user("env", "-u", "XDG_RUNTIME_DIR", "sh", "-c", command()))
    assert found["systemd"]["value"]["manager"] is True
    assert found["systemd.runtime_dir"]["hint"] == f"Type `export XDG_RUNTIME_DIR=/run/user/{UID}`."


def test_a_user_who_does_not_linger_is_told_what_ends_at_logout(host):
    # As cron or `su` without a session: there is no manager to reach.
    switch = ["setpriv", f"--reuid={GUEST_UID}", f"--regid={GUEST_UID}", "--clear-groups", "--", "env", "-i", "-C", "/"]
    found = findings(host.root(*switch, f"HOME=/home/{GUEST}", "PATH=/usr/bin:/bin", "sh", "-c", command()))
    assert found["linger"]["state"] == "note"
    assert found["linger"]["value"]["enabled"] is False
    assert found["linger"]["value"]["kills"] is False
    assert found["linger"]["hint"] == f"Type `loginctl enable-linger {GUEST}`."
    assert found["systemd"]["state"] == "note"
    assert f"export XDG_RUNTIME_DIR=/run/user/{GUEST_UID}" in found["systemd"]["hint"]
    assert found["limits"]["value"]["scope"] is False
    host.root("mkdir", "-p", "/etc/systemd/logind.conf.d")
    host.root("sh", "-c", "printf '[Login]\\nKillUserProcesses=yes\\n' > /etc/systemd/logind.conf.d/kill.conf")
    host.root("systemctl", "restart", "systemd-logind")
    found = findings(host.root(*switch, f"HOME=/home/{GUEST}", "PATH=/usr/bin:/bin", "sh", "-c", command()))
    assert found["linger"]["state"] == "warning"
    assert "KillUserProcesses" in found["linger"]["text"]
