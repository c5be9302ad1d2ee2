"""The mirror: what a spawner has to know to go on as keeper.

Where the lease ends is not in it, see `shared`. It is sent with each turn that changes it, before a signal, and before
records are dropped. An order to start goes before its row: then there is a record, or what the spawner itself has made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kueue.runner.wire import line_of

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper

OURSELVES = -1
"""Where the number of an offer may stand: the keeper's own affairs. Offers count from 0."""


class Mirror:
    """That of one keeper, held by its current spawner."""

    def __init__(self, keeper: Keeper) -> None:
        self.changed: set[int] = set()
        """Offers whose mirror is old; `OURSELVES` for what is not about one attempt."""
        self._told = (True, True)
        """`lapsed` and `pause_told` of the policy. All rows go with them: what is paused by one of both and not by the
        other would never go on, or never be paused.
        """
        self._keeper = keeper

    def send(self) -> None:
        """Send what has changed, if there is a spawner that can read it."""
        spawner = self._keeper.spawners.current
        if self._told != self._lapse:
            self.changed.update(self._keeper.cares, {OURSELVES})
        if not self.changed or spawner is None or not spawner.lines.open:
            return
        changed, self.changed = self.changed, set()  # a signal that comes meanwhile changes more
        spawner.lines.put(line_of({"do": "mirror", **self.of(changed)}))
        spawner.lines.flush()

    @property
    def _lapse(self) -> tuple[bool, bool]:
        return (self._keeper.policy.lapsed, self._keeper.policy.pause_told)

    def of(self, offers: set[int]) -> dict[str, Any]:
        """What a successor has to know of these, as in `changed`."""
        rows: dict[str, Any] = {}
        for offer in offers - {OURSELVES}:
            care = self._keeper.cares.get(offer)
            rows[str(offer)] = care and {"policy": self._keeper.policy.row(offer), "care": care.mirror()}
        policy = self._keeper.policy
        self._told = self._lapse
        return {
            "rows": rows,
            "lapsed": policy.lapsed,
            "pause_told": policy.pause_told,
            "shut_down": [policy.shut_down_from, policy.shut_down_until] if policy.is_leaving else None,
            "server_lock": [
                self._keeper.server_watch.path.encode("utf-8", "surrogateescape").hex(),
                self._keeper.server_watch.seconds,
            ],
            **({"reviver": self._keeper.reviver.mirror()} if OURSELVES in offers else {}),
        }
