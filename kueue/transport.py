"""A command's connection to the server: the way there, the proof of who answers, and frames of messages.

Standard library alone, and of that little: a command must start in a few milliseconds. `socket` and `ssl` are imported
when the server is not on this host; its Unix socket needs only the module in C below `socket`.
"""

# pathlib is left out for the command's start-up time (5 ms):
# ruff: noqa: PTH119, PTH120

from __future__ import annotations

import _socket
import json
import os
import sys
import time
from errno import ECONNREFUSED

from kueue import __version__
from kueue.errors import ProtocolError, Refused, Unreachable, UserError

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeAlias

    from kueue.identity import Identity

    Message: TypeAlias = dict[str, Any]

PROTOCOL = 1
FRAME_LIMIT = 16 * 1024 * 1024

_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.05


class Server:
    """Where the server is.

    `local_sockets`: Unix sockets to try first, if the server may run on this host. `identities`: of the current secret,
    then of the previous one; each is tried.
    """

    def __init__(
        self, host: str, port: int, local_sockets: Sequence[str] = (), identities: Sequence[Identity] = ()
    ) -> None:
        self.host = host
        self.port = port
        self.local_sockets = tuple(local_sockets)
        self.identities = tuple(identities)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ConnectionLost(Exception):
    """The connection broke or could not be made; trying again may help."""


class Silence(ConnectionLost):
    """Nothing came for as long as was waited; the connection itself may be well."""


class Connection:
    """One connection to a server that has said welcome."""

    def __init__(self, sock: _socket.socket) -> None:
        self.welcome: Message = {}
        self.way = ""
        """For people: over what it goes."""
        self._socket = sock
        self._buffer = bytearray()

    def send(self, frames: Iterable[bytes], timeout_seconds: float | None = None) -> None:
        try:
            self._socket.settimeout(timeout_seconds)
            for frame in frames:
                self._socket.sendall(frame)
        except OSError as error:
            raise ConnectionLost(_why(error)) from error

    def receive(self, timeout_seconds: float | None = None) -> list[Message]:
        """The messages of the next frame.

        Raises `ConnectionLost` at the end and its kind `Silence` after `timeout_seconds`; what came of a frame by then
        is kept for the next call.
        """
        while True:
            if len(self._buffer) >= 4:
                length = int.from_bytes(self._buffer[:4], "big")
                if length > FRAME_LIMIT:
                    raise ProtocolError(f"The server sent a frame of {length} bytes; {FRAME_LIMIT} are allowed.")
                if len(self._buffer) >= 4 + length:
                    payload = bytes(self._buffer[4 : 4 + length])
                    del self._buffer[: 4 + length]
                    return _decode(payload)
            try:
                self._socket.settimeout(timeout_seconds)
                piece = self._socket.recv(256 * 1024)
            except OSError as error:
                # A time-out of ours has no errno; the kernel's ETIMEDOUT means that the peer is gone.
                is_ours = isinstance(error, TimeoutError) and error.errno is None
                raise (Silence if is_ours else ConnectionLost)(_why(error)) from error
            if not piece:
                raise ConnectionLost("the server closed the connection")
            self._buffer += piece

    def close(self) -> None:
        self._socket.close()


def open_connection(server: Server, welcome_seconds: float, own_server: Callable[[], str]) -> Connection:
    """The Unix socket if there is a server of this user behind one, else TLS, with each secret in turn.

    `welcome_seconds`: how long what was connected to may take to prove who it is and say welcome. `own_server`: what to
    do if a server of this user on this very host may be what refuses us; empty: there is none.
    Raises `ConnectionLost` where trying again may help, else `KueueError`.
    """
    for path in server.local_sockets:
        try:
            sock = _open_local(path)
        except Silence:
            continue  # it may take us at its port
        if sock is not None:
            return _greet(server, sock, welcome_seconds, f"over {path}")
    return _open_tls(server, welcome_seconds, own_server)


def knock(paths: Sequence[str], seconds: float) -> None:
    """Have the server behind the first of these Unix sockets that is anybody's say welcome.

    Raises `ConnectionLost` or `KueueError` if there is none, or it refuses us; `Silence` if it has not answered after
    `seconds`, also where so many wait already that it takes nobody any more.
    """
    deadline = time.monotonic() + seconds
    server = Server("this host", 0, paths)
    for path in paths:
        while True:
            try:
                sock = _open_local(path)
                break
            except Silence:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_SECONDS)
        if sock is not None:
            _greet(server, sock, max(0.1, deadline - time.monotonic())).close()
            return
    raise ConnectionLost("nobody listens there")


def _open_tls(server: Server, welcome_seconds: float, own_server: Callable[[], str]) -> Connection:
    import socket  # noqa: PLC0415 - 25 ms with ssl that a command on the server's own host need not pay
    import ssl  # noqa: PLC0415 - as above

    from kueue.identity import check_peer  # noqa: PLC0415 - as above

    refusal: Exception | None = None
    broken: ConnectionLost | None = None
    for identity in server.identities:
        context = identity.client_context()
        try:
            plain = socket.create_connection((server.host, server.port), timeout=_CONNECT_SECONDS)
            _must_be_another(plain)
        except (socket.gaierror, UnicodeError) as error:  # the latter of what can be no name: a..b
            why = getattr(error, "strerror", None) or error
            raise Unreachable(
                f"The server's name {server.host!r} (for {server}) is not known: {why}.",
                hint="Check server_name in the configuration.",
            ) from error
        except OSError as error:
            raise ConnectionLost(_why(error)) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_dead_peers(plain)
            plain.settimeout(welcome_seconds)
            secured = context.wrap_socket(plain, server_hostname=identity.server_hostname)
            check_peer(secured.getpeercert(binary_form=True), [identity])
            return _greet(server, secured, welcome_seconds, f"over {secured.version()}")
        except ssl.SSLEOFError:
            plain.close()
            broken = ConnectionLost("the server closed the connection")
        except ssl.SSLError as error:
            # The alert that refuses our certificate arrives with the first read, not in the handshake.
            plain.close()
            refusal = error
        except ConnectionLost as lost:
            plain.close()
            if isinstance(lost.__cause__, ssl.SSLError) and not isinstance(lost.__cause__, ssl.SSLEOFError):
                refusal = lost.__cause__
            else:
                broken = lost
        except OSError as error:
            plain.close()
            broken = ConnectionLost(_why(error))
    if broken is not None:
        # Who refuses says so. This is a server that dies, or a tunnel with nobody behind it, however often.
        raise ConnectionLost(f"the connection ended before the server's welcome ({broken})") from broken
    raise Refused(
        "Authentication failed!",
        hint=own_server()
        or f"shared_secret in the configuration must be the one of the server at {server}."
        " If that server is somebody else's, choose another server_port.",
    ) from refusal


def _greet(server: Server, sock: _socket.socket, welcome_seconds: float, way: str = "") -> Connection:
    connection = Connection(sock)
    connection.way = way
    hello = encode([{"type": "ClientHello", "protocol": PROTOCOL, "version": __version__}])
    try:
        try:  # noqa: SIM105 - contextlib takes a millisecond to load
            connection.send([hello], welcome_seconds)
        except ConnectionLost:
            pass  # a server that refuses us may have closed already; why stands in what is still to be read
        connection.welcome = _checked_welcome(server, connection.receive(welcome_seconds))
    except BaseException:
        connection.close()
        raise
    return connection


def _checked_welcome(server: Server, said: Sequence[Message]) -> Message:
    for message in said:
        raise_refusals(message)
    if [message["type"] for message in said] != ["Welcome"]:
        raise ProtocolError(f"What answers at {server} is no kueue server.")
    welcome = said[0]
    if welcome.get("protocol") != PROTOCOL:
        raise Refused(
            f"The server at {server} speaks protocol {welcome.get('protocol')} (kueue "
            f"{welcome.get('version')}), this command protocol {PROTOCOL} (kueue {__version__}).",
            hint="Install the same version of kueue on both.",
        )
    return welcome


def is_this_host(name: str) -> bool:
    """Does the name or address certainly mean this machine? No question is sent to a name server."""
    if name in {"localhost", "127.0.0.1", "::1"}:
        return True
    host = os.uname().nodename
    if name.lower() in {host.lower(), host.partition(".")[0].lower()}:
        return True
    family = _socket.AF_INET6 if ":" in name else _socket.AF_INET
    try:
        _socket.inet_pton(family, name)
    except OSError:
        return name.partition(".")[0].lower() == host.partition(".")[0].lower()
    probe = _socket.socket(family, _socket.SOCK_DGRAM)
    try:
        probe.bind((name, 0))  # the kernel allows it for the machine's own addresses alone
    except OSError:
        return False
    finally:
        probe.close()
    return True


def encode(messages: Sequence[Message]) -> bytes:
    """One frame. Raises `UserError` when it is longer than the protocol allows."""
    payload = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
    if len(payload) > FRAME_LIMIT:
        raise UserError(f"This takes {len(payload)} bytes in one message; at most {FRAME_LIMIT} can be sent.")
    return len(payload).to_bytes(4, "big") + payload


def raise_refusals(message: Message) -> None:
    """Raises what a message means that is no answer."""
    if message["type"] == "Failed":
        raise UserError(message["error"], hint=message.get("hint", ""), exit_code=message.get("exit_code", 1))
    if message["type"] == "Goodbye":
        raise ConnectionLost("it stops")
    if message["type"] == "Sorry":
        if not message.get("lasting", True):
            raise ConnectionLost(message["reason"].rstrip("."))
        raise Refused(message["reason"], hint=message.get("hint", ""))


def _why(error: OSError) -> str:
    """The reason in words, as part of a sentence."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (error.strerror or str(error)).lower()


def _decode(payload: bytes) -> list[Message]:
    try:
        messages = json.loads(payload)
    except ValueError as error:
        raise ProtocolError("The server sent a frame that is not JSON.") from error
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "type" in one for one in messages):
        raise ProtocolError("The server sent a frame that holds no messages.")
    return messages


def _open_local(path: str) -> _socket.socket | None:
    """The connected Unix socket of a server of this user; none when nobody listens there.

    Raises `Silence` when somebody listens who takes nobody in.
    """
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    directory = -1
    try:
        sock.settimeout(_CONNECT_SECONDS)
        if len(os.fsencode(path)) > 107:  # sun_path of unix(7) holds 108 bytes with the closing zero
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
            path = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        sock.connect(path)
        _check_owner(sock, path)
    except (BlockingIOError, TimeoutError) as error:
        # As many wait there as the kernel lets wait (EAGAIN of connect(2)).
        sock.close()
        raise Silence(_why(error)) from error
    except OSError:
        # The TLS port is tried next, and tells the person if there is no server at all.
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    finally:
        if directory >= 0:
            os.close(directory)
    return sock


def _must_be_another(sock: _socket.socket) -> None:
    """Where nobody listens the kernel may give our own end that very port (RFC 9293, 3.5). Raises `OSError`."""
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(ECONNREFUSED, os.strerror(ECONNREFUSED))
    except OSError:
        sock.close()
        raise


def _check_owner(sock: _socket.socket, path: str) -> None:
    """Raises `Refused` unless the listener runs under our user id (SO_PEERCRED of unix(7))."""
    credentials = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != os.geteuid():
        raise Refused(f"The socket {path} is served by another user.")


def _notice_dead_peers(sock: _socket.socket) -> None:
    """Without this a waiter would never learn that the server's machine lost power (tcp(7))."""
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(_socket, option):
            sock.setsockopt(_socket.IPPROTO_TCP, getattr(_socket, option), value)
