"""What the restart tool does about files on a dead file server: a real one, which holds whoever looks."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kueue_ops import known_hosts, patience, restart_loop, restart_settings, ssh, ssh_settings
from kueue_ops.address import HostAddress
from kueue_ops.host_care import HostCare
from kueue_ops.lanes import Lanes
from kueue_ops.restart_decision import Limits
from kueue_ops.restart_status import RoundsStatus
from kueue_ops.server_view import ServerView
from kueue_ops.sight import ServerWord
from kueue_ops.trouble import HostTrouble
from tests.support.file_server import dead_file_server


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Settings in a home that may die; the state is elsewhere."""
    monkeypatch.setenv("KUEUE_STATE_DIR", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir()
    path = home / "config.toml"
    path.write_text(
        '[common_settings]\nshared_secret = "a secret of this test"\n[restart_workers]\nssh_user = "u"\n'
        'hostnames = "a b"\n'
    )
    path.chmod(0o600)
    return restart_settings.load(str(path))


def until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_comes_in_time_is_returned_or_raised():
    assert patience.within(20, "good", lambda: 17) == 17
    with pytest.raises(ZeroDivisionError):
        patience.within(20, "bad", lambda: 1 // 0)


def test_what_hangs_is_left_behind_once_and_asked_again_when_it_has_come_back():
    gate, begun = threading.Event(), []

    def work():
        begun.append(1)
        gate.wait(30)
        return 17

    for _ in range(5):
        with pytest.raises(TimeoutError):
            patience.within(0.05, "one kind", work)
    assert len(begun) == 1
    assert patience.within(20, "another kind", lambda: 1) == 1
    gate.set()

    def answers():
        try:
            return patience.within(20, "one kind", work) == 17
        except TimeoutError:
            return False

    until(answers)


def test_of_several_that_hang_side_by_side_all_have_to_come_back():
    gates = threading.Event(), threading.Event()

    def leave_behind(gate):
        with pytest.raises(TimeoutError):
            patience.within(0.2, "many", lambda: gate.wait(30))

    def answers():
        try:
            return patience.within(20, "many", lambda: True)
        except TimeoutError:
            return False

    callers = [threading.Thread(target=leave_behind, args=(gate,)) for gate in gates]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    hanging = [thread for thread in threading.enumerate() if thread.name == "many"]
    assert len(hanging) == 2
    gates[0].set()
    until(lambda: sum(thread.is_alive() for thread in hanging) == 1)
    assert not answers()
    gates[1].set()
    until(answers)


def test_the_stamp_of_settings_on_a_dead_file_server_is_the_last_one_that_was_seen(lab):
    path = Path(lab.config.path)
    before = lab.stamp
    assert before
    with dead_file_server(path.parent):
        assert lab.stamp == before
        begun = time.monotonic()
        assert {lab.stamp for _ in range(100)} == {before}
        assert time.monotonic() - begun < 20
    os.utime(path, (1, 1))
    until(lambda: lab.stamp != before)


def test_the_limits_of_looks_hold_although_the_settings_are_on_a_dead_file_server(lab):
    gate = threading.Event()

    class Hand:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def look(self):
            gate.wait(60)

        def close(self):
            pass

    class Server:
        def word(self, _):
            return ServerWord(is_reached=False)

    told = []
    care = HostCare(
        {name: HostAddress(name, None, name) for name in "ab"},
        Server(),
        lambda *_: Hand(),
        limits=Limits(),
        settings_stamp=lambda: lab.stamp,
        changed=told.append,
    )
    lanes = Lanes(2, 0.2)
    with dead_file_server(Path(lab.config.path).parent):
        for name in "ab":
            lanes.submit(
                name,
                lambda ticket: care.check(ticket.key, ticket),
                lambda result: result.is_hung and care.hung(result.key),
            )
        until(lambda: {one.host for one in told} == {"a", "b"})
        (result,) = lanes.each(["a"], lambda _: gate.wait(60))
        assert result.is_hung
        gate.set()
    assert lanes.wait_idle(20)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EAGAIN, errno.EACCES])
def test_a_stamp_that_cannot_be_had_is_the_last_one_and_that_of_a_file_that_is_gone_is_none(lab, monkeypatch, number):
    before = lab.stamp
    assert before

    def stat(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(restart_settings.os, "stat", stat)
        assert lab.stamp == before
    Path(lab.config.path).unlink()
    assert lab.stamp == ""


def test_without_a_thread_a_stamp_is_the_last_one_and_the_files_of_ssh_are_a_sentence(lab, tmp_path, monkeypatch):
    before = lab.stamp

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert lab.stamp == before
    with pytest.raises(HostTrouble, match="config cannot be read: this account may have no more threads"):
        ssh_settings.SshConfig(tmp_path / "config")
    with pytest.raises(HostTrouble, match="this account may have no more threads"), ssh._guard(lambda: None, 1.0):
        pass
    assert ServerView(lambda: None, lambda *_: None).workers() is None


def test_a_status_that_cannot_be_written_is_left_out_and_written_later(lab):
    place = Path(lab.status)
    with dead_file_server(place.parent):
        begun = time.monotonic()
        for _ in range(3):
            restart_loop.write_status(lab, RoundsStatus(()))
        assert time.monotonic() - begun < 20

    def is_written():
        restart_loop.write_status(lab, RoundsStatus(()))
        return place.exists()

    until(is_written)


def test_a_status_is_written_although_its_folder_was_tidied_away(lab):
    place = Path(lab.status)
    place.parent.rmdir()
    restart_loop.write_status(lab, RoundsStatus(()))
    assert place.exists()


def test_files_of_ssh_on_a_dead_file_server_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "FILE_SECONDS", 0.2)
    folder = tmp_path / "dotssh"
    folder.mkdir()
    with dead_file_server(folder):
        with pytest.raises(HostTrouble, match="config cannot be read: the file system does not answer"):
            ssh_settings.SshConfig(folder / "config")
        with pytest.raises(HostTrouble, match="known_hosts cannot be read: the file system does not answer"):
            known_hosts.look_up([folder / "known_hosts"], "h", 22)
        assert not known_hosts.remember(folder / "known_hosts", "h", "ssh-ed25519", b"key")
