"""The status file of the restart tool, and the table made of it."""

from __future__ import annotations

import io
import os

import pytest

from kueue.cli.screen import Screen
from kueue_ops import restart_status
from kueue_ops.restart_decision import Decision
from kueue_ops.restart_status import HostStatus, RoundsStatus
from kueue_ops.sight import HostSight, ScreenSession, ServerWord, Service, WorkerSight

UP = HostStatus(
    "ada@h1.lab:2222",
    is_reachable=True,
    session="screen 7",
    worker="h1",
    worker_pid=17,
    server="alive",
    action="leave",
    sentence="Its worker is up.",
    has_worker=True,
    is_settled=True,
    looked_wall=1.0,
)


def file_of(*hosts):
    return RoundsStatus(hosts)


def test_what_was_written_is_read_again_and_is_private(tmp_path):
    path = str(tmp_path / "status.json")
    for _ in range(2):
        restart_status.write(path, file_of(UP))
    assert restart_status.read(path).hosts == (UP,)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["status.json"]


def test_what_is_no_text_is_written_and_read_again(tmp_path):
    path = str(tmp_path / "status.json")
    latin = HostStatus("h1", worker="\udce9", sentence="/h\udce9/.ssh/config cannot be read.", hint="ls /h\udce9")
    restart_status.write(path, file_of(latin, UP))
    assert restart_status.read(path).hosts == (latin, UP)


def test_no_file_and_half_a_file_are_none(tmp_path):
    path = tmp_path / "status.json"
    assert restart_status.read(str(path)) is None
    path.write_text('{"pid": 1')
    assert restart_status.read(str(path)) is None
    for damaged in (b'{"pid": "one"}', b'{"hosts": [{"host": 1}]}', b'{"hosts": [{"host": "h\xe9"}]}', b""):
        path.write_bytes(damaged)
        assert restart_status.read(str(path)) is None


def test_the_server_is_asked_now_and_hosts_that_were_never_looked_at_are_guessed_by_their_name():
    workers = {"h1": WorkerSight("h1", is_alive=False), "h2": WorkerSight("h2", is_alive=True, offline=True)}
    rows = restart_status.merged([UP.host, "bob@h2.lab", "h3"], file_of(UP), workers)
    assert [(row.worker, row.server) for row in rows] == [("h1", "not seen"), ("h2", "offline"), ("", "not seen")]
    assert [row.is_reachable for row in rows] == [True, None, None]
    assert {row.server for row in restart_status.merged([UP.host], None, None)} == {"away"}


def test_the_table_has_a_row_for_each_host_and_shows_no_control_characters():
    bad = HostStatus("h2", is_reachable=False, server="not seen", action="trouble", sentence="No \x1b[31m route.")
    screen = Screen(io.StringIO(), io.StringIO())
    lines = restart_status.table(screen, [UP, bad], is_running=True)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["host", "reachable", "session", "worker", "server", "last action", "next check", "remark"]
    assert cells[1] == ["ada@h1.lab:2222", "yes", "screen 7", "h1", "alive", "-", "-", ""]
    assert cells[2][:5] == ["h2", "no", "?", "?", "not seen"]
    assert "\x1b" not in lines[2]


@pytest.mark.parametrize(
    ("sessions", "service", "pid", "shown"),
    [
        ((), None, None, "none"),
        ((ScreenSession(7, is_dead=False),), None, 17, "screen 7"),
        ((ScreenSession(7, is_dead=True),), None, None, "dead"),
        ((ScreenSession(7, is_dead=False, program="vim"),), None, None, "none"),
        ((ScreenSession(7, is_dead=False, program="vim"), ScreenSession(8, is_dead=False)), None, 17, "screen 8"),
        ((), Service("active", is_enabled=True, pid=17), 17, "systemd"),
        ((), Service("activating", is_enabled=True, pid=17), None, "systemd"),
        ((ScreenSession(7, is_dead=False),), Service("active", is_enabled=True, pid=9), 17, "screen 7"),
        ((), Service("failed", is_enabled=True, pid=None), None, "none"),
    ],
)
def test_what_holds_the_worker_is_shown(sessions, service, pid, shown):
    look = HostSight("h1", "b", sessions, has_screen=True, command="w", worker_pid=pid, service=service)
    status = HostStatus.of("h1", look, ServerWord(is_reached=False), Decision("leave", "x"), None)
    assert status.session == shown
