"""Workers that keep the protocol, their machines, and a server of engine and store: what the engine is proven against.

Time is one clock. A connection is two ordered queues; it is read when the test says so, may be cut (nothing arrives
until it heals) and may be given up by one side while the other still holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kueue.core import invariants
from kueue.core.engine import Engine
from kueue.core.queue import Turn
from kueue.core.settings import Settings
from kueue.model import Canceled, EndRecord, Exited, MachineLoad, MachineTotals, Now, Outcome, Signaled
from kueue.protocol import messages as m
from kueue.storage.memory import MemoryStore
from kueue.storage.store import Batch

WALL = 1_000_000.0
TOTALS = MachineTotals(slots=4, cores=4, ram_mb=4000, named=(("gpu", 2),))
CAP = 7
LICENCES = {"lic": 2}


def settings(timeout: float) -> Settings:
    return Settings(
        worker_timeout_seconds=timeout,
        job_offer_timeout_seconds=3.0,
        global_max_parallel_jobs=CAP,
        counters=LICENCES,
    )


@dataclass
class Held:
    """An attempt in the hands of a runner."""

    offer: int
    job: int
    on_lost: str
    state: str = "queued"
    started: float | None = None
    end: EndRecord | None = None
    is_stopping: bool = False
    is_killed: bool = False
    """It got SIGKILL and is not continued, though the kernel may take its time."""
    is_recorded: bool = True
    """False after a power loss that took the record along."""


@dataclass
class Link:
    """One connection, both ways."""

    session: int
    to_server: list[m.Message] = field(default_factory=list)
    to_worker: list[m.Message] = field(default_factory=list)
    is_closed: bool = False
    """By the server; the worker learns of it when it reads."""


class Machine:
    """A worker, its runner and the machine they live on. Honest, but slow, moody and mortal."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.boot = 0
        self.link: Link | None = None
        self.is_cut = False
        self.is_frozen = False
        self.is_off = False
        self.is_runner_silent = False
        self.mood = "start"
        self.held: dict[int, Held] = {}
        self.candidates: list[m.Offer] = []
        self.lease_until = float("-inf")
        self.beats: dict[int, float] = {}
        self.beat = 0

    # --- what runs ---------------------------------------------------------------------------------------------------

    def runs(self, held: Held) -> bool:
        """Unpaused, at this very moment."""
        return (
            not self.is_off
            and held.state == "running"
            and not held.is_killed
            and (held.on_lost != "rerun" or self.world.steady < self.lease_until)
        )

    def lapse(self) -> None:
        """The lease is over: what was being stopped is killed; the rest is paused, see `runs`."""
        if self.is_off:
            return
        for held in self.held.values():
            if held.is_stopping and held.state == "running":
                held.is_killed = held.is_killed or self.world.steady >= self.lease_until
                if self.mood != "stubborn":
                    self._end(held, Canceled())

    def _end(self, held: Held, outcome: Outcome) -> None:
        held.state = "ended"
        held.end = EndRecord(
            outcome=outcome,
            started_wall=held.started,
            ended_wall=self.world.wall,
            run_seconds=0.0 if held.started is None else self.world.wall - held.started,
        )
        if self.can_speak:
            self.say(m.AttemptEnded(offer=held.offer, end=held.end))

    @property
    def can_speak(self) -> bool:
        return self.link is not None and not self.is_frozen and not self.is_off and not self.is_runner_silent

    def finish(self, held: Held, outcome: Outcome) -> None:
        """The process ends by itself."""
        if self.runs(held):
            self._end(held, outcome)

    # --- talking -----------------------------------------------------------------------------------------------------

    def say(self, message: m.Message) -> None:
        if self.link is not None:
            self.link.to_server.append(message)

    def hang_up(self) -> None:
        """Forget the connection and what was not handed to the runner; the server may not notice for long."""
        if self.link is not None:
            self.world.zombies.append(self.link)
        self.link = None
        self.candidates = []
        self.beats = {}

    def connect(self) -> None:
        if self.is_off or self.is_frozen or self.is_cut or self.world.is_down:
            return
        self.hang_up()
        self.link = self.world.connect(self)
        self.say(
            m.WorkerHello(
                identity=f"i{self.number}",
                name=f"w{self.number}",
                machine_id=f"m{self.number}",
                boot_id=f"b{self.boot}",
                totals=TOTALS,
                attempts=tuple(self._report(held) for held in self.held.values() if held.is_recorded),
            )
        )

    def _report(self, held: Held) -> m.AttemptReport:
        state = held.state
        if self.is_runner_silent and state != "gone":
            state = "unknown"
        elif state == "running" and not self.runs(held):
            state = "paused"
        end = held.end if state == "ended" else None
        started = held.started if state in {"running", "paused", "ended"} else None
        return m.AttemptReport(
            offer=held.offer,
            job=held.job,
            queue_id=self.world.store.queue_id,
            state=state,  # type: ignore[arg-type]
            started_wall=started,
            end=end,
        )

    def read(self, limit: int | None = None) -> None:
        """Act on what has come from the server."""
        if self.link is None or self.is_frozen or self.is_off or self.is_cut:
            return
        mail, self.link.to_worker = self.link.to_worker[:limit], self.link.to_worker[len(self.link.to_worker[:limit]) :]
        for message in mail:
            self._hear(message)
        if self.link.is_closed and not self.link.to_worker:
            self.hang_up()

    def _hear(self, message: m.Message) -> None:
        match message:
            case m.HeartbeatAnswer(number=number, lease_seconds=lease):
                if number in self.beats and not self.is_runner_silent:
                    self.lease_until = max(self.lease_until, self.beats[number] + lease)
                self.take_candidates()
            case m.Offer():
                self.candidates.append(message)
                self.take_candidates()
            case m.WithdrawOffer(offer=offer):
                self._withdraw(offer)
            case m.StopAttempt(offer=offer, kill=kill):
                held = self.held.get(offer)
                if held is None or held.state == "queued":
                    self._withdraw(offer)
                elif held.state == "running":
                    held.is_stopping = True
                    held.is_killed = held.is_killed or kill or not self.runs(held)
                    if self.mood != "stubborn":
                        self._end(held, Canceled())
                else:
                    self._tell(held)
            case m.Acknowledge(offers=offers):
                for offer in offers:
                    assert self.held[offer].state in {"ended", "gone"} if offer in self.held else True
                    self.held.pop(offer, None)
            case m.WorkerWelcome() | m.Sorry() | m.ForgetOutput():
                pass
            case _:
                raise AssertionError(message)

    def _withdraw(self, offer: int) -> None:
        self.candidates = [one for one in self.candidates if one.offer != offer]
        held = self.held.get(offer)
        if held is None or held.state == "queued":
            if not self.is_runner_silent or held is None:
                self.held.pop(offer, None)
                self.say(m.OfferWithdrawn(offer=offer))
        else:
            self._tell(held)

    def _tell(self, held: Held) -> None:
        if self.is_runner_silent:
            return
        if held.state == "running":
            assert held.started is not None
            self.say(m.AttemptStarted(offer=held.offer, started_wall=held.started))
        elif held.end is not None:
            self.say(m.AttemptEnded(offer=held.offer, end=held.end))
        elif held.state == "gone":
            self.say(m.AttemptGone(offer=held.offer, reason="power loss"))

    def take_candidates(self) -> None:
        """Answer offers, as the mood is. Nothing starts without a lease."""
        if self.mood == "silent":
            return
        offers, self.candidates = self.candidates, []
        for offer in offers:
            if self.mood == "defer":
                self.say(m.OfferDeferred(offer=offer.offer, reason="busy", load=MachineLoad()))
            elif self.mood == "reject":
                self.say(m.OfferRejected(offer=offer.offer, reason="no such directory"))
            elif self.is_runner_silent or self.world.steady >= self.lease_until:
                self.candidates.append(offer)
            else:
                self.held[offer.offer] = Held(offer.offer, offer.job, offer.terms.on_lost)
                if self.mood == "queue":
                    self.say(m.AttemptQueued(offer=offer.offer))
                else:
                    self.start(self.held[offer.offer])

    def start(self, held: Held) -> None:
        """The runner starts what is queued, or gives it back if the lease is over."""
        if held.state != "queued" or self.is_runner_silent or self.is_off:
            return
        if self.world.steady >= self.lease_until:
            del self.held[held.offer]
            if self.can_speak:
                self.say(m.OfferDeferred(offer=held.offer, reason="no lease", load=MachineLoad()))
            return
        held.state = "running"
        held.started = self.world.wall
        if self.can_speak:
            self.say(m.AttemptStarted(offer=held.offer, started_wall=held.started))

    def heartbeat(self) -> None:
        if self.link is not None and not self.is_frozen and not self.is_off:
            self.beat += 1
            self.beats[self.beat] = self.world.steady
            self.say(m.Heartbeat(number=self.beat))

    # --- misfortunes -------------------------------------------------------------------------------------------------

    def power_off(self, *, records_survive: bool) -> None:
        self.is_off = True
        self.hang_up()
        for held in list(self.held.values()):
            if held.state == "queued":
                del self.held[held.offer]
                continue
            if held.state == "running":
                held.state = "gone"
            held.is_recorded = held.is_recorded and records_survive
        self.lease_until = float("-inf")

    def power_on(self) -> None:
        self.is_off = False
        self.is_frozen = False
        self.is_runner_silent = False
        self.boot += 1
        self.held = {offer: held for offer, held in self.held.items() if held.is_recorded}

    def runner_answers(self) -> None:
        """The silent runner is back; a hello can tell now what the last one could not."""
        if self.is_runner_silent:
            self.is_runner_silent = False
            self.hang_up()


class World:
    """The server, its store, and three machines."""

    def __init__(self, machines: int = 3) -> None:
        self.steady = 1000.0
        self.timeout = 10.0
        self.store = MemoryStore(queue_id="q", wall=lambda: self.wall)
        self.sessions = 0
        self.links: dict[int, Link] = {}
        self.zombies: list[Link] = []
        self.answers: dict[int, list[m.Message]] = {}
        """What was said to clients, by session."""
        self.is_down = False
        self.crashes_before_commit = False
        self.outcomes: dict[int, Outcome] = {}
        self.deciding: dict[int, tuple[int | None, EndRecord | None]] = {}
        self.machines = [Machine(self, number) for number in range(machines)]
        self.engine = self._start()

    @property
    def wall(self) -> float:
        return WALL + self.steady

    @property
    def now(self) -> Now:
        return Now(wall=self.wall, steady=self.steady)

    # --- the server --------------------------------------------------------------------------------------------------

    def _start(self) -> Engine:
        engine = Engine(settings(self.timeout), queue_id=self.store.queue_id)
        engine.replay(self.store.aggregates(), self.store.replay())
        engine.opened(self.now)
        return engine

    def connect(self, machine: Machine) -> Link:
        del machine
        self.sessions += 1
        link = self.links[self.sessions] = Link(self.sessions)
        return link

    def client(self) -> int:
        self.sessions += 1
        self.answers[self.sessions] = []
        return self.sessions

    def crash(self) -> None:
        """All sessions end; what is committed stays."""
        for link in self.links.values():
            link.is_closed = True
            link.to_worker.clear()
        self.links.clear()
        self.zombies.clear()
        self.answers.clear()
        self.engine = self._start()

    def take(self, turn: Turn) -> None:
        """Commit, then send; or crash in between, or before."""
        if turn.facts and self.crashes_before_commit:
            self.crashes_before_commit = False
            self.crash()
            return
        if turn.facts:
            self.store.commit(
                Batch(
                    facts=tuple(turn.facts),
                    finished=tuple(turn.finished),
                    aggregates=self.engine.aggregates(),
                    wall=self.wall,
                )
            )
        for row in turn.finished:
            assert row.id not in self.outcomes, "a job is done once"
            self.outcomes[row.id] = row.outcome
            decided = [past for past in row.attempts if row.end is not None]
            self.deciding[row.id] = decided[-1].offer if decided else None, row.end
        for session, message in turn.sends:
            if session in self.answers:
                self.answers[session].append(message)
            elif session in self.links:
                self.links[session].to_worker.append(message)
        for session in turn.closes:
            link = self.links.pop(session, None)
            if link is not None:
                link.is_closed = True

    def ask(self, session: int, message: m.Message) -> list[m.Message]:
        """One question of a client; what was said to it at once."""
        self.answers.setdefault(session, [])
        before = len(self.answers[session])
        past = {row.id: row for row in self.store.finished()}
        self.take(self.engine.handle(session, message, self.now, past))
        return self.answers.get(session, [])[before:]

    def read(self, link: Link, limit: int | None = None) -> None:
        """The server reads a connection; a closed one is not heard any more."""
        mail = link.to_server[:limit]
        del link.to_server[: len(mail)]
        for message in mail:
            if self.links.get(link.session) is link:
                self.take(self.engine.handle(link.session, message, self.now))

    def read_all(self) -> None:
        for machine in self.machines:
            if machine.link is not None and not machine.is_cut:
                self.read(machine.link)

    def notice(self, link: Link) -> None:
        """The server learns that a connection is gone."""
        if self.links.pop(link.session, None) is link:
            self.take(self.engine.session_closed(link.session, self.now))

    def tick(self) -> None:
        """Deadlines, as the driver does it: all mail before, and a second look a little later."""
        self.read_all()
        self.take(self.engine.tick(self.now))
        self.steady += 0.06
        self.read_all()
        self.take(self.engine.tick(self.now))

    def settle(self) -> None:
        while self.engine.queue.unsettled:
            self.take(self.engine.settle(self.now))

    # --- time --------------------------------------------------------------------------------------------------------

    def step(self, seconds: float = 1.0) -> None:
        """A moment passes in which everybody who can does what is due."""
        self.steady += seconds
        for machine in self.machines:
            machine.lapse()
            machine.heartbeat()
        if not self.is_down:
            self.tick()
            self.settle()
        for machine in self.machines:
            machine.read()

    def down(self, seconds: int, timeout: float) -> None:
        """The server stops, stays away, and is started with that time-out."""
        self.is_down = True
        self.timeout = timeout
        for link in self.links.values():
            link.is_closed = True
            link.to_worker.clear()
        self.links.clear()
        self.zombies.clear()
        self.answers.clear()
        for _ in range(seconds):
            self.step()
        self.is_down = False
        self.engine = self._start()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        state = self.engine.state
        invariants.check(state)
        for name, used in state.used.items():
            total = CAP if name == "@slots" else LICENCES[name]
            assert used <= total, f"{name}: {used} of {total}"
        for node in state.nodes.values():
            assert node.slots <= TOTALS.slots
            assert node.cores <= TOTALS.cores
            assert node.ram_mb <= TOTALS.ram_mb
            for name, units in node.named.items():
                assert units <= set(range(dict(TOTALS.named)[name]))
        running = [held.job for machine in self.machines for held in machine.held.values() if machine.runs(held)]
        assert len(running) == len(set(running)), f"a job runs twice: {sorted(running)}"
        for row in self.store.finished():
            assert self.outcomes[row.id] == row.outcome, "an outcome has changed"
        for machine in self.machines:
            for held in machine.held.values():
                offer, end = self.deciding.get(held.job, (None, None))
                if offer == held.offer and held.end is not None and end is not None:
                    assert end == held.end, "the recorded end is not what happened"


GOOD: Outcome = Exited(0)
BAD: Outcome = Exited(3)
SHOT: Outcome = Signaled(11)
