"""What was handed to runners: how each attempt stands there, and what may have to be said again.

Rules
- An attempt stays here until its runner was told to forget it, or never had it.
- Start records in the spool tell of attempts whose runner cannot.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kueue.worker.orders import AttemptState, RunnerState, StartAttempt, StopOrder, WithdrawOrder


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

    @property
    def is_over(self) -> bool:
        return self.state.state in {"ended", "gone"}


class HandedOver(dict[int, Handed]):
    """By offer. `spool`: where the runners keep their records."""

    def __init__(self, spool: Path) -> None:
        super().__init__()
        self._spool = spool

    def of(self, runner: str) -> list[Handed]:
        """What that runner has in its care."""
        return [one for one in self.values() if one.runner == runner]

    def cares(self, runner: str) -> bool:
        return any(one.runner == runner for one in self.values())

    def stands(self, offer: int, state: RunnerState, **more: object) -> None:
        """The runner's word; `more`: fields of `AttemptState`."""
        one = self.get(offer)
        if one is not None:
            one.start = None
            one.state = msgspec.structs.replace(one.state, state=state, **more)

    def states(self, is_well: Callable[[str], bool]) -> tuple[AttemptState, ...]:
        """All of them; ``unknown`` where the runner is not well and so cannot tell of what is not over."""
        return tuple(
            one.state if one.is_over or is_well(one.runner) else msgspec.structs.replace(one.state, state="unknown")
            for one in self.values()
        )

    def learn(self, runner: str) -> None:
        """Take up what the records tell of a runner that does not answer. Blocks on the disk."""
        for offer, record in self._records():
            if record.get("runner") == runner and offer not in self:
                state = AttemptState(
                    offer=offer,
                    job=record["job"],
                    queue_id=record["queue_id"],
                    state="unknown",
                    memo=record.get("memo", ""),
                    note="its runner does not answer",
                )
                self[offer] = Handed(state, runner)

    def has_orphans(self, is_alive: Callable[[str], bool]) -> bool:
        """Is there a record of an attempt whose runner is dead and that no other has taken in? Blocks on the disk."""
        return any(offer not in self and not is_alive(record.get("runner", "")) for offer, record in self._records())

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for folder in self._spool.iterdir() if self._spool.is_dir() else ():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    yield int(folder.name), json.loads((folder / "start.json").read_bytes())
