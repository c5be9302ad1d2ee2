"""The keeper's spawners: the one that gets the new jobs, and those that were mute and have not died yet."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kueue.runner.children import boottime
from kueue.runner.desk import close, want
from kueue.runner.log import Log
from kueue.runner.wire import Lines

MUTE_SECONDS = 10.0  # so long may a spawner take to make a process before another one takes its place


@dataclass
class Child:
    """A spawner of ours."""

    pid: int
    lines: Lines


class Spawners:
    """Makes spawners, carries lines to and from them, replaces those that do not answer.

    `live`: a spawner's whole life, called in the new process with its end of the socket. `made`: called in the keeper
    when there is a new one, which knows nothing yet.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        log: Log,
        live: Callable[[socket.socket], None],
        made: Callable[[], None],
    ) -> None:
        self.current: Child | None = None
        self._selector = selector
        self._log = log
        self._live = live
        self._made = made
        self._retired: dict[int, Child] = {}
        self._sent: dict[int, float] = {}
        """Starts that the current one has not answered yet: offer → when they were sent; the oldest first."""

    @property
    def all(self) -> list[Child]:
        return [*([self.current] if self.current else []), *self._retired.values()]

    def make(self) -> None:
        """Make a new one to be the current; there is none if the system has no room for a process."""
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._log(f"no spawner could be made: {error.strerror}")
            return
        if pid == 0:
            self._live(theirs)
            os._exit(0)
        theirs.close()
        self.current = Child(pid, Lines(ours))
        self._selector.register(self.current.lines, selectors.EVENT_READ)
        self._made()

    @property
    def due(self) -> float | None:
        """When `replace_mute` has something to do, unless there is an answer before (boottime)."""
        return next(iter(self._sent.values())) + MUTE_SECONDS if self._sent else None

    def replace_mute(self, now: float) -> None:
        """A mute spawner is killed: its processes become the keeper's own children when it dies, which a dead file
        server may put off.
        """
        due = self.due
        if self.current is None or due is None or now < due:
            return
        child, self.current = self.current, None
        self._log(f"spawner {child.pid} does not answer: another one takes its place")
        os.kill(child.pid, signal.SIGKILL)  # our child, and not reaped
        self._retired[child.pid] = child
        self._sent.clear()
        self.make()

    def start(self, offer: int, line: bytes) -> int | None:
        """Order a process for this offer. Returns the number of the spawner; None: there is none."""
        if self.current is None:
            self.make()
        if self.current is None:
            return None
        self._sent[offer] = boottime()
        self.current.lines.put(line)
        return self.current.pid

    def answered(self, offer: int) -> None:
        """What became of the start is known."""
        self._sent.pop(offer, None)

    def hear(self, child: Child) -> list[bytes]:
        """What it has said; at the end of the stream it is no longer listened to."""
        lines = child.lines.receive()
        if not child.lines.open:
            close(self._selector, child.lines)
        return lines

    def lost(self, child: Child) -> list[bytes]:
        """It is dead. Returns its last words."""
        self._retired.pop(child.pid, None)
        if child is self.current:
            self.current = None
            self._sent.clear()
        words = child.lines.receive() if child.lines.open else []
        close(self._selector, child.lines)
        return words

    def flush(self) -> None:
        """Send what the sockets take."""
        for child in self.all:
            if child.lines.open:
                child.lines.flush()
                want(self._selector, child.lines)
