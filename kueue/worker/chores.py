"""What has to be done again and again for attempts: their output kept small, old output dropped, stopped trees held.

All of it may block on the disk or on processes, so it runs in threads, one at a time for each chore.
"""

from __future__ import annotations

from collections.abc import Collection

import trio

from kueue import log, threads
from kueue.worker.agent import Agent
from kueue.worker.processes import Trees
from kueue.worker.spool import Spool

TRIM_SECONDS = 1.0
CLEAN_SECONDS = 600.0
UNTOLD_SECONDS = 1.0
"""Between two looks whether a server has told the age at which output is dropped."""
HELD_SECONDS = 1.0
"""Between two looks at trees that the worker itself stopped: the kernel continues orphaned process groups."""

_log = log.logger("worker")


class Chores:
    """`tasks` run for ever."""

    def __init__(self, agent: Agent, spool: Spool) -> None:
        self.tasks = (self._trim, self._clean, self._hold)
        self._agent = agent
        self._spool = spool
        self._guard = Trees(spool.root)
        self._guarding = trio.Lock()
        """A pass that stops must not end after the one that lets go: what it stopped would never go on."""
        self._held: set[int] = set()
        self._holding = trio.Event()
        self._busy = trio.Event()
        self._told = ""

    def stir(self) -> None:
        """There may be attempts to look after."""
        self._busy.set()
        self._busy = trio.Event()

    def hold(self, offers: Collection[int]) -> None:
        """Stop every process of these attempts and keep them stopped."""
        self._held.update(offers)
        self._holding.set()

    def release(self, offers: Collection[int]) -> None:
        """They are not stopped again; `let_go` has to follow."""
        self._held.difference_update(offers)

    async def let_go(self, offers: tuple[int, ...]) -> None:
        """Continue what `hold` stopped."""
        async with self._guarding:
            still = [offer for offer in offers if offer not in self._held]
            await threads.patiently(self._guard.let_go, still)

    def tell_remark(self) -> None:
        """Say, once, what is wrong with the spool."""
        if self._spool.remark and self._spool.remark != self._told:
            self._told = self._spool.remark
            _log.warning("%s", self._told)

    async def _trim(self) -> None:
        while True:
            running = [one.offer for one in self._agent.attempts.values() if not one.is_over]
            if running:
                await threads.patiently(self._spool.trim, running)
                self.tell_remark()
                await trio.sleep(TRIM_SECONDS)
            else:
                await self._busy.wait()

    async def _clean(self) -> None:
        while True:
            age = self._agent.cleanup_after_seconds
            if age is not None:
                dropped = await threads.patiently(self._spool.clean, age, set(self._agent.attempts))
                if dropped:
                    _log.info("dropped the kept output of %d attempts by age", dropped)
            await trio.sleep(CLEAN_SECONDS if age is not None else UNTOLD_SECONDS)

    async def _hold(self) -> None:
        while True:
            await self._holding.wait()
            if not self._held:
                self._holding = trio.Event()
                continue
            async with self._guarding:
                await threads.patiently(self._guard.stop, set(self._held))
            self._held &= {one.offer for one in self._agent.attempts.values() if not one.is_over}
            await trio.sleep(HELD_SECONDS)
