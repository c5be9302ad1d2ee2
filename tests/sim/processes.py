"""The processes of a job on a machine, as the kernel has them: they run, stand still, end, or refuse to.

Rules
- A tree makes progress only while its machine runs and nobody has stopped it.
- Nothing here knows of leases, offers or servers; who watches (`Watcher`) is told of every change at its real time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kueue.model import Share
from tests.sim.world import Machine

TERM, KILL = 15, 9


@dataclass(frozen=True)
class Plan:
    """What the program of a job does when it is let."""

    run_seconds: float
    code: int | None = 0
    signal: int | None = None
    """Ends itself by this signal instead."""
    term_seconds: float | None = 0.0
    """How long after SIGTERM it ends; None: it ignores it."""
    term_code: int | None = None
    """With which code; None: it dies of the signal."""
    leftover_seconds: float = 0.0
    """A child outlives the main process by so much."""
    exec_seconds: float = 0.0
    """From the process to its program: directory and output file lie on a file server that hangs."""
    cannot_start: bool = False
    dies_slowly_seconds: float = 0.0
    """From SIGKILL to its end (a system call that waits for a device)."""
    place_seconds: float = 0.002
    """How long the worker looks at its directory, while the weather lasts."""


class Watcher(Protocol):
    """Who sees all processes of the world."""

    def tree_began(self, tree: Tree) -> None: ...
    def tree_runs(self, tree: Tree) -> None: ...


class Tree:
    """Main process and, after its end, perhaps one that it left."""

    def __init__(
        self, machine: Machine, offer: int, job: int, plan: Plan, share: Share, background: bool, watcher: Watcher
    ) -> None:
        self.machine = machine
        self.world = machine.world
        self.offer = offer
        self.job = job
        self.plan = plan
        self.share = share
        self.may_leave_background = background
        self.watcher = watcher
        self.began_at = machine.world.now
        self.main_lives = True
        self.main_end: tuple[int | None, int | None] | None = None
        """(code, signal)"""
        self.leftover_lives = False
        self.is_stopped = False
        self.is_killed = False
        self.is_active = False
        self.ran_seconds = 0.0
        """Real seconds of the main process on a processor."""
        self.slept_seconds = 0.0
        """Real seconds that its machine slept meanwhile; a steady clock counts them."""
        self._asleep_since: float | None = None
        self.on_main_end: Callable[[], None] = lambda: None
        self._active_since = 0.0
        self.on_executed: Callable[[], None] = lambda: None
        self.is_executed = False
        self._exec_left = plan.exec_seconds
        self._left = plan.run_seconds
        self._term_left: float | None = None
        self._leftover_left = plan.leftover_seconds
        self._turn = 0
        watcher.tree_began(self)
        self._update()

    @property
    def living(self) -> int:
        return int(self.main_lives) + int(self.leftover_lives)

    @property
    def unstopped(self) -> int:
        """Processes that the scheduler may run."""
        return 0 if self.is_stopped else self.living

    @property
    def works(self) -> bool:
        """Something of the attempt runs that is not allowed to stay behind."""
        return self.is_active and (self.main_lives or not self.may_leave_background)

    # --- signals -----------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        if self.main_lives and self._term_left is None and (self.plan.term_seconds is not None or not self.is_executed):
            self._account()
            self._term_left = self.plan.term_seconds if self.is_executed and self.plan.term_seconds else 0.0
            self._update()
        elif self.leftover_lives:
            self._account()
            self._leftover_left = 0.0
            self._update()

    def kill(self) -> None:
        if self.is_killed or not self.living:
            return
        self._account()
        self.is_killed = True
        self._update()
        self.world.after(0.0005 + self.plan.dies_slowly_seconds, self._killed)

    def stop(self) -> None:
        if not self.is_stopped:
            self._account()
            self.is_stopped = True
            self._update()

    def go_on(self) -> None:
        if self.is_stopped:
            self._account()
            self.is_stopped = False
            self._update()

    def vanish(self) -> None:
        """The power went."""
        self._account()
        self.main_lives = self.leftover_lives = False
        self._update()

    def machine_changed(self) -> None:
        if not self.machine.is_awake and not self.is_stopped:
            self._asleep_since = self.world.now
        elif self._asleep_since is not None:
            self.slept_seconds += self.world.now - self._asleep_since
            self._asleep_since = None
        self._account()
        self._update()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Book what ran until now."""
        if not self.is_active:
            return
        ran = self.world.now - self._active_since
        self._active_since = self.world.now
        if self.main_lives:
            if self.is_executed:
                self.ran_seconds += ran
                self._left -= ran
            else:
                self._exec_left -= ran
            if self._term_left is not None:
                self._term_left -= ran
        else:
            self._leftover_left -= ran

    def _update(self) -> None:
        is_active = self.living > 0 and not self.is_stopped and not self.is_killed and self.machine.is_running
        began = is_active and not self.is_active
        self.is_active = is_active
        self._active_since = self.world.now
        self._turn += 1
        if is_active:
            turn = self._turn
            self.world.after(max(0.0, self._due()), lambda: self._due_came(turn))
        if began:
            self.watcher.tree_runs(self)

    def _due(self) -> float:
        if not self.main_lives:
            return self._leftover_left
        left = self._left if self.is_executed else self._exec_left
        return left if self._term_left is None else min(left, self._term_left)

    def _due_came(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._account()
        if not self.main_lives:
            self.leftover_lives = False
        elif self._term_left is not None and self._term_left <= (self._left if self.is_executed else self._exec_left):
            self._main_ends(
                (self.plan.term_code, None) if self.plan.term_code is not None and self.is_executed else (None, TERM)
            )
        elif not self.is_executed:
            self.is_executed = True
            self.on_executed()
        else:
            self._main_ends((None, self.plan.signal) if self.plan.signal else (self.plan.code, None))
        self._update()

    def _main_ends(self, end: tuple[int | None, int | None]) -> None:
        self.main_lives = False
        self.main_end = end
        self.leftover_lives = self.plan.leftover_seconds > 0 and self._term_left is None
        self.on_main_end()

    def _killed(self) -> None:
        if not self.living:
            return
        had_main = self.main_lives
        self.main_lives = self.leftover_lives = False
        if had_main:
            self.main_end = (None, KILL)
        self._update()
        if had_main:
            self.on_main_end()
