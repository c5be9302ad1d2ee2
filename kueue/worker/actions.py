"""What the agent wants done: the only way its decisions reach the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kueue.model import Place
from kueue.protocol.messages import FetchOutput, FromWorker
from kueue.worker.orders import Order


@dataclass(frozen=True)
class Say:
    """Send this to the server, in the order of the actions. Excerpts of the output are put into ends on the way out."""

    message: FromWorker


@dataclass(frozen=True)
class Instruct:
    """Give this order to the runner that has the attempt (starts: the newest runner; leases: all)."""

    order: Order


@dataclass(frozen=True)
class CheckPlace:
    """Find out whether the job's directory can be used here; answered by `Agent.place_checked`.

    It may take for ever on a dead file server; the agent stops waiting by itself.
    """

    offer: int
    place: Place


@dataclass(frozen=True)
class PauseTrees:
    """The runner did not confirm its pause: stop every process of these attempts and keep them stopped."""

    offers: tuple[int, ...]


@dataclass(frozen=True)
class ContinueTrees:
    """The lease is good again: let go of what `PauseTrees` stopped."""

    offers: tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Serve this question about a job's output."""

    question: FetchOutput


@dataclass(frozen=True)
class DropOutput:
    """Nobody wants the kept output of these attempts any more."""

    offers: tuple[int, ...]


@dataclass(frozen=True)
class Close:
    """End this session. A new one is made after a pause."""

    reason: str
    hint: str = ""
    lasting: bool = False
    """The server will say the same again until somebody changes something: try rarely."""


Action: TypeAlias = Say | Instruct | CheckPlace | PauseTrees | ContinueTrees | Fetch | DropOutput | Close
