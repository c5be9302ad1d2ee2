"""One simulated lab from a seed: built, shaken, left in peace, judged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kueue.core import invariants
from kueue.core.settings import Settings
from kueue.model import MachineTotals
from tests.sim.network import Network
from tests.sim.oracle import Oracle, Violation
from tests.sim.people import People
from tests.sim.processes import Plan
from tests.sim.service import Service
from tests.sim.weather import FAULTS, Weather
from tests.sim.workstation import Quirks, Workstation
from tests.sim.world import Machine, World

PATIENCE_SECONDS = 1500.0
"""Simulated time after the last fault in which everything must end; what is still to run is far less."""
STORY_LINES = 70


@dataclass
class Result:
    """How the world of one seed went."""

    seed: int
    violation: Violation | None
    steps: int
    seconds: float
    """Simulated."""
    jobs: int
    attempts: int
    chained_starts: int
    chained_returns: int
    digest: str
    story: str = ""


class Lab:
    """Everything in one place; see the modules of its parts."""

    def __init__(self, seed: int, weights: Mapping[str, int] = FAULTS, quirks: Quirks | None = None) -> None:
        world = self.world = World(seed)
        rng = world.rng
        self.timeout = rng.choice((10.0, 10.0, 15.0, 30.0, 60.0))
        self.network = Network(world)
        self.oracle = Oracle(world)
        self.plans: dict[str, Plan] = {}
        self.server_machine = Machine(world, "server")
        self.quirks = quirks or Quirks()
        counters = {"licence": 2}
        slots = rng.choice((3, 6, 100))
        settings = Settings(
            worker_timeout_seconds=self.timeout,
            job_offer_timeout_seconds=rng.choice((2.0, 5.0, 20.0)),
            global_max_parallel_jobs=slots,
            counters=counters,
        )
        self.oracle.counters = counters
        self.oracle.global_slots = slots
        self.service = Service(world, self.network, self.server_machine, settings, self.oracle, self.quirks)
        totals = MachineTotals(slots=4, cores=4, ram_mb=1000, named=(("gpu", 2),))
        self.stations = [
            Workstation(world, self.network, f"w{number}", totals, self.plans, self.oracle, self.quirks)
            for number in range(rng.randint(2, 4))
        ]
        self.oracle.stations = {station.name: station for station in self.stations}
        self.people = People(world, self.network, self.oracle)
        self.weather = Weather(self, dict(weights))

    def run(self) -> None:
        """Raises `Violation`."""
        world = self.world
        self.service.start()
        for station in self.stations:
            world.after(world.between(0.0, 2.0), station.start_worker)
        self.weather.plan()
        world.run(self.weather.until)
        self.weather.clear()
        if not world.run(world.now + PATIENCE_SECONDS, self._is_quiet):
            self.oracle.fail("liveness", self._what_is_left(), next(iter(self._left()), None))
        self._judge()

    def _left(self) -> list[int]:
        return [job for job in self.oracle.expected if job not in self.oracle.done]

    def _is_quiet(self) -> bool:
        engine = self.service.engine
        return (
            engine is not None
            and not engine.state.jobs
            and not self._left()
            and not self.people.is_waiting
            and not any(station.spool for station in self.stations)
        )

    def _what_is_left(self) -> str:
        engine = self.service.engine
        parts = [f"jobs {self._left()} do not end"]
        if engine is not None:
            parts += [
                f"job {job.id} is {job.state.value}, attempt {job.attempt and job.attempt.offer}"
                for job in engine.state.jobs.values()
            ]
        if self.people.is_waiting:
            parts += [f"no answer to {command.question}" for command in self.people.open]
        parts += [f"{station.name} keeps {sorted(station.spool)}" for station in self.stations if station.spool]
        return "; ".join(parts)

    def _judge(self) -> None:
        engine = self.service.engine
        assert engine is not None
        if self.service.checks_invariants:
            invariants.check(engine.state)
        self.world.run(self.world.now + 60.0, lambda: self.service.is_at_rest)
        if self.service.checks_invariants:
            self.service.compare_replay()
        stored = {row.id: row for row in self.service.store.finished(limit=10_000)}
        self.oracle.over(stored)

    def story(self, job: int | None) -> str:
        told = [entry for entry in self.world.story if job is None or entry[1] in {None, job}]
        return "\n".join(f"{at:10.3f}  {text}" for at, _, text in told[-STORY_LINES:])

    def digest(self) -> str:
        """Equal for equal runs."""
        text = f"{self.world.steps} {list(self.world.story)} {sorted(self.oracle.done.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_seed(
    seed: int,
    *,
    weights: Mapping[str, int] = FAULTS,
    quirks: Quirks | None = None,
    prepare: Callable[[Lab], None] = lambda _: None,
) -> Result:
    """Run one world. Never raises for a broken promise: see `Result.violation`."""
    lab = Lab(seed, weights, quirks)
    prepare(lab)
    violation: Violation | None = None
    try:
        lab.run()
    except Violation as found:
        violation = found
    except Exception as error:  # noqa: BLE001 - the agent or the policy raised what it never should
        if lab.oracle.violation is not None:
            violation = lab.oracle.violation
        else:
            violation = Violation("raised", f"at {lab.world.now:.3f} s: {type(error).__name__}: {error}", None)
            violation.__cause__ = error
    return Result(
        seed=seed,
        violation=violation,
        steps=lab.world.steps,
        seconds=lab.world.now,
        jobs=len(lab.oracle.ranges),
        attempts=len(lab.oracle.trees),
        chained_starts=lab.oracle.chained_starts,
        chained_returns=lab.oracle.chained_returns,
        digest=lab.digest(),
        story=lab.story(violation.job) if violation is not None else "",
    )
