"""The keeper's spawners: the one that gets the new jobs, and those that were mute and have not died yet."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from kueue.runner.children import boottime
from kueue.runner.desk import close, want
from kueue.runner.log import Log
from kueue.runner.shared import Shared
from kueue.runner.tree import status
from kueue.runner.wire import Lines

MUTE_SECONDS = 10.0  # so long may a spawner take to make a process before another one takes its place


@dataclass
class Child:
    """A spawner of ours."""

    pid: int
    lines: Lines
    shared: Shared


class Spawners:
    """Makes spawners, carries lines to and from them, replaces those that do not answer.

    `live`: a spawner's whole life, called in the new process with its end of the socket and the page that it shares
    with us. `made`: called in the keeper when there is a new one, which knows nothing yet.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        log: Log,
        live: Callable[[socket.socket, Shared], None],
        made: Callable[[], None],
    ) -> None:
        self.current: Child | None = None
        self._selector = selector
        self._log = log
        self._live = live
        self._made = made
        self._retired: dict[int, Child] = {}
        self._sent: dict[int, float] = {}
        """Starts that the current one has not answered yet: offer → when they were sent; the oldest first. By a clock
        that does not count suspend, in which nobody can answer.
        """
        self._stopped_since: float | None = None
        """Since when the current one is seen stopped (boottime)."""

    @property
    def all(self) -> list[Child]:
        return [*([self.current] if self.current else []), *self._retired.values()]

    def make(self) -> None:
        """Make a new one to be the current; there is none if the system has no room for a process."""
        ours, theirs = socket.socketpair()
        try:
            shared = Shared(boottime())
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._log(f"no spawner could be made: {error.strerror}")
            return
        if pid == 0:
            self._live(theirs, shared)
            os._exit(0)
        theirs.close()
        self.current = Child(pid, Lines(ours), shared)
        self._selector.register(self.current.lines, selectors.EVENT_READ)
        self._made()

    @property
    def due(self) -> float | None:
        """When `replace_mute` has something to do, unless there is an answer before (boottime)."""
        times = []
        if self._sent:
            times.append(boottime() + MUTE_SECONDS - (time.monotonic() - next(iter(self._sent.values()))))
        if self._stopped_since is not None:
            times.append(self._stopped_since + MUTE_SECONDS)
        return min(times, default=None)

    def look(self, now: float) -> None:
        """To be called now and then: one that somebody has stopped tells of no end, and is asked nothing meanwhile that
        it could fail to answer. Only stopped ones are found: who waits for a disk may be well.
        """
        found = status(self.current.pid) if self.current is not None else None
        if found is None or not found.is_stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now

    def replace_mute(self, now: float) -> None:
        """A mute spawner is killed: its processes become the keeper's own children when it dies, which a dead file
        server may put off.
        """
        if self._stopped_since is not None and now >= self._stopped_since + MUTE_SECONDS:
            self.look(now)  # it may have gone on
        child, due = self.current, self.due
        if child is None or due is None or now < due:
            return
        self._log(f"spawner {child.pid} does not answer: another one takes its place")
        os.kill(child.pid, signal.SIGKILL)  # our child, and not reaped
        self._retired[child.pid] = child
        self._forget_current()
        self.make()

    def start(self, offer: int, line: bytes) -> int | None:
        """Order a process for this offer. Returns the number of the spawner; None: there is none."""
        if self.current is None:
            self.make()
        if self.current is None:
            return None
        self._sent[offer] = time.monotonic()
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
            self._forget_current()
        words = child.lines.receive() if child.lines.open else []
        close(self._selector, child.lines)
        return words

    def _forget_current(self) -> None:
        self.current = None
        self._sent.clear()
        self._stopped_since = None

    def flush(self) -> None:
        """Send what the sockets take."""
        for child in self.all:
            if child.lines.open:
                child.lines.flush()
                want(self._selector, child.lines)
