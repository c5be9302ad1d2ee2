"""The engine under arbitrary histories: workers, clients, crashes and time, with an opinion of its own on each step."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kueue.core.engine import Engine
from kueue.core.state import State
from kueue.model import JobRange, JobState, MachineLoad, Outcome, Payload, Place, Request, Terms
from kueue.protocol import messages as m
from tests.properties.world import BAD, CAP, GOOD, LICENCES, SHOT, TOTALS, Machine, World
from tests.properties.world import settings as server_settings

MACHINES = st.integers(0, 2)
REQUESTS = st.builds(
    Request,
    slots=st.sampled_from([1, 1, 2, 4]),
    cores=st.sampled_from([0, 1, 3, 8]),
    ram_mb=st.sampled_from([0, 500, 2500]),
    cores_are_wish=st.booleans(),
    ram_is_wish=st.booleans(),
    named=st.sampled_from([(), (), (("gpu", 1),), (("gpu", 2),)]),
    counters=st.sampled_from([(), (), (("lic", 1),), (("lic", 2),)]),
    priority=st.sampled_from([10, 10, 20]),
)
TERMS = st.builds(
    Terms, max_attempts=st.integers(1, 3), on_lost=st.sampled_from(["rerun", "rerun", "rerun", "wait", "fail"])
)
MOODS = st.sampled_from(["start", "start", "queue", "defer", "reject", "silent", "stubborn", "start"])
HELD = st.sampled_from([False, False, False, True])
CWD = st.sampled_from(["/a", "/b"])
HOUR = 3600.0
FLOW = st.integers(0, 3)
MISHAPS = [
    "connect", "connect", "hang up", "old mail", "old connection noticed", "cut", "heal", "freeze", "thaw",
    "runner hangs", "runner answers", "worker reads one", "server reads one", "power fails", "power returns",
    "offline", "online", "declared dead",
]  # fmt: skip
SERVER = [
    "crash", "crash before the next commit", "restart", "restart after 3 s", "restart after 12 s", "reload", "stall",
]  # fmt: skip


def picture(state: State, wall: float) -> dict[str, object]:
    """All of a state as plain values."""
    attempts = {
        offer: tuple(getattr(attempt, name) for name in attempt.__slots__) for offer, attempt in state.attempts.items()
    }
    plain = {"id", "payload", "state", "past", "numbered", "lost", "lost_workers", "stop"}
    jobs = {}
    for job in state.jobs.values():
        jobs[job.id] = {name: getattr(job, name) for name in job.__slots__ if name in plain}
        jobs[job.id]["template"] = dataclasses.astuple(job.template)
        jobs[job.id]["attempt"] = job.attempt and job.attempt.offer
    nodes = {
        node.record: (node.slots, node.cores, node.ram_mb, {k: v for k, v in node.named.items() if v}, {*node.attempts})
        for node in state.nodes.values()
    }
    waiting = {
        (job.id, shape.request, shape.first() == job.id)
        for group in state.waiting.groups.values()
        for shape in group.shapes.values()
        for job in state.jobs.values()
        if job.id in shape
    }
    return {
        "attempts": attempts,
        "jobs": jobs,
        "nodes": nodes,
        "identities": state.node_by_identity,
        "waiting": waiting,
        "revocable": state.revocable,
        "used": {name: amount for name, amount in state.used.items() if amount},
        "by_state": state.by_state,
        "given_away": state.given_away,
        "answers": {key: answer for key, answer in state.answers.items() if wall - answer.wall < HOUR},
        "sums": state.sums.frozen(),
    }


class EngineHistories(RuleBasedStateMachine):
    """One history. Every rule is one thing that happens to somebody."""

    @initialize(connected=st.integers(0, 3))
    def begin(self, connected: int) -> None:
        self.world = World()
        for machine in self.world.machines[:connected]:
            machine.connect()
        self.world.step()
        self.client = self.world.client()
        self.asked = 0
        self.submitted: dict[str, tuple[m.Submit, m.Message]] = {}
        self.known_ids: set[int] = set()
        self.watched: dict[int, set[int]] = {}
        self.canceled: set[int] = set()
        self.highest = 0

    def machine(self, number: int) -> Machine:
        return self.world.machines[number]

    def ask(self, message: m.Message) -> list[m.Message]:
        if self.client not in self.world.answers:
            self.client = self.world.client()
        return self.world.ask(self.client, message)

    def request_id(self) -> str:
        self.asked += 1
        return f"{self.asked:032x}"

    def some_id(self, number: int) -> int:
        held = sorted(job.id for job in self.world.engine.state.jobs.values() if job.attempt is not None)
        known = held if held and number % 3 else sorted(self.known_ids)
        return known[number // 3 % len(known)] if known else number

    # --- clients -----------------------------------------------------------------------------------------------------

    @rule(request=REQUESTS, terms=TERMS, count=st.integers(1, 4), held=HELD, cwd=CWD, flow=FLOW)
    def submit(self, request: Request, terms: Terms, count: int, held: bool, cwd: str, flow: int) -> None:
        entry = JobRange(
            payload=Payload(argv=("true",)), place=Place(cwd=cwd), request=request, terms=terms, held=held, count=count
        )
        message = m.Submit(seq=1, request_id=self.request_id(), ranges=(entry,))
        for answer in self.ask(message):
            assert isinstance(answer, m.Submitted)
            ids = {job for first, last in answer.ids for job in range(first, last + 1)}
            assert len(ids) == count
            assert not ids & self.known_ids, "an id is given twice"
            assert min(ids) > self.highest or not self.known_ids
            self.highest = max(ids)
            self.known_ids |= ids
            self.submitted[message.request_id] = message, answer
        self.flow(flow)

    @precondition(lambda self: self.submitted)
    @rule(number=st.integers(0, 100))
    def submit_again(self, number: int) -> None:
        """The client did not get the answer and repeats itself, perhaps to a server that was started anew."""
        message, answer = list(self.submitted.values())[number % len(self.submitted)]
        for again in self.ask(message):
            assert again == answer

    @rule(number=st.integers(0, 100), kill=st.booleans(), force=HELD, flow=FLOW)
    def remove(self, number: int, kill: bool, force: bool, flow: int) -> None:
        job = self.some_id(number)
        message = m.RemoveJobs(seq=2, request_id=self.request_id(), ids=((job, job),), kill=kill, force=force)
        for answer in self.ask(message):
            if isinstance(answer, m.JobEnded):
                continue
            assert isinstance(answer, m.Results)
            (result,) = answer.results
            if result.ok:
                self.canceled.add(job)
                assert job in self.world.outcomes
        self.flow(flow)

    @rule(number=st.integers(0, 100))
    def hold(self, number: int) -> None:
        job = self.some_id(number)
        self.ask(m.HoldJobs(seq=3, request_id=self.request_id(), ids=((job, job),)))

    @rule()
    def release_all(self) -> None:
        self.ask(m.ReleaseJobs(seq=4, request_id=self.request_id(), ids=((0, 10**9),)))

    @precondition(lambda self: self.known_ids)
    @rule()
    def watch_all(self) -> None:
        self.watched.setdefault(self.client, set())
        self.ask(m.WatchJobs(seq=5, ids=((0, 10**9),)))
        self.watched = {session: jobs for session, jobs in self.watched.items() if session in self.world.answers}
        if self.client in self.watched:
            self.watched[self.client] |= self.known_ids

    # --- workers -----------------------------------------------------------------------------------------------------

    @rule(number=MACHINES, what=st.sampled_from(MISHAPS), index=st.integers(0, 10), flow=FLOW)
    def mishap(self, number: int, what: str, index: int, flow: int) -> None:
        """Something happens to one machine, its worker, its runner, or its connection."""
        machine, world = self.machine(number), self.world
        match what:
            case "connect":
                machine.connect()
            case "hang up":
                machine.hang_up()
            case "old mail" | "old connection noticed" if world.zombies:
                link = world.zombies.pop(index % len(world.zombies))
                if what == "old mail":
                    world.read(link)
                world.notice(link)
            case "cut":
                machine.is_cut = True
            case "heal":
                machine.is_cut = False
            case "freeze":
                machine.is_frozen = True
            case "thaw":
                machine.is_frozen = False
            case "runner hangs":
                machine.is_runner_silent = True
            case "runner answers":
                machine.runner_answers()
            case "worker reads one":
                machine.read(1)
            case "server reads one" if machine.link is not None and not machine.is_cut:
                world.read(machine.link, 1)
            case "power fails":
                machine.power_off(records_survive=index % 2 == 0)
            case "power returns" if machine.is_off:
                machine.power_on()
            case "offline" | "online":
                self.ask(m.SetNode(seq=6, request_id=self.request_id(), name=f"w{number}", state=what))  # type: ignore[arg-type]
            case "declared dead" if machine.is_off:
                # Only ever when it is true.
                self.ask(m.SetNode(seq=6, request_id=self.request_id(), name=f"w{number}", state="dead", force=True))
            case _:
                pass
        self.flow(flow)

    @rule(
        number=MACHINES,
        what=st.sampled_from(["cut", "freeze", "runner hangs", "power fails", "hang up"]),
        seconds=st.sampled_from([2, 7, 9, 11, 13, 25]),
        ends=st.booleans(),
        index=st.integers(0, 10),
    )
    def outage(self, number: int, what: str, seconds: int, ends: bool, index: int) -> None:
        """A mishap that lasts, while the others go on; the server works all the time."""
        self.mishap(number, what, index, 0)
        for passed in range(seconds):
            if ends and passed == seconds // 2:
                self.job_ends(number, index, GOOD, 0)
            for machine in self.world.machines:
                if machine.link is None and machine.number != number:
                    machine.connect()
            self.world.step()
            self.world.check()
        for remedy in ("heal", "thaw", "runner answers", "power returns"):
            self.mishap(number, remedy, index, 0)
        self.mishap(number, "connect", index, 1)

    @rule(number=MACHINES, mood=MOODS)
    def mood(self, number: int, mood: str) -> None:
        self.machine(number).mood = mood

    @rule(number=MACHINES, flow=FLOW)
    def runner_starts_what_is_queued(self, number: int, flow: int) -> None:
        machine = self.machine(number)
        for held in list(machine.held.values()):
            machine.start(held)
        self.flow(flow)

    @rule(number=MACHINES, index=st.integers(0, 10), outcome=st.sampled_from([GOOD, BAD, SHOT]), flow=FLOW)
    def job_ends(self, number: int, index: int, outcome: Outcome, flow: int) -> None:
        machine = self.machine(number)
        held = [one for one in machine.held.values() if machine.runs(one)]
        if held:
            machine.finish(held[index % len(held)], outcome)
        self.flow(flow)

    # --- server and time ---------------------------------------------------------------------------------------------

    def flow(self, rounds: int) -> None:
        """So many times, what waits on the connections is read and answered."""
        for _ in range(rounds):
            self.world.settle()
            for machine in self.world.machines:
                machine.read()
            self.world.read_all()

    @rule(seconds=st.sampled_from([1, 1, 2, 3, 5, 11]), everybody=st.booleans())
    def time_passes(self, seconds: int, everybody: bool) -> None:
        for _ in range(seconds):
            if everybody:
                for machine in self.world.machines:
                    if machine.link is None:
                        machine.connect()
                    machine.say(m.Report(load=MachineLoad()))
            self.world.step()
            self.world.check()

    @rule(what=st.sampled_from(SERVER), timeout=st.sampled_from([10.0, 20.0]))
    def server(self, what: str, timeout: float) -> None:
        world = self.world
        match what:
            case "crash":
                world.crash()
            case "crash before the next commit":
                world.crashes_before_commit = True
            case "restart":
                world.down(0, timeout)
            case "restart after 3 s":
                world.down(3, timeout)
            case "restart after 12 s":
                world.down(12, timeout)
            case "reload":
                world.timeout = timeout
                world.take(world.engine.reload(server_settings(timeout), world.now))
            case "stall":
                world.engine.stalled(world.now)
            case _:
                raise AssertionError(what)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.check()
        live = set(world.engine.state.jobs)
        done = set(world.outcomes)
        assert live | done >= self.known_ids, "an acknowledged job is missing"
        assert not live & done
        self.watched = {session: jobs for session, jobs in self.watched.items() if session in world.answers}
        for session, jobs in self.watched.items():
            told = [a.id for a in world.answers[session] if isinstance(a, m.JobEnded)]
            assert set(told) >= jobs & done, "a watcher was not told"

    @invariant()
    def replay_equals_live(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.engine.queue.turn.facts:
            return  # decided at the opening and on its way to the store with the next turn
        twin = Engine(world.engine.settings, queue_id="q")
        twin.replay(world.store.aggregates(), world.store.replay())
        assert picture(twin.state, world.wall) == picture(world.engine.state, world.wall)

    @invariant()
    def nothing_that_fits_waits(self) -> None:
        if hasattr(self, "world") and not self.world.engine.queue.unsettled:
            waiting_in_vain(self.world)

    def teardown(self) -> None:
        """When all faults are mended everything ends, and every end is acknowledged."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.crashes_before_commit = False
        for number, machine in enumerate(world.machines):
            machine.is_cut = machine.is_frozen = False
            machine.mood = "start"
            machine.runner_answers()
            if machine.is_off:
                machine.power_on()
            world.steady += 12
            machine.connect()
            world.read_all()
            self.ask(m.SetNode(seq=7, request_id=self.request_id(), name=f"w{number}", state="online"))
        self.release_all()
        for job in list(world.engine.state.jobs.values()):
            if job.template.request.cores > TOTALS.cores and not job.template.request.cores_are_wish:
                remove = m.RemoveJobs(seq=8, request_id=self.request_id(), ids=((job.id, job.id),), kill=True)
                self.ask(remove)
        for _ in range(400):
            world.step()
            world.check()
            for machine in world.machines:
                if machine.link is None:
                    machine.connect()
                for held in list(machine.held.values()):
                    machine.start(held)
                    machine.finish(held, GOOD)
            if not world.engine.state.jobs and not any(machine.held for machine in world.machines):
                break
        left = {
            job.id: (job.state, job.template, job.attempt and job.attempt.offer, job.stop)
            for job in world.engine.state.jobs.values()
        }
        assert not left, left
        assert not any(machine.held for machine in world.machines), "an end was never acknowledged"
        assert not world.engine.state.attempts
        assert not world.engine.queue.offered_at
        assert not world.engine.queue.notes_of_attempts
        assert set(world.outcomes) >= self.known_ids


def waiting_in_vain(world: World) -> None:
    """No waiting job fits a worker that takes jobs; counted by hand from the attempts alone."""
    state = world.engine.state
    slots, cores, ram, gpus, counters = {}, {}, {}, {}, {"@slots": 0, "lic": 0}
    for job in state.jobs.values():
        if job.attempt is not None:
            for share in job.attempt.allocation.shares:
                slots[share.node] = slots.get(share.node, 0) + share.slots
                cores[share.node] = cores.get(share.node, 0) + share.cores
                ram[share.node] = ram.get(share.node, 0) + share.ram_mb
                gpus[share.node] = gpus.get(share.node, 0) + sum(len(units) for _, units in share.named)
            for name, amount in job.attempt.allocation.counters:
                counters[name] += amount
    for job in state.jobs.values():
        gives_away = job.state is JobState.UNREACHABLE and job.template.terms.on_lost == "rerun"
        if job.state is not JobState.PENDING and not gives_away:
            continue
        request = job.template.request
        own = dict(job.attempt.allocation.counters) if job.attempt is not None else {}
        if counters["@slots"] - own.get("@slots", 0) + request.slots > CAP:
            continue
        if counters["lic"] - own.get("lic", 0) + dict(request.counters).get("lic", 0) > LICENCES["lic"]:
            continue
        for node, worker in world.engine.queue.workers.items():
            record = state.nodes[node].record
            is_asked_in_vain = any(
                one.overdue and not one.silent for one in state.attempts.values() if one.node == node
            )
            is_aside = worker.set_aside_until is not None and world.steady < worker.set_aside_until
            if worker.session is None or record.offline or worker.stopping or is_asked_in_vain or is_aside:
                continue
            if job.template.directory in worker.declined or request in worker.deferred:
                continue
            # Nobody else uses these machines: a wish takes all of itself, or all of the machine.
            wants_cores = min(request.cores, TOTALS.cores) if request.cores_are_wish else request.cores
            wants_ram = min(request.ram_mb, TOTALS.ram_mb) if request.ram_is_wish else request.ram_mb
            fits = (
                slots.get(node, 0) + request.slots <= TOTALS.slots
                and cores.get(node, 0) + wants_cores <= TOTALS.cores
                and ram.get(node, 0) + wants_ram <= TOTALS.ram_mb
                and gpus.get(node, 0) + dict(request.named).get("gpu", 0) <= 2
            )
            assert not fits, f"job {job.id} ({request}) would fit worker {node}"


TestEngineHistories = EngineHistories.TestCase
TestEngineHistories.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
