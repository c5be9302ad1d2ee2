"""Connections that come to a server: listeners, and an entrance where each has to prove itself and say hello.

Rules
- Nothing is read from a peer that has not proven the secret (TLS) or its uid (local socket), and every step of an
  arrival has a deadline of its own: a peer that dribbles bytes gains nothing.
- Whatever a peer does (junk, half frames, resets, huge lengths) ends its own connection and is one line of the log.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from kueue import identity, threads
from kueue.errors import KueueError, UserError
from kueue.net import BACKLOG_LIMIT, MessageStream, keep_alive, messages_over, name_of
from kueue.protocol import codec
from kueue.protocol.messages import FRAME_LIMIT, FromClient, FromWorker

HANDSHAKE_SECONDS = 10.0
HELLO_SECONDS = 10.0

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What `accept` says when this process or this machine has run out of something."""

_OURS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""What `accept` says of a listener that is broken; all else is about one peer, or passes (accept(2))."""

_log = logging.getLogger("kueue.net")


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
        self._shortage = Shortage()
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
                    # Those that are connected go on, new ones wait in the kernel's queue.
                    if error.errno in _SHORT:
                        self._shortage.met(error, nursery)
                    else:
                        self._quiet.say("cannot accept a connection: %s", error.strerror)
                    await trio.sleep(0.1)
                else:
                    nursery.start_soon(self._meet, stream, meet)

    async def _meet(self, stream: trio.SocketStream, meet: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        """One connection from its beginning to its end; nothing that happens to it may reach the others."""
        self.connections += 1
        name = name_of(stream)
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
        name = name_of(stream)
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


class Shortage:
    """A time in which no connection can be accepted: said when it begins, each minute while it lasts, and at its end.

    It is over when nothing has failed for ten seconds: at a limit each connection that leaves lets one more in.
    """

    AGAIN_SECONDS, CALM_SECONDS = 60.0, 10.0

    def __init__(self) -> None:
        self._began: float | None = None
        self._said = self._last = 0.0

    def met(self, error: OSError, nursery: trio.Nursery) -> None:
        """Once more nothing could be accepted. `nursery`: for the task that sees the end."""
        self._last = now = trio.current_time()
        if self._began is None:
            self._began = now
            nursery.start_soon(self._see_end)
        elif now - self._said < self.AGAIN_SECONDS:
            return
        self._said = now
        _log.warning(
            "cannot accept connections for now: %s%s; those that are open go on",
            error.strerror,
            f" (the limit is {_files()}: raise `ulimit -Hn` or LimitNOFILE=)" if error.errno == errno.EMFILE else "",
        )

    async def _see_end(self) -> None:
        rest = self.CALM_SECONDS
        while rest > 0:
            await trio.sleep(rest)
            rest = self._last + self.CALM_SECONDS - trio.current_time()
        assert self._began is not None
        _log.info("connections are accepted again; for %.0f s that failed", self._last - self._began)
        self._began = None


def _files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
