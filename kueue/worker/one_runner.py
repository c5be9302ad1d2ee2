"""One runner as its worker knows it: where it is, whether it answers, and how to tell it something."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import trio

from kueue.worker.attachment import Attachment
from kueue.worker.orders import Order


@dataclass
class Runner:
    """One runner, dead or alive."""

    path: Path
    version: str = ""
    keeper: int | None = None
    """Number of the process that answered last."""
    connection: Attachment | None = None
    answers: bool = False
    """It answered, and the last thing we asked has not been waiting for too long."""
    is_dead: bool = False
    is_dismissed: bool = False
    """Of an earlier release and without attempts: it leaves by itself when no worker is attached."""
    is_leaving: bool = False
    """It was told to end and takes nothing new, by what it said last."""
    asked_at: float | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    """It has answered, did not in time, or is dead: enough is known for a hello."""
    buried: trio.Event = field(default_factory=trio.Event)
    """It has answered an `Inherit` of the same connection since this was made."""
    stirred: trio.Event = field(default_factory=trio.Event)
    """Something was ordered or heard: it may have something in its care now, or be gone."""

    def stir(self) -> None:
        self.stirred.set()
        self.stirred = trio.Event()

    @property
    def id(self) -> str:
        return self.path.name

    def put(self, order: Order) -> None:
        """For the next flush. Without a connection: said again after it is made, or answered by what is found then."""
        self.stir()
        if self.connection is not None:
            self.connection.put(order)

    async def flush(self) -> None:
        if self.connection is not None:
            await self.connection.flush()

    async def tell(self, order: Order) -> None:
        """At once."""
        self.put(order)
        await self.flush()

    def is_well(self, answer_seconds: float) -> bool:
        """It answers, and has not been asked `answer_seconds` ago without an answer."""
        waits = trio.current_time() - self.asked_at if self.asked_at is not None else 0.0
        return self.answers and waits < answer_seconds
