"""What the policy decides, to be carried out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Start:
    """Spawn the main process, unless `not_after` (boottime) has passed: then call `start_refused`."""

    offer: int
    not_after: float


@dataclass(frozen=True)
class Terminate:
    """SIGTERM to every process of the tree; then `signalled` and `seen`."""

    offer: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every process of the tree, in passes until no new one shows up; then `signalled` and `seen`."""

    offer: int


@dataclass(frozen=True)
class Pause:
    """SIGSTOP in passes until nothing of the tree runs; then `seen`."""

    offer: int


@dataclass(frozen=True)
class Continue:
    """SIGCONT, children before their parents."""

    offer: int


@dataclass(frozen=True)
class Look:
    """Count what is left of the tree; then `seen`."""

    offer: int


@dataclass(frozen=True)
class Finish:
    """The attempt is over: write its record, then tell it."""

    offer: int
    kind: Literal["exited", "signaled", "not_started", "timed_out", "canceled", "gone"]
    number: int = 0
    """The exit code, or the signal."""
    cause: str = ""
    reason: str = ""
    after_seconds: float = 0.0
    leftovers: int = 0
    paused_seconds: float = 0.0


@dataclass(frozen=True)
class Tell:
    """Say how the attempt stands. Words that are no states: ``refused``, ``withdrawn``, ``unknown``; after them there
    is no such attempt.
    """

    offer: int
    word: str
    note: str = ""


@dataclass(frozen=True)
class PauseDone:
    """All that had to be paused or killed at this deadline is proven to be."""

    deadline: float


Action: TypeAlias = Start | Terminate | Kill | Pause | Continue | Look | Finish | Tell | PauseDone
