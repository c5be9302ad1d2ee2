"""The worker's side of its runners: finds them, starts the newest, carries orders to them and events back.

Rules
- A runner is found by its directory and told alive by its lock. One that is alive and does not answer makes its
  attempts ``unknown``; one whose lock is free is dead, and the newest runner buries what it left.
- Orders that a broken connection may have swallowed are repeated or answered (`Refused`) after the next attachment.
- New attempts go to a runner of this release; if there is none that answers, one is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import trio

from kueue import __version__
from kueue.errors import KueueError
from kueue.model import to_os_text
from kueue.worker.orders import (
    Attach,
    Attached,
    AttemptState,
    Changed,
    Detach,
    Ended,
    Event,
    ForgetAttempts,
    Gone,
    Inherit,
    Order,
    Ping,
    Queued,
    Refused,
    RunnerState,
    SetLease,
    StartAttempt,
    Started,
    StopOrder,
    Unknown,
    Withdrawn,
    WithdrawOrder,
)
from kueue.worker.scope import Scopes

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # a runner that is well answers within milliseconds; a loaded machine may need seconds
RETRY_SECONDS = 0.05  # between tries to attach, while a spawner takes over for its keeper
LATER_SECONDS = 1.0  # between tries to attach to one that was mute
LAUNCH_SECONDS = 30.0  # Python starts from a cold, slow disk
EVENT_BUFFER = 1000  # the reader of a runner waits for the worker beyond this
LINE_BYTES = 64 * 1024 * 1024
SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")
SYSTEMD_PREFIXES = ("WATCHDOG_", "LISTEN_")
_FLOCK = "hhqqi4x" if sys.maxsize > 2**32 else "hhqqi"  # struct flock, fcntl(2)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class _Mute(Exception):
    """The runner did not answer in time, or ended the connection."""


@dataclass
class _Runner:
    """One runner, dead or alive."""

    path: Path
    version: str = ""
    stream: trio.SocketStream | None = None
    answers: bool = False
    """It answered, and the last thing we asked has not been waiting for too long."""
    is_dead: bool = False
    is_dismissed: bool = False
    """Of an earlier release and without attempts: it leaves by itself when no worker is attached."""
    asked_at: float | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    """It has answered, did not in time, or is dead: enough is known for a hello."""
    sending: trio.Lock = field(default_factory=trio.Lock)
    buried: trio.Event = field(default_factory=trio.Event)
    """It has answered the last `Inherit`."""

    @property
    def id(self) -> str:
        return self.path.name


@dataclass
class _Known:
    """What is known of an attempt, and what may have to be said again."""

    state: AttemptState
    runner: str
    start: StartAttempt | None = None
    stop: StopOrder | None = None
    withdraw: WithdrawOrder | None = None
    is_orphan: bool = False
    """Its runner died; the newest was asked to take it in."""


class RunnerSet:
    """All runners of one worker. `state_dir` is the worker's own directory on a local disk.

    `restart_command`, `restart_env`: how the runner brings a dead worker back; empty command: it does not.
    `scopes`: where a runner is to be put; None: a new session has to do.
    """

    def __init__(
        self,
        state_dir: Path,
        identity: str,
        *,
        restart_command: Sequence[str] = (),
        restart_env: Mapping[str, str] | None = None,
        server_lock_path: str | None = None,
        server_lock_seconds: float = 0.0,
        scopes: Scopes | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        linger_seconds: float = 10.0,
    ) -> None:
        self._state = state_dir
        self._identity = identity
        self._attach = Attach(
            worker_pid=os.getpid(),
            restart_command=tuple(to_os_text(word) for word in restart_command),
            restart_env=tuple((to_os_text(name), to_os_text(value)) for name, value in (restart_env or {}).items()),
            server_lock_path=to_os_text(server_lock_path) if server_lock_path else None,
            server_lock_seconds=server_lock_seconds,
        )
        self._scopes = scopes
        self._answer_seconds = answer_seconds
        self._linger_seconds = linger_seconds
        self._runners: dict[str, _Runner] = {}
        self._known: dict[int, _Known] = {}
        self._lease: SetLease | None = None
        self._mute: set[str] = set()
        """Runners that did not answer when the hello was made: the server may give away what they run."""
        self._launching = trio.Lock()
        self._burying = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self._archive: tuple[Path, str] | None = None
        self._events, self.events = trio.open_memory_channel[Event](EVENT_BUFFER)
        """What the runners say, in the order of each."""

    # -- the worker's calls

    async def open(self, nursery: trio.Nursery) -> None:
        """Attach to all runners there are; returns when each has answered, was silent for too long, or is dead.

        Their tasks live in `nursery` until `close` or its cancellation.
        """
        self._nursery = nursery
        await trio.to_thread.run_sync(self._prepare)
        for path in self._directories():
            self._meet(path)
        runners = list(self._runners.values())
        for runner in runners:
            await runner.settled.wait()
        if any(True for _ in self._orphans()):
            await self._newest()

    async def send(self, order: Order) -> None:
        """Hand an order to the runner it concerns; returns when it is sent, or noted for when the runner answers again.

        Raises `KueueError` if a new runner is needed and cannot be started.
        """
        match order:
            case StartAttempt(offer=offer, job=job, queue_id=queue_id, memo=memo):
                if offer in self._known:
                    await self._to(self._runners.get(self._known[offer].runner), order)
                    return
                runner = await self._newest()
                state = AttemptState(offer=offer, job=job, queue_id=queue_id, state="queued", memo=memo)
                self._known[offer] = _Known(state, runner.id, start=order)
                await self._to(runner, order)
            case SetLease():
                self._lease = order
                for runner in list(self._runners.values()):
                    if runner.id not in self._mute:
                        await self._to(runner, order)
            case StopOrder(offer=offer) | WithdrawOrder(offer=offer):
                known = self._known.get(offer)
                if known is None:
                    # Whoever starts it later must know that it was withdrawn; nobody has it now.
                    await self._to(await self._newest(), order)
                    return
                if isinstance(order, StopOrder):
                    known.stop = order
                else:
                    known.withdraw = order
                await self._to(self._runners.get(known.runner), order)
            case ForgetAttempts(offers=offers):
                by_runner: dict[str, list[int]] = {}
                for offer in offers:
                    known = self._known.pop(offer, None)
                    if known is not None:
                        by_runner.setdefault(known.runner, []).append(offer)
                for name, mine in by_runner.items():
                    await self._to(self._runners.get(name), ForgetAttempts(offers=tuple(mine)))
                    await self._dismiss_if_done(self._runners.get(name))
            case Attach() | Inherit() | Detach() | Ping():
                for runner in list(self._runners.values()):
                    await self._to(runner, order)

    @property
    def up(self) -> int:
        """Runners that answer."""
        return sum(self._is_well(runner) for runner in self._runners.values())

    def attempts(self) -> tuple[AttemptState, ...]:
        """How every attempt stands that no runner was told to forget; ``unknown`` where the runner does not answer.

        To be asked for each hello: a runner that does not answer now gets no lease before the next.
        """
        self._mute = {runner.id for runner in self._runners.values() if not self._is_well(runner)}
        states = []
        for known in self._known.values():
            runner = self._runners.get(known.runner)
            state = known.state
            if (runner is None or not self._is_well(runner)) and state.state not in ("ended", "gone"):
                state = msgspec.structs.replace(state, state="unknown")
            states.append(state)
        return tuple(states)

    async def guard(self) -> bool:
        """Stop, by ourselves, the processes of all attempts that may be given away. True: nothing of them runs."""
        path, _version = await trio.to_thread.run_sync(self._pack)
        command = [*self._python(path), "guard", "--state", str(self._state)]
        with trio.fail_after(LAUNCH_SECONDS):
            result = await trio.run_process(command, capture_stdout=True, check=False, env=_clean_environment())
        return result.returncode == 0

    async def close(self, *, orderly: bool = True) -> None:
        """Leave the runners to themselves. `orderly`: they shall not bring this worker back."""
        self._closing = True
        for runner in self._runners.values():
            stream = runner.stream
            if stream is not None:
                if orderly:
                    with trio.move_on_after(1.0):
                        await self._to(runner, Detach())
                await trio.aclose_forcefully(stream)
        await self._events.aclose()

    # -- one runner

    def _meet(self, path: Path) -> _Runner:
        runner = self._runners.get(path.name)
        if runner is None:
            runner = self._runners[path.name] = _Runner(path)
            assert self._nursery is not None
            self._nursery.start_soon(self._serve, runner)
            self._nursery.start_soon(self._ping, runner)
        return runner

    async def _serve(self, runner: _Runner) -> None:
        """Stay attached to one runner until it is dead."""
        since = trio.current_time()
        while not self._closing:
            try:
                await self._attachment(runner)
                since = trio.current_time()
            except (_Mute, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as problem:
                log.debug("runner %s: %s", runner.id, problem)
            runner.answers = False
            runner.stream = None
            if runner.is_dismissed or self._closing:
                return
            if not _is_locked(runner.path / "lock"):
                break
            late = trio.current_time() - since > self._answer_seconds
            if late:
                self._learn_from_spool(runner)
                runner.settled.set()
            await trio.sleep(LATER_SECONDS if late else RETRY_SECONDS)
        if not self._closing:
            await self._bury(runner)

    async def _attachment(self, runner: _Runner) -> None:
        """One connection from attach to its end. Raises `_Mute` and the errors of sockets."""
        stream = await self._connect(runner.path)
        async with stream, contextlib.aclosing(_lines(stream)) as lines:
            newest = runner.version in ("", self._pack()[1])
            attach = self._attach if newest else msgspec.structs.replace(self._attach, restart_command=())
            with trio.fail_after(self._answer_seconds):
                await stream.send_all(_encoder.encode(attach) + b"\n")
                attached = await anext(lines, None)
            if not isinstance(attached, Attached):
                raise _Mute("it did not answer")
            runner.version = attached.version
            runner.stream = stream
            runner.answers = True
            runner.asked_at = None
            await self._apply_attached(runner, attached, is_first=True)
            await self._dismiss_if_done(runner)
            async for event in lines:
                runner.asked_at = None
                runner.answers = True
                await self._hear(runner, event)

    async def _dismiss_if_done(self, runner: _Runner | None) -> None:
        """A runner of an earlier release gets no new attempts: without any it is of no more use."""
        if runner is None or runner.stream is None or runner.version == self._pack()[1]:
            return
        if self._has_care(runner):
            return
        runner.is_dismissed = True
        self._runners.pop(runner.id, None)
        await self._to(runner, Detach())

    async def _ping(self, runner: _Runner) -> None:
        """Ask now and then, so that a runner that has gone mute is noticed. One with nothing in its care may sleep."""
        while not (runner.is_dead or runner.is_dismissed):
            await trio.sleep(self._answer_seconds)
            if self._has_care(runner) and runner.stream is not None and runner.asked_at is None:
                runner.asked_at = trio.current_time()
                await self._to(runner, Ping())

    def _has_care(self, runner: _Runner) -> bool:
        return any(known.runner == runner.id for known in self._known.values())

    def _is_well(self, runner: _Runner) -> bool:
        waits = trio.current_time() - runner.asked_at if runner.asked_at is not None else 0.0
        return runner.answers and waits < self._answer_seconds

    async def _connect(self, path: Path) -> trio.SocketStream:
        """Through a descriptor of the directory: a Unix socket's path may have 107 bytes only (unix(7))."""
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with trio.fail_after(self._answer_seconds):
                await sock.connect(f"/proc/self/fd/{folder}/socket")
        except BaseException:
            sock.close()
            raise
        finally:
            os.close(folder)
        _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            sock.close()
            raise _Mute(f"its socket belongs to user {uid}")
        return trio.SocketStream(sock)

    async def _to(self, runner: _Runner | None, order: Order) -> None:
        if runner is None or runner.stream is None:
            return  # said again after the next attachment, or answered by what is found then
        stream = runner.stream
        try:
            async with runner.sending:
                with trio.move_on_after(self._answer_seconds) as limit:
                    await stream.send_all(_encoder.encode(order) + b"\n")
                if limit.cancelled_caught:  # half a line may be sent: this connection is of no more use
                    await trio.aclose_forcefully(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as problem:
            log.debug("runner %s: %s", runner.id, problem)  # its reader sees the same and attaches again

    async def _apply_attached(self, runner: _Runner, attached: Attached, *, is_first: bool) -> None:
        """Its word on all its attempts. What we had handed to it and it does not name it never got.

        `is_first`: nothing was sent on this connection before it; later ones decide only about what was buried.
        """
        named = {state.offer for state in attached.attempts}
        for state in attached.attempts:
            known = self._known.get(state.offer)
            if known is None:
                self._known[state.offer] = _Known(state, runner.id)
            else:
                known.state, known.runner, known.start, known.is_orphan = state, runner.id, None, False
        runner.settled.set()
        missing = [
            offer
            for offer, known in self._known.items()
            if known.runner == runner.id and offer not in named and (is_first or known.is_orphan)
        ]
        for offer in missing:
            known = self._known.pop(offer)
            if known.start is not None or known.state.state in ("queued", "starting"):
                await self._publish(Refused(offer=offer, reason="its runner ended before it was started"))
            else:
                reason = "its runner has no record of it"
                state = known.state
                await self._publish(Gone(offer=offer, job=state.job, queue_id=state.queue_id, reason=reason))
        for state in attached.attempts:
            if state.state == "ended" and state.end is not None:
                await self._publish(Ended(offer=state.offer, job=state.job, end=state.end))
            elif state.state == "gone":
                await self._publish(Gone(offer=state.offer, job=state.job, queue_id=state.queue_id, reason=state.note))
            elif state.started_wall is not None:
                await self._publish(Started(offer=state.offer, job=state.job, started_wall=state.started_wall))
        for offer in named:
            again = self._known[offer].stop or self._known[offer].withdraw
            if again is not None and self._known[offer].state.state not in ("ended", "gone"):
                await self._to(runner, again)
        if self._lease is not None and runner.id not in self._mute:
            await self._to(runner, self._lease)
        runner.buried.set()
        await self._publish(attached)

    async def _hear(self, runner: _Runner, event: Event) -> None:
        if isinstance(event, Attached):
            await self._apply_attached(runner, event, is_first=False)
            return
        match event:
            case Started(offer=offer, started_wall=wall, pid=pid):
                self._now(offer, "running", started_wall=wall, pid=pid)
            case Queued(offer=offer):
                self._now(offer, "queued")
            case Changed(offer=offer, state=state, note=note):
                self._now(offer, state, note=note)
            case Ended(offer=offer, end=end):
                self._now(offer, "ended", end=end)
            case Gone(offer=offer, reason=reason):
                self._now(offer, "gone", note=reason)
            case Refused(offer=offer) | Withdrawn(offer=offer) | Unknown(offer=offer):
                self._known.pop(offer, None)
            case _:
                pass
        await self._publish(event)

    def _now(self, offer: int, state: RunnerState, **more: object) -> None:
        known = self._known.get(offer)
        if known is not None:
            known.start = None
            known.state = msgspec.structs.replace(known.state, state=state, **more)

    async def _publish(self, event: Event) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._events.send(event)

    # -- runners come and go

    async def _newest(self) -> _Runner:
        """A runner of this release that answers; one is started if there is none. Raises `KueueError`."""
        async with self._launching:
            _path, version = await trio.to_thread.run_sync(self._pack)
            for runner in self._runners.values():
                if runner.version == version and runner.stream is not None and self._is_well(runner):
                    return runner
            return await self._launch()

    async def _launch(self) -> _Runner:
        token = secrets.token_hex(4)
        prefix = await self._scopes.prefix(token) if self._scopes is not None else ()
        if self._scopes is not None and prefix:
            try:
                return await self._launch_as(token, prefix)
            except KueueError as error:
                self._scopes.failed(str(error))
                token = secrets.token_hex(4)
        return await self._launch_as(token, ())

    async def _launch_as(self, token: str, prefix: Sequence[str]) -> _Runner:
        """`prefix`: what puts it into a scope of its own, if any."""
        path, version = await trio.to_thread.run_sync(self._pack)
        name = f"{version}-{token}"
        command = [*prefix, *self._python(path), "run", "--state", str(self._state), "--runner", name]
        command += ["--identity", self._identity, "--version", version, "--linger", str(self._linger_seconds)]
        if prefix:
            command += ["--delegated", "yes"]
        try:
            with trio.fail_after(LAUNCH_SECONDS):
                result = await trio.run_process(
                    command, check=False, env=_clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
        except (OSError, trio.TooSlowError) as error:
            raise KueueError(f"The runner cannot be started: {error}", hint="Try the command by hand.") from error
        folder = self._state / "runners" / name
        if result.returncode:
            raise KueueError("The runner cannot be started.", hint=f"{folder}/log says why.")
        runner = self._meet(folder)
        await runner.settled.wait()
        if runner.stream is None:
            raise KueueError("The new runner does not answer.", hint=f"{folder}/log may say why.")
        return runner

    async def _bury(self, runner: _Runner) -> None:
        """The runner is dead. The newest takes in what it left; what has no record was never started."""
        runner.is_dead = True
        self._learn_from_spool(runner)
        self._runners.pop(runner.id, None)
        runner.settled.set()
        delay = 1.0
        async with self._burying:
            while not self._closing:
                left = [known for known in self._known.values() if known.runner == runner.id]
                if not left:
                    return
                log.warning("runner %s is gone with %d attempts", runner.id, len(left))
                try:
                    newest = await self._newest()
                except KueueError as error:
                    log.warning("%s %s", error, error.hint)
                    await trio.sleep(delay)
                    delay = min(60.0, delay * 2)
                    continue
                for known in left:
                    if known.runner == runner.id:
                        known.is_orphan = True
                        known.runner = newest.id
                newest.buried = trio.Event()
                await self._to(newest, Inherit())
                with trio.move_on_after(self._answer_seconds):
                    await newest.buried.wait()
                    return
                for known in left:
                    if known.is_orphan:
                        known.runner = runner.id

    def _learn_from_spool(self, runner: _Runner) -> None:
        for offer, record in self._starts():
            if record.get("runner") == runner.id and offer not in self._known:
                state = AttemptState(
                    offer=offer,
                    job=record["job"],
                    queue_id=record["queue_id"],
                    state="unknown",
                    memo=record.get("memo", ""),
                    note="its runner does not answer",
                )
                self._known[offer] = _Known(state, runner.id)

    def _orphans(self) -> Iterator[int]:
        """Attempts whose runner is dead and that no runner has taken in."""
        for offer, record in self._starts():
            name = record.get("runner", "")
            if offer not in self._known and not _is_locked(self._state / "runners" / name / "lock"):
                yield offer

    def _starts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        spool = self._state / "spool"
        for folder in spool.iterdir() if spool.is_dir() else ():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    yield int(folder.name), json.loads((folder / "start.json").read_bytes())

    def _directories(self) -> list[Path]:
        folder = self._state / "runners"
        return [path for path in folder.iterdir() if _is_locked(path / "lock")] if folder.is_dir() else []

    # -- the program file

    def _prepare(self) -> None:
        for name in ("runners", "spool"):
            (self._state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        path, _version = self._pack()
        for old in self._state.glob("runner-*.pyz"):
            if old != path:  # a runner has loaded all it needs before it serves anybody
                old.unlink(missing_ok=True)

    def _pack(self) -> tuple[Path, str]:
        """The runner as one file, written if it is not there, and its version with the checksum of its content."""
        if self._archive is None or not self._archive[0].exists():
            content = runner_archive()
            version = f"{__version__}+{hashlib.sha256(content).hexdigest()[:10]}"
            path = self._state / f"runner-{version}.pyz"
            if not path.exists():
                fresh = path.with_suffix(f".{os.getpid()}.new")
                try:
                    fresh.write_bytes(content)
                    fresh.replace(path)
                except OSError as error:
                    raise KueueError(
                        f"{path} cannot be written: {error.strerror}",
                        hint="The runner of the jobs starts from there; start the worker again when that is mended.",
                    ) from error
            self._archive = (path, version)
        return self._archive

    @staticmethod
    def _python(path: Path) -> list[str]:
        # Not the link in a virtual environment: without it the runner does not look there for anything.
        return [os.path.realpath(sys.executable), "-I", "-S", "-B", str(path)]


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[Event, None]:
    """Events until the end of the stream; what a newer runner says and we do not know is skipped."""
    rest = b""
    while True:
        data = await stream.receive_some(256 * 1024)
        if not data:
            return
        *lines, rest = (rest + bytes(data)).split(b"\n")
        if len(rest) > LINE_BYTES:
            raise _Mute("a line without end")
        for line in lines:
            try:
                event = _decoder.decode(line)
            except msgspec.DecodeError as error:
                log.debug("a line of a runner is not understood: %s", error)
                continue
            yield event


def runner_archive() -> bytes:
    """The package `kueue.runner` as a zip file that Python can run; the same bytes for the same source."""
    package = resources.files("kueue").joinpath("runner")
    files = {
        "kueue/__init__.py": "",
        "__main__.py": "import sys\nfrom kueue.runner.main import main\nsys.exit(main())\n",
    }
    for item in package.iterdir():
        if item.name.endswith(".py"):
            files[f"kueue/runner/{item.name}"] = item.read_text(encoding="utf-8")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    return buffer.getvalue()


def _clean_environment() -> dict[str, str]:
    """Ours without what systemd meant for the worker alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SYSTEMD_VARIABLES and not name.startswith(SYSTEMD_PREFIXES)
    }


def _is_locked(path: Path) -> bool:
    """Does anybody hold this lock (an OFD lock, fcntl(2))? Looks without taking it."""
    try:
        with path.open("rb") as file:
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, query)
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
