"""Main processes whose spawner has died: finds them, and learns how they end.

They are children of the keeper now, or of somebody else (an older spawner that is mute, init): then there is a
descriptor that says when they end, and a record or the kernel that says how.
"""

from __future__ import annotations

import os
import selectors
from typing import TYPE_CHECKING

from kueue.runner import cgroup
from kueue.runner.care import Care
from kueue.runner.children import boottime, ended_child, ended_elsewhere, has_ended, take
from kueue.runner.mains import read_mains
from kueue.runner.spool import MAIN, Record
from kueue.runner.tree import is_same, status

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper


class Orphans:
    """Those of one keeper, which is told what became of them."""

    def __init__(self, keeper: Keeper) -> None:
        self.children: dict[int, int] = {}
        """Main processes that are the keeper's own children → offer."""
        self._keeper = keeper
        self._watched: dict[int, int] = {}
        """Descriptor of a main process that somebody else reaps → offer."""
        self._unexplained: dict[int, int] = {}
        """Offer → descriptor of a main process that has ended under somebody else; its status may come yet."""

    def serve(self, ready: set[int]) -> None:
        """Handle what has come on these descriptors."""
        for descriptor in ready & self._watched.keys():
            self._watched_ended(descriptor)

    def reap(self) -> None:
        while (pid := ended_child()) is not None:
            if pid not in self.children:
                # It may be a main process whose spawner has died. Then the kernel shows that one as dead too, and it
                # must be heard first: reaped as nobody's, the process would seem never to have been made.
                dead = [child for child in self._keeper.spawners.all if has_ended(child.pid)]
                if dead:
                    for child in dead:
                        take(child.pid, None, self._keeper.spool)
                        self._keeper.course.lost_spawner(child)
                    continue
            ended = take(pid, self.children.pop(pid, None), self._keeper.spool)
            care = self._keeper.cares.get(ended.offer) if ended.offer is not None else None
            if care is not None:
                self._keeper.course.exited(care, ended.record)

    def find(self, care: Care, main: Record | None = None) -> None:
        """Find the main process of an attempt whose spawner died, or how it ended. `main`: how, if that is known."""
        attempt = self._keeper.policy.attempts[care.offer]
        main = main or self._keeper.spool.read(care.offer, MAIN)
        noted = read_mains(self._keeper.rundir.path).get(care.offer)
        if main is not None:
            care.pid = main["pid"]
            if noted is not None and noted[0] == care.pid:
                care.start = noted[1]
            care.began(main["at"], main["wall"])
            self._keeper.course.exited(care, main)
            return
        if care.pid is None:
            found = noted if noted is not None and is_same(*noted) else self._oldest(care)
            if found is not None:
                self._keeper.course.forked(care, *found)
            elif care.line and attempt.stop is None:
                self._keeper.course.order(
                    care.offer, self._keeper.policy.deadline
                )  # certain: its process was never made
                return
            else:
                self._keeper.do(
                    self._keeper.policy.start_refused(
                        care.offer, "its spawner died before the process was made", boottime()
                    )
                )
                return
        if not care.executed:
            care.executed = True
            self._keeper.do(self._keeper.policy.started(care.offer, care.started_at or boottime()))
        assert care.pid is not None
        now = status(care.pid)
        if now is not None and now.parent == os.getpid():
            self.children[care.pid] = care.offer
        else:
            self._watch(care)

    def _oldest(self, care: Care) -> tuple[int, int] | None:
        """Number and start time of the first of its processes, the main one; also if it is dead and not reaped."""
        found = []
        marked = self._keeper.scanner.pass_over(care.tag.__eq__).get(care.tag, ())
        for pid in {*marked, *cgroup.members(care.cgroup)} - self._keeper.scanner.spared:
            now = status(pid)
            if now is not None:
                found.append((now.start, pid))
        return min(found)[::-1] if found else None

    def _watch(self, care: Care) -> None:
        """Learn of the end of a process that is not our child."""
        try:
            descriptor = os.pidfd_open(care.pid or 0)
        except (OSError, ValueError):
            self.find_end(care)
            return
        if not is_same(care.pid or 0, care.start):
            os.close(descriptor)
            self.find_end(care)
            return
        self._watched[descriptor] = care.offer
        self._keeper.selector.register(descriptor, selectors.EVENT_READ)

    def _watched_ended(self, descriptor: int) -> None:
        offer = self._watched.pop(descriptor)
        self._keeper.selector.unregister(descriptor)
        self._unexplained[offer] = descriptor
        if offer in self._keeper.cares:
            self.find_end(self._keeper.cares[offer])
        else:
            self._explained(offer)

    def find_end(self, care: Care) -> None:
        """The main process has ended under somebody else: read what that one wrote down, or ask the kernel."""
        attempt = self._keeper.policy.attempts.get(care.offer)
        if attempt is None or not attempt.lives or attempt.main_ended:
            self._explained(care.offer)
            return
        main = self._keeper.spool.read(care.offer, MAIN)
        if main is None and care.pid is not None and is_same(care.pid, care.start):
            self._keeper.once_more(care.offer)  # not reaped yet
            return
        if main is None and care.offer in self._unexplained:
            main = ended_elsewhere(care.pid or 0, self._unexplained[care.offer])
            if main is not None:
                self._keeper.spool.write_main(care.offer, main)
        self._explained(care.offer)
        if main is not None:
            self._keeper.course.exited(care, main)
        else:
            self._keeper.do(self._keeper.policy.exited(care.offer, None, None, boottime()))

    def _explained(self, offer: int) -> None:
        descriptor = self._unexplained.pop(offer, None)
        if descriptor is not None:
            os.close(descriptor)
