"""A real `kueue_server` process and hand-made peers that speak to it: blocking sockets, real TLS, real frames."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kueue import identity, places
from kueue.model import EndRecord, Exited, JobRange, MachineLoad, MachineTotals, Payload, Place, Request, Terms
from kueue.protocol import codec
from kueue.protocol import messages as m

ROOT = Path(__file__).parents[2]
SECRET = "a shared secret of good length"
PATIENCE = 30.0


def eventually(claim: Callable[[], Any], what: str = "", seconds: float = PATIENCE) -> Any:
    """The first true answer of `claim`."""
    deadline = time.monotonic() + seconds
    while not (answer := claim()):
        assert time.monotonic() < deadline, f"never came true: {what or claim}"
        time.sleep(0.02)
    return answer


@functools.cache
def _cache() -> str:
    directory = tempfile.mkdtemp(prefix="kueue-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.cache
def known(secret: str) -> identity.Identity:
    return identity.identity_of(secret, _cache())


class ServerProgram:
    """One server's directory; the process can be started and ended any number of times."""

    def __init__(self, base: Path, *, secret: str = SECRET, **server_settings: object) -> None:
        self.base = base
        self.state = base / "state"
        self.config = base / "config.toml"
        self.log = base / "server.log"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.more_environ: dict[str, str] = {}
        self._sockets: list[socket.socket] = []
        self.secret = secret
        self.figures = ""
        """Where /metrics is shown; its default is one port for all tests."""
        self.settings: dict[str, object] = {"bind_addresses": "127.0.0.1", "worker_timeout_seconds": 30}
        self.settings.update(server_settings)
        self.write_config()

    @property
    def identity(self) -> identity.Identity:
        return known(self.secret)

    def write_config(self, *, previous: str = "", resources: dict[str, int] | None = None, **changed: object) -> None:
        self.settings.update(changed)
        lines = ["[common_settings]", f'shared_secret = "{self.secret}"', f"server_port = {self.port}"]
        if previous:
            lines.append(f'shared_secret_previous = "{previous}"')
        lines.append("[server_settings]")
        lines += [f"{key} = {repr(value).replace(chr(39), chr(34))}" for key, value in self.settings.items()]
        lines += ["[metrics_settings]", f'server_bind = "{self.figures}"']
        if resources is not None:
            lines += ["[global_resources]", *(f"{name} = {total}" for name, total in resources.items())]
        self.config.write_text("\n".join(lines) + "\n")
        self.config.chmod(0o600)

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "kueue.server.main", "-c", str(self.config), *options]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "KUEUE_STATE_DIR": str(self.state), "PYTHONPATH": str(ROOT), **self.more_environ}

    def start(self, *options: str, prefix: Sequence[str] = (), ready: bool = True) -> ServerProgram:
        known(self.secret)
        cache = places.Places(places.own_directory(str(self.state))).cache
        for pem in Path(_cache()).glob("*.pem"):
            # Deriving a key takes a third of a second by design; the tests do it once.
            if not (Path(cache) / pem.name).exists():
                shutil.copy2(pem, cache)
        already = self.said().count("listening on")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *self.command(*options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ(),
                cwd=self.base,
            )
        if ready:
            eventually(
                lambda: self.said().count("listening on") > already or self.process.poll() is not None,
                "the server listens",
            )
            assert self.process.poll() is None, self.said()
            self.port = int((self.state / "server" / "port").read_text())
            self.write_config_port()
        return self

    def write_config_port(self) -> None:
        text = self.config.read_text()
        self.config.write_text(
            "\n".join(
                f"server_port = {self.port}" if line.startswith("server_port") else line for line in text.split("\n")
            )
        )

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it in order; its exit code."""
        self.send(number)
        assert self.process is not None
        return self.process.wait(15)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(15)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for sock in self._sockets:
            sock.close()

    def raw_tls(self, secret: str | None = None) -> ssl.SSLSocket:
        """A connection after the handshake, before any hello."""
        known_one = known(secret or self.secret)
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(plain)
        secure = known_one.client_context().wrap_socket(plain, server_hostname=known_one.server_hostname)
        self._sockets.append(secure)
        return secure

    def raw_local(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(sock)
        sock.settimeout(PATIENCE)
        directory = os.open(self.state / "server", os.O_PATH | os.O_DIRECTORY)
        try:
            sock.connect(f"/proc/self/fd/{directory}/{self.port}-{self.identity.fingerprint}.sock")
        finally:
            os.close(directory)
        return sock

    def client(self, *, local: bool = False, secret: str | None = None) -> Client:
        return Client(self.raw_local() if local else self.raw_tls(secret))

    def worker(self, name: str = "w1", **fields: Any) -> Worker:
        return Worker(self.raw_tls(), name, **fields)


class Peer:
    """Frames over a blocking socket."""

    def __init__(self, sock: socket.socket, decoder: codec.Decoder[Any]) -> None:
        self.sock = sock
        self._decoder = decoder
        self._reader = codec.FrameReader(m.FRAME_LIMIT)
        self._heard: list[Any] = []
        self._aside: list[Any] = []

    def say(self, *messages: m.Message) -> None:
        self.sock.sendall(codec.encode(messages))

    def hear(self, seconds: float = PATIENCE) -> Any:
        """The next message; None at the end of the connection. Raises `TimeoutError`."""
        if self._aside:
            return self._aside.pop(0)
        return self._next(time.monotonic() + seconds)

    def _next(self, deadline: float) -> Any:
        while not self._heard:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.sock.settimeout(left)
            try:
                chunk = self.sock.recv(65536)
            except (ConnectionError, ssl.SSLEOFError):
                chunk = b""
            if not chunk:
                return None
            self._heard += self._decoder.decode_all(self._reader.feed(chunk))
        return self._heard.pop(0)

    def hear_a(self, kind: type, seconds: float = PATIENCE) -> Any:
        """The next message of that kind; others are kept for `hear`."""
        for at, message in enumerate(self._aside):
            if isinstance(message, kind):
                return self._aside.pop(at)
        deadline = time.monotonic() + seconds
        while True:
            message = self._next(deadline)
            assert message is not None, f"the connection ended before a {kind.__name__}"
            if isinstance(message, kind):
                return message
            self._aside.append(message)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(Peer):
    """As the command speaks."""

    def __init__(self, sock: socket.socket, *, hello: bool = True) -> None:
        super().__init__(sock, codec.to_client)
        self._seq = itertools.count(1)
        if hello:
            self.say(m.ClientHello(version="test"))
            self.welcome = self.hear_a(m.Welcome)

    def ask(self, kind: type[m.Message], **fields: Any) -> Any:
        """The answer to one question; lists come whole, in one message."""
        seq = next(self._seq)
        if "request_id" in kind.__struct_fields__ and "request_id" not in fields:
            fields["request_id"] = secrets.token_hex(16)
        self.say(kind(seq=seq, **fields))
        first = self._answer(seq)
        while isinstance(first, (m.JobList, m.JobDetails)) and not first.end:
            more = self._answer(seq)
            values = {name: getattr(more, name) for name in more.__struct_fields__}
            first = type(first)(**{**values, "jobs": first.jobs + more.jobs})
        return first

    def _answer(self, seq: int) -> Any:
        while True:
            message = self.hear()
            assert message is not None, "the connection ended"
            if getattr(message, "seq", None) == seq:
                return message

    def submit(self, *argv: str, count: int = 1, **fields: Any) -> list[int]:
        answer = self.ask(m.Submit, ranges=(job_range(*argv, count=count, **fields),))
        assert isinstance(answer, m.Submitted), answer
        return [job for first, last in answer.ids for job in range(first, last + 1)]

    def states(self) -> dict[int, str]:
        return {row.id: row.state for row in self.ask(m.ListJobs).jobs}


def job_range(*argv: str, count: int = 1, cores: int = 1, on_lost: str = "rerun", **more: Any) -> JobRange:
    return JobRange(
        payload=Payload(argv=argv or ("true",)),
        place=Place(cwd="/tmp"),
        request=Request(cores=cores, ram_mb=1, counters=more.pop("counters", ())),
        terms=Terms(on_lost=on_lost),  # type: ignore[arg-type]
        count=count,
        **more,
    )


class Worker(Peer):
    """As a worker speaks, without one: it does what the test says."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        identity: str = "",
        slots: int = 10,
        attempts: tuple[Any, ...] = (),
        protocol: int = m.PROTOCOL,
        machine_id: str = "machine",
        welcome: bool = True,
    ) -> None:
        super().__init__(sock, codec.to_worker)
        self.beats = itertools.count(1)
        self.say(
            m.WorkerHello(
                protocol=protocol,
                version="test",
                identity=identity or f"identity of {name}",
                name=name,
                machine_id=machine_id,
                boot_id="boot",
                totals=MachineTotals(slots, slots, 1000),
                load=MachineLoad(),
                attempts=attempts,
            )
        )
        self.welcome = self.hear_a(m.WorkerWelcome) if welcome else None

    def beat(self, seconds: float = PATIENCE) -> m.HeartbeatAnswer:
        number = next(self.beats)
        self.say(m.Heartbeat(number=number))
        answer = self.hear_a(m.HeartbeatAnswer, seconds)
        assert answer.number == number
        return answer

    def start(self, offer: m.Offer) -> None:
        self.say(m.AttemptStarted(offer=offer.offer, started_wall=time.time()))

    def end(self, offer: m.Offer, code: int = 0, **fields: Any) -> None:
        self.say(m.AttemptEnded(offer=offer.offer, end=end_record(code, **fields)))


def end_record(code: int = 0, **fields: Any) -> EndRecord:
    return EndRecord(outcome=Exited(code), started_wall=time.time(), ended_wall=time.time(), **fields)
