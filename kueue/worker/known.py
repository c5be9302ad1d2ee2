"""An attempt as the worker knows it: where it stands, what the server is told of it, and what room it takes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kueue.core.room import free_room
from kueue.model import EndRecord, MachineLoad, MachineTotals, OnLost, OsText, Share
from kueue.protocol.messages import AttemptEnded, AttemptGone, AttemptReport, AttemptStarted, FromWorker
from kueue.worker.orders import AttemptState, RunnerState

NO_SHARE = Share(node=0, slots=0, cores=0, ram_mb=0)


class Memo(msgspec.Struct, frozen=True):
    """What the worker has its runner keep for it, so that a restarted worker knows what its attempts hold."""

    share: Share = NO_SHARE
    on_lost: OnLost = "rerun"
    cwd: OsText = ""
    stdout: OsText | None = None
    stderr: OsText | None = None
    line: int | None = None
    """The first offer of its line, whose room it shares; none: it has room of its own."""


_decoder = msgspec.json.Decoder(Memo)


def write_memo(memo: Memo) -> str:
    return msgspec.json.encode(memo).decode()


def read_memo(text: str) -> Memo:
    """A memo of another release that cannot be read counts as one of an attempt that holds nothing."""
    try:
        return _decoder.decode(text) if text else Memo()
    except msgspec.MsgspecError:
        return Memo()


@dataclass
class Attempt:
    """One attempt that was handed to a runner and whose end the server has not acknowledged."""

    offer: int
    job: int
    queue_id: str
    state: RunnerState
    memo: Memo = field(default_factory=Memo)
    started_wall: float | None = None
    end: EndRecord | None = None
    note: str = ""
    stop: bool = False
    """The server wants it ended."""
    kill: bool = False
    lease_until: float | None = None
    """The deadline (boottime) that its runner was given; None: not known."""
    still_at: float | None = None
    """The deadline at which its runner had it wait in a line, and proved that nothing ran that had to be paused."""

    @property
    def is_over(self) -> bool:
        return self.state in {"ended", "gone"}

    @property
    def line(self) -> tuple[str, int]:
        """Queue and first offer: all attempts of a line have one room."""
        return self.queue_id, self.offer if self.memo.line is None else self.memo.line

    @property
    def is_revocable(self) -> bool:
        """The server may give it away when the lease has lapsed, so it must not run then."""
        return not self.is_over and self.memo.on_lost == "rerun"

    @property
    def is_proven_still(self) -> bool:
        """Its runner said that nothing of it runs, and had no lease since to let it."""
        if self.state != "queued":
            return self.state == "paused"
        return self.still_at is not None and self.lease_until is not None and self.still_at >= self.lease_until


def from_runner(state: AttemptState) -> Attempt:
    return Attempt(
        offer=state.offer,
        job=state.job,
        queue_id=state.queue_id,
        state=state.state,
        memo=read_memo(state.memo),
        started_wall=state.started_wall,
        end=state.end,
        note=state.note,
    )


def report(attempt: Attempt) -> AttemptReport:
    """The attempt as a hello tells it.

    An end record does not travel in the hello: it follows right after the welcome in an `AttemptEnded`, which is the
    one way by which excerpts of the output travel with it.
    """
    return AttemptReport(
        offer=attempt.offer,
        job=attempt.job,
        queue_id=attempt.queue_id,
        state="queued" if attempt.state == "starting" else attempt.state,
        started_wall=attempt.started_wall,
    )


def how_it_stands(attempt: Attempt) -> FromWorker | None:
    """What the server is told when it asks; None: the runner's answer is on its way."""
    match attempt.state:
        case "running" | "paused" | "stopping":
            return AttemptStarted(offer=attempt.offer, started_wall=attempt.started_wall or 0.0)
        case "ended":
            assert attempt.end is not None
            return AttemptEnded(offer=attempt.offer, end=attempt.end)
        case "gone":
            return AttemptGone(offer=attempt.offer, reason=attempt.note)
        case "queued" | "starting" | "unknown":
            return None


def learn(attempts: dict[int, Attempt], state: AttemptState) -> Attempt:
    """A runner's word replaces what was known; returns the attempt as it is known now."""
    fresh = from_runner(state)
    known = attempts.get(state.offer)
    attempts[state.offer] = fresh
    if known is not None:
        fresh.stop, fresh.kill = known.stop, known.kill
        fresh.lease_until, fresh.still_at = known.lease_until, known.still_at
        fresh.end = fresh.end or known.end
        fresh.started_wall = known.started_wall if fresh.started_wall is None else fresh.started_wall
        if fresh.memo == Memo():
            fresh.memo = known.memo
    return fresh


class Room(NamedTuple):
    """Sums over attempts."""

    slots: int
    cores: int
    ram_mb: int


def taken(attempts: Iterable[Attempt]) -> Room:
    """The room of all attempts that are not over, that of each line once."""
    slots = cores = ram_mb = 0
    lines: set[tuple[str, int]] = set()
    for attempt in attempts:
        if not attempt.is_over and attempt.line not in lines:
            lines.add(attempt.line)
            share = attempt.memo.share
            slots += share.slots
            cores += share.cores
            ram_mb += share.ram_mb
    return Room(slots, cores, ram_mb)


def missing_units(share: Share, totals: MachineTotals, attempts: Iterable[Attempt]) -> str:
    """The first named resource of which a unit is absent or held by another attempt; empty when all are free."""
    if not share.named:
        return ""
    amounts = dict(totals.named)
    held = {
        (name, unit)
        for attempt in attempts
        if not attempt.is_over
        for name, units in attempt.memo.share.named
        for unit in units
    }
    for name, units in share.named:
        if any(unit >= amounts.get(name, 0) or (name, unit) in held for unit in units):
            return name
    return ""


def why_not_now(share: Share, totals: MachineTotals, load: MachineLoad, attempts: Collection[Attempt]) -> str:
    """What of a share has no room on this machine beside these attempts; empty when there is room."""
    slots, cores, ram_mb = free_room(totals, load, *taken(attempts))
    if share.slots > slots:
        return f"{slots} of {totals.slots} job slots free, {share.slots} wanted"
    if share.cores > cores:
        return f"{cores} of {totals.cores} cores free, {share.cores} wanted"
    if share.ram_mb > ram_mb:
        return f"{ram_mb} of {totals.ram_mb} MB free, {share.ram_mb} wanted"
    name = missing_units(share, totals, attempts)
    return f"a unit of {name} is in use or absent" if name else ""


def why_not_behind(line: tuple[str, int], attempts: Iterable[Attempt]) -> str:
    """Why an offer ahead is not taken into its line; empty when it is.

    Whoever does not answer cannot be waited for: it may never end.
    """
    lost = next((one.offer for one in attempts if one.state == "unknown" and one.line == line), None)
    return "" if lost is None else f"the runner of attempt {lost}, which it waits for, does not answer"
