"""The way to the port of a host, over real sockets."""

import contextlib
import os
import socket
import threading
import time

import paramiko
import psutil
import pytest

from kueue_ops.address import HostAddress
from kueue_ops.ssh import HostConnection, Limits
from kueue_ops.ssh_dial import Proxy, dial
from kueue_ops.ssh_settings import SshConfig
from kueue_ops.trouble import HostTrouble


def test_an_address_of_a_kind_that_this_kernel_has_not_hides_no_other(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        target = SshConfig(tmp_path / "none").target(HostAddress("a", None, "a", here[1]))
        found = [
            (socket.AF_DECnet if hasattr(socket, "AF_DECnet") else 12, socket.SOCK_STREAM, 0, "", ("a", 1)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", here),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with dial(target, 10.0) as channel:
            assert channel.getpeername() == here


@pytest.mark.parametrize("what", [threading.Timer, paramiko.Transport])
def test_without_a_thread_the_host_has_a_trouble(tmp_path, monkeypatch, what):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(what, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = HostAddress("a", None, "127.0.0.1", listener.getsockname()[1])

        def greet() -> None:
            channel, _ = listener.accept()
            with channel, contextlib.suppress(ConnectionResetError):
                channel.sendall(b"SSH-2.0-test\r\n")
                channel.recv(1)

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(HostTrouble, match="thread"):
            HostConnection(address, SshConfig(tmp_path / "none"), Limits(10.0, 10.0))
        greeter.join()


def test_a_proxy_that_cannot_be_started_leaves_no_descriptor_open():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="null byte"):
        Proxy("nc \0")
    assert os.listdir("/proc/self/fd") == before


def test_a_proxy_that_is_a_pipeline_leaves_no_part_of_it_behind():
    proxy = Proxy("sleep 1234567 | sleep 1234567")

    def group() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == proxy._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    while len(group()) < 2:
        time.sleep(0.01)
    proxy.close()
    deadline = time.monotonic() + 20
    while group():
        assert time.monotonic() < deadline
        time.sleep(0.01)
