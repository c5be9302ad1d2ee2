"""The way to the port of a host, over real sockets."""

import socket

from kueue_ops.address import HostAddress
from kueue_ops.ssh_dial import dial
from kueue_ops.ssh_settings import SshConfig


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
