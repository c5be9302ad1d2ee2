"""What the doctor says of what was measured: values in, findings out; for what no test machine can be brought into."""

from __future__ import annotations

import pytest

from kueue import __version__
from kueue.cli.doctor import file_verdict, host_verdict, lab_verdict
from kueue.cli.doctor.finding import Answer, Finding, as_json, is_well, ordered

DIRECTORY = {
    "path": "/home/ada",
    "account_path": "/home/ada",
    "reason": "",
    "fstype": "nfs4",
    "source": "fileserver:/home",
    "mount": "/home",
    "network": True,
    "exists": True,
    "directory": True,
    "inode": 17,
    "owner": 1000,
    "mode": "0700",
    "writable": True,
    "free_mb": 50_000,
    "total_mb": 100_000,
    "free_inodes": None,
    "read_only": False,
}
LIMITS = {
    "nofile": [1024, 1_048_576],
    "nproc": [None, None],
    "locks_hard": None,
    "kernel": "6.18.1",
    "pidfd": True,
    "ends_are_kept": True,
    "hidepid": "",
    "cgroup2": True,
}
SERVER = {
    "name": "ralab01",
    "port": 11236,
    "here": False,
    "addresses": ["192.0.2.7"],
    "tcp": {"192.0.2.7": "open"},
    "local": False,
    "previous": False,
    "version": __version__,
    "pid": 7,
    "read_only": "",
    "rtt_ms": 1.5,
}
NOTHING = Answer({})


def by_name(findings):
    return {one.name: one for one in findings}


def the(findings):
    (one,) = findings
    return one


def test_findings_are_in_the_order_of_topics_and_only_a_problem_is_bad():
    findings = [Finding("limits", "note", "b"), Finding("config.key", "warning", "c"), Finding("config", "ok", "a")]
    assert [one.name for one in ordered(findings)] == ["config", "config.key", "limits"]
    assert is_well(findings)
    answer = as_json([Finding("home", "problem", "x", "y", {"inode": 1})])
    assert answer == {
        "findings": [{"name": "home", "state": "problem", "text": "x", "hint": "y", "value": {"inode": 1}}],
        "ok": False,
    }


def test_a_shared_home_is_well_and_says_where_it_comes_from():
    home = the(file_verdict.home_findings(Answer(DIRECTORY), NOTHING, 1000))
    assert home == Finding("home", "ok", "/home/ada, nfs4 from fileserver:/home.", "", DIRECTORY)


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        ({"writable": False}, "warning", "is not writable for this account"),
        ({"free_mb": 3}, "warning", "has only 3 MB left"),
        ({"account_path": "/users/ada"}, "note", "the account's is /users/ada"),
        ({"directory": False}, "problem", "is not there"),
    ],
)
def test_what_is_wrong_with_a_home(change, state, text):
    home = the(file_verdict.home_findings(Answer({**DIRECTORY, **change}), NOTHING, 1000))
    assert home.state == state
    assert text in home.text


def test_the_current_directory_is_well_where_other_machines_can_have_it():
    assert the(file_verdict.cwd_findings(Answer(DIRECTORY))).state == "ok"
    local = {**DIRECTORY, "network": False, "fstype": "ext4"}
    assert the(file_verdict.cwd_findings(Answer(local))).state == "note"


def test_state_on_a_network_file_system_is_a_warning_that_names_a_local_place():
    found = by_name(file_verdict.state_findings(Answer(DIRECTORY), 1000))
    assert found["state"].state == "ok"
    assert found["state.network"].state == "warning"
    assert 'state_dir = "/var/tmp/kueue-1000"' in found["state.network"].hint


def test_little_room_is_a_warning_and_none_a_problem():
    local = {**DIRECTORY, "network": False, "fstype": "ext4"}
    for free, state in ((31, "problem"), (500, "warning"), (2000, "ok")):
        assert the(file_verdict.state_findings(Answer({**local, "free_mb": free}), 1000)).state == state
    assert the(file_verdict.state_findings(Answer({**local, "free_inodes": 900}), 1000)).state == "warning"
    assert the(file_verdict.spool_findings(Answer({**local, "free_mb": 1500}), 2000)).state == "warning"
    assert the(file_verdict.spool_findings(Answer({**local, "free_mb": 1500}), 0)).state == "ok"


def test_a_kernel_without_pidfd_is_a_problem_and_an_older_one_is_told_of_what_it_lacks():
    limits = by_name(host_verdict.limits_findings(Answer({**LIMITS, "pidfd": False}), NOTHING, NOTHING))["limits"]
    assert limits.state == "problem"
    assert "5.3" in limits.text
    found = by_name(host_verdict.limits_findings(Answer({**LIMITS, "ends_are_kept": False}), NOTHING, NOTHING))
    assert found["limits"].state == "ok"
    assert found["limits.kernel"].state == "note"


@pytest.mark.parametrize(
    ("systemd", "linger", "scope"),
    [
        ({"manager": True}, {"enabled": True}, True),
        ({"manager": True, "below_manager": True}, {"enabled": False}, True),
        ({"manager": True}, {"enabled": False}, False),
        ({"manager": False}, {"enabled": True}, False),
    ],
)
def test_a_runner_gets_a_scope_where_the_manager_outlives_the_login(systemd, linger, scope):
    limits = the(host_verdict.limits_findings(Answer(LIMITS), Answer(systemd), Answer(linger)))
    assert limits.value["scope"] is scope


def test_a_manager_that_is_not_reached_is_a_note_with_the_variable_to_set():
    facts = {"booted": True, "manager": False, "said": "No medium found", "units": {}, "runtime_dir": ""}
    found = by_name(host_verdict.systemd_findings(Answer(facts), 1000))
    assert "No medium found" in found["systemd"].text
    assert found["systemd.runtime_dir"].hint == "Type `export XDG_RUNTIME_DIR=/run/user/1000`."


@pytest.mark.parametrize(
    ("tcp", "text"),
    [
        ({"192.0.2.7": "ECONNREFUSED"}, "the server is not running, or server_port is wrong"),
        ({"192.0.2.7": "ETIMEDOUT"}, "a firewall drops the connection"),
        ({"192.0.2.7": "EHOSTUNREACH"}, "there is no way to that host"),
        ({"192.0.2.7": "EACCES"}, "connecting fails (EACCES)"),
        ({"2001:db8::7": "ENETUNREACH", "192.0.2.7": "ETIMEDOUT"}, "(192.0.2.7) is not reached: it does not answer"),
    ],
)
def test_each_way_not_to_reach_a_server_has_its_sentence(tcp, text):
    server = the(lab_verdict.server_findings(Answer({**SERVER, "tcp": tcp, "addresses": list(tcp)}), NOTHING))
    assert server.state == "problem"
    assert text in server.text
    assert server.hint
    assert "{port}" not in server.hint


def test_one_of_two_addresses_that_does_not_answer_is_a_warning():
    facts = {**SERVER, "tcp": {"2001:db8::7": "ETIMEDOUT", "192.0.2.7": "open"}}
    found = by_name(lab_verdict.server_findings(Answer(facts), NOTHING))
    assert found["server"].state == "ok"
    assert found["server.address.2001:db8::7"].state == "warning"


def test_a_server_without_room_is_a_problem_and_a_slow_one_a_note():
    found = by_name(lab_verdict.server_findings(Answer({**SERVER, "read_only": "disk full", "rtt_ms": 900.0}), NOTHING))
    assert found["server.read_only"].state == "problem"
    assert found["server.slow"].state == "note"


def test_a_server_whose_lock_cannot_be_put_back_is_a_problem():
    told = "/s/lock was removed or replaced; no job is given away until it is"
    found = by_name(lab_verdict.server_findings(Answer({**SERVER, "lock_trouble": told}), NOTHING))
    assert (found["server.lock"].state, found["server.lock"].text) == ("problem", f"{told}.")


def test_a_name_server_that_does_not_answer_is_told_as_that():
    facts = {"name": "ralab01", "port": 11236, "addresses": []}
    answer = Answer(facts, "does not answer", "looking up the name ralab01")
    server = the(lab_verdict.server_findings(answer, NOTHING))
    assert server.text == "The server ralab01, port 11236, does not answer (while looking up the name ralab01)."
    assert "getent" in server.hint


@pytest.mark.parametrize(
    ("offset", "state"), [(None, "note"), (0.5, "ok"), (-1.9, "ok"), (2.05, "ok"), (2.2, "warning"), (-40.0, "warning")]
)
def test_a_difference_of_clocks_counts_when_it_is_certain(offset, state):
    server = Answer({"offset_seconds": offset, "uncertainty_seconds": 0.1})
    clock = the(lab_verdict.clock_findings(server, Answer({"synchronised": True})))
    assert clock.state == state
    assert clock.value["offset_seconds"] == offset


def test_a_worker_of_that_name_elsewhere_is_told():
    facts = {"name": "w1", "running": False, "pid": None, "log": "", "others": {}, "server_runs": False}
    row = {"name": "w1", "state": "online", "note": "", "version": __version__}
    worker = the(lab_verdict.worker_findings(Answer(facts), Answer({**SERVER, "workers": [row]})))
    assert worker.state == "note"
    assert "none runs with this state directory" in worker.text


@pytest.mark.parametrize(
    ("programs", "placed", "state", "word"),
    [
        (("kueue", "kueue_server", "kueue_worker"), "", "ok", "by ssh: /bin/kueue_worker."),
        ((), "/h/.local/share/kueue/bin/kueue_worker", "ok", "starts /h/.local/share/kueue/bin/kueue_worker."),
        (("kueue_worker",), "/h/bin/kueue_worker", "note", "sent by ssh: kueue, kueue_server."),
        ((), "", "note", "sent by ssh: kueue, kueue_server, kueue_worker."),
    ],
)
def test_a_program_that_ssh_does_not_find_is_noted_unless_the_restart_tool_does(programs, placed, state, word):
    shell = {"reached": True, "programs": {name: f"/bin/{name}" for name in programs}, "placed_worker": placed}
    facts = {"version": __version__, "where": "/x/kueue", "beside": {"kueue_worker": "/x/bin/kueue_worker"}}
    found = the(host_verdict.version_findings(facts, Answer(shell)))
    assert found.state == state
    assert word in found.text
