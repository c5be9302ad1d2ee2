"""Reaching the ssh port of a host: name look-up, connecting, the first byte; or a ProxyCommand that does it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any

import paramiko

from kueue_ops import patience
from kueue_ops.ssh_settings import Target
from kueue_ops.trouble import HostTrouble, trouble

DEAD_PEER_SECONDS = 20
"""Unanswered for so long, the kernel ends the connection (TCP_USER_TIMEOUT): a host without power says no goodbye."""
_PROXY_END_SECONDS = 2.0
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}


def dial(target: Target, limit_seconds: float) -> socket.socket:
    """A connected socket. All addresses of the name share the limit, so that a dead one does not use it up."""
    deadline = time.monotonic() + limit_seconds
    addresses = _addresses(target, limit_seconds)
    last: OSError | None = None
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        remaining = max(0.05, deadline - time.monotonic()) / (len(addresses) - number)
        channel: socket.socket | None = None
        try:
            channel = socket.socket(family, kind, protocol)  # fails for IPv6 where the kernel has none
            channel.settimeout(remaining)
            channel.connect(address)
            channel.settimeout(None)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_PEER_SECONDS)
        except OSError as error:
            if channel is not None:
                channel.close()
            # A refusal tells more than the silence of another address.
            last = last if isinstance(last, ConnectionRefusedError) else error
        else:
            return channel
    assert last is not None
    raise _unreached(target, last, limit_seconds) from last


def has_greeting(channel: socket.socket, limit_seconds: float) -> bool:
    """Does the other side say anything within the limit? The bytes stay where they are."""
    poll = select.poll()  # select() cannot look at descriptors from 1024 on
    poll.register(channel, select.POLLIN)
    if not poll.poll(1000 * limit_seconds):
        return False
    with contextlib.suppress(OSError):
        return bool(channel.recv(1, socket.MSG_PEEK))
    return False


def is_there(channel: socket.socket | paramiko.Channel) -> bool:
    """Has the other side not ended the connection?"""
    if isinstance(channel, paramiko.Channel):
        return not (channel.closed or channel.eof_received)
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    return not poll.poll(0)


class Proxy:
    """A running ProxyCommand; `channel` is its standard input and output.

    paramiko's own runs it without a shell, spins when it has ended, and never reads what it complains about.
    """

    def __init__(self, command: str) -> None:
        with contextlib.ExitStack() as made:
            self.channel, theirs = map(made.enter_context, socket.socketpair())
            self._said = made.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said,
                start_new_session=True,
            )
            made.pop_all()  # `close` does it
        theirs.close()

    @property
    def last_words(self) -> str:
        """Why it ended; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.1)
            self._said.seek(0)
            lines = self._said.read(2**16).decode("utf-8", "replace").strip().splitlines()
            return lines[-1][:200] if lines else f"exit code {code}"
        return ""

    def close(self) -> None:
        self.channel.close()
        self._tell(signal.SIGTERM)
        try:
            self._process.wait(_PROXY_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._tell(signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def _tell(self, number: signal.Signals) -> None:
        """Also what the command started: of a pipeline the shell alone would end, and the rest stay behind for ever."""
        if self._process.poll() is None:  # else the number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _addresses(
    target: Target, limit_seconds: float
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]]:
    """The look-up has no limit of its own, so it is left behind when it takes too long."""

    def ask() -> list[Any]:
        return list(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))

    try:
        return patience.within(limit_seconds, f"look-up of {target.host}", ask)
    except TimeoutError as error:
        raise trouble(
            "unknown_host",
            f"The name {target.host} could not be looked up within {limit_seconds:g} s.",
            f"Try: getent hosts {target.host}",
        ) from error
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise trouble(
            "unknown_host",
            f"The host {target.host} is not known: {reason}.",
            "Check the name in restart_workers.hostnames, or give it a HostName in ~/.ssh/config.",
        ) from error


def _unreached(target: Target, error: OSError, limit: float) -> HostTrouble:
    where = f"{target.name} (port {target.port})"
    if isinstance(error, ConnectionRefusedError):
        return trouble("refused", f"{where} refuses connections.", "Is sshd running there, and on this port?")
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return trouble(
            "timeout",
            f"{where} does not answer within {limit:g} s.",
            "The machine is off or unplugged, or a firewall drops what is sent there.",
        )
    kind = "no_route" if error.errno in _NO_ROUTE else "ssh"
    reason = error.strerror or str(error)
    return trouble(kind, f"{where} cannot be reached: {reason}.", f"Try {target.command_line}")  # type: ignore[arg-type]
