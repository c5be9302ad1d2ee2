"""The restart tool where the worker is a unit of the user's service manager: it is asked to start, renew and stop it."""

import json
import os
import re
import signal

import pytest

from kueue_ops.sight import UNIT
from tests.lab.cluster import Cluster, NoHost, install
from tests.lab.department import BIN, HOME, STATE, Department
from tests.support import wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "ralab01"


@pytest.fixture(scope="module")
def department(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    try:
        install()
        cluster = Cluster(folder, (HOST,))
    except NoHost as reason:
        pytest.skip(f"no host of its own with systemd and sshd: {reason}")
    try:
        yield Department(cluster, wheel.build(tmp_path_factory.mktemp("wheel")))
    finally:
        cluster.close()


@pytest.fixture
def lab(department):
    """The unit is installed and enabled, and runs."""
    department.tool("--stop")
    department.desk.user(f"{BIN}/kueue_install", "systemd", "worker", "--start")
    department.until(lambda: HOST in department.workers(), "the server sees it")
    yield department
    department.desk.user(f"{BIN}/kueue_install", "systemd", "worker", "--uninstall")
    department.tool("--stop")


def main_pid(lab):
    return int(lab.systemctl("show", "-p", "MainPID", "--value", UNIT))


def is_in_unit(lab):
    """The worker is the unit's, and in no session."""
    pid, _ = lab.worker(HOST)
    return pid != 0 and pid == main_pid(lab) and lab.sessions(HOST) == []


def row(lab):
    return json.loads(lab.tool("--status", "--json")[1])["hosts"][0]


def test_one_that_was_stopped_is_started_by_its_unit_and_the_status_says_so(lab):
    lab.systemctl("stop", UNIT)
    assert lab.worker(HOST) == (0, 0)
    code, _, said = lab.tool("--once")
    assert code == 0, said
    assert is_in_unit(lab)
    assert re.search(rf"No worker runs; {UNIT} is (inactive|failed)\.", said)
    assert f"systemctl --user restart {UNIT}" in said
    assert row(lab)["session"] == "systemd"
    assert row(lab)["last_action"] == "started"


def test_one_that_was_killed_is_started_before_the_unit_does_it_itself(lab):
    pid = main_pid(lab)
    lab.desk.user("kill", "-KILL", str(pid))
    code, _, said = lab.tool("--once")
    assert code == 0, said
    assert main_pid(lab) != pid
    assert is_in_unit(lab)


def test_an_old_version_is_renewed_by_a_restart_of_the_unit_and_its_jobs_go_on(lab):
    jobs = lab.start_jobs(1)
    pid = main_pid(lab)
    note = lab.desk.disk / f"{STATE[1:]}/workers/{HOST}/running"
    assert note.read_text().split()[0] == str(pid)
    note.write_text(f"{pid} 0.0.1\n")
    code, _, said = lab.tool("--once")
    assert code == 0, said
    assert "version 0.0.1" in said
    assert f"systemctl --user restart {UNIT}" in said
    assert main_pid(lab) != pid
    assert is_in_unit(lab)
    ((job, code),) = jobs.items()
    (end,) = lab.finish(jobs)
    assert (end["outcome"], end["attempt"]) == ({"type": "exited", "code": code}, 1), job


def test_a_stop_goes_to_the_unit_and_without_the_unit_there_is_a_session_again(lab):
    code, said, complaints = lab.tool("--stop")
    assert code == 0, complaints
    assert f"Stopped {UNIT}" in said
    assert f"disable {UNIT}" in said
    assert lab.systemctl("show", "-p", "ActiveState", "--value", UNIT) == "inactive\n"
    assert lab.worker(HOST) == (0, 0)
    lab.systemctl("disable", UNIT)
    code, _, said = lab.tool("--once")
    assert code == 0, said
    assert main_pid(lab) == 0
    assert len(lab.sessions(HOST)) == 1
    assert row(lab)["session"].startswith("screen ")
    # With the unit enabled anew the worker that lives in a session is left there.
    lab.systemctl("enable", UNIT)
    before = lab.worker(HOST)
    assert lab.tool("--once")[0] == 0
    assert lab.worker(HOST) == before


def test_a_unit_that_is_for_another_host_is_passed_over(lab):
    lab.tool("--stop")
    place = lab.home / f".config/systemd/user/{UNIT}.d/host-{HOST}.conf"
    place.write_text(place.read_text().replace(f"|{HOST}", "|elsewhere"))
    lab.systemctl("daemon-reload")
    code, _, said = lab.tool("--once")
    assert code == 0, said
    assert main_pid(lab) == 0
    assert len(lab.sessions(HOST)) == 1
    place.write_text(place.read_text().replace("|elsewhere", f"|{HOST}"))
    lab.systemctl("daemon-reload")


def test_a_unit_that_another_host_of_the_same_home_has_enabled_meanwhile_is_passed_over(lab):
    """The service manager here has not read anything anew, so nothing refers to the unit, and systemd forgets its try."""
    lab.desk.user(f"{BIN}/kueue_install", "systemd", "worker", "--uninstall")
    lab.tool("--stop")
    folder = lab.home / ".config/systemd/user"
    (folder / f"{UNIT}.d").mkdir()
    (folder / f"{UNIT}.d/host-elsewhere.conf").write_text("[Unit]\nConditionHost=|elsewhere\n")
    (folder / UNIT).write_text("[Service]\nExecStart=/bin/false\n[Install]\nWantedBy=default.target\n")
    wants = folder / "default.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / UNIT).symlink_to(f"../{UNIT}")
    try:
        code, _, said = lab.tool("--once")
        assert code == 0, said
        assert main_pid(lab) == 0
        assert len(lab.sessions(HOST)) == 1
    finally:
        lab.tool("--stop")
        (wants / UNIT).unlink()
        (folder / UNIT).unlink()
        (folder / f"{UNIT}.d/host-elsewhere.conf").unlink()
        (folder / f"{UNIT}.d").rmdir()


def test_a_unit_whose_worker_ends_at_once_is_told_with_the_reason(lab):
    lab.tool("--stop")
    path = lab.home / ".config/kueue/config.toml"
    good = path.read_text()
    path.write_text(good.replace("cores = 16", "cores = -3"))
    try:
        code, said, complaints = lab.tool("--once")
    finally:
        path.write_text(good)
    assert code == 1
    assert re.search(rf"{UNIT}.*(cores must be|failed \(exit-code)", said + complaints), said + complaints


def test_a_unit_whose_worker_hangs_is_renewed(lab):
    """By hand of a script as the tool sends it: the tool itself waits a minute and a half for the server's word."""
    pid = main_pid(lab)
    inside = [one for one in lab.desk.processes() if _number_inside(one) == pid]
    os.kill(inside[0], signal.SIGSTOP)
    script = (
        "import sys\nfrom kueue_ops.address import parse_host\nfrom kueue_ops.remote import Remote, RemoteOptions\n"
        f"with Remote(parse_host('{HOST}'), RemoteOptions()) as there:\n    print(there.renew(there.look()).how)\n"
    )
    assert lab.desk.user(f"{BIN}/python", "-c", script, seconds=120) == "service\n"
    assert main_pid(lab) not in {0, pid}
    assert is_in_unit(lab)
    assert lab.finds("test", "-d", HOME)[0] == 0


def _number_inside(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(next(line.split()[-1] for line in file if line.startswith("NSpid:")))
