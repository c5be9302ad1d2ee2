"""What the server knows of a worker while it lives: its session, its lease, its load, what it declined. Never stored.

Rules
- `heard` is the steady time at which the newest message of the current session was handled.
- A worker is silent when ``steady - max(heard, opened) > T``; see `core.silence`.
- A directory that a worker declined is asked for again after a back-off, by one job; until then its jobs step aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from kueue.core.declines import Declines
from kueue.core.placement import Room
from kueue.core.room import free_room, wish_room
from kueue.core.state import Node
from kueue.model import MachineInfo, MachineLoad, Request

RETRY_SECONDS = 5.0
"""First pause before a declined directory is tried again; short, so that a `mkdir` helps within 10 s."""
RETRIES_PER_SECOND = 50
"""Bound on re-asking when very many directories are missing on one worker."""
REMEMBERED_SECONDS = 3600.0
"""So long after the pause of a directory its next job still goes alone; then it is forgotten, as if never declined."""

FAST_FAILURE_SECONDS = 1.0
FAST_FAILURES = 3
SET_ASIDE_SECONDS = 60.0
SET_ASIDE_SECONDS_MAX = 1800.0


@dataclass
class Worker:
    """The living side of a `Node`."""

    id: int
    session: int | None = None
    heard: float | None = None
    hello_boottime: float = 0.0
    """On its own clock: when the newest hello of its present boot was made."""
    suspected: float | None = None
    """Steady time at which silence was first seen; declared only when seen again, after all mail was read."""
    is_silent: bool = False
    silent_wall: float | None = None
    version: str = ""
    info: MachineInfo = MachineInfo()
    load: MachineLoad = MachineLoad()
    connected_wall: float | None = None
    updated_wall: float | None = None
    declined: Declines = field(default_factory=Declines)
    probing: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Directory declined before, whose pause is over → (the reason then, steady time of the end of the pause), the
    oldest first: the next job is sent alone."""
    asking: dict[str, int] = field(default_factory=dict)
    """Directory → the offer that is out asking for it."""
    deferred: dict[Request, str] = field(default_factory=dict)
    """Request that it put off until its next report → why."""
    knows_lines: bool = False
    """It takes offers ahead."""
    paces: dict[Request, float] = field(default_factory=dict)
    """Request → mean run time in seconds of its newest jobs there, of those that are short; the newest last."""
    unchained: set[Request] = field(default_factory=set)
    """Requests of which it put off an offer ahead, until its next report."""
    unknown: dict[int, float] = field(default_factory=dict)
    """Offer → steady time since when this worker cannot say what became of it."""
    traceless: set[int] = field(default_factory=set)
    """Offers that have started, and of which it has no trace: it keeps no room for them."""
    fast_failures: int = 0
    set_aside_until: float | None = None
    set_aside_seconds: float = SET_ASIDE_SECONDS
    set_aside_note: str = ""
    note: str = ""
    """What hinders it, as it said last in this session."""
    stopping: bool = False
    """It said goodbye and takes nothing new."""

    def hung_up(self) -> None:
        self.session = None
        # Asked for anew when it comes back, if it does: nobody else lets go of what was kept beside it.
        self.declined.clear()

    def closed(self, node: Node, now_steady: float) -> str:
        """Why it gets no new jobs, as a predicate to its name; empty: it does."""
        if node.record.offline:
            return "is offline (taken out by hand)"
        if self.session is None:
            return "is silent" if self.is_silent else "is not connected"
        if self.stopping:
            return "is stopping"
        if any(attempt.overdue and not attempt.silent for attempt in node.attempts.values()):
            return "does not answer an offer"
        if self.is_set_aside(now_steady):
            return f"is set aside: {self.set_aside_note}"
        return ""

    def room(self, node: Node, now_steady: float) -> Room:
        """What it has to give now."""
        totals = node.record.totals
        slots, cores, ram_mb = free_room(totals, self.load, node.slots, node.cores, node.ram_mb)
        wish_cores, wish_ram_mb = wish_room(totals, self.load)
        named = {name: frozenset(range(amount)) - node.named.get(name, frozenset()) for name, amount in totals.named}
        return Room(
            node=self.id,
            totals=totals,
            slots=slots,
            cores=cores,
            ram_mb=ram_mb,
            wish_cores=wish_cores,
            wish_ram_mb=wish_ram_mb,
            named=named,
            declined=self.declined,
            deferred=self.deferred,
            load=self.load,
            traceless=self.traceless,
            closed=self.closed(node, now_steady),
        )

    # --- declined directories ----------------------------------------------------------------------------------------

    def decline_place(self, directory: str, reason: str, steady: float) -> None:
        pause = max(RETRY_SECONDS, len(self.declined) / RETRIES_PER_SECOND)
        self.declined.add(directory, reason, steady + pause)
        self.probing.pop(directory, None)
        self.asking.pop(directory, None)

    def offered(self, directory: str, offer: int) -> None:
        """A job of that directory is on its way; if the directory was declined before, it goes alone."""
        if directory in self.probing:
            self.declined.add(directory, self.probing[directory][0], float("inf"))
            self.asking[directory] = offer

    def sees(self, directory: str) -> None:
        """A job has started there: whatever was declined before is seen now."""
        if self.declined or self.probing:
            self.declined.drop(directory)
            self.probing.pop(directory, None)
            self.asking.pop(directory, None)

    def asked(self, directory: str, offer: int) -> None:
        """That offer is over; if it was out asking and nothing was learnt, the next job asks."""
        if self.asking.get(directory) == offer:
            del self.asking[directory]
            self.declined.drop(directory)

    def retry(self, steady: float) -> bool:
        """Let pauses that are over end. Returns whether there were any."""
        due = self.declined.take_due(steady)
        for directory, decline in due:
            self.probing[directory] = decline.reason, steady
        old = takewhile(lambda directory: steady - self.probing[directory][1] > REMEMBERED_SECONDS, self.probing)
        for directory in list(old):
            del self.probing[directory]
        return bool(due)

    def next_retry(self) -> float | None:
        return self.declined.next_retry()

    # --- black holes -------------------------------------------------------------------------------------------------

    def ended(self, steady: float, *, failed_fast: bool) -> bool:
        """Count an end. Returns whether the worker has now failed too many in a row."""
        if self.is_set_aside(steady):
            # What was offered before the pause tells nothing about the time after it.
            return False
        if not failed_fast:
            self.fast_failures = 0
            self.set_aside_seconds = SET_ASIDE_SECONDS
            self.set_aside_note = ""
            return False
        self.fast_failures += 1
        return self.fast_failures >= FAST_FAILURES

    def is_set_aside(self, steady: float) -> bool:
        return self.set_aside_until is not None and steady < self.set_aside_until

    def set_aside(self, steady: float, reason: str) -> float:
        """Give it no jobs for a while. Returns the seconds; they double each time in a row."""
        pause = self.set_aside_seconds
        self.set_aside_until = steady + pause
        self.set_aside_seconds = min(2 * pause, SET_ASIDE_SECONDS_MAX)
        self.set_aside_note = reason
        # One more fast failure after the pause sets it aside again: it is on probation, not forgiven.
        self.fast_failures = FAST_FAILURES - 1
        return pause
