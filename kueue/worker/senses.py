"""How busy the machine is, and what of that our own jobs make: measured now and then, and told to the agent."""

from __future__ import annotations

import math

import trio

from kueue import clock, threads
from kueue.worker import machine
from kueue.worker.agent import Agent
from kueue.worker.ghost import STEP_SECONDS, LoadOfJobs
from kueue.worker.machine import MachineSettings, Ours
from kueue.worker.orders import Ended
from kueue.worker.processes import Trees

FRESH_SECONDS = 0.1
"""A measurement so young is used again: a burst of offers must not become a burst of looks at the kernel."""


class Senses:
    """`spool`: where the runners keep the records of the attempts."""

    def __init__(self, agent: Agent, settings: MachineSettings, spool: str) -> None:
        self._agent = agent
        self._settings = settings
        self._load = LoadOfJobs()
        self._ours = Ours()
        self._use = Trees(spool)
        self._measured_at = -math.inf
        self._busy = trio.Event()

    def measure(self) -> None:
        """Tell the agent how busy the machine is, unless it was told just now."""
        now = clock.steady()
        if now - self._measured_at < FRESH_SECONDS:
            return
        self._measured_at = now
        figures = machine.measure()
        self._ours = Ours(self._load.ghost, self._load.running, self._ours.ram_mb)
        self._agent.measured(machine.load(self._settings, figures, self._ours), machine.totals(self._settings, figures))

    def reconfigure(self, settings: MachineSettings) -> None:
        """New limits, from now on."""
        self._settings = settings
        self._measured_at = -math.inf
        self.measure()

    def ended(self, event: Ended) -> None:
        """To be called before the agent hears of it."""
        if self._runs(event.offer):
            self._load.ended(event.offer, event.end.run_seconds, event.end.cpu_seconds)

    def stir(self) -> None:
        """There may be jobs to follow."""
        self._busy.set()
        self._busy = trio.Event()

    async def sample(self) -> None:
        """The kernel's step, for our own jobs; for ever."""
        before: dict[int, float] = {}
        then = clock.steady()
        while True:
            if not self._agent.attempts and self._load.ghost == 0.0:
                await self._busy.wait()  # an idle worker sleeps
                then = clock.steady()
            await trio.sleep(STEP_SECONDS)
            offers = [one.offer for one in self._agent.attempts.values() if not one.is_over]
            use = await threads.patiently(self._use.use, offers) if offers else {}
            now = clock.steady()
            cores = {
                offer: max(0.0, one.cpu_seconds - before.get(offer, 0.0)) / max(now - then, 1e-3)
                for offer, one in use.items()
                if one.processes and self._runs(offer)
            }
            self._load.step(cores)
            self._ours = Ours(self._load.ghost, self._load.running, sum(one.ram_mb for one in use.values()))
            before, then = {offer: one.cpu_seconds for offer, one in use.items()}, now

    def _runs(self, offer: int) -> bool:
        attempt = self._agent.attempts.get(offer)
        return attempt is not None and not attempt.is_over
