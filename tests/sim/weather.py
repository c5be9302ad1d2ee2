"""What befalls a world: jobs of all kinds, and faults of all kinds, drawn from its seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from kueue.errors import DiskFull
from kueue.model import JobRange, MachineLoad, Payload, Place, Request, Terms
from tests.sim.network import lose
from tests.sim.processes import Plan

if TYPE_CHECKING:
    from tests.sim.lab import Lab
    from tests.sim.service import Backup
    from tests.sim.workstation import Workstation

FAULTS = {
    "cut": 6,
    "slow": 2,
    "slow, then cut": 4,
    "half open": 3,
    "reset": 2,
    "hello held up": 2,
    "server killed": 5,
    "server restarted": 2,
    "server stopped": 3,
    "server sleeps": 2,
    "disk full": 2,
    "slow disk": 2,
    "reload": 3,
    "worker killed": 4,
    "worker stopped": 4,
    "worker restarted": 2,
    "runner killed": 2,
    "keeper killed": 2,
    "spawner killed": 2,
    "runner stopped": 3,
    "runner stopped, session lost": 2,
    "power": 2,
    "sleep": 3,
    "slow spawner": 2,
    "busy": 1,
    "wall": 1,
    "offline": 1,
    "cancel": 5,
    "hold": 2,
    "restored backup": 1,
    "runner and worker stopped": 0,
}
"""Fault → weight. Those of weight 0 come by a chance of their own: the other worlds are what they were before."""


class Weather:
    """Plans everything at the start of a world."""

    def __init__(self, lab: Lab, weights: dict[str, int]) -> None:
        self.lab = lab
        self.world = lab.world
        self.rng = lab.world.rng
        self.weights = weights
        self._backup: Backup | None = None
        """One a world: what a second one would undo of the first is nobody's to judge."""
        self.until = self.world.between(40.0, 130.0) + lab.timeout

    # --- work --------------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        for _ in range(self.rng.randint(2, 6)):
            self.world.at(self.world.between(0.5, 0.7 * self.until), self._submit)
        # By chance of their own: half of the worlds are what they were without them.
        chance = Random(f"short jobs of {self.world.seed}")
        for _ in range(chance.choice((0, 0, 1, 2))):
            self.world.at(chance.uniform(0.5, 0.7 * self.until), self._submit_short)
        for _ in range(self.rng.randint(4, 16)):
            kind = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
            at = self.world.between(3.0, 0.9 * self.until)
            self.world.at(at, lambda kind=kind: self.strike(kind))
        chance = Random(f"both guards of {self.world.seed}")
        for _ in range(chance.choice((0, 0, 1, 2)) if "runner and worker stopped" in self.weights else 0):
            at = chance.uniform(3.0, 0.9 * self.until)
            self.world.at(at, lambda: self.strike("runner and worker stopped"))

    def _submit(self) -> None:
        lab, rng = self.lab, self.rng
        ranges = []
        for _ in range(rng.randint(1, 3)):
            key = f"plan{len(lab.plans)}"
            lab.plans[key] = self._job()
            licences = (("licence", rng.randint(1, 2)),) if rng.random() < 0.3 else ()
            units = (("gpu", rng.randint(1, 2)),) if rng.random() < 0.2 else ()
            request = Request(
                slots=rng.choice((1, 1, 1, 2)),
                cores=rng.choice((1, 1, 2, 4)),
                ram_mb=rng.choice((0, 100, 400)),
                named=units,
                counters=licences,
                priority=rng.choice((5, 10, 10)),
            )
            terms = Terms(
                timeout_seconds=rng.choice((None, None, None, 4.0)),
                max_attempts=rng.choice((3, 3, 5, 1)),
                on_lost=rng.choices(("rerun", "wait", "fail"), (8, 1, 1))[0],
                keep_background=rng.random() < 0.1,
            )
            entry = JobRange(
                payload=Payload(argv=("job", key)),
                place=Place(cwd=f"/d{rng.randint(0, 1)}", pwd=key),
                request=request,
                terms=terms,
                held=rng.random() < 0.05,
                count=rng.choice((1, 1, 2)),
            )
            ranges.append(entry)
        lab.people.submit(ranges)

    def _submit_short(self) -> None:
        """More short jobs of one request than the lab has room for; among them some that turn out otherwise."""
        lab, rng = self.lab, self.rng
        request = Request(
            slots=1,
            cores=rng.choice((1, 2, 4)),
            ram_mb=100,
            named=(("gpu", 1),) if rng.random() < 0.3 else (),
            counters=(("licence", 1),) if rng.random() < 0.3 else (),
        )
        terms = Terms(max_attempts=5, on_lost=rng.choices(("rerun", "wait", "fail"), (8, 1, 1))[0])
        directory = f"/d{rng.randint(0, 1)}"
        ranges = []
        for _ in range(rng.randint(1, 4)):
            seconds = self.world.between(0.005, 0.15)
            for plan, count in (
                (Plan(run_seconds=seconds), rng.randint(8, 20)),
                (replace(self._job(), place_seconds=0.002), rng.randint(0, 2)),
            ):
                if count:
                    key = f"plan{len(lab.plans)}"
                    lab.plans[key] = plan
                    payload, place = Payload(argv=("job", key)), Place(cwd=directory, pwd=key)
                    ranges.append(JobRange(payload=payload, place=place, request=request, terms=terms, count=count))
        lab.people.submit(ranges)

    def _job(self) -> Plan:
        rng = self.rng
        seconds = rng.choice((0.05, 1.0, 5.0, 10.0, self.lab.timeout, 2 * self.lab.timeout))
        plan = Plan(run_seconds=seconds * self.world.between(0.5, 1.5), term_seconds=rng.choice((0.0, 0.01, 2.0, None)))
        match rng.randint(0, 11):
            case 0:
                return replace(plan, code=rng.randint(1, 255))
            case 1:
                return replace(plan, signal=11)
            case 2:
                return replace(plan, leftover_seconds=self.world.between(0.1, 5.0))
            case 3:
                return replace(plan, exec_seconds=self.world.between(1.0, 1.5 * self.lab.timeout))
            case 4:
                return replace(plan, cannot_start=True)
            case 5:
                return replace(plan, dies_slowly_seconds=self.world.between(0.5, 5.0))
            case 6:
                return replace(plan, place_seconds=rng.choice((1.0, 4.0, 7.0)))
            case 7:
                return replace(plan, term_code=3, term_seconds=1.0)
            case _:
                return plan

    # --- faults ------------------------------------------------------------------------------------------------------

    def _long_or_short(self) -> float:
        """Seconds on both sides of the time-out."""
        return self.lab.timeout * self.rng.choice((0.05, 0.3, 0.7, 0.95, 1.1, 1.3, 1.6, 2.5))

    def _station(self) -> Workstation:
        return self.rng.choice(self.lab.stations)

    def strike(self, kind: str) -> None:
        self.world.tell(f"*** {kind}")
        lab, world, rng = self.lab, self.world, self.rng
        station = self._station()
        link = lab.network.link(station.machine)
        service = lab.service
        match kind:
            case "cut":
                link.cut()
                world.after(self._long_or_short(), link.heal)
            case "slow":
                link.delay_seconds = (0.0, lab.timeout * world.between(0.05, 0.6))
                world.after(self._long_or_short(), link.quicken)
            case "slow, then cut":
                # Answers come late, yet before the worker gives up its connection: these are what a lease grows from.
                timeout = service.settings.worker_timeout_seconds
                link.back_seconds = (max(2.5, 0.12 * timeout), max(4.5, 0.27 * timeout))
                at = lab.timeout * world.between(0.5, 1.5)
                world.after(at, link.half_cut)
                world.after(at + world.between(0.0, 0.7 * timeout), link.cut)
                world.after(lab.timeout * world.between(2.5, 4.0), link.heal)
                world.after(lab.timeout * world.between(2.5, 4.0), link.quicken)
            case "half open":
                self._lose_session(station)
                if rng.random() < 0.5:
                    link.cut()
                    world.after(self._long_or_short(), link.heal)
            case "hello held up":
                station.cuts_at_hello = world.between(20.0, 50.0)
                self._lose_session(station)
            case "reset":
                if station._end is not None and service.program is not None:
                    for session in list(service.sessions.values()):
                        if session.end.out.to is station._end:
                            session.end.close()
                            service._left(session)
            case "server killed":
                service.crash()
                world.after(self._pause(), lambda: service.start(self._other_settings(0.3)))
            case "server restarted":
                service.stop_orderly()
                world.after(world.between(0.2, 3.0), lambda: service.start(self._other_settings(0.3)))
            case "server stopped":
                program = service.program
                if program is not None:
                    program.stop()
                    world.after(self._long_or_short(), program.go_on)
            case "server sleeps":
                lab.server_machine.sleep()
                world.after(self._long_or_short(), lab.server_machine.wake)
            case "disk full":
                service.store.fail_with = DiskFull("no space left on device")
                world.after(self._long_or_short(), self._give_room)
            case "slow disk":
                service.commit_seconds = (0.1, 3.0)
                world.after(self._long_or_short(), lambda: setattr(service, "commit_seconds", (0.001, 0.01)))
            case "reload":
                service.reload(self._other_settings(1.0))
            case "worker killed":
                station.crash_worker()
                world.after(self._pause(), station.start_worker)
            case "worker stopped":
                self._stop(station, station.worker)
            case "worker restarted":
                station.stop_worker_orderly()
                world.after(self._pause(), station.start_worker)
            case "runner killed":
                station.crash_runner()
            case "keeper killed":
                station.crash_keeper()
            case "spawner killed":
                station.crash_spawner()
            case "runner stopped":
                self._stop(station, station.runner.program if station.runner is not None else None)
            case "runner stopped, session lost":
                if station.runner is not None:
                    self._stop(station, station.runner.program, lab.timeout * world.between(1.5, 3.0))
                    world.after(world.between(1.0, 8.0), lambda: self._lose_session(station))
            case "runner and worker stopped":
                if station.runner is not None:
                    seconds = lab.timeout * world.between(1.2, 2.5)
                    self._stop(station, station.runner.program, seconds)
                    self._stop(station, station.worker, seconds * world.between(0.8, 1.2))
            case "power":
                self._power(station)
            case "sleep":
                station.machine.sleep()
                world.after(self._long_or_short(), station.machine.wake)
            case "slow spawner":
                station.slow_spawn_seconds = self._long_or_short()
                world.after(self._long_or_short(), lambda: setattr(station, "slow_spawn_seconds", 0.0))
            case "busy":
                cores = station.totals.cores
                station.load = MachineLoad(busy_cores=cores, others_busy_cores=cores)
                world.after(world.between(5.0, 40.0), lambda: setattr(station, "load", MachineLoad()))
            case "wall":
                world.wall_offset += rng.choice((-100.0, -3.0, 3.0, 100.0))
            case "offline":
                lab.people.set_node(station.name, "offline")
                world.after(world.between(2.0, 30.0), lambda: lab.people.set_node(station.name, "online"))
            case "cancel":
                if lab.people.jobs:
                    how = rng.random()
                    lab.people.remove(rng.choice(lab.people.jobs), kill=how < 0.6, force=how > 0.95)
            case "hold":
                if lab.people.jobs:
                    job = rng.choice(lab.people.jobs)
                    lab.people.hold(job)
                    world.after(world.between(1.0, 20.0), lambda: lab.people.release(job))
            case "restored backup":
                if self._backup is None:
                    self._backup = service.backup()
                    world.after(world.between(0.5, 2.5 * lab.timeout), self._restore)
            case _:
                raise AssertionError(kind)

    def _restore(self) -> None:
        if self._backup is None or self.world.now > self.until:
            return
        service = self.lab.service
        service.crash()
        service.restore(self._backup, is_readable=self.rng.random() < 0.7)
        self.world.after(self._pause(), lambda: service.start(self._other_settings(0.3)))

    def _pause(self) -> float:
        return self.rng.choice((0.2, 0.5, 2.0, 5.0, 1.2 * self.lab.timeout))

    def _give_room(self) -> None:
        self.lab.service.store.fail_with = None

    def _other_settings(self, probability: float):
        settings = self.lab.service.settings
        if self.rng.random() < probability:
            factor = self.rng.choice((0.34, 0.5, 2.0, 3.0))
            timeout = min(90.0, max(10.0, settings.worker_timeout_seconds * factor))
            return replace(settings, worker_timeout_seconds=timeout)
        return settings

    def _lose_session(self, station: Workstation) -> None:
        if station._end is not None:
            lose(station._end)

    def _stop(self, station: Workstation, program, seconds: float | None = None) -> None:
        if program is None or not program.is_alive:
            return
        self.world.tell(f"{program.name} is stopped")
        program.stop()
        station.watch_guard()

        def go_on() -> None:
            self.world.tell(f"{program.name} goes on")
            program.go_on()
            station.watch_guard()

        self.world.after(self._long_or_short() if seconds is None else seconds, go_on)

    def _power(self, station: Workstation) -> None:
        if not station.machine.is_up:
            return
        station.power_off()
        if self.rng.random() < 0.4:
            # A person sees that it is dark, and says so; it is switched on only after that was answered.
            station.is_being_buried = True

            def answered() -> None:
                station.is_being_buried = False
                station.boot()

            said = self.world.between(0.5, 10.0)
            self.world.after(said, lambda: self.lab.people.set_node(station.name, "dead", answered))
        else:
            self.world.after(self._long_or_short(), station.boot)

    # --- and then it clears ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """All faults stop; everything that was down is started."""
        lab = self.lab
        self.world.tell("*** the weather clears")
        for station in lab.stations:
            link = lab.network.link(station.machine)
            link.is_calm = True
            link.heal()
            link.quicken()
            station.cuts_at_hello = 0.0
            station.machine.wake()
            station.load = MachineLoad()
            station.slow_spawn_seconds = 0.0
            station.has_hanging_files = False
            station.boot()
            for program in list(station.machine.programs):
                program.go_on()
            station.start_worker()
            station.watch_guard()
            lab.people.set_node(station.name, "online")
        lab.server_machine.wake()
        if lab.service.program is not None:
            lab.service.program.go_on()
        lab.service.start()
        self._give_room()
        self._release_all()

    def _release_all(self) -> None:
        """Somebody looks after held jobs; also those that are submitted when the weather has cleared."""
        engine = self.lab.service.engine
        for node in list(engine.state.nodes.values()) if engine is not None else []:
            if node.record.offline:
                self.lab.people.set_node(node.record.name, "online")
        oracle = self.lab.oracle
        left = [job for job in oracle.expected if job not in oracle.done]
        for job in left:
            self.lab.people.release(job)
            if (
                oracle.is_restored
                and oracle.ranges[job].terms.on_lost == "wait"
                and self.world.now > self.until + 100.0
            ):
                # It may have ended after the backup, which nobody can know: a person has to say what becomes of it.
                self.lab.people.remove(job, force=True)
        self.world.after(20.0, self._release_all)
