"""The client API: questions to the server and their answers, as plain dicts over a blocking socket.

Rules
- Standard library alone, and of that little: a command must start in a few milliseconds. `socket` and `ssl` are
  imported when the server is not on this host; its Unix socket needs only the module in C below `socket`.
- A question is encoded once. After a lost connection the very same bytes go out again; with their ``request_id`` the
  server knows a change it has made already and repeats its first answer.
- A server that is away is waited for: `patience_seconds` for a question, for ever in a conversation. The person is
  told once.

The messages are those of `kueue.protocol.messages`, which this module does not import; a test holds the two together.
"""

# pathlib is left out for the command's start-up time (5 ms):
# ruff: noqa: PTH119, PTH120

from __future__ import annotations

import _socket
import json
import os
import sys
import time

from kueue import __version__
from kueue.errors import ProtocolError, Refused, Unreachable, UserError
from kueue.units import merge_id_ranges, subtract_id_ranges

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, TypeAlias

    from kueue.config import Config
    from kueue.identity import Identity

    Message: TypeAlias = dict[str, Any]
    IdRanges: TypeAlias = Sequence[tuple[int, int]]

PROTOCOL = 1
FRAME_LIMIT = 16 * 1024 * 1024
PATIENCE_SECONDS = 30.0

_CONNECT_SECONDS = 5.0
_WELCOME_SECONDS = 10.0
_PART_CHARACTERS = 2 * 1024 * 1024
# A character takes at most six bytes of JSON, so a part of two full argument lists stays below the frame limit.


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


class Client:
    """Asks one server, over one connection at a time that is made when first needed.

    `tell` gets each remark for the person, one sentence.
    """

    def __init__(
        self,
        server: Server,
        *,
        patience_seconds: float | None = PATIENCE_SECONDS,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.server = server
        self.patience_seconds = patience_seconds
        self.welcome_seconds = _WELCOME_SECONDS
        """How long what was connected to may take to prove itself and say welcome."""
        self.welcome: Message = {}
        self.tell = tell if tell is not None else _tell_stderr
        self.own_server: Callable[[], str] = lambda: ""
        """What to do if a server of this user on this very host may be what refuses us; empty: there is none."""
        self._connection: Connection | None = None
        self._last_seq = 0

    def __enter__(self) -> Client:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def next_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq

    def ask(self, kind: str, **fields: Any) -> Message:
        """The one answer to a question that changes nothing.

        Raises `UserError` when the server refuses the question, `Unreachable` when patience is at an end, `Refused`
        when the server does not accept this client.
        """
        return self.ask_parts(kind, **fields)[-1]

    def ask_parts(self, kind: str, **fields: Any) -> list[Message]:
        """All parts of an answer that may come in several, up to the one that does not say ``"end": false``."""
        seq = self.next_seq()
        return self._exchange([encode([{"type": kind, "seq": seq, **fields}])], seq)

    def change(self, kind: str, **fields: Any) -> Message:
        """The answer to a question that changes something: carried out once, however often it had to be sent."""
        return self.ask(kind, request_id=new_request_id(), **fields)

    def submit(self, ranges: Sequence[Message], *, refuse_impossible: bool = False) -> Message:
        """Makes jobs, all or none, from ranges in the form of `model.JobRange`. Returns the message `Submitted`."""
        seq, request_id = self.next_seq(), new_request_id()
        parts = _parts(ranges)
        frames = [
            encode(
                [
                    {
                        "type": "Submit",
                        "seq": seq,
                        "request_id": request_id,
                        "ranges": part,
                        "part": number,
                        "last": number == len(parts) - 1,
                        "refuse_impossible": refuse_impossible,
                    }
                ]
            )
            for number, part in enumerate(parts)
        ]
        return self._exchange(frames, seq)[-1]

    def watch(self, ids: IdRanges, *, look_seconds: float | None = None) -> Iterator[Message]:
        """First one `Watching` that names the ids that do not exist, then a `JobEnded` for each other job as it ends.

        Ends with the last of them. Waits for a server that is away for ever. A job that was cleaned away while the
        server was not reached comes as a `JobEnded` without outcome.

        With `look_seconds` it is looked, once and after so long without a word, whether anything goes on at all; if
        none of the jobs is offered or runs, one that waits comes in a `JobList`.
        """
        # Counted out only when the server has said which of them exist: a range may be typed of any length.
        asked = merge_id_ranges(ids)
        remaining: set[int] = set()
        seq, active_seq, waiting_seq = self.next_seq(), self.next_seq(), self.next_seq()
        is_first = True

        def open_ids() -> list[tuple[int, int]]:
            if is_first:
                return asked
            return merge_id_ranges((job, job) for job in remaining)

        def look() -> list[Message]:
            question: Message = {"type": "ListJobs", "ids": open_ids(), "limit": 1}
            return [
                {**question, "seq": active_seq, "states": ["offered", "running"]},
                {**question, "seq": waiting_seq, "states": ["held", "pending"]},
            ]

        seen: dict[int, Message] = {}
        for message in self.converse(
            lambda: [{"type": "WatchJobs", "seq": seq, "ids": open_ids()}],
            later=None if look_seconds is None else (look_seconds, look),
        ):
            if message["type"] == "JobList":
                seen[message["seq"]] = message
                if len(seen) == 2 and not seen[active_seq]["jobs"] and seen[waiting_seq]["jobs"]:
                    yield seen[waiting_seq]
                continue
            if message.get("seq") != seq:
                continue
            if message["type"] == "Watching":
                missing = [(first, last) for first, last in message.get("missing", ())]
                if is_first:
                    is_first = False
                    there = subtract_id_ranges(asked, missing)
                    remaining = {job for first, last in there for job in range(first, last + 1)}
                    yield message
                else:
                    gone = {job for first, last in missing for job in range(first, last + 1)} & remaining
                    remaining -= gone
                    for job in sorted(gone):
                        yield {"type": "JobEnded", "seq": seq, "id": job, "outcome": None, "exit_code": 125}
            elif message["type"] == "JobEnded" and message["id"] in remaining:
                remaining.discard(message["id"])
                yield message
            if not remaining:
                return

    def converse(
        self,
        questions: Callable[[], Sequence[Message]],
        *,
        later: tuple[float, Callable[[], Sequence[Message]]] | None = None,
    ) -> Iterator[Message]:
        """All that the server says in answer to `questions()`, for as long as the caller listens.

        After a lost connection `questions` is called again: it returns what is still open by then. Raises as `ask`
        does, but waits for a server that is away for ever. `later`: seconds, and what is asked as well, once, when
        nothing was said for so long.
        """
        outage = _Outage(self, None)
        while True:
            try:
                connection = self._connected()
                outage.is_over()
                asked = list(questions())
                connection.send([encode(asked)])
                while True:
                    try:
                        messages = connection.receive(None if later is None else later[0])
                    except Silence:
                        if later is None:
                            raise
                        messages = []
                        also = list(later[1]())
                        connection.send([encode(also)])
                        asked += also
                        later = None
                    ours = {None, *(question["seq"] for question in asked)}
                    for message in messages:
                        # Answers that an earlier conversation did not wait for may still be on their way.
                        if message.get("seq") in ours:
                            _raise_refusals(message)
                            yield message
            except ConnectionLost as lost:  # noqa: PERF203 - the loop is about these
                self.close()
                outage.wait(str(lost))

    def _exchange(self, frames: Sequence[bytes], seq: int) -> list[Message]:
        outage = _Outage(self, self.patience_seconds)
        silence_seconds = None if self.patience_seconds is None else max(self.patience_seconds, _WELCOME_SECONDS)
        while True:
            answers: list[Message] = []
            try:
                connection = self._connected()
                connection.send(frames, silence_seconds)
                while True:
                    for message in connection.receive(silence_seconds):
                        if message.get("seq", seq) == seq:
                            _raise_refusals(message)
                            answers.append(message)
                            # The `end` of an Output is the stream's; a question without follow has one answer.
                            if message.get("end", True) or message["type"] == "Output":
                                return answers
            except ConnectionLost as lost:
                self.close()
                outage.wait(str(lost))

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> Connection:
        for path in self.server.local_sockets:
            sock = _open_local(path)
            if sock is not None:
                return self._greet(sock)
        return self._open_tls()

    def _open_tls(self) -> Connection:
        import socket  # noqa: PLC0415 - 25 ms with ssl that a command on the server's own host need not pay
        import ssl  # noqa: PLC0415 - as above

        from kueue.identity import check_peer  # noqa: PLC0415 - as above

        refusal: Exception | None = None
        broken: ConnectionLost | None = None
        for identity in self.server.identities:
            context = identity.client_context()
            try:
                plain = socket.create_connection((self.server.host, self.server.port), timeout=_CONNECT_SECONDS)
            except (socket.gaierror, UnicodeError) as error:  # the latter of what can be no name: a..b
                why = getattr(error, "strerror", None) or error
                raise Unreachable(
                    f"The server's name {self.server.host!r} (for {self.server}) is not known: {why}.",
                    hint="Check server_name in the configuration.",
                ) from error
            except OSError as error:
                raise ConnectionLost(_why(error)) from error
            try:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _notice_dead_peers(plain)
                plain.settimeout(self.welcome_seconds)
                secured = context.wrap_socket(plain, server_hostname=identity.server_hostname)
                check_peer(secured.getpeercert(binary_form=True), [identity])
                return self._greet(secured)
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
            hint=self.own_server()
            or f"shared_secret in the configuration must be the one of the server at {self.server}."
            " If that server is somebody else's, choose another server_port.",
        ) from refusal

    def _greet(self, sock: _socket.socket) -> Connection:
        connection = Connection(sock)
        hello = encode([{"type": "ClientHello", "protocol": PROTOCOL, "version": __version__}])
        try:
            try:  # noqa: SIM105 - contextlib takes a millisecond to load
                connection.send([hello], self.welcome_seconds)
            except ConnectionLost:
                pass  # a server that refuses us may have closed already; why stands in what is still to be read
            self.welcome = self._checked_welcome(connection.receive(self.welcome_seconds))
        except BaseException:
            connection.close()
            raise
        return connection

    def _checked_welcome(self, said: Sequence[Message]) -> Message:
        for message in said:
            _raise_refusals(message)
        if [message["type"] for message in said] != ["Welcome"]:
            raise ProtocolError(f"What answers at {self.server} is no kueue server.")
        welcome = said[0]
        if welcome.get("protocol") != PROTOCOL:
            raise Refused(
                f"The server at {self.server} speaks protocol {welcome.get('protocol')} (kueue "
                f"{welcome.get('version')}), this command protocol {PROTOCOL} (kueue {__version__}).",
                hint="Install the same version of kueue on both.",
            )
        return welcome


class _Outage:
    """A time without a server, and how long it is put up with (`None`: for ever)."""

    def __init__(self, client: Client, patience_seconds: float | None) -> None:
        self._client = client
        self._patience_seconds = patience_seconds
        self._begun = time.monotonic()
        self._is_told = False
        self._pause_seconds = 0.05

    def is_over(self) -> None:
        self._pause_seconds = 0.05

    def wait(self, reason: str) -> None:
        """Sleeps a little, longer each time; raises `Unreachable` when patience is at an end."""
        server = self._client.server
        elapsed = time.monotonic() - self._begun
        if self._patience_seconds is not None and elapsed >= self._patience_seconds:
            raise Unreachable(
                f"The server at {server} is not reached: {reason}.",
                hint="Is it running? `kueue up` starts one on this machine; else check server_name and server_port.",
            )
        if not self._is_told:
            self._is_told = True
            limit = "" if self._patience_seconds is None else f" (at most {self._patience_seconds:g} s)"
            self._client.tell(f"Waiting for the server at {server}{limit}: {reason}.")
        remaining = self._pause_seconds
        if self._patience_seconds is not None:
            remaining = min(remaining, max(0.0, self._patience_seconds - elapsed))
        time.sleep(remaining)
        self._pause_seconds = min(1.0, self._pause_seconds * 1.5)


def connect(config: Config, *, patience_seconds: float | None = PATIENCE_SECONDS) -> Client:
    """A client for the server that the configuration names; nothing is sent before the first question."""
    from kueue import identity, places  # noqa: PLC0415 - a client with a `Server` of its own needs neither

    common = config.common
    state = places.find(common.state_dir)
    identities = identity.identities(common.shared_secret, common.shared_secret_previous, state.cache)
    sockets = (
        [state.server_socket(common.server_port, one.fingerprint) for one in identities]
        if is_this_host(common.server_name)
        else []
    )
    server = Server(common.server_name, common.server_port, sockets, identities)
    client = Client(server, patience_seconds=patience_seconds)
    if sockets:
        lock, path = state.server_lock, config.path

        def own_server() -> str:
            if not places.is_locked(lock):
                return ""
            pid = places.holder(lock)
            return (
                f"The server that runs here{f' (pid {pid})' if pid else ''} was started with another secret or port "
                f"than {path} has. Put the old file back, or `kueue down && kueue up`."
            )

        client.own_server = own_server
    return client


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


def new_request_id() -> str:
    """128 random bits as 32 hex digits."""
    return os.urandom(16).hex()


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


def _raise_refusals(message: Message) -> None:
    """Raises what a message means that is no answer."""
    if message["type"] == "Failed":
        raise UserError(message["error"], hint=message.get("hint", ""), exit_code=message.get("exit_code", 1))
    if message["type"] == "Goodbye":
        raise ConnectionLost("it stops")
    if message["type"] == "Sorry":
        if not message.get("lasting", True):
            raise ConnectionLost(message["reason"].rstrip("."))
        raise Refused(message["reason"], hint=message.get("hint", ""))


def _parts(ranges: Sequence[Message]) -> list[list[Message]]:
    """The ranges in portions that each fit a frame, long lists of arguments cut into several ranges."""
    parts: list[list[Message]] = [[]]
    size = 0
    for one in ranges:
        argvs = one.get("argvs") or ()
        begin, taken = 0, 0
        for index, argv in enumerate(argvs):
            weight = 8 + sum(len(word) + 8 if isinstance(word, str) else len(word["b64"]) + 16 for word in argv)
            if taken and size + taken + weight > _PART_CHARACTERS:
                parts[-1].append({**one, "argvs": argvs[begin:index]})
                parts.append([])
                begin, taken, size = index, 0, 0
            taken += weight
        if not argvs:
            taken = len(str(one["payload"])) + len(str(one["place"]))
            if size and size + taken > _PART_CHARACTERS:
                parts.append([])
                size = 0
        parts[-1].append({**one, "argvs": argvs[begin:]} if begin else one)
        size += taken
    return parts


def _open_local(path: str) -> _socket.socket | None:
    """The connected Unix socket of a server of this user; none when nobody listens there."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    directory = -1
    try:
        sock.settimeout(_CONNECT_SECONDS)
        if len(os.fsencode(path)) > 107:  # sun_path of unix(7) holds 108 bytes with the closing zero
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
            path = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        sock.connect(path)
        _check_owner(sock, path)
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


def _tell_stderr(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
