"""What a worker shows of itself: /metrics and /healthz at a place of the settings, in the worker's own loop.

Rules
- Off unless `worker_bind` is set; prometheus-client is loaded only then.
- None of it may stop the worker: a failure is a line of the log.
- The spool is measured in a thread, at most once a minute; while it is, the figures before count.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING

import trio

from kueue import clock, log
from kueue.http import Page, Site
from kueue.worker.body import Body

if TYPE_CHECKING:
    from kueue.exposition import Program
    from kueue.worker.metrics import Disk

DISK_SECONDS = 60.0
"""Between two looks at the spool, which may hold tens of thousands of files."""
LOOK_SECONDS = 2.0

_log = log.logger("worker.metrics")


class Window:
    """The figures of one worker. `run` serves them."""

    def __init__(self, body: Body, place: str) -> None:
        """`place`: ``host:port``; empty: nowhere."""
        self._body = body
        self._place = place
        self._changed = trio.Event()
        self._program: Program | None = None
        self._disk: Disk | None = None
        self._measured_at = float("-inf")
        self._threads = trio.CapacityLimiter(1)
        self._site = Site({"/metrics": self.metrics, "/healthz": self.health, "/": self.index})

    def renew(self, place: str) -> None:
        """Show them at `place` from now on."""
        if place != self._place:
            self._place = place
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled, or until a bug of ours: the worker goes on without figures then."""
        try:
            while True:
                self._changed = trio.Event()
                async with trio.open_nursery() as nursery:
                    if self._place:
                        await trio.to_thread.run_sync(import_module, "kueue.worker.metrics")
                        nursery.start_soon(self._site.listen, self._place, "/metrics and /healthz")
                    await self._changed.wait()
                    nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001  logged whole; jobs must go on
            _log.exception("a bug: there are no figures until the next start; the worker goes on")

    async def metrics(self, accept: str) -> Page:
        """All figures, in the format that was asked for."""
        from kueue.exposition import Program, rendered  # noqa: PLC0415  loaded by `run`, if at all
        from kueue.worker.metrics import Sight, families  # noqa: PLC0415  as above

        if self._program is None:
            self._program = Program()
        await self._measure()
        found = families(Sight(self._body, clock.boottime(), self._disk))
        kind, body = await rendered([*found, *self._program.families()], accept)
        return Page(body, kind)

    async def health(self, _: str) -> Page:
        """200 while the server has taken the worker in, else 503."""
        await trio.lowlevel.checkpoint()
        is_good = self._body.agent.is_welcome
        return Page(
            json.dumps({"status": "ok" if is_good else "not connected"}).encode() + b"\n",
            "application/json",
            HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def index(self, _: str) -> Page:
        """For the person who looks whether anything is there."""
        await trio.lowlevel.checkpoint()
        return Page(b"kueue_worker: see /metrics and /healthz\n")

    async def _measure(self) -> None:
        from kueue.worker.metrics import look_at_disk  # noqa: PLC0415  as above

        if clock.steady() - self._measured_at < DISK_SECONDS:
            return
        self._measured_at = clock.steady()
        with trio.move_on_after(LOOK_SECONDS):
            self._disk = await trio.to_thread.run_sync(
                look_at_disk, self._body.spool.root, abandon_on_cancel=True, limiter=self._threads
            )
