"""The client API: questions to the server and their answers, as plain dicts over a blocking socket.

Rules
- Standard library alone, and of that little: a command must start in a few milliseconds.
- A question is encoded once. After a lost connection the very same bytes go out again; with their ``request_id`` the
  server knows a change it has made already and repeats its first answer.
- A server that is away is waited for: `patience_seconds` for a question, for ever in a conversation. The person is
  told once.

The messages are those of `kueue.protocol.messages`, which this module does not import; a test holds the two together.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock, get_ident
from itertools import count

from kueue.errors import KueueError, Unreachable, UserError
from kueue.transport import (
    Connection,
    ConnectionLost,
    Server,
    Silence,
    encode,
    is_this_host,
    knock,
    open_connection,
    raise_refusals,
)
from kueue.units import merge_id_ranges, subtract_id_ranges

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, TypeAlias

    from kueue.config import Config
    from kueue.places import Places

    Message: TypeAlias = dict[str, Any]
    IdRanges: TypeAlias = Sequence[tuple[int, int]]

PATIENCE_SECONDS = 30.0

_WELCOME_SECONDS = 10.0
_ROUSE_SECONDS = 5.0
_PART_CHARACTERS = 2 * 1024 * 1024
# A character takes at most six bytes of JSON, so a part of two full argument lists stays below the frame limit.


class Client:
    """Asks one server, over one connection at a time that is made when first needed.

    Threads may share one: each question waits for the answer to the one before. A conversation (`watch`, `converse`)
    needs a client of its own. After a fork the child makes a connection of its own.
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
        self.debug: Callable[[str], None] | None = None
        """Gets every step of a connection, one line each; None: nobody wants to know."""
        self.own_server: Callable[[], str] = lambda: ""
        """What to do if a server of this user on this very host may be what refuses us; empty: there is none."""
        self._connection: Connection | None = None
        self._seqs = count(1)
        self._own()

    def __enter__(self) -> Client:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def next_seq(self) -> int:
        return next(self._seqs)

    def _own(self) -> None:
        self._process = os.getpid()
        self._in_use = allocate_lock()
        self._asking = 0
        """The thread that waits for an answer; 0: none."""

    def _drop_inherited(self) -> None:
        """What the parent has asked since the fork is answered over the same connection."""
        if self._process != os.getpid():
            self.close()
            self._own()

    def ask(self, kind: str, **fields: Any) -> Message:
        """The one answer to a question that changes nothing.

        Raises `UserError` when the server refuses the question, `Unreachable` when patience is at an end, `Refused`
        when the server does not accept this client.
        """
        return self.ask_parts(kind, **fields)[-1]

    def ask_parts(self, kind: str, **fields: Any) -> list[Message]:
        """All parts of an answer that may come in several, up to the one that does not say ``"end": false``."""
        seq = self.next_seq()
        return self._exchange(kind, [encode([{"type": kind, "seq": seq, **fields}])], seq)

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
        return self._exchange("Submit", frames, seq)[-1]

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
        self._drop_inherited()
        outage = _Outage(self, None)
        while True:
            try:
                connection = self._connected()
                outage.is_over()
                asked = list(questions())
                self._step(f"asks {_kinds(asked)} and listens")
                connection.send([encode(asked)])
                while True:
                    try:
                        messages = connection.receive(None if later is None else later[0])
                    except Silence:
                        if later is None:
                            raise
                        messages = []
                        also = list(later[1]())
                        self._step(f"nothing so far: asks {_kinds(also)} as well")
                        connection.send([encode(also)])
                        asked += also
                        later = None
                    ours = {None, *(question["seq"] for question in asked)}
                    for message in messages:
                        # Answers that an earlier conversation did not wait for may still be on their way.
                        if message.get("seq") in ours:
                            raise_refusals(message)
                            yield message
            except ConnectionLost as lost:  # noqa: PERF203 - the loop is about these
                self._lost(lost, outage)

    def _exchange(self, kind: str, frames: Sequence[bytes], seq: int) -> list[Message]:
        self._drop_inherited()
        if self._asking == get_ident():
            raise UserError("This client waits for an answer already.", hint="A signal handler needs one of its own.")
        with self._in_use:
            self._asking = get_ident()
            try:
                return self._answers(kind, frames, seq)
            finally:
                self._asking = 0

    def _answers(self, kind: str, frames: Sequence[bytes], seq: int) -> list[Message]:
        outage = _Outage(self, self.patience_seconds)
        silence_seconds = None if self.patience_seconds is None else max(self.patience_seconds, _WELCOME_SECONDS)
        while True:
            answers: list[Message] = []
            try:
                connection = self._connected()
                begun = time.monotonic()
                self._step(f"asks {kind}, {sum(map(len, frames))} bytes")
                connection.send(frames, silence_seconds)
                while True:
                    for message in connection.receive(silence_seconds):
                        if message.get("seq", seq) == seq:
                            raise_refusals(message)
                            answers.append(message)
                            # The `end` of an Output is the stream's; a question without follow has one answer.
                            if message.get("end", True) or message["type"] == "Output":
                                self._step(f"answered after {_elapsed(begun)}: {_kinds(answers)}")
                                return answers
            except ConnectionLost as lost:
                self._lost(lost, outage)

    def _connected(self) -> Connection:
        if self._connection is None:
            begun = time.monotonic()
            self._step(f"connects to {self.server}")
            self._connection = open_connection(self.server, self.welcome_seconds, self.own_server)
            self.welcome = self._connection.welcome
            self._step(
                f"welcome after {_elapsed(begun)} {self._connection.way}, from kueue {self.welcome.get('version')}"
            )
        return self._connection

    def _lost(self, lost: ConnectionLost, outage: _Outage) -> None:
        self.close()
        self._step(f"no connection: {lost}")
        outage.wait(str(lost))

    def _step(self, text: str) -> None:
        if self.debug is not None:
            self.debug(text)


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


def rouse_own_server(state: Places) -> None:
    """Have the server of this state directory, if one runs, put back its lock if that was removed or replaced.

    It looks whenever somebody comes. One whose sockets were removed as well is not found. Raises `KueueError` if it is
    there and does not answer for some seconds, or cannot put the lock back.
    """
    from kueue import places  # noqa: PLC0415 - as above

    try:
        if places.is_locked(state.server_lock):
            return
        names = os.listdir(state.server)  # noqa: PTH208 - pathlib takes 5 ms to load
        sockets = [f"{state.server}/{name}" for name in sorted(names) if name.endswith(".sock")]
        if not sockets:
            return
        knock(sockets, _ROUSE_SECONDS)
    except Silence as silence:
        # Behind a socket of nobody there is no connection to wait on.
        raise KueueError(
            f"A server runs that does not answer, and its lock {state.server_lock} was removed or replaced.",
            hint=f"fuser {' '.join(sockets)} tells its pid. If it was stopped: kill -CONT PID; else kill it.",
        ) from silence
    except (ConnectionLost, KueueError, OSError):
        return  # there is none, or none that could not be seen anyway
    if not places.is_locked(state.server_lock):
        raise KueueError(
            f"A server runs that cannot put its lock {state.server_lock} back: something else is there.",
            hint="Remove what is there, then try again. `kueue version` tells its pid.",
        )


def new_request_id() -> str:
    """128 random bits as 32 hex digits."""
    return os.urandom(16).hex()


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


def _kinds(messages: Sequence[Message]) -> str:
    """``JobList``, ``3 x JobList``, ``WatchJobs, ListJobs``: what they are, in their order."""
    counts: dict[str, int] = {}
    for message in messages:
        counts[message["type"]] = counts.get(message["type"], 0) + 1
    return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in counts.items())


def _elapsed(begun: float) -> str:
    return f"{(time.monotonic() - begun) * 1000:.1f} ms"


def _tell_stderr(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
