"""One ssh connection to a host, with a time limit on every step and a sentence for everything that goes wrong.

Rules
- No step waits without end: name look-up, connecting, greeting, key exchange, login, opening a channel, each command.
- Nothing is asked of anybody; an unknown host key is refused, unless ssh_config says otherwise (`ssh_settings`).
- fabric and paramiko are told everything: they read no configuration of their own here.

Why this way: fabric accepts every host key (also those of jump hosts), cuts time limits to whole seconds, and gives a
command its input one character in 10 ms. paramiko waits an hour for a channel and for ever for the answer to a
command, and goes on as if connected when a key exchange hangs. So the socket is dialled elsewhere (`ssh_dial`), and a
guard closes the transport at the deadline of each step.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import fabric
import paramiko

from kueue_ops.address import HostAddress
from kueue_ops.known_hosts import Known, fingerprint, look_up, remember
from kueue_ops.ssh_dial import Proxy, dial, has_greeting, is_there
from kueue_ops.ssh_login import KeyLogin
from kueue_ops.ssh_settings import SshConfig, Target
from kueue_ops.trouble import HostTrouble, trouble

KEEPALIVE_SECONDS = 5
ANSWER_LIMIT = 2**20
"""The last bytes of one stream of one command that are kept; a start-up file may print without end."""
DRAIN_SECONDS = 2.0
"""For output that is on its way when a command has ended, or never comes because a child holds the stream."""
JUMPS_MAX = 8
_PIECE = 2**15
_TURN_TRIES = 3

# Else paramiko's tracebacks go to stderr through logging's last resort; all that matters becomes a sentence.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Limits(NamedTuple):
    """Seconds."""

    connect: float = 10.0
    """For connecting, for the greeting and for the login, each."""
    command: float = 30.0


class Said(NamedTuple):
    """What a command said."""

    stdout: str
    stderr: str
    exit_code: int
    """-1: the host told none."""


class Bound(Protocol):
    """Says when a host that answers may be worked on; waiting for one that is silent is no work."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class HostConnection:
    """An open connection; ends with the ``with`` block. Raises `HostTrouble`, nothing else, for what the host does."""

    def __init__(
        self,
        address: HostAddress,
        config: SshConfig,
        limits: Limits,
        *,
        default_user: str = "",
        key_file: str = "",
        bound: Bound | None = None,
    ) -> None:
        """Connects and logs in. What `bound` raises passes through."""
        self.address = address
        self._bound = bound
        self.remarks: list[str] = []
        """What a person should know of the way there, for example that a new host key was remembered."""
        self._config = config
        self._limits = limits
        self._open: list[Any] = []
        self.target = config.target(address, default_user=default_user, key_file=key_file)
        try:
            self._connection = self._connect(self.target, ())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HostConnection:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, the way there included; never waits for the host."""
        for one in reversed(self._open):
            with contextlib.suppress(Exception):  # it is gone either way
                one.close()
        self._open.clear()

    # --- commands ----------------------------------------------------------------------------------------------------

    def run(self, command: str, data: bytes = b"", *, until: str = "", limit_seconds: float | None = None) -> Said:
        """Runs `command` by the login shell with `data` as its input; returns when it ends or has written `until`.

        What it means is for the caller to judge.
        """
        limit = self._limits.command if limit_seconds is None else limit_seconds
        transport = self._connection.transport
        with _guard(transport.close, limit + 1.0) as rang:
            try:
                with contextlib.closing(transport.open_session(timeout=limit)) as channel:
                    channel.settimeout(limit)
                    channel.exec_command(command)
                    return self._talk(channel, data, until.encode(), limit)
            except (paramiko.SSHException, OSError, EOFError) as error:
                if rang.is_set() or _is_timeout(error):
                    raise self._hung(limit) from error
                raise trouble("ssh", f"{self.address}: the connection broke: {_reason(error)}.") from error

    def _talk(self, channel: paramiko.Channel, data: bytes, until: bytes, limit: float) -> Said:
        deadline = time.monotonic() + limit
        ended = 0.0
        out, err = bytearray(), bytearray()
        left: memoryview | None = memoryview(data)
        while True:
            if left is not None and channel.send_ready():
                if left:
                    left = left[channel.send(bytes(left[:_PIECE])) :]
                if not left:
                    channel.shutdown_write()
                    left = None
            moved = _read(channel.recv_ready, channel.recv, out)
            moved = _read(channel.recv_stderr_ready, channel.recv_stderr, err) or moved
            if until and until in out:
                break
            now = time.monotonic()
            if moved and now < deadline:
                continue
            if channel.closed or (channel.eof_received and channel.exit_status_ready()):
                break
            if channel.exit_status_ready():
                # The status may overtake the output; but a child that holds the stream must not hold us.
                ended = ended or now
                if now > ended + DRAIN_SECONDS:
                    break
            if now > deadline:
                raise self._hung(limit, _last_line(err) or _last_line(out, until))
            time.sleep(0.01)
        if not (until and until in out) and not channel.get_transport().is_active():
            raise trouble("ssh", f"{self.address}: the connection broke.", f"Try {self.target.command_line}")
        code = channel.recv_exit_status() if channel.exit_status_ready() else -1
        return Said(out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), code)

    def _hung(self, limit: float, last: str = "") -> HostTrouble:
        words = f" (last words: {last})" if last else ""
        return trouble(
            "hung",
            f"{self.address} let us in and then did not answer within {limit:g} s{words}.",
            f"Try {self.target.command_line}: a dead file server under the home directory or a start-up file of the "
            "shell that waits for something does that.",
        )

    # --- connecting --------------------------------------------------------------------------------------------------

    def _connect(
        self, target: Target, chain: tuple[tuple[str, int], ...], gateway: fabric.Connection | None = None
    ) -> fabric.Connection:
        """`chain`: (host, port) of those that are to be reached through this one; `gateway`: what leads there."""
        limit = self._limits.connect
        channel: Any = None
        for _ in range(_TURN_TRIES):
            channel = self._way(target, chain) if gateway is None else self._through(gateway, target)
            if self._bound is None:
                break
            self._bound.enter()
            # sshd waits two minutes for a login; ours may have waited longer for its turn.
            if is_there(channel):
                break
        known = look_up(target.known_hosts, target.known_as or target.host, target.known_port)
        connection = fabric.Connection(
            host=target.host,
            user=target.user,
            port=target.port,
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            gateway=False,
            connect_kwargs={
                "sock": channel,
                "banner_timeout": limit,
                "auth_timeout": limit,
                "channel_timeout": limit,
                "timeout": 2 * limit,
                "auth_strategy": KeyLogin(target, limit),
                "transport_factory": _preferring(known.types),
            },
        )
        client = connection.client
        self._open.append(client)
        client.set_missing_host_key_policy(_HostKey(target, known, self.remarks))
        # Greeting, key exchange and login have the limit once each.
        with _guard(client.close, 3 * limit + 1.0) as rang:
            try:
                connection.open()
            # RuntimeError: there is no thread to be had for the transport.
            except (paramiko.SSHException, OSError, EOFError, ValueError, RuntimeError) as error:
                raise self._not_open(target, error, is_late=rang.is_set()) from error
        connection.transport.set_keepalive(KEEPALIVE_SECONDS)
        return connection

    def _way(self, target: Target, chain: tuple[tuple[str, int], ...]) -> Any:
        """A socket, or what paramiko takes for one, that leads to the port of the target."""
        if target.proxy_command:
            try:
                proxy = Proxy(target.proxy_command)
            except (OSError, ValueError) as error:
                raise trouble(
                    "ssh", f"{target.name}: its ProxyCommand cannot be started: {_reason(error)}.", target.command_line
                ) from error
            self._open.append(proxy)
            return proxy.channel
        chain = (*chain, (target.host.lower(), target.port))
        hops = [self._config.target(hop) for hop in target.jump]
        if len(chain) > JUMPS_MAX:
            raise trouble("ssh", f"{self.address}: ProxyJump has no end.", "Look at ProxyJump in ~/.ssh/config.")
        # `Host *` with ProxyJump names the jump host itself, too: as with ssh(1) the way there is a direct one.
        if not hops or any((hop.host.lower(), hop.port) in chain for hop in hops):
            channel = dial(target, self._limits.connect)
            self._open.append(channel)
            if not has_greeting(channel, self._limits.connect):
                raise _mute(target, self._limits.connect)
            return channel
        # Only the first hop has a way of its own, the others are reached through the one before.
        gateway: fabric.Connection | None = None
        for hop in hops:
            gateway = self._connect(hop, chain, gateway)
        return self._through(gateway, target)

    def _through(self, gateway: Any, target: Target) -> Any:
        if self._bound is not None:
            self._bound.leave()
        try:
            return gateway.transport.open_channel(
                "direct-tcpip", (target.host, target.port), ("", 0), timeout=self._limits.connect
            )
        except paramiko.ChannelException as error:
            what = "does not let connections through" if error.code == 1 else "cannot reach it"
            raise trouble(
                "no_route", f"{target.name}: the jump host {gateway.host} {what} ({error.text}).", target.command_line
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise trouble(
                "timeout", f"{target.name}: the jump host {gateway.host} did not connect: {_reason(error)}."
            ) from error

    def _not_open(self, target: Target, error: Exception, *, is_late: bool) -> HostTrouble:
        limit = self._limits.connect
        for one in self._open:
            if isinstance(one, Proxy) and one.last_words:
                return trouble(
                    "ssh", f"{target.name}: its ProxyCommand failed: {one.last_words}.", f"Try {target.command_line}"
                )
        text = _reason(error)
        if "banner" in text.lower():
            return _mute(target, limit)
        if is_late or _is_timeout(error) or "No existing session" in text:
            return trouble(
                "timeout",
                f"{target.name} stopped answering in the middle of the ssh hand-shake (limit {limit:g} s).",
                target.command_line,
            )
        return trouble("ssh", f"{target.name}: the ssh hand-shake failed: {text}.", f"Try {target.command_line}")


class _HostKey(paramiko.MissingHostKeyPolicy):
    """Decides about every host key: paramiko itself is given none to compare with."""

    def __init__(self, target: Target, known: Known, remarks: list[str]) -> None:
        self._target = target
        self._known = known
        self._remarks = remarks

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002  paramiko's signature
        target, known, blob = self._target, self._known, key.asbytes()
        kind = key.get_name()
        if any(one.blob == blob for one in known.revoked):
            raise trouble(
                "changed_key",
                f"The host key of {target.name} is marked as revoked in {known.revoked[0].where}.",
                "Ask who administers that machine; it may be another one that pretends to be it.",
            )
        if known.knows(blob):
            return
        if known.keys:
            where = ", ".join(one.where for one in known.keys)
            raise trouble(
                "changed_key",
                f"The host key of {target.name} has changed: it shows {kind} {fingerprint(blob)}, another one than "
                f"{where}.",
                f"If the machine was reinstalled: ssh-keygen -R '{target.entry}', then once {target.command_line}; "
                "if not, somebody else may answer in its place.",
            )
        if target.accepts_new_key:
            place = target.keys_kept_in
            kept = place is not None and remember(place, target.entry, kind, blob)
            self._remarks.append(
                f"{target.name}: new host key {kind} {fingerprint(blob)} accepted, as ssh_config says, and "
                f"{'remembered' if kept else 'not remembered'}."
            )
            return
        raise trouble(
            "unknown_key",
            f"The host key of {target.name} is not known ({kind} {fingerprint(blob)}).",
            f"Log in once by hand and compare it: {target.command_line}"
            + ("  (a certificate authority is known for it, which does not help here)" if known.has_authority else ""),
        )


def _preferring(types: tuple[str, ...]) -> Callable[..., paramiko.Transport]:
    """Lets the host show a key of a kind that is known, else its other key would look like a new one."""
    algorithms = [
        name for kind in types for name in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))
    ]

    def factory(channel: Any, **more: Any) -> paramiko.Transport:
        transport = paramiko.Transport(channel, **more)
        options = transport.get_security_options()
        able = [name for name in algorithms if name in options.key_types]
        options.key_types = (*able, *(name for name in options.key_types if name not in able))
        return transport

    return factory


@contextlib.contextmanager
def _guard(close: Callable[[], object], seconds: float) -> Iterator[threading.Event]:
    """Closes what hangs after `seconds`, which ends every wait of paramiko; the event tells that it did.

    Raises `HostTrouble` when there is no thread to be had for it.
    """
    rang = threading.Event()

    def ring() -> None:
        rang.set()
        with contextlib.suppress(Exception):  # whoever waits on it gets the error
            close()

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as error:
        raise trouble(
            "ssh", "Nothing more can be begun here: this account may have no more threads.", "Look at ulimit -u."
        ) from error
    try:
        yield rang
    finally:
        timer.cancel()


def _mute(target: Target, limit: float) -> HostTrouble:
    return trouble(
        "no_greeting",
        f"{target.name} accepts connections on port {target.port} and does not greet as ssh within {limit:g} s.",
        f"It is overloaded, or something else listens there: {target.command_line}",
    )


def _read(is_ready: Callable[[], bool], receive: Callable[[int], bytes], into: bytearray) -> bool:
    if not is_ready():
        return False
    piece = receive(_PIECE)
    into += piece
    # The end is kept: what start-up files print comes before the answer.
    del into[: max(0, len(into) - ANSWER_LIMIT)]
    return bool(piece)


def _last_line(output: bytearray, end: bytes = b"") -> str:
    """Of what a person wrote: not of our own answer, whose lines begin like its `end`."""
    mark = end.decode().strip().partition(" ")[0]
    lines = output.decode("utf-8", "replace").strip().splitlines()
    lines = [line for line in lines if line.strip() and not (mark and line.startswith(mark))]
    return "".join(character for character in lines[-1][-200:] if character.isprintable()) if lines else ""


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, (TimeoutError, socket.timeout)) or "timeout" in str(error).lower()


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")
