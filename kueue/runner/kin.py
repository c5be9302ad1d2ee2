"""Who belongs to an attempt without carrying its mark: its main process, descendants, and the sessions they lead.

A job may change its own limits, and with them the mark. Then this identifies, in this order:

- the main process, by number and start time;
- whoever was once found to belong, by number and start time: also when its parent has ended since;
- the children of those, as long as the parent lives (an orphan's parent is the spawner, and says nothing);
- the sessions of those: nobody can join a session (setsid(2)), one is born into it. A process group is within one.

Rules
- A session is named by the number of the process that made it, and the kernel gives that number to nobody as long as
  one process is in that session. So it is theirs if its maker still lives, if one in it was born while the number was
  certainly the maker's, or if one in it is known.
- Times are clock ticks. That number and start time name one process, and that "born in the tick in which the maker was
  reaped" is before it, rests on one thing: a number comes again only after all others had their turn, see pid_max in
  proc(5), and no machine starts that many processes in a tick.
- Not found without mark and cgroup: who left the session and lost its parent before anybody looked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kueue.runner.tree import Status

TICKS = os.sysconf("SC_CLK_TCK")
MANY = 4096  # dead members remembered for the sessions they made; a job that makes more is not a job of people


class Kin:
    """The processes of one attempt that were identified once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        """Number → start time, and until when the number was certainly its own (both in clock ticks after boot)."""

    def learn(self, pid: int, start: int, until: float = 0.0) -> None:
        """`until`: boottime at which it had not been reaped."""
        held = max(start, int(until * TICKS))
        before = self._known.get(pid)
        if before is not None and before[0] == start:
            held = max(held, before[1])
        self._known[pid] = (start, held)

    def knows(self, pid: int, start: int) -> bool:
        known = self._known.get(pid)
        return known is not None and known[0] == start

    def only(self) -> tuple[int, int, int] | None:
        """Number, start time and until when it was not reaped, if no more than one process was ever found."""
        if len(self._known) != 1:
            return None
        ((pid, (start, held)),) = self._known.items()
        return pid, start, held

    @property
    def eldest(self) -> int:
        """Nobody who was born before belongs here."""
        return min(start for start, _ in self._known.values())

    def gather(self, sure: Mapping[int, Status], others: Mapping[int, Status], now: float) -> set[int]:
        """Which of the `others` belong to the tree as well; `sure`: those identified by mark or cgroup.

        Of both, number → state as read after `now` (boottime); the dead that are not reaped yet are among them.
        """
        present = set(sure)
        for pid, (start, _) in self._known.items():
            found = others.get(pid)
            if found is not None and found.start == start:
                present.add(pid)
        sessions = {state.session for pid in present if (state := sure.get(pid) or others.get(pid))}
        sessions &= self._known.keys() | present
        rest = {pid: state for pid, state in others.items() if pid not in present}
        grows = True
        while grows:
            grows = False
            for pid, state in list(rest.items()):
                if state.parent in present or state.session in sessions or self._is_early(state):
                    del rest[pid]
                    present.add(pid)
                    if state.session in present or state.session in self._known:
                        sessions.add(state.session)
                    grows = True
        for pid in present:
            self.learn(pid, (sure.get(pid) or others[pid]).start, now)
        if len(self._known) > MANY:
            self._known = {pid: known for pid, known in self._known.items() if pid in present or pid in sessions}
        return present - sure.keys()

    def _is_early(self, state: Status) -> bool:
        """Was it born into a session whose number belonged to one of ours at that time?"""
        maker = self._known.get(state.session)
        return maker is not None and maker[0] <= state.start <= maker[1]
