"""What the restart tool can decide about a host, how patient it is, and how it says so. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Action: TypeAlias = Literal["leave", "start", "renew", "back_off", "give_up", "trouble"]
Cause: TypeAlias = Literal["", "missing", "session", "unseen", "version"]


class Limits(msgspec.Struct, frozen=True):
    """How patient the policy is; seconds."""

    recheck_seconds: float = 3600.0
    """Between two rounds."""
    confirm_seconds: float = 5.0
    """After a start it is looked again so soon."""
    settle_seconds: float = 30.0
    """A fresh session may be without a worker process for so long."""
    unseen_seconds: float = 90.0
    """A worker that lives may be unknown to the server for so long."""
    stale_seconds: float = 360.0
    """After so long the server has noticed any death: its ``worker_timeout_seconds`` and a little more."""
    first_pause_seconds: float = 60.0
    tries: int = 5
    given_up_seconds: float = 86400.0
    turn_seconds: float = 300.0
    """The longest that a host that is being renewed keeps the others waiting."""

    def pause(self, failures: int) -> float:
        """Seconds between a start that failed and the next; doubling, never below 1."""
        first = max(1.0, min(self.first_pause_seconds, self.recheck_seconds))
        return min(first * 2.0 ** min(failures - 1, 30), max(3600.0, self.recheck_seconds))


class Decision(msgspec.Struct, frozen=True):
    """What to do now, and how to say it."""

    action: Action
    sentence: str
    """Stays word for word the same while nothing changes."""
    hint: str = ""
    more: str = ""
    """What changes from round to round, such as the time of the next try."""
    cause: Cause = ""
    has_worker: bool = False
    """The host has a worker, as far as can be said."""
    is_settled: bool = True
    """False: a look a little later will tell more."""
    look_again_seconds: float | None = None
    """Sooner than the next round."""
    waits_for_turn: bool = False

    @property
    def is_good(self) -> bool:
        """The host has the worker that it is to have."""
        return self.action == "leave" and self.has_worker and self.is_settled and self.cause != "version"


def spoken(seconds: float) -> str:
    """A length of time for people: ``40 s``, ``2 min``, ``3 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
