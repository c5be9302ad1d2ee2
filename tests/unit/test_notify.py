"""Words to the service manager."""

from __future__ import annotations

import os
import socket

import pytest

from kueue import notify


@pytest.fixture
def manager(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def test_states_arrive_as_lines_of_one_datagram(manager):
    assert notify.notify(notify.READY, "STATUS=listening")
    assert manager.recv(1000) == b"READY=1\nSTATUS=listening"
    assert notify.status("two\nlines")
    assert manager.recv(1000) == b"STATUS=two lines"
    assert notify.reloading()
    assert manager.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


def test_an_abstract_address_is_understood(monkeypatch):
    name = f"kueue-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify.notify(notify.ALIVE)
        assert sock.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", ["", "relative", "/no/such/socket"])
def test_without_a_listening_manager_nothing_happens(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify.notify(notify.READY)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_patience(monkeypatch, environ, seconds):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert notify.watchdog_seconds() == seconds
