"""Measurements that may hang, each in a process of its own with a limit.

Rules
- A file system whose server is dead holds whoever looks at it, in ways that no signal ends: so nobody waits for a
  probe, and a process that cannot be killed is left behind.
- A probe tells what it is about to do and what it knows so far; both outlive it.
- A probe has no terminal and none of our streams: over ssh one left behind must not keep the session open.
- The parent has one thread alone: `fork` beside threads may hang (and Python 3.12 warns of it).

Why this way: a thread that hangs in the kernel keeps its process from ending, time limits of Python calls (`stat`,
`getaddrinfo`) do not exist, and starting a new interpreter for each probe takes longer than the probe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kueue.cli.doctor.finding import Answer, Facts
from kueue.errors import KueueError

_OUTPUT_BYTES = 65536
_REAP_SECONDS = 0.2

Note = Callable[..., None]
"""``note("what comes next", key=value)``: `stage` and facts for the case that there is no end."""


class Said(NamedTuple):
    """How a program answered."""

    code: int
    """Exit code; negative: ended by that signal."""
    out: str
    err: str

    @property
    def words(self) -> str:
        """All that it said, on one line, cut."""
        return " ".join(f"{self.err} {self.out}".split())[:200]


class _Probe:
    """One that runs, or has ended."""

    def __init__(self, pid: int, pipe: int, until: float) -> None:
        self.pid = pid
        self.pipe = pipe
        self.until = until
        self.buffer = b""
        self.answer: Answer | None = None


class Probes:
    """Measurements by name. Used as a context; at its end nothing runs that can be ended."""

    def __init__(self) -> None:
        self._probes: dict[str, _Probe] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Probes:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        for probe in self._probes.values():
            self._end(probe)
        self._selector.close()

    def start(self, name: str, limit_seconds: float, measure: Callable[[Note], Facts]) -> None:
        """Have `measure` run; it gets `Note`, returns facts in values of JSON, and may raise what it likes."""
        try:
            read, write = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            self._probes[name] = _not_begun(error)
            return
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read)
            os.close(write)
            self._probes[name] = _not_begun(error)
            return
        if pid == 0:
            _run(measure, write)
        os.close(write)
        probe = self._probes[name] = _Probe(pid, read, time.monotonic() + limit_seconds)
        self._selector.register(read, selectors.EVENT_READ, probe)

    def answer(self, name: str) -> Answer:
        """What it found; waits for it until its limit, and for no other."""
        probe = self._probes[name]
        while probe.answer is None:
            left = probe.until - time.monotonic()
            if left <= 0:
                said = _understood(probe.buffer)
                self._end(probe)
                probe.answer = said._replace(trouble="does not answer")
                break
            for key, _ in self._selector.select(left):
                self._read(key.data)
        return probe.answer

    def _read(self, probe: _Probe) -> None:
        piece = os.read(probe.pipe, _OUTPUT_BYTES)
        probe.buffer += piece
        if not piece:
            probe.answer = _understood(probe.buffer)
            self._end(probe)

    def _end(self, probe: _Probe) -> None:
        if probe.pipe < 0:
            return
        self._selector.unregister(probe.pipe)
        os.close(probe.pipe)
        probe.pipe = -1
        # The session of the probe, with whatever it started. Until it is reaped the number is its own.
        for end in (os.killpg, os.kill):  # it may not have got as far as its session
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(probe.pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_SECONDS
        with contextlib.suppress(ChildProcessError):  # the kernel did it: SIGCHLD is ignored
            while os.waitpid(probe.pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.002)


def _not_begun(error: OSError) -> _Probe:
    """In the place of one that this account has no room for: that is what the person has to know."""
    why = error.strerror
    if error.errno == errno.EAGAIN:
        why = "this account may have no more processes (`ulimit -u`; `ps -u $USER` shows them)"
    elif error.errno in {errno.EMFILE, errno.ENFILE}:
        why = "no more files can be opened (`ulimit -n`)"
    probe = _Probe(-1, -1, 0.0)
    probe.answer = Answer({}, f"has no answer: {why}")
    return probe


def _run(measure: Callable[[Note], Facts], pipe: int) -> None:
    """The life of the child. Never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)

        def note(stage: str, **facts: object) -> None:
            _say(pipe, {"stage": stage, "facts": facts})

        try:
            _say(pipe, {"facts": measure(note), "end": True})
        except KueueError as error:
            _say(pipe, {"end": True, "trouble": f"fails: {str(error).rstrip('.')}"})
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            _say(pipe, {"end": True, "trouble": f"fails: {type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _say(pipe: int, what: Facts) -> None:
    data = json.dumps(what).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _understood(buffer: bytes) -> Answer:
    facts: Facts = {}
    stage, trouble, ended = "", "", False
    for line in buffer.split(b"\n")[:-1]:
        said = json.loads(line)
        facts.update(said.get("facts", {}))
        stage, trouble, ended = said.get("stage", stage), said.get("trouble", trouble), said.get("end", ended)
    if ended and not trouble:
        return Answer(facts)
    return Answer(facts, trouble or "ended without an answer", stage)


def run(
    words: Sequence[str], seconds: float, *, environ: dict[str, str] | None = None, stdin: int | None = None
) -> Said | None:
    """What a program says to no input; None: it is not there, or did not end in time. For use inside a probe."""
    try:
        # In the session of the probe: what is still there when the probe ends is ended with it.
        with subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"} if environ is None else environ,
        ) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
    except OSError:
        return None
    return Said(process.returncode, *(text[:_OUTPUT_BYTES].decode("utf-8", "replace") for text in (out, err)))
