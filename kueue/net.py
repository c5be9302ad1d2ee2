"""Connections of the server and the worker under trio: binding, mutual TLS, the local socket, streams of messages.

Rules
- Nothing is read from a peer that has not proven the secret (TLS) or its uid (local socket), and every step of an
  arrival has a deadline of its own: a peer that dribbles bytes gains nothing.
- Whatever a peer does (junk, half frames, resets, huge lengths) ends its own connection and is one line of the log.
- Sending never waits: `MessageStream.put` queues, one task per connection writes. A peer that does not read is dropped
  when its backlog is too long; who can leave something out looks at `backlog` first.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import trio

from kueue import identity, threads
from kueue.errors import KueueError, ProtocolError, Refused, Unreachable, UserError
from kueue.protocol import codec
from kueue.protocol.messages import FRAME_LIMIT, FRAME_LIMIT_BEFORE_HELLO, FromClient, FromWorker, Message

HANDSHAKE_SECONDS = 10.0
HELLO_SECONDS = 10.0
CONNECT_SECONDS = 10.0
GOODBYE_SECONDS = 2.0
"""How long the last words may take when a connection is closed in good order."""
BACKLOG_LIMIT = 64 * 1024 * 1024
"""Bytes queued for one peer above which it counts as one that does not read: four of the largest frames."""
COMPANY_SECONDS = 0.005
"""How long what can wait waits for company: a short job begins and ends within it."""

_READ_BYTES = 256 * 1024
_OURS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""What `accept` says of a listener that is broken; all else is about one peer, or passes (accept(2))."""

_log = logging.getLogger("kueue.net")

M = TypeVar("M")
N = TypeVar("N")


# --- a stream of messages ---------------------------------------------------------------------------------------------


class MessageStream(Generic[M]):
    """Messages in and out over one connection. Made by `messages_over`, which runs its writer."""

    def __init__(
        self, stream: trio.abc.Stream, decoder: codec.Decoder[M], *, name: str, limit: int, backlog_limit: int
    ) -> None:
        self.name = name
        """Who is at the other end, for the log."""
        self.backlog = 0
        """Bytes that are queued or being written."""
        self._stream = stream
        self._decoder: codec.Decoder[Any] = decoder
        self._reader = codec.FrameReader(limit)
        self._bodies: list[bytes] = []
        self._backlog_limit = backlog_limit
        self._queue: list[bytes | bytearray] = []
        self._work = trio.Event()
        self._hurry = trio.Event()
        self._less = trio.Event()
        self._closed = False
        self._writing = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<MessageStream {self.name}>"

    @property
    def is_closed(self) -> bool:
        """Nothing more will be sent; `receive` gives what has come and then the end."""
        return self._closed

    def speaking(self, decoder: codec.Decoder[N], limit: int = FRAME_LIMIT) -> MessageStream[N]:
        """The same stream, from now on with another vocabulary and frame limit: used once, after the hello."""
        self._decoder = decoder
        self._reader.limit = limit
        return cast("MessageStream[N]", self)

    def put(self, messages: Sequence[Message], *, can_wait: bool = False) -> None:
        """Queue messages, in order, without waiting; after the end of the connection they are dropped.

        `can_wait`: nobody waits for them, so they may stay some milliseconds for the next ones to go with them.
        A backlog above the limit drops the connection.
        """
        if self._closed or not messages:
            return
        frame = codec.encode(messages)
        self._queue.append(frame)
        self.backlog += len(frame)
        if self.backlog > self._backlog_limit:
            self.drop(f"does not read: {self.backlog} bytes wait for it")
        self._work.set()
        if not can_wait:
            self._hurry.set()

    async def send(self, messages: Sequence[Message], below: int = 1024 * 1024) -> None:
        """Queue messages and wait until less than `below` bytes are waiting; returns at the end of the connection."""
        self.put(messages)
        await self.drained(below)

    async def drained(self, below: int = 1) -> None:
        """Wait until less than `below` bytes are waiting to be written, or the connection has ended."""
        await trio.lowlevel.checkpoint()
        while self.backlog >= below and not self._closed:
            await self._less.wait()

    async def receive(self) -> list[M]:
        """All messages that have come, at least one; empty at the end of the connection, whoever ended it.

        Raises `ProtocolError` for what the peer may not send, `Unreachable` for a broken connection, `Refused` when
        the peer does not accept our certificate. The connection is of no use after any of them.
        """
        while True:
            bodies, self._bodies = self._bodies, []
            messages = self._decoder.decode_all(bodies)
            if messages:
                await trio.lowlevel.checkpoint()
                return messages
            if not await self._fill():
                return []

    async def receive_first(self) -> list[M]:
        """The messages of the first frame alone: what follows may need another vocabulary. Errors as `receive`."""
        while not self._bodies:
            if not await self._fill():
                return []
        return self._decoder.decode(self._bodies.pop(0))

    async def _fill(self) -> bool:
        """Read once; False at the end."""
        try:
            chunk = await self._stream.receive_some(_READ_BYTES)
        except trio.ClosedResourceError:
            return False
        except trio.BrokenResourceError as error:
            if self._closed:
                return False
            raise _broken(error, self.name) from error
        if not chunk:
            if not self._reader.is_between_frames:
                raise ProtocolError("The connection ended in the middle of a frame.")
            return False
        self._bodies += self._reader.feed(chunk)
        return True

    def drop(self, reason: str = "") -> None:
        """End the connection at once; what is queued is lost. A `reason` ("it `reason`") goes to the log."""
        if not self._closed:
            self._closed = True
            self._less.set()
            if reason:
                _log.info("%s: connection dropped: it %s", self.name, reason)
            self._writing.cancel()

    async def write(self) -> None:
        """The writer: runs until the connection ends. All that waits goes out in one call."""
        try:
            with self._writing:
                while True:
                    if not self._queue:
                        self._work = trio.Event()
                        await self._work.wait()
                    if not self._hurry.is_set():
                        with trio.move_on_after(COMPANY_SECONDS):
                            await self._hurry.wait()
                    self._hurry = trio.Event()
                    queue, self._queue = self._queue, []
                    data = queue[0] if len(queue) == 1 else b"".join(queue)
                    await self._stream.send_all(data)
                    self.backlog -= len(data)
                    self._less.set()
                    self._less = trio.Event()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader meets the same end and tells
        finally:
            self._closed = True
            self._less.set()
            # Also wakes a reader: without a writer the connection is of no use.
            await trio.aclose_forcefully(self._stream)


def _broken(error: trio.BrokenResourceError, name: str) -> KueueError:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "").upper():
        # In TLS 1.3 a client is refused only after its own handshake is done: the alert comes with the first read.
        return _refused()
    return Unreachable(f"The connection to {name} broke: {cause or str(error) or 'closed by the other side'}.")


def _refused() -> Refused:
    return Refused(
        identity.AUTHENTICATION_FAILED,
        hint="The shared_secret of this machine and of the server must be equal.",
    )


@asynccontextmanager
async def messages_over(
    stream: trio.abc.Stream,
    decoder: codec.Decoder[M],
    *,
    name: str,
    limit: int = FRAME_LIMIT_BEFORE_HELLO,
    backlog_limit: int = BACKLOG_LIMIT,
) -> AsyncIterator[MessageStream[M]]:
    """A message stream over any connection. On leaving in good order what is queued is still sent, for two seconds.

    The connection is closed in any case. An exception of the block comes out as it is, not in a group.
    """
    messages = MessageStream(stream, decoder, name=name, limit=limit, backlog_limit=backlog_limit)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(messages.write)
        try:
            yield messages
        except Exception as error:  # noqa: BLE001  raised again below, outside of the nursery, which would wrap it
            failure = error
        with trio.move_on_after(GOODBYE_SECONDS):
            await messages.drained()
        messages.drop()
    if failure is not None:
        raise failure


# --- meeting those who come -------------------------------------------------------------------------------------------


async def bind(addresses: str, port: int) -> list[trio.SocketListener]:
    """Listening sockets for blank-separated addresses (``0.0.0.0 [::]``), each on its own; `port` 0: any free one.

    What cannot be bound is logged and skipped. Raises `KueueError` when there is no address or none can be bound.
    ``[::]`` takes IPv6 alone, so that ``0.0.0.0`` beside it always succeeds; the other sockets take the port of the
    first.
    """
    words = addresses.split()
    if not words:
        raise KueueError("No bind addresses configured!", hint="Set server_settings.bind_addresses.")
    listeners: list[trio.SocketListener] = []
    for word in words:
        host = word.removeprefix("[").removesuffix("]")
        try:
            with threads.wanted("name look-up"):
                found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except UserError as error:
            _log.error("Failed to bind %s, port %d: %s", word, port, error)
            continue
        except OSError as error:
            _log.error("Failed to bind %s, port %d: %s", word, port, error.strerror or error)
            continue
        except UnicodeError:
            _log.error("Failed to bind %s, port %d: not a host name", word, port)
            continue
        for family, _, _, _, address in found:
            # A name may have an address that this host cannot have: ::1 of localhost where IPv6 is switched off.
            try:
                listeners.append(await _listen(family, (address[0], port, *address[2:])))
            except OSError as error:  # noqa: PERF203 - each address has its own trouble
                shown = word if len(found) == 1 else f"{word} ({address[0]})"
                _log.error("Failed to bind %s, port %d: %s", shown, port, error.strerror or error)
            else:
                port = port or listeners[0].socket.getsockname()[1]
    if not listeners:
        raise KueueError(
            "Failed to bind any address!",
            hint=f"Does another server run on port {port}? The log above names each address and its trouble.",
        )
    return listeners


async def _listen(family: int, address: tuple[Any, ...]) -> trio.SocketListener:
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted server must get its port back although old connections linger in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await sock.bind(address)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def addresses_of(listeners: Sequence[trio.SocketListener]) -> list[tuple[str, int]]:
    """(host, port) of each listener."""
    return [listener.socket.getsockname()[:2] for listener in listeners]


async def bind_unix(address: str, path: str) -> trio.SocketListener:
    """The listening local socket at `path` (0600), which is bound by `address`: see `places.socket_address`.

    A socket left there is removed: the caller holds the lock that says there is no other server.
    """
    file = Path(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(file.lstat().st_mode):  # noqa: ASYNC240  a local directory of our own
            raise KueueError(f"{path} is in the way: it is not a socket.")
        file.unlink()  # noqa: ASYNC240  as above
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.bind(address)
        # The directory is 0700, so nobody can connect in between.
        file.chmod(0o600)  # noqa: ASYNC240  as above
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise KueueError(f"The local socket {path} cannot be made: {error.strerror}.") from error
    return trio.SocketListener(sock)


@dataclass(frozen=True)
class Peer:
    """Who came, as far as it is proven."""

    name: str
    """``192.0.2.7:41234`` or ``uid 1000, pid 17``."""
    uid: int | None = None
    """Of a peer at the local socket."""
    secret: str = ""
    """Fingerprint of the secret that it proved; empty at the local socket."""


@dataclass(frozen=True)
class Limits:
    """How much strangers may cost."""

    connections: int = 2000
    strangers: int = 100
    """Connections that have not proven anything yet."""
    handshake_seconds: float = HANDSHAKE_SECONDS
    hello_seconds: float = HELLO_SECONDS
    backlog: int = BACKLOG_LIMIT


Hello = FromClient | FromWorker
Handler = Callable[[MessageStream[Hello], Sequence[Hello], Peer], Awaitable[None]]
"""Given the stream, the messages of the first frame and the peer; the connection is closed when it returns."""


class Entrance:
    """Accepts connections, has each prove itself and say hello, and gives it to the handler."""

    def __init__(self, identities: Sequence[identity.Identity], handler: Handler, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.connections = 0
        """Open ones, strangers included."""
        self.refused_total = 0
        """Connections that ended before their hello."""
        self._handler = handler
        self._strangers: dict[trio.CancelScope, str] = {}
        self._quiet = _Quiet()
        self.renew(identities)

    def renew(self, identities: Sequence[identity.Identity]) -> None:
        """From the next connection on these secrets count, the first of them as the present one."""
        self._identities = tuple(identities)
        self._context = identities[0].server_context(identities[1:])

    async def serve(self, listeners: Sequence[trio.SocketListener], local: trio.SocketListener | None = None) -> None:
        """Meet peers until cancelled; the listeners are closed then, and connections cancelled."""
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(self._accept, listener, self._over_tls, nursery)
            if local is not None:
                nursery.start_soon(self._accept, local, self._over_unix, nursery)

    async def _accept(
        self,
        listener: trio.SocketListener,
        meet: Callable[[trio.SocketStream], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except trio.ClosedResourceError:  # noqa: PERF203  a connection costs a thousand times more
                    return
                except OSError as error:
                    if error.errno in _OURS:
                        raise
                    # Mostly out of descriptors: those that are connected go on, new ones wait in the kernel's queue.
                    self._quiet.say("cannot accept connections for now: %s", error.strerror)
                    await trio.sleep(0.1)
                else:
                    nursery.start_soon(self._meet, stream, meet)

    async def _meet(self, stream: trio.SocketStream, meet: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        """One connection from its beginning to its end; nothing that happens to it may reach the others."""
        self.connections += 1
        name = _name(stream)
        try:
            if self.connections > self.limits.connections:
                self.refused_total += 1
                self._quiet.say("%s: refused, %d connections are open", name, self.connections - 1)
            else:
                await meet(stream)
        except (KueueError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._quiet.say("%s: %s", name, error)
        except Exception:  # noqa: BLE001  logged whole; the other connections must go on
            _log.exception("%s: connection closed after a failure of our own", name)
        finally:
            self.connections -= 1
            await trio.aclose_forcefully(stream)

    async def _over_tls(self, stream: trio.SocketStream) -> None:
        name = _name(stream)
        keep_alive(stream)
        secure = trio.SSLStream(stream, self._context, server_side=True, https_compatible=True)
        identities = self._identities
        with trio.CancelScope(deadline=trio.current_time() + self.limits.handshake_seconds) as scope:
            self._take_in(scope, name)
            try:
                await secure.do_handshake()
                presented = secure.getpeercert(binary_form=True)
                identity.check_peer(presented, identities)
            except (trio.BrokenResourceError, KueueError) as error:
                self.refused_total += 1
                self._quiet.say("%s: not let in: %s", name, error.__cause__ or error)
                return
            finally:
                self._strangers.pop(scope, None)
        if scope.cancelled_caught:
            self.refused_total += 1
            self._quiet.say("%s: not let in: its handshake took too long, or too many strangers came", name)
            return
        proven = next(one.fingerprint for one in identities if one.certificate == presented)
        await self._hear(secure, Peer(name, secret=proven))

    def _take_in(self, scope: trio.CancelScope, name: str) -> None:
        """Count a stranger; of too many the oldest of the busiest address goes, so that others still get in."""
        self._strangers[scope] = name.rpartition(":")[0]
        if len(self._strangers) > self.limits.strangers:
            busiest = Counter(self._strangers.values()).most_common(1)[0][0]
            oldest = next(scope for scope, host in self._strangers.items() if host == busiest)
            del self._strangers[oldest]
            oldest.cancel()

    async def _over_unix(self, stream: trio.SocketStream) -> None:
        pid, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            self.refused_total += 1
            self._quiet.say("local socket: uid %d is not let in", uid)
            return
        await self._hear(stream, Peer(f"uid {uid}, pid {pid}", uid))

    async def _hear(self, stream: trio.abc.Stream, peer: Peer) -> None:
        """The hello and all after it. The peer is proven by now, so its first frame may be as large as any other:
        a worker's hello tells of thousands of attempts.
        """
        async with messages_over(
            stream, codec.first, name=peer.name, limit=FRAME_LIMIT, backlog_limit=self.limits.backlog
        ) as messages:
            hello: list[Hello] | None = None
            with trio.move_on_after(self.limits.hello_seconds):
                hello = await messages.receive_first()
            if hello:
                await self._handler(messages, hello, peer)
                return
            self.refused_total += 1
            self._quiet.say("%s: %s", peer.name, "left without a hello" if hello is not None else "said no hello")


class _Quiet:
    """One line for each peer that misbehaves, but at most 20 in a minute: a scanner must not fill the log."""

    LINES, SECONDS = 20, 60.0

    def __init__(self) -> None:
        self._since = -self.SECONDS
        self._said = 0

    def say(self, text: str, *values: object) -> None:
        now = trio.current_time()
        if now - self._since >= self.SECONDS:
            if self._said > self.LINES:
                _log.info("%d more lines of this kind were left out", self._said - self.LINES)
            self._since, self._said = now, 0
        self._said += 1
        if self._said <= self.LINES:
            _log.info(text, *values)


def keep_alive(stream: trio.SocketStream) -> None:
    """Notice a vanished peer within about two minutes: laptops close, cables are pulled, firewalls forget."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Milliseconds after which sent bytes without an answer end the connection (tcp(7)); the default is 15 minutes.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)


def _name(stream: trio.SocketStream) -> str:
    try:
        address = stream.socket.getpeername()
    except OSError:
        return "a peer that is gone"
    return _at(address[0], address[1]) if isinstance(address, tuple) else "local socket"


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- going to the server ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def connect_tls(
    host: str, port: int, identities: Sequence[identity.Identity], decoder: codec.Decoder[M]
) -> AsyncIterator[MessageStream[M]]:
    """A proven connection to the server; the first frame limit is the small one: call `speaking` after the welcome.

    Each identity is tried in turn. Raises `Unreachable` naming host and port, or `Refused` ("Authentication failed!");
    also `MessageStream.receive` may raise `Refused` before the welcome.
    """
    if not identities:
        raise _refused()
    for present in identities:
        secure = await _handshake(host, port, present)
        if secure is not None:
            break
    else:
        raise _refused()
    async with messages_over(secure, decoder, name=_at(host, port)) as messages:
        yield messages


async def _handshake(host: str, port: int, present: identity.Identity) -> trio.SSLStream[trio.SocketStream] | None:
    """The connection, or None when the server holds another secret."""
    where = _at(host, port)
    with trio.move_on_after(CONNECT_SECONDS):
        try:
            with threads.wanted("name look-up"):
                stream = await trio.open_tcp_stream(host, port)
        except (OSError, UnicodeError, ValueError, UserError) as error:
            raise Unreachable(
                f"Cannot connect to the server at {where}: {_reason(error)}.",
                hint="Is kueue_server running there? See server_name and server_port in the settings.",
            ) from error
        try:
            keep_alive(stream)
            secure = trio.SSLStream(
                stream, present.client_context(), server_hostname=present.server_hostname, https_compatible=True
            )
            await secure.do_handshake()
            identity.check_peer(secure.getpeercert(binary_form=True), [present])
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, Refused) or isinstance(error.__cause__, ssl.SSLCertVerificationError):
                return None
            if isinstance(error, (OSError, trio.BrokenResourceError)):
                raise Unreachable(
                    f"The server at {where} did not complete the handshake: {_reason(error.__cause__ or error)}.",
                    hint="Does kueue_server listen there, or another program?",
                ) from error
            raise
        return secure
    raise Unreachable(
        f"The server at {where} does not answer within {CONNECT_SECONDS:.0f} s.",
        hint="Is the machine on, and does a firewall let the port through?",
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, KueueError):
        return str(error).rstrip(".")
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    cause = error.__cause__ or error
    nested = getattr(cause, "exceptions", None)  # one for each address that was tried
    if nested:
        return "; ".join(dict.fromkeys(_reason(each) for each in nested))
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)  # trio's own text repeats the address
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror  # of the resolver, whose numbers are not those of the system
    return str(cause) or "the connection was closed"
