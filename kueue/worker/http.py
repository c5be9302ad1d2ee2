"""What a worker shows of itself in its window; it has none unless `worker_bind` is set.

Rules
- The spool is measured in a thread, at most once a minute; while it is, the figures before count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kueue import clock, threads
from kueue.window import Window
from kueue.worker.body import Body

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kueue.worker.metrics import Disk

DISK_SECONDS = 60.0
"""Between two looks at the spool, which may hold tens of thousands of files."""
LOOK_SECONDS = 2.0


class WorkerWindow(Window[str]):
    """The figures of one worker; its settings are the place alone."""

    program = "kueue_worker"
    module = "kueue.worker.metrics"
    what_goes_on = "the worker"

    def __init__(self, body: Body, place: str) -> None:
        """`place`: ``host:port``; empty: nowhere."""
        super().__init__(place)
        self._body = body
        self._disk: Disk | None = None
        self._measured_at = float("-inf")
        self._threads = trio.CapacityLimiter(1)

    def place(self) -> str:
        return self.settings

    def state(self) -> str:
        """``ok`` while the server has taken the worker in."""
        return "ok" if self._body.agent.is_welcome else "not connected"

    async def families(self) -> list[Metric]:
        from kueue.worker.metrics import Sight, families  # noqa: PLC0415  loaded by `run`, if at all

        await self._measure()
        return families(Sight(self._body, clock.boottime(), self._disk))

    async def _measure(self) -> None:
        from kueue.worker.metrics import look_at_disk  # noqa: PLC0415  as above

        if clock.steady() - self._measured_at < DISK_SECONDS:
            return
        self._measured_at = clock.steady()
        with trio.move_on_after(LOOK_SECONDS):
            self._disk = await threads.patiently(
                look_at_disk, self._body.spool.root, abandon_on_cancel=True, limiter=self._threads
            )
