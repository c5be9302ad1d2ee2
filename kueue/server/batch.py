"""One group commit in the making: what the engine decided and who waits for it to be stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from kueue.core.engine import Engine
from kueue.core.facts import AnyFact, FinishedJob
from kueue.core.queue import Turn
from kueue.protocol.messages import Message
from kueue.server.desk import Waiting
from kueue.storage.store import Batch


@dataclass
class Pending:
    """Decided, not stored, not said."""

    facts: list[AnyFact] = field(default_factory=list)
    finished: list[FinishedJob] = field(default_factory=list)
    sends: list[tuple[int, Message]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    askers: list[tuple[int, int]] = field(default_factory=list)
    """(session, seq) of the questions that changed something: they hear of it if the batch cannot be stored."""
    questions: list[tuple[int, Message]] = field(default_factory=list)
    """Questions that are answered after the commit, by a task of their session."""
    changes: list[Waiting[None]] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.facts += turn.facts
        self.finished += turn.finished
        self.sends += turn.sends
        self.closes += turn.closes
        self.remarks += turn.remarks

    def follow(self, later: Pending) -> None:
        """Add all of `later` behind this."""
        self.facts += later.facts
        self.finished += later.finished
        self.sends += later.sends
        self.closes += later.closes
        self.remarks += later.remarks
        self.askers += later.askers
        self.questions += later.questions
        self.changes += later.changes

    @property
    def is_empty(self) -> bool:
        """Nothing to store and nobody to tell."""
        return not (self.facts or self.sends or self.closes or self.questions or self.changes or self.remarks)

    def batch(self, engine: Engine, wall: float) -> Batch:
        """For the store. The engine must stand just where the last of these facts left it."""
        return Batch(facts=tuple(self.facts), finished=tuple(self.finished), aggregates=engine.aggregates(), wall=wall)
