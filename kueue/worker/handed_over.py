"""What was handed to runners: how each attempt stands there, and what may have to be said again.

Rules
- An attempt stays here until its runner was told to forget it, or never had it.
- Records in the spool tell of attempts whose runner cannot: what has ended by them is not run again, whoever answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from kueue.model import EndRecord, Lost
from kueue.worker.known import read_memo
from kueue.worker.orders import (
    Attached,
    AttemptState,
    Changed,
    Ended,
    Event,
    Gone,
    Queued,
    Refused,
    RunnerState,
    StartAttempt,
    Started,
    StopOrder,
    Unknown,
    Withdrawn,
    WithdrawOrder,
)
from kueue.worker.runner_disk import StartRecord


@dataclass
class Handed:
    """One attempt."""

    state: AttemptState
    runner: str
    """Id of the runner that has it in its care."""
    start: StartAttempt | None = None
    """The order to start it, while nothing was heard of it."""
    stop: StopOrder | None = None
    withdraw: WithdrawOrder | None = None
    is_orphan: bool = False
    """Its runner died; the newest was asked to take it in."""
    line: tuple[str, int] | None = None
    """Queue and first offer of its line; none: it began one itself."""

    @property
    def is_over(self) -> bool:
        return self.state.state in {"ended", "gone"}


def line_of(state: AttemptState) -> tuple[str, int] | None:
    """As in `Handed`, from the memo that its runner keeps."""
    line = read_memo(state.memo).line
    return None if line is None else (state.queue_id, line)


class HandedOver(dict[int, Handed]):
    """By offer."""

    def of(self, runner: str) -> list[Handed]:
        """What that runner has in its care."""
        return [one for one in self.values() if one.runner == runner]

    def elsewhere(self, line: tuple[str, int], runner: str) -> int | None:
        """An attempt of that line which is not over and with another runner; none: there is none."""
        return next(
            (
                offer
                for offer, one in self.items()
                if one.runner != runner and not one.is_over and line in ((one.state.queue_id, offer), one.line)
            ),
            None,
        )

    def cares(self, runner: str) -> bool:
        return any(one.runner == runner for one in self.values())

    def stands(self, offer: int, state: RunnerState, **more: object) -> None:
        """The runner's word; `more`: fields of `AttemptState`."""
        one = self.get(offer)
        if one is not None:
            one.start = None
            one.state = msgspec.structs.replace(one.state, state=state, **more)

    def heard(self, event: Event) -> None:
        """What a runner says of one attempt."""
        match event:
            case Started(offer=offer, started_wall=wall, pid=pid):
                self.stands(offer, "running", started_wall=wall, pid=pid)
            case Queued(offer=offer):
                self.stands(offer, "queued")
            case Changed(offer=offer, state=state, note=note):
                self.stands(offer, state, note=note)
            case Ended(offer=offer, end=end):
                self.stands(offer, "ended", end=end)
            case Gone(offer=offer, reason=reason):
                self.stands(offer, "gone", note=reason)
            case Refused(offer=offer) | Withdrawn(offer=offer) | Unknown(offer=offer):
                self.pop(offer, None)
            case _:
                pass

    def counted(self, runner: str, attached: Attached, *, is_first: bool) -> list[Event]:
        """Take over its word on all its attempts. Returns what is to be told of them.

        What we had handed to it and it does not name it never got, if nothing was sent on this connection before
        (`is_first`). Orphans were handed to another one: see `left_over`.
        """
        for state in attached.attempts:
            known = self.get(state.offer)
            if known is None:
                self[state.offer] = Handed(state, runner, line=line_of(state))
            else:
                known.state, known.runner, known.start, known.is_orphan = state, runner, None, False
        named = {state.offer for state in attached.attempts}
        missing = [one for one in self.of(runner) if is_first and one.state.offer not in named and not one.is_orphan]
        for one in missing:
            del self[one.state.offer]
        return [*map(_unnamed, missing), *(event for state in attached.attempts for event in _told_again(state))]

    def left_over(self, orphans: Iterable[Handed], records: Iterable[StartRecord]) -> list[Event]:
        """Those that nobody named and that have no record are gone. Returns what is to be told of them.

        A record that is left is in the care of a runner that we do not know yet: it was slow to start, and took it in.
        """
        recorded = {offer for offer, _ in records}
        gone = [
            one
            for one in orphans
            if one.is_orphan and one.state.offer not in recorded and self.get(one.state.offer) is one
        ]
        for one in gone:
            del self[one.state.offer]
        return [*map(_unnamed, gone)]

    def said_again(self, attached: Attached) -> Iterator[StopOrder | WithdrawOrder]:
        """Orders that a broken connection may have swallowed."""
        for state in attached.attempts:
            known = self.get(state.offer)
            order = known and (known.stop or known.withdraw)
            if known is not None and order and not known.is_over:
                yield order

    def states(self, is_well: Callable[[str], bool]) -> tuple[AttemptState, ...]:
        """All of them; ``unknown`` where the runner is not well and so cannot tell of what is not over."""
        return tuple(
            one.state if one.is_over or is_well(one.runner) else msgspec.structs.replace(one.state, state="unknown")
            for one in self.values()
        )

    def learn(self, runner: str, records: Iterable[StartRecord]) -> None:
        """Take up what the records tell of a runner that does not answer."""
        for offer, record in records:
            if record["runner"] == runner and offer not in self:
                state = AttemptState(
                    offer=offer,
                    job=record["job"],
                    queue_id=record["queue_id"],
                    state="unknown",
                    memo=record.get("memo", ""),
                    note="its runner does not answer",
                )
                self[offer] = Handed(_ended(state, record["end"]) or state, runner, line=line_of(state))

    def ended_since(self, runner: str, records: Iterable[StartRecord]) -> Iterator[Event]:
        """Take up the ends that a runner has written down and cannot tell. Yields what is to be told of them."""
        for offer, record in records:
            known = self.get(offer)
            if known is None or known.runner != runner or known.is_over or record["runner"] != runner:
                continue
            ended = _ended(known.state, record["end"])
            if ended is not None:
                known.state = ended
                yield from _told_again(ended)

    def dead(self, is_alive: Callable[[str], bool], records: Iterable[StartRecord]) -> list[str]:
        """Runners that are dead and left attempts behind that no other has taken in."""
        left = {record["runner"] for offer, record in records if offer not in self}
        return sorted(runner for runner in left if not is_alive(runner))

    def waiting(self, runner: str) -> tuple[int, ...]:
        """Attempts that this runner said wait in a line."""
        return tuple(one.state.offer for one in self.of(runner) if one.state.state == "queued" and one.start is None)


def _unnamed(one: Handed) -> Refused | Gone:
    state = one.state
    if one.start is not None or state.state in {"queued", "starting"}:
        return Refused(offer=state.offer, reason="its runner ended before it was started")
    return Gone(offer=state.offer, job=state.job, queue_id=state.queue_id, reason="its runner has no record of it")


def _told_again(state: AttemptState) -> Iterator[Event]:
    if state.state == "ended" and state.end is not None:
        yield Ended(offer=state.offer, job=state.job, end=state.end)
    elif state.state == "gone":
        yield Gone(offer=state.offer, job=state.job, queue_id=state.queue_id, reason=state.note)
    elif state.started_wall is not None:
        yield Started(offer=state.offer, job=state.job, started_wall=state.started_wall)


def _ended(state: AttemptState, record: object) -> AttemptState | None:
    """The attempt as its exit record leaves it; None: there is none that can be read."""
    try:
        end = msgspec.convert(record, EndRecord)
    except msgspec.ValidationError:
        return None
    if isinstance(end.outcome, Lost):
        return msgspec.structs.replace(state, state="gone", note=end.outcome.reason)
    return msgspec.structs.replace(state, state="ended", end=end, started_wall=end.started_wall, note="")
