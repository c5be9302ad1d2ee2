"""Binding, proof, streams of messages, and everything a bad peer may try: over real sockets."""

import contextlib
import errno
import gc
import logging
import os
import resource
import socket
import ssl
import stat
import struct
import threading

import pytest
import trio
import trio.testing

from kueue import identity, net, places
from kueue.entrance import Entrance, Limits, Shortage, addresses_of, bind, bind_unix
from kueue.errors import KueueError, ProtocolError, Refused, Unreachable
from kueue.model import MachineTotals
from kueue.protocol import codec
from kueue.protocol.messages import (
    ClientHello,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    ListJobs,
    Output,
    ServerInfo,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)

pytestmark = pytest.mark.trio

WELCOME = Welcome(protocol=1, version="v", queue_id="q", principal="operator")
WORKER = WorkerHello(identity="i", name="n", machine_id="m", boot_id="b", totals=MachineTotals(1, 1, 1))
WORKER_WELCOME = WorkerWelcome(
    protocol=1,
    version="v",
    queue_id="q",
    worker=0,
    worker_timeout_seconds=300,
    lease_seconds=270,
    cleanup_after_seconds=1,
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("identities"))


@pytest.fixture(scope="session")
def ours(cache):
    return identity.identity_of("keep private!", cache)


@pytest.fixture(scope="session")
def other(cache):
    return identity.identity_of("another secret", cache)


async def answer(stream, hello, peer):
    """A server that welcomes, then answers each question with `Done` and each heartbeat."""
    if isinstance(hello[0], WorkerHello):
        talk = stream.speaking(codec.from_worker)
        talk.put([WORKER_WELCOME])
    else:
        talk = stream.speaking(codec.from_client)
        talk.put([WELCOME])
    while messages := await talk.receive():
        for message in messages:
            if isinstance(message, Heartbeat):
                talk.put([HeartbeatAnswer(number=message.number, lease_seconds=1.0)])
            else:
                talk.put([Done(seq=message.seq, text=peer.name)])


class Running:
    def __init__(self, entrance, port):
        self.entrance = entrance
        self.port = port

    def tls(self, who):
        """Blocks: to be called in a thread."""
        return who.client_context().wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout=20))


@contextlib.asynccontextmanager
async def serving(identities, handler=answer, limits=None, local=None):
    listeners = await bind("127.0.0.1", 0)
    entrance = Entrance(identities, handler, limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(entrance.serve, listeners, local)
        yield Running(entrance, addresses_of(listeners)[0][1])
        nursery.cancel_scope.cancel()


async def until(condition):
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110  what is waited for is not ours to signal
            await trio.sleep(0.002)


async def served(running, who):
    """The service still works for a good client."""
    async with net.connect_tls("127.0.0.1", running.port, [who], codec.to_client) as stream:
        stream.put([ClientHello()])
        assert await stream.receive() == [WELCOME]
        stream.put([ServerInfo(seq=7)])
        (done,) = await stream.receive()
        assert done.seq == 7


# --- binding ----------------------------------------------------------------------------------------------------------


async def test_both_families_are_bound_on_one_port_and_reached():
    listeners = await bind("0.0.0.0 [::]", 0)
    addresses = addresses_of(listeners)
    assert [host for host, _ in addresses] == ["0.0.0.0", "::"]
    assert len({port for _, port in addresses}) == 1
    for listener, host in zip(listeners, ("127.0.0.1", "::1"), strict=True):
        with socket.create_connection((host, addresses[0][1])):
            await (await listener.accept()).aclose()
        await listener.aclose()


async def test_what_cannot_be_bound_is_logged_and_skipped(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listeners = await bind("127.0.0.1 192.0.2.1 no.such.host.invalid 127.0.0.2", port)
        assert addresses_of(listeners) == [("127.0.0.2", port)]
        told = [record.getMessage() for record in caplog.records]
        assert [text.split(",")[0] for text in told] == [
            "Failed to bind 127.0.0.1",
            "Failed to bind 192.0.2.1",
            "Failed to bind no.such.host.invalid",
        ]
        for listener in listeners:
            await listener.aclose()
        with pytest.raises(KueueError, match="Failed to bind any address!"):
            await bind("127.0.0.1", port)


async def test_a_name_of_which_one_address_is_not_this_hosts_is_bound_at_the_others():
    class Names(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host, port, *_, **__):
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("192.0.2.1", "127.0.0.1")
            ]

        async def getnameinfo(self, sockaddr, flags):
            raise AssertionError

    before = trio.socket.set_custom_hostname_resolver(Names())
    try:
        listeners = await bind("both", 0)
    finally:
        trio.socket.set_custom_hostname_resolver(before)
    assert [host for host, _ in addresses_of(listeners)] == ["127.0.0.1"]
    for listener in listeners:
        await listener.aclose()


async def test_no_address_at_all_has_its_own_sentence():
    with pytest.raises(KueueError, match="No bind addresses configured!"):
        await bind("  ", 0)


@pytest.mark.parametrize("length", [5, 180])
async def test_the_local_socket_is_private_and_says_who_calls(tmp_path, ours, length):
    path = f"{places.own_directory(str(tmp_path / ('d' * length)))}/1-a.sock"
    for _ in range(2):  # the second time over the socket that the first left behind
        address, descriptor = places.socket_address(path)
        local = await bind_unix(address, path)
        async with serving([ours], local=local):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            async with (
                await trio.open_unix_socket(address) as plain,
                net.messages_over(plain, codec.to_client, name="server") as stream,
            ):
                stream.put([ClientHello()])
                assert await stream.receive() == [WELCOME]
                stream.put([ServerInfo(seq=1)])
                (done,) = await stream.receive()
                assert done.text == f"uid {os.getuid()}, pid {os.getpid()}"
        if descriptor >= 0:
            os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_at_the_local_socket_is_not_let_in(tmp_path, ours, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    local = await bind_unix(str(tmp_path / "s"), str(tmp_path / "s"))
    async with serving([ours], local=local) as running:
        async with await trio.open_unix_socket(str(tmp_path / "s")) as plain:
            with contextlib.suppress(trio.BrokenResourceError):
                await plain.send_all(codec.encode([ClientHello()]))
                assert await plain.receive_some() == b""
        assert running.entrance.refused_total == 1


async def test_a_file_in_the_place_of_the_local_socket_is_left_alone(tmp_path):
    (tmp_path / "s").write_text("precious")
    with pytest.raises(KueueError, match="not a socket"):
        await bind_unix(str(tmp_path / "s"), str(tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "precious"


# --- proof ------------------------------------------------------------------------------------------------------------


async def test_a_client_and_a_worker_with_the_secret_are_served(ours):
    async with serving([ours]) as running:
        await served(running, ours)
        async with net.connect_tls("localhost", running.port, [ours], codec.to_worker) as stream:
            stream.put([WORKER])
            assert await stream.receive() == [WORKER_WELCOME]
            talk = stream.speaking(codec.to_worker)
            talk.put([Heartbeat(number=n) for n in range(3)])
            got = []
            while len(got) < 3:
                got += await talk.receive()
            assert [message.number for message in got] == [0, 1, 2]
        await until(lambda: running.entrance.connections == 0)


async def test_a_connection_to_itself_is_no_server(ours, monkeypatch):
    """Where nobody listens on a port that the kernel gives to clients it may give that very one."""

    async def to_itself(*_):
        sock = trio.socket.socket()
        await sock.bind(("127.0.0.1", 0))
        await sock.connect(sock.getsockname())
        return trio.SocketStream(sock)

    monkeypatch.setattr(trio, "open_tcp_stream", to_itself)
    with pytest.raises(Unreachable, match="refused"):
        async with net.connect_tls("127.0.0.1", 1, [ours], codec.to_client):
            pass


async def test_a_peer_that_resets_at_once_leaves_no_socket_open(ours):
    listener = socket.create_server(("127.0.0.1", 0))

    def reset():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()

    thread = threading.Thread(target=reset)
    thread.start()
    for _ in range(50):
        with pytest.raises(KueueError):
            async with net.connect_tls("127.0.0.1", listener.getsockname()[1], [ours], codec.to_client):
                pass
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    gc.collect()  # a socket that was left open is a warning, and with that an error


async def test_a_name_that_no_thread_can_look_up_is_that_of_a_server_that_cannot_be_reached(ours, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
    monkeypatch.setattr("threading.Thread.start", refused)
    with pytest.raises(Unreachable, match="limit of processes"):
        async with net.connect_tls("localhost.localdomain", 1, [ours], codec.to_client):
            pass


async def test_a_wrong_secret_is_refused_by_both_sides(ours, other):
    async with serving([ours]) as running:
        with pytest.raises(Refused, match="Authentication failed!"):
            async with net.connect_tls("127.0.0.1", running.port, [other], codec.to_worker):
                pass
        await until(lambda: running.entrance.refused_total == 1)
        await served(running, ours)


async def test_a_client_that_checks_nothing_and_shows_nothing_gets_no_welcome(ours, caplog):
    caplog.set_level(logging.INFO, "kueue")
    async with serving([ours]) as running:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        secure = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", running.port), context, https_compatible=True)
        async with net.messages_over(secure, codec.to_client, name="server") as stream:
            stream.put([ClientHello()])
            got = []
            with contextlib.suppress(Refused, Unreachable):
                got = await stream.receive()
            assert got == []
        assert running.entrance.refused_total == 1
    assert "not let in: [SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]" in caplog.text


async def test_a_refusal_that_comes_only_after_the_handshake_is_a_refusal(ours, other):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.path)
    context.load_verify_locations(cadata=other.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            plain, _ = server.accept()
            with plain, pytest.raises(ssl.SSLError):
                context.wrap_socket(plain, server_side=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, serve)
            async with net.connect_tls("127.0.0.1", server.getsockname()[1], [ours], codec.to_worker) as stream:
                with pytest.raises(Refused, match="Authentication failed!"):
                    await stream.receive()


async def test_a_changed_secret_serves_old_and_new_in_every_combination(ours, other):
    for server in ([ours], [other], [other, ours], [ours, other]):
        async with serving(server) as running:
            for peer in ([ours], [other, ours], [other], [ours, other]):
                common = set(server) & set(peer)
                if common:
                    async with net.connect_tls("127.0.0.1", running.port, peer, codec.to_client) as stream:
                        stream.put([ClientHello()])
                        assert await stream.receive() == [WELCOME]
                else:
                    with pytest.raises(Refused):
                        async with net.connect_tls("127.0.0.1", running.port, peer, codec.to_client):
                            pass


async def test_secrets_are_renewed_while_connections_stay(ours, other):
    async with serving([ours]) as running:
        async with net.connect_tls("127.0.0.1", running.port, [ours], codec.to_client) as stream:
            stream.put([ClientHello()])
            await stream.receive()
            running.entrance.renew([other])
            await served(running, other)
            stream.put([ServerInfo(seq=3)])
            assert len(await stream.receive()) == 1
        with pytest.raises(Refused):
            await served(running, ours)


async def test_nothing_that_is_said_can_be_read_on_the_way(ours):
    async with serving([ours]) as running:
        seen = bytearray()
        listeners = await bind("127.0.0.1", 0)

        async def pump(source, target):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for chunk in source:
                    seen.extend(chunk)
                    await target.send_all(chunk)
                await target.send_eof()

        async def relay(client):
            server = await trio.open_tcp_stream("127.0.0.1", running.port)
            async with client, server, trio.open_nursery() as nursery:
                nursery.start_soon(pump, client, server)
                await pump(server, client)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, relay, listeners)
            async with net.connect_tls("127.0.0.1", addresses_of(listeners)[0][1], [ours], codec.to_client) as stream:
                stream.put([ClientHello(version="TOPSECRET")])
                assert await stream.receive() == [WELCOME]
            nursery.cancel_scope.cancel()
        assert len(seen) > 500
        assert b"TOPSECRET" not in seen
        assert b"operator" not in seen
        # A recording of a proven client proves nothing.
        with socket.create_connection(("127.0.0.1", running.port)) as thief:
            thief.sendall(bytes(seen))
            await until(lambda: running.entrance.refused_total >= 1)


# --- bad peers --------------------------------------------------------------------------------------------------------


def junk(running, who):
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        plain.sendall(os.urandom(3000))


def http(running, who):
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")


def nothing(running, who):
    socket.create_connection(("127.0.0.1", running.port)).close()


def reset(running, who):
    with running.tls(who) as secure:
        secure.sendall(codec.encode([ClientHello()]))
        secure.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_frame(running, who):
    with running.tls(who) as secure:
        secure.sendall(codec.encode([ClientHello()])[:-3])


def gigabyte(running, who):
    with running.tls(who) as secure:
        secure.sendall((2**30).to_bytes(4, "big") + b"x" * 1000)


def nonsense(running, who):
    with running.tls(who) as secure:
        secure.sendall(b"\0\0\0\x05{bad}")


def not_a_hello(running, who):
    with running.tls(who) as secure:
        secure.sendall(codec.encode([ClientHello()]) + b"\0\0\0\x02xx")


@pytest.mark.parametrize("attack", [junk, http, nothing, reset, half_frame, gigabyte, nonsense, not_a_hello])
async def test_a_bad_peer_ends_only_its_own_connection(ours, attack, caplog):
    caplog.set_level(logging.INFO, "kueue")
    async with serving([ours]) as running:
        async with net.connect_tls("127.0.0.1", running.port, [ours], codec.to_client) as stream:
            stream.put([ClientHello()])
            assert await stream.receive() == [WELCOME]
            for _ in range(3):
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(attack, running, ours)
            await until(lambda: running.entrance.connections == 1)
            stream.put([ServerInfo(seq=3)])
            assert len(await stream.receive()) == 1
        await served(running, ours)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_who_dribbles_or_says_nothing_is_sent_away(ours):
    limits = Limits(handshake_seconds=0.3, hello_seconds=0.3)
    async with serving([ours], limits=limits) as running:
        mute = await trio.to_thread.run_sync(running.tls, ours)
        with socket.create_connection(("127.0.0.1", running.port)) as silent, mute:
            await until(lambda: running.entrance.connections == 0)
            assert running.entrance.refused_total == 2
            with contextlib.suppress(OSError):
                assert silent.recv(1) == b""
            with contextlib.suppress(OSError):
                assert mute.recv(1) == b""


async def test_of_too_many_strangers_the_oldest_of_the_busiest_address_goes(ours):
    async with serving([ours], limits=Limits(strangers=3)) as running:
        with contextlib.ExitStack() as crowd:
            quiet = crowd.enter_context(
                socket.create_connection(("127.0.0.1", running.port), source_address=("127.0.0.2", 0))
            )
            await until(lambda: running.entrance.connections == 1)
            for _ in range(10):
                crowd.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            await until(lambda: running.entrance.refused_total == 8)
            await served(running, ours)
            quiet.setblocking(False)
            with pytest.raises(BlockingIOError):
                quiet.recv(1)


async def test_above_the_cap_a_connection_is_closed_at_once_and_later_ones_are_served(ours):
    async with serving([ours], limits=Limits(connections=2)) as running:
        async with net.connect_tls("127.0.0.1", running.port, [ours], codec.to_client) as first:
            first.put([ClientHello()])
            await first.receive()
            second = await trio.to_thread.run_sync(running.tls, ours)
            with second, socket.create_connection(("127.0.0.1", running.port)) as third:
                third.settimeout(10)
                assert await trio.to_thread.run_sync(third.recv, 1) == b""
        await until(lambda: running.entrance.connections == 0)
        await served(running, ours)


async def test_without_descriptors_the_connected_go_on_and_others_wait(ours, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kueue")
    monkeypatch.setattr("kueue.entrance.Shortage.CALM_SECONDS", 0.5)
    monkeypatch.setattr("kueue.entrance.Shortage.AGAIN_SECONDS", 1000.0)
    async with (
        serving([ours]) as running,
        net.connect_tls("127.0.0.1", running.port, [ours], codec.to_client) as stream,
    ):
        stream.put([ClientHello()])
        await stream.receive()
        waiting = socket.create_connection(("127.0.0.1", running.port))
        await until(lambda: running.entrance.connections == 2)
        late = socket.socket()
        spare = os.dup(0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        hoard = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    hoard.append(os.dup(0))
            late.connect(("127.0.0.1", running.port))
            await until(lambda: "cannot accept connections" in caplog.text)
            stream.put([ServerInfo(seq=3)])
            assert len(await stream.receive()) == 1
            await trio.sleep(1.0)  # many tries later
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in hoard:
                os.close(descriptor)
        await until(lambda: running.entrance.connections == 3)
        await until(lambda: "connections are accepted again" in caplog.text)
        waiting.close()
        late.close()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "accept" in record.getMessage()]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert f"Too many open files (the limit is {spare}" in said[0][1]


async def test_a_lasting_want_of_descriptors_is_told_again_after_a_while(caplog, autojump_clock):
    caplog.set_level(logging.INFO, "kueue")
    shortage = Shortage()
    async with trio.open_nursery() as nursery:
        for _ in range(1300):
            shortage.met(OSError(errno.ENFILE, os.strerror(errno.ENFILE)), nursery)
            await trio.sleep(0.1)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        # One that comes in now and then, as others leave, does not end it.
        await trio.sleep(9)
        shortage.met(OSError(errno.ENFILE, os.strerror(errno.ENFILE)), nursery)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["INFO"]
    assert "for 139 s" in caplog.text


async def test_a_scanner_does_not_fill_the_log(ours, caplog):
    caplog.set_level(logging.INFO, "kueue")
    async with serving([ours]) as running:
        for _ in range(60):
            nothing(running, ours)
        await until(lambda: running.entrance.refused_total == 60)
    assert len(caplog.records) <= 20


async def test_a_failure_of_our_own_in_one_session_is_logged_whole_and_stops_no_other(ours, caplog):
    async def fails(stream, hello, peer):
        if hello[0].version == "fatal":
            raise ZeroDivisionError("a bug")
        await answer(stream, hello, peer)

    async with serving([ours], fails) as running:
        async with net.connect_tls("127.0.0.1", running.port, [ours], codec.to_client) as stream:
            stream.put([ClientHello(version="fatal")])
            assert await stream.receive() == []
        await served(running, ours)
    assert "ZeroDivisionError: a bug" in caplog.text


# --- streams ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two_ends(decoder_a=codec.to_client, decoder_b=codec.from_client, **more):
    a, b = trio.testing.memory_stream_pair()
    async with (
        net.messages_over(a, decoder_a, name="a", limit=2**24, **more) as one,
        net.messages_over(b, decoder_b, name="b", limit=2**24) as two,
    ):
        yield one, two


async def test_messages_keep_their_order_and_many_arrive_together():
    async with two_ends() as (one, two):
        for n in range(1000):
            one.put([ListJobs(seq=n)])
        got, reads = [], 0
        while len(got) < 1000:
            got += await two.receive()
            reads += 1
        assert [message.seq for message in got] == list(range(1000))
        assert reads < 20


async def test_what_is_queued_is_sent_before_a_close_in_good_order():
    a, b = trio.testing.memory_stream_pair()
    async with net.messages_over(b, codec.from_client, name="b") as two:
        async with net.messages_over(a, codec.to_client, name="a") as one:
            one.put([ListJobs(seq=1)])
        assert await two.receive() == [ListJobs(seq=1)]
        assert await two.receive() == []


async def test_a_goodbye_to_a_peer_that_does_not_read_has_a_deadline(autojump_clock):
    a, b = trio.testing.lockstep_stream_pair()
    async with b:
        before = trio.current_time()
        async with net.messages_over(a, codec.to_client, name="a") as one:
            one.put([ListJobs(seq=1)])
        assert trio.current_time() - before == pytest.approx(net.GOODBYE_SECONDS)


async def test_a_peer_that_does_not_read_is_dropped_and_delays_nobody(caplog):
    caplog.set_level(logging.INFO, "kueue")
    a, b = trio.testing.lockstep_stream_pair()
    async with b, net.messages_over(a, codec.to_client, name="slow", backlog_limit=10_000) as one:
        with trio.fail_after(10):
            for n in range(1000):
                one.put([Output(seq=n, offset=0, data=b"x" * 100)])
            assert one.is_closed
            assert await one.receive() == []
            await one.drained()
    assert "slow: connection dropped: it does not read" in caplog.text


async def test_a_sender_can_wait_until_its_backlog_is_small():
    async with two_ends() as (one, two):
        sent = []

        async def send():
            for n in range(200):
                await one.send([ListJobs(seq=n)], below=500)
                sent.append(n)
                assert one.backlog < 500

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            got = []
            while len(got) < 200:
                got += await two.receive()
        assert sent == list(range(200))


async def test_dropping_wakes_a_reader_and_ends_a_write_that_hangs():
    a, b = trio.testing.lockstep_stream_pair()
    async with b, net.messages_over(a, codec.to_client, name="a") as one, trio.open_nursery() as nursery:
        one.put([ListJobs(seq=1)])

        async def drop():
            await trio.testing.wait_all_tasks_blocked()
            one.drop("was told to go")

        nursery.start_soon(drop)
        with trio.fail_after(10):
            assert await one.receive() == []


async def test_a_stream_cut_inside_a_frame_is_an_error_and_at_its_end_is_not():
    a, b = trio.testing.memory_stream_pair()
    frame = codec.encode([ClientHello()])
    await a.send_all(frame + frame[:5])
    await a.send_eof()
    async with net.messages_over(b, codec.from_client, name="b") as two:
        assert await two.receive() == [ClientHello()]
        with pytest.raises(ProtocolError, match="middle of a frame"):
            await two.receive()
    await a.aclose()


async def test_what_follows_the_hello_is_read_with_the_new_vocabulary():
    a, b = trio.testing.memory_stream_pair()
    await a.send_all(codec.encode([WORKER]) + codec.encode([Heartbeat(number=1)]) + codec.encode([Heartbeat(number=2)]))
    async with net.messages_over(b, codec.first, name="b") as two:
        assert await two.receive_first() == [WORKER]
        assert await two.speaking(codec.from_worker).receive() == [Heartbeat(number=1), Heartbeat(number=2)]
    await a.aclose()


async def test_an_error_in_the_block_comes_out_as_it_is():
    with pytest.raises(Unreachable, match="as it is"):
        async with two_ends():
            raise Unreachable("as it is")


async def test_a_cancelled_session_closes_its_connection():
    a, b = trio.testing.memory_stream_pair()
    with trio.CancelScope() as scope:
        async with net.messages_over(a, codec.to_client, name="a"):
            scope.cancel()
            await trio.sleep_forever()
    assert await b.receive_some() == b""


# --- going to a server that is not there ------------------------------------------------------------------------------


async def test_a_server_that_is_away_is_named_with_its_port(ours):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port}: Connection refused") as caught:
        async with net.connect_tls("127.0.0.1", port, [ours], codec.to_worker):
            pass
    assert "kueue_server" in caught.value.hint


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
async def test_a_name_that_means_nothing_is_unreachable(ours, host):
    with pytest.raises(Unreachable, match="Cannot connect to the server at"):
        async with net.connect_tls(host, 1, [ours], codec.to_worker):
            pass


@pytest.mark.parametrize("behaviour", [b"SSH-2.0-OpenSSH\r\n", b""])
async def test_another_program_at_the_port_is_unreachable_not_refused(ours, behaviour):
    async def other_program(stream):
        async with stream:
            if behaviour:
                await stream.send_all(behaviour)
            await stream.receive_some()

    listeners = await bind("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, other_program, listeners)
        with pytest.raises(Unreachable, match="did not complete the handshake"):
            async with net.connect_tls("127.0.0.1", addresses_of(listeners)[0][1], [ours], codec.to_worker):
                pass
        nursery.cancel_scope.cancel()


async def test_a_server_that_accepts_and_says_nothing_is_given_up(ours, monkeypatch):
    monkeypatch.setattr(net, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="does not answer within"):
        async with net.connect_tls("127.0.0.1", silent.getsockname()[1], [ours], codec.to_worker):
            pass
