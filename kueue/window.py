"""What a long-running program shows of itself: /metrics and /healthz at a place of the settings, in its own loop.

Rules
- None of it may stop the program: a failure is a line of the log.
- prometheus-client is loaded only if somebody wants figures.
- Changed settings count at once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import trio

from kueue import log, threads
from kueue.http import Page, Site

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kueue.exposition import Program

S = TypeVar("S")


class Window(ABC, Generic[S]):
    """The figures of one program under the settings `S`. `run` serves them."""

    program: ClassVar[str]
    module: ClassVar[str]
    """Makes the figures; it takes 60 ms to load, and is loaded in a thread."""
    what_goes_on: ClassVar[str]
    """Without figures, after a bug: ``the queue``."""

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self._changed = trio.Event()
        self._of_process: Program | None = None
        self._site = Site({"/metrics": self.metrics, "/healthz": self.health, "/": self.index})

    @abstractmethod
    async def families(self) -> Sequence[Metric]:
        """The figures as they are now, without those of the process."""

    @abstractmethod
    def state(self) -> str:
        """``ok``, or the word that says why all is not well."""

    @abstractmethod
    def place(self) -> str:
        """``host:port`` where the pages are served; empty: nowhere."""

    def wants_figures(self) -> bool:
        """Do these settings ask for any?"""
        return bool(self.place())

    def open(self, nursery: trio.Nursery) -> None:
        """Starts what else belongs to these settings; ended when they change."""

    def renew(self, settings: S) -> None:
        """Make these settings count from now on."""
        if settings != self.settings:
            self.settings = settings
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled, or until a bug of ours: the program goes on without figures then."""
        try:
            while True:
                self._changed = trio.Event()
                async with trio.open_nursery() as nursery:
                    if self.wants_figures():
                        # In a thread: heartbeats are answered meanwhile.
                        await threads.patiently(import_module, self.module)
                    if self.place():
                        nursery.start_soon(self._site.listen, self.place(), "/metrics and /healthz")
                    self.open(nursery)
                    await self._changed.wait()
                    nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001  logged whole; what the program is there for must go on
            log.logger(f"{self.program.removeprefix('kueue_')}.metrics").exception(
                "a bug: there are no figures until the next start; %s goes on", self.what_goes_on
            )

    async def metrics(self, accept: str) -> Page:
        """All figures, in the format that was asked for."""
        from kueue.exposition import Program, rendered  # noqa: PLC0415  loaded by `run`, if at all

        if self._of_process is None:
            self._of_process = Program()
        kind, body = await rendered([*await self.families(), *self._of_process.families()], accept)
        return Page(body, kind)

    async def health(self, _: str) -> Page:
        """200 if all is well, else 503; the word says why."""
        await trio.lowlevel.checkpoint()
        word = self.state()
        status = HTTPStatus.OK if word == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return Page(json.dumps({"status": word}).encode() + b"\n", "application/json", status)

    async def index(self, _: str) -> Page:
        """For the person who looks whether anything is there."""
        await trio.lowlevel.checkpoint()
        return Page(f"{self.program}: see /metrics and /healthz\n".encode())
