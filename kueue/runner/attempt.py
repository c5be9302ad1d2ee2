"""One attempt as the policy knows it: what was agreed, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["queued", "starting", "running", "paused", "stopping", "ended", "gone"]
Why: TypeAlias = Literal["canceled", "timed_out", "leftovers", "gone"]

SIGTERM = 15  # signal(7); the module `signal` is one of those that this one does without
FIRST_LOOK_SECONDS = 0.02  # a tree that was signalled is mostly gone by then


@dataclass
class Terms:
    """What was agreed for an attempt, see `StartAttempt`."""

    on_lost: Literal["rerun", "wait", "fail"] = "rerun"
    timeout_seconds: float | None = None
    keep_background: bool = False
    grace_seconds: float = 10.0
    line: int | None = None


@dataclass
class Attempt:
    """One attempt; plain values only, so that it can be handed to whoever takes over."""

    offer: int
    terms: Terms
    phase: Literal["queued", "starting", "running", "over"] = "queued"
    ordered_at: float = 0.0
    started_at: float | None = None
    main_ended: bool = False
    ended_at: float = 0.0
    exit_code: int | None = None
    exit_signal: int | None = None
    stop: Why | None = None
    stopped_main: bool | None = None
    """Did our first signal find the main process alive? None: none was sent."""
    killing: bool = False
    only_killed: bool = False
    """No SIGTERM went before the SIGKILL: then an exit code can only be the job's own."""
    kill_at: float | None = None
    paused: bool = False
    pause_proven: bool = False
    paused_since: float = 0.0
    paused_seconds: float = 0.0
    leftovers: int = 0
    leftovers_since: float | None = None
    look_at: float | None = None
    look_gap: float = FIRST_LOOK_SECONDS
    slow_told: bool = False
    stuck_told: bool = False
    gone: bool = False
    why_not: tuple[str, str] | None = None
    """(cause, reason) if the program could not be executed."""

    @property
    def state(self) -> State:
        if self.phase == "over":
            return "gone" if self.gone else "ended"
        if self.phase == "queued":
            return "queued"
        if self.stop:
            return "stopping"
        if self.paused:
            return "paused"
        return "starting" if self.phase == "starting" else "running"

    @property
    def is_shot(self) -> bool:
        """A signal ended it. Shells and many programs pass one on as this code; any other is the job's own word."""
        return self.exit_signal is not None or self.exit_code == 128 + SIGTERM

    @property
    def may_leave(self) -> bool:
        """Its background processes, if any, are nobody's to stop."""
        return self.terms.keep_background and self.stop is None

    @property
    def line(self) -> int:
        """The first offer of its line."""
        return self.offer if self.terms.line is None else self.terms.line

    @property
    def lives(self) -> bool:
        """A process of it exists or may come into being at any moment."""
        return self.phase in ("starting", "running")
