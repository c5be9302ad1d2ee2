"""Units: true for the installation, understood by old and new systemd, and no sandbox around jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kueue.errors import KueueError
from kueue_ops import assets, systemd
from kueue_ops.systemd import PARTS, Command

# As in systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.kill(5) and systemd.resource-control(5) of 239.
KNOWN_TO_239 = {
    "Unit": {"Description", "After", "ConditionHost", "ConditionPathExists", "StartLimitIntervalSec"},
    "Service": {
        *("Type", "NotifyAccess", "ExecStart", "ExecReload", "Restart", "RestartSec", "WatchdogSec"),
        *("TimeoutStartSec", "TimeoutStopSec", "SyslogIdentifier", "KillMode", "Delegate", "WorkingDirectory"),
        *("Environment", "LimitCORE", "UMask", "NoNewPrivileges", "LockPersonality", "RestrictRealtime"),
        *("RestrictNamespaces", "RestrictAddressFamilies", "SystemCallArchitectures"),
    },
    "Install": {"WantedBy"},
}
# Older ones say "Unknown key" (or "lvalue") in their log and do without; nothing depends on it.
IGNORED_WITHOUT_HARM = {"OOMPolicy": 243}
WRITTEN_WHERE_KNOWN = {"RestartSteps": 254, "RestartMaxDelaySec": 254}

INSTALLED = Command(("/opt/kueue/bin/kueue_x",))


def shipped(part):
    return (assets.folder("systemd-user") / PARTS[part].unit).read_text()


def settings(text):
    """(section, key, value) of each line."""
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.append((section, key, value))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_old_systemd_knows_every_directive_or_passes_over_it_without_harm(part):
    for text in (shipped(part), systemd.unit(shipped(part), INSTALLED, "/etc/kueue.toml", 253), systemd.host("a1")):
        for section, key, _ in settings(text):
            assert key in KNOWN_TO_239[section] or key in IGNORED_WITHOUT_HARM


@pytest.mark.parametrize("part", PARTS)
def test_pauses_between_restarts_grow_where_systemd_can(part):
    keys = {key for _, key, _ in settings(systemd.unit(shipped(part), INSTALLED, "", 254))}
    assert set(WRITTEN_WHERE_KNOWN) <= keys
    assert not set(WRITTEN_WHERE_KNOWN) & {key for _, key, _ in settings(systemd.unit(shipped(part), INSTALLED))}


@pytest.mark.parametrize("part", PARTS)
def test_a_service_is_watched_and_never_given_up(part):
    found = {key: value for _, key, value in settings(shipped(part))}
    assert (found["Type"], found["NotifyAccess"], found["Restart"]) == ("notify", "main", "on-failure")
    assert int(found["RestartSec"]) >= 5
    assert found["StartLimitIntervalSec"] == "0"
    assert int(found["WatchdogSec"]) >= 60
    assert found["WantedBy"] == "default.target"


def test_around_the_worker_there_is_nothing_that_a_job_would_inherit():
    keys = {key for _, key, _ in settings(shipped("worker"))}
    assert keys == {
        *(
            "Description",
            "After",
            "StartLimitIntervalSec",
            "Type",
            "NotifyAccess",
            "ExecStart",
            "ExecReload",
            "Restart",
        ),
        *("RestartSec", "WatchdogSec", "TimeoutStartSec", "TimeoutStopSec", "SyslogIdentifier", "KillMode"),
        *("OOMPolicy", "Delegate", "WantedBy"),
    }
    found = {key: value for _, key, value in settings(shipped("worker"))}
    assert (found["KillMode"], found["OOMPolicy"], found["Delegate"]) == ("process", "continue", "yes")


@pytest.mark.parametrize("part", ["server", "restart-workers"])
def test_what_starts_no_jobs_is_confined(part):
    found = {key: value for _, key, value in settings(shipped(part))}
    for key in ("NoNewPrivileges", "LockPersonality", "RestrictRealtime"):
        assert found[key] == "yes"
    assert found["LimitCORE"] == "0"
    assert found["ConditionPathExists"] == "%h/.config/kueue/config.toml"


def test_a_unit_names_the_programs_of_the_installation():
    command = Command(("/usr/bin/python3", "-m", "kueue.server.main"), "/src/a b", "/src/ops")
    text = systemd.unit(shipped("server"), command, "/data/100%/my config.toml")
    assert 'ExecStart=/usr/bin/python3 -m kueue.server.main --config "/data/100%%/my config.toml"\n' in text
    assert "WorkingDirectory=/src/a b\n" in text
    assert "Environment=PYTHONPATH=/src/ops\n" in text
    assert "ConditionPathExists=/data/100%%/my config.toml\n" in text
    assert systemd.started(text) == "/usr/bin/python3"


@pytest.mark.parametrize("path", ["/a b/kueue_x", "/100%/kueue_x", "/a$b/{kueue};x"])
def test_any_path_comes_out_of_a_unit_as_it_went_in(path):
    assert systemd.started(systemd.unit(shipped("worker"), Command((path,)))) == path


@pytest.mark.parametrize(
    "path", ["/a\nb/kueue_x", "/a\rb", "/a/ ", "/a\tb", "/a\x01b", "/a\udcffb", '/"a"/x', "/a'b/x", "/a\\b"]
)
def test_a_path_that_cannot_stand_in_a_unit_is_refused(path):
    with pytest.raises(KueueError, match="cannot be written into a unit"):
        systemd.unit(shipped("worker"), Command((path,)))


def test_a_host_has_a_file_of_its_own():
    assert "\nConditionHost=|ralab01.uni\n" in systemd.host("ralab01.uni")
    assert systemd.host_of(systemd.host_file("ralab01.uni")) == "ralab01.uni"
    assert systemd.host_of("override.conf") == ""
    for name in ("", "a b", "*", "a/b", "|a", "!a"):
        with pytest.raises(KueueError, match="host name"):
            systemd.host(name)


# --- as systemd itself reads them -------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze on this machine")
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


def verify(home, units):
    environ = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run")}
    command = ["systemd-analyze", "--user", "verify", *map(str, units)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    lines = (done.stdout + done.stderr).splitlines()
    # It reads all units of the machine: a socket of gpg-agent has no room in a path as long as that of a test.
    return done.returncode, "\n".join(line for line in lines if "kueue" in line)


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_systemd_finds_no_fault_in_the_units_as_they_come(home):
    for part in PARTS.values():
        program(home / ".local/bin" / part.program)
    units = [shutil.copy(assets.folder("systemd-user") / part.unit, home) for part in PARTS.values()]
    assert verify(home, units) == (0, "")


def test_systemd_finds_no_fault_in_installed_units_with_odd_paths(home):
    version = int(re.search(r"systemd (\d+)", subprocess.check_output(["systemctl", "--version"], text=True))[1])
    units = []
    for part in PARTS.values():
        path = home / "with blanks & 100% $HOME" / part.program
        program(path)
        text = systemd.unit(shipped(part.name), Command((str(path),), str(home)), f"{home}/a '$b\".toml", version)
        unit = home / part.unit
        unit.write_text(text)
        (home / f"{part.unit}.d").mkdir()
        (home / f"{part.unit}.d" / systemd.host_file("a1")).write_text(systemd.host("a1"))
        units.append(unit)
    assert verify(home, units) == (0, "")


def test_the_check_above_would_find_a_fault(home):
    program(home / ".local/bin/kueue_worker")
    unit = Path(home, "kueue-worker.service")
    unit.write_text(shipped("worker").replace("KillMode=process", "KillMood=process"))
    assert "KillMood" in verify(home, [unit])[1]
