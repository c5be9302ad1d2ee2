"""What must not run without a lease, as a spawner knows it from mirror and own starts, and how it is stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from kueue.runner.tree import Scanner

Main: TypeAlias = tuple[int, int, float]
"""Number and start time of a main process, and until when it was not reaped, see `Scanner.know_main`."""


class Revocable:
    """The trees of those attempts that the server may give away, and that live or may come into being."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[int, str]] = {}
        """Offer → tag, and directory of its cgroup (empty: it has none)."""
        self._may_leave: set[int] = set()
        """Offers whose background processes are nobody's to stop."""
        self._ended: set[int] = set()
        """Those whose main process has ended and whose keeper does not know it yet."""
        self._scanner: Scanner | None = None
        """Kept from one pass to the next: it remembers who was found to belong."""

    def __bool__(self) -> bool:
        return bool(self._trees)

    def made(self, offer: int, tag: int, cgroup: str, order: Mapping[str, Any]) -> None:
        """A process was made for it. Its row comes behind the `order`."""
        if order.get("on_lost", "rerun") == "rerun":
            self._trees[offer] = (tag, cgroup)
            if order.get("keep_background"):
                self._may_leave.add(offer)

    def main_ended(self, offer: int) -> None:
        """What is left of it are its background processes."""
        self._ended.add(offer)
        if offer in self._may_leave:
            self._trees.pop(offer, None)

    def told(self, offer: int, row: Mapping[str, Any] | None) -> None:
        """Its row in the mirror; None: there is no such attempt any more."""
        policy = row["policy"] if row is not None else None
        self._may_leave.discard(offer)
        if policy is None or policy["main_ended"]:
            self._ended.discard(offer)
        elif policy["terms"]["keep_background"] and policy["stop"] is None:
            self._may_leave.add(offer)
        if row is not None and policy is not None and must_stand(policy, has_ended=offer in self._ended):
            self._trees[offer] = (row["care"]["tag"], row["care"]["cgroup"])
        else:
            self._trees.pop(offer, None)

    def stop(self, mains: Mapping[int, Main]) -> int:
        """One pass. Returns how many of their processes still ran.

        `mains`: by offer, as far as they are known.
        """
        if self._scanner is None:
            self._scanner = Scanner()
            self._scanner.spared = {os.getpid()}  # it carries the tag of each child that it makes
        scanner, running = self._scanner, 0
        for offer, (tag, cgroup) in self._trees.items():
            if cgroup:
                scanner.cgroups[tag] = cgroup
            if offer in mains:
                scanner.know_main(tag, *mains[offer])
            running += scanner.pause_tree(tag).running
        return running

    def done(self) -> None:
        """No further pass follows."""
        self._scanner = None


def must_stand(policy: Mapping[str, Any], *, has_ended: bool = False) -> bool:
    """`policy`: an attempt's row, see `Policy.row`. As there, but what is being stopped or killed stands still, too.

    `has_ended`: its main process, by what is younger than the row.
    """
    terms = policy["terms"]
    is_left = (has_ended or policy["main_ended"]) and terms["keep_background"] and policy["stop"] is None
    return policy["phase"] in ("starting", "running") and terms["on_lost"] == "rerun" and not is_left
