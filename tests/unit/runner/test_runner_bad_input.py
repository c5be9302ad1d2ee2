"""What a runner does with words that no worker says: it skips them and goes on, with the jobs it has."""

import json

import pytest
from runner_bench import wait_until

pytestmark = pytest.mark.slow

NO_ORDERS = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"type": []}',
    b"[" * 100_000,
    b'{"type": "Attach", "x": ' + b"[" * 100_000,
    b'{"type": "SetLease"}',
    b'{"type": "SetLease", "deadline_boottime": "soon"}',
    b'{"type": "SetLease", "deadline_boottime": NaN}',
    b'{"type": "SetLease", "deadline_boottime": 1e999}',
    b'{"type": "SetLease", "deadline_boottime": 1' + b"0" * 400 + b"}",
    b'{"type": "StopOrder", "offer": 1, "grace_seconds": "long"}',
    b'{"type": "StopOrder", "offer": 1, "kill": "no"}',
    b'{"type": "Inherit", "attempts": 5}',
    b'{"type": "Inherit", "attempts": [{"offer": 9, "job": 9, "queue_id": "\\ud800"}]}',
    b'{"type": "Inherit", "attempts": [{"offer": 9, "job": 9, "queue_id": "q", "memo": []}]}',
    b'{"type": "StartAttempt", "offer": 5, "job": 5, "queue_id": "\\ud800", "argv": [], "env": []}',
    b'{"type": "StartAttempt", "offer": 5, "job": 5, "queue_id": "q", "grace_seconds": null}',
    b'{"type": "Attach", "worker_pid": "x"}',
    b'{"type": "Attach", "restart_command": ["\\ud800"]}',
    b'{"type": "Attach", "server_lock_path": {"b64": "a"}}',
    b'{"type": "Attach", "server_lock_seconds": 1e999}',
    b'{"type": "StopOrder", "offer": {}}',
    b'{"type": "WithdrawOrder"}',
    b'{"type": "ForgetAttempts", "offers": 5}',
    b'{"type": "ForgetAttempts", "offers": [[]]}',
    b'{"type": "StartAttempt", "offer": 5}',
]


@pytest.mark.parametrize("line", NO_ORDERS, ids=lambda line: repr(line[:45]))
def test_a_line_that_is_no_order_is_skipped(bench, desk, line):
    desk.start(1, "sleep", "600")
    desk.expect("Started", 1)
    keeper = bench.keeper()
    desk.sock.sendall(line + b"\n")
    desk.drain()
    assert bench.keeper() == keeper
    assert desk.run(2, "true")["outcome"] == {"type": "exited", "code": 0}


@pytest.mark.parametrize("line", NO_ORDERS, ids=lambda line: repr(line[:45]))
def test_who_does_not_attach_first_is_sent_away(bench, desk, line):
    desk.lease()
    desk.drain()
    keeper = bench.keeper()
    stranger = type(desk)._connect(desk)  # a second connection beside the attached one
    stranger.sendall(line + b"\n")
    assert stranger.recv(1000) == b""
    stranger.close()
    assert bench.keeper() == keeper
    assert desk.run(1, "true")["outcome"] == {"type": "exited", "code": 0}


@pytest.mark.parametrize("junk", ["", "junk", "[" * 100_000, json.dumps({"tag": 7})])
def test_records_that_a_job_has_overwritten_hide_no_end(bench, desk, junk):
    (bench.work / "junk").write_text(junk)
    script = f"for name in start main not_started exit; do cp junk {bench.folder(1)}/$name.json; done; exit 3"
    assert desk.run(1, "sh", "-c", script)["outcome"] == {"type": "exited", "code": 3}


def test_the_end_of_a_job_that_removed_its_records_is_written_and_told(bench, desk):
    assert desk.run(1, "sh", "-c", f"rm -rf {bench.folder(1)}; exit 3")["outcome"] == {"type": "exited", "code": 3}
    assert wait_until((bench.folder(1) / "exit.json").exists, "the end is written")
