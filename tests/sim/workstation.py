"""A worker's machine: the real agent, its runner, the processes of jobs, the disk, and all that may befall them.

Rules
- The agent's actions are performed in their order. What the agent does not do itself (finding runners, waiting for
  places, reconnecting) is done here as the worker program does it.
- The disk (`spool`) and the processes (`trees`) belong to the machine: they outlive the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kueue.model import MachineLoad, MachineTotals
from kueue.protocol import messages as m
from kueue.worker import orders as o
from kueue.worker.actions import Action, CheckPlace, Close, ContinueTrees, DropOutput, Fetch, Instruct, PauseTrees, Say
from kueue.worker.agent import Agent, AgentSettings
from tests.sim.link import RunnerLink
from tests.sim.network import End, Network
from tests.sim.processes import Plan, Tree, Watcher
from tests.sim.runner import YOUNG_SECONDS, Desk, Record, Runner
from tests.sim.world import Machine, Program, World

HELD_SECONDS = 1.0
"""Between two looks at trees that the worker itself stopped."""
REPORT_SECONDS = 20.0
BACK_OFF_SECONDS = (0.3, 4.0)
GUARD_PATIENCE_SECONDS = 0.6
"""From knowing that a runner is silent to its trees stopped, for the smallest time-out."""


@dataclass
class Quirks:
    """Deliberate deviations of the shells, for planted faults."""

    obeys_the_dead: bool = False
    leases_at_attachment: bool = False
    sends_before_storing: bool = False
    hears_closed_sessions: bool = False
    dead_spawners_start: bool = False
    no_stand_in: bool = False


class Workstation:
    """One machine with one worker."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        totals: MachineTotals,
        plans: dict[str, Plan],
        watcher: Watcher,
        quirks: Quirks,
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.totals = totals
        self.watcher = watcher
        self.quirks = quirks
        self.plans = plans
        self.machine = Machine(world, name)
        self.machine.on_wake.append(self._machine_changed)
        self.machine.on_sleep.append(self._machine_changed)
        self.spool: dict[int, Record] = {}
        self.trees: dict[int, Tree] = {}
        self.runner: Runner | None = None
        self.agent: Agent | None = None
        self.worker: Program | None = None
        self.load = MachineLoad()
        self.cuts_at_hello = 0.0
        """Seconds for which the link is cut just when the next hello is on its way."""
        self.has_hanging_files = True
        self.is_being_buried = False
        """Somebody is telling the server that it is dead; nobody switches it on before that was answered."""
        self.slow_spawn_seconds = 0.0
        """Longest time that a spawner which something holds up needs for a process; 0: it is well."""
        self.unguarded_until = float("-inf")
        """Real time until which neither worker nor runner could do anything (infinite: they cannot now)."""
        self._runners = 0
        self.link: RunnerLink | None = None
        self._end: End | None = None
        self._wake_turn = 0
        self._planned: float | None = None
        self._backoff = BACK_OFF_SECONDS[0]
        self._is_connecting = False
        self._knows = False
        """The present worker has learned what it has to guard."""
        self._held: dict[int, None] = {}
        self._is_holding = False

    def plan_of(self, order: o.StartAttempt) -> Plan:
        return self.plans[str(order.argv[1])]

    def spawn_seconds(self) -> float:
        """From the order to the process."""
        if self.slow_spawn_seconds and self.world.chance(0.3):
            return self.world.between(0.5, self.slow_spawn_seconds)
        return 0.001

    # --- life of the programs ----------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        if not self.machine.is_up or (self.worker is not None and self.worker.is_alive):
            return
        program = self.worker = Program(self.machine, f"worker {self.name}")
        program.on_death.append(lambda _: self._worker_died())
        self.agent = Agent(
            AgentSettings(
                identity=f"identity-{self.name}",
                name=self.name,
                machine_id=f"machine-{self.name}",
                boot_id=f"boot-{self.name}-{self.machine.boots}",
                report_interval_seconds=REPORT_SECONDS,
            ),
            self.totals,
        )
        link = self.link = RunnerLink(self, program)
        self._end = None
        self._is_connecting = self._is_holding = self._knows = False
        self._held.clear()
        self._planned = None
        self._backoff = BACK_OFF_SECONDS[0]
        self._watch_guard()
        program.wake(self.world.between(0.05, 0.4), link.open)

    def _worker_died(self) -> None:
        self._watch_guard()

    def crash_worker(self) -> None:
        if self.worker is not None:
            self.world.tell(f"worker {self.name} is killed")
            self.worker.die()

    def stop_worker_orderly(self) -> None:
        worker = self.worker
        if worker is not None and worker.is_running and self.agent is not None:
            self.world.tell(f"worker {self.name} stops orderly")
            self._perform(self.agent.stop())
            if self._end is not None:
                self._end.close()
            worker.die()

    def crash_runner(self) -> None:
        if self.runner is not None and not self.runner.is_dead:
            self.world.tell(f"runner {self.runner.name} is killed, both processes")
            self.runner.die()
            self._watch_guard()

    def crash_spawner(self) -> None:
        if self.runner is not None and not self.runner.is_dead:
            self.world.tell(f"spawner of {self.runner.name} is killed")
            self.runner.spawner_dies()

    def crash_keeper(self) -> None:
        if self.runner is not None and not self.runner.is_dead:
            self.world.tell(f"keeper of {self.runner.name} is killed")
            self.runner.keeper_dies()

    def power_off(self) -> None:
        self.world.tell(f"{self.name} loses power")
        self.machine.power_off()
        if self.runner is not None:
            self.runner.is_dead = True
        for tree in self.trees.values():
            tree.vanish()
        self._watch_guard()
        for offer, record in list(self.spool.items()):
            if self.world.now - record.written_at < YOUNG_SECONDS and self.world.chance(0.5):
                del self.spool[offer]
            elif self.world.now - record.end_written_at < YOUNG_SECONDS and self.world.chance(0.5):
                record.end = None

    def boot(self) -> None:
        if not self.machine.is_up and not self.is_being_buried:
            self.world.tell(f"{self.name} boots")
            self.machine.boot()
            self.start_worker()

    def _machine_changed(self) -> None:
        for tree in list(self.trees.values()):
            tree.machine_changed()

    def _watch_guard(self) -> None:
        """Note whether anybody is there to stop processes."""
        if not self.is_guarded:
            self.unguarded_until = float("inf")
        elif self.unguarded_until == float("inf"):
            self.unguarded_until = self.world.now

    def watch_guard(self) -> None:
        self._watch_guard()

    @property
    def is_guarded(self) -> bool:
        # A worker that has just started waits for its runner's answer before it knows what to guard.
        worker = self.worker is not None and self.worker.is_alive and not self.worker.is_stopped and self._knows
        runner = self.runner is not None and self.runner.program.is_alive and not self.runner.program.is_stopped
        spawner = self.runner is not None and self.runner.has_spawner and self.machine.is_up
        return worker or runner or spawner

    # --- worker and runner -------------------------------------------------------------------------------------------

    def launch_runner(self) -> Runner:
        self._runners += 1
        self.runner = Runner(self, f"{self.name}-r{self._runners}")
        return self.runner

    def runner_hung_up(self, desk: Desk) -> None:
        """The runner's end of that attachment is gone."""
        worker = desk.worker
        link = self.link
        if worker is self.worker and link is not None:
            worker.post(lambda: link.hung_up(desk))

    def to_worker(self, desk: Desk, event: o.Event) -> None:
        if desk.worker is self.worker and self.link is not None:
            self.link.carries(desk, event)

    def runner_event(self, event: o.News) -> None:
        self._do(lambda agent, now: agent.runner_event(event, now))

    def settled(self, attempts: Sequence[o.AttemptState]) -> None:
        """The worker knows what an earlier one left behind."""
        assert self.agent is not None
        self.agent.begins(attempts, self.machine.boottime())
        self._plan_wake()
        worker = self.worker
        self.world.after(GUARD_PATIENCE_SECONDS, lambda: self._knows_now(worker))

    def _knows_now(self, worker: Program | None) -> None:
        if worker is self.worker:
            self._knows = True
            self._watch_guard()

    # --- worker and server -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self._is_connecting or self._end is not None or self.worker is None or not self.worker.is_running:
            return
        self._is_connecting = True
        self.network.connect(self.worker, self._connected)

    def _connected(self, end: End | None) -> None:
        self._is_connecting = False
        if end is None:
            self._again()
            return
        self._end = end
        end.on_messages = lambda messages: self._hears(end, messages)
        end.on_closed = lambda: self._hung_up(end)
        agent = self.agent
        assert agent is not None
        assert self.link is not None
        agent.measured(self.load)
        agent.runners_stand(self.link.attempts())
        end.send(agent.hello(self.machine.boottime()))
        if self.cuts_at_hello:
            link = self.network.link(self.machine)
            link.cut()
            self.world.after(self.cuts_at_hello, link.heal)
            self.cuts_at_hello = 0.0
        self._plan_wake()

    def _again(self) -> None:
        assert self.worker is not None
        self.worker.wake(self._backoff * self.world.between(0.5, 1.0), self.connect)
        self._backoff = min(BACK_OFF_SECONDS[1], self._backoff * 2)

    def _hung_up(self, end: End) -> None:
        if end is not self._end:
            return
        self._end = None
        assert self.agent is not None
        self.agent.session_closed()
        self._plan_wake()
        self._again()

    def _hears(self, end: End, messages: Sequence[m.Message]) -> None:
        for message in messages:
            if end is not self._end:
                return
            if isinstance(message, m.WorkerWelcome):
                self._backoff = BACK_OFF_SECONDS[0]
            self._do(lambda agent, now, message=message: agent.hears(message, now))

    # --- the agent ---------------------------------------------------------------------------------------------------

    def _do(self, call) -> None:
        if self.worker is None or not self.worker.is_alive:
            return
        assert self.agent is not None
        self._perform(call(self.agent, self.machine.boottime()))
        self._plan_wake()

    def _perform(self, actions: Sequence[Action]) -> None:
        assert self.worker is not None
        for action in actions:
            match action:
                case Say(message):
                    if self._end is not None:
                        self._end.send(message)
                case Instruct(order):
                    assert self.link is not None
                    self.link.send(order)
                case CheckPlace(offer, place):
                    self._check_place(offer, str(place.pwd))
                case PauseTrees(offers):
                    self.world.tell(f"worker {self.name} stops the trees of {offers} itself")
                    self._held.update(dict.fromkeys(offers))
                    self._hold()
                case ContinueTrees(offers):
                    for offer in offers:
                        self._held.pop(offer, None)
                        if offer in self.trees:
                            self.trees[offer].go_on()
                case Close(reason=reason):
                    self.world.tell(f"worker {self.name} closes its session: {reason}")
                    end = self._end
                    if end is not None:
                        end.close()
                        self._hung_up(end)
                    return
                case Fetch() | DropOutput():
                    pass

    def _hold(self) -> None:
        """What the guard stopped stays stopped."""
        assert self.agent is not None
        assert self.worker is not None
        for offer in list(self._held):
            attempt = self.agent.attempts.get(offer)
            if attempt is None or attempt.is_over:
                del self._held[offer]
            elif offer in self.trees:
                self.trees[offer].stop()
        if self._held and not self._is_holding:
            self._is_holding = True
            self.worker.wake(HELD_SECONDS, self._hold_again)

    def _hold_again(self) -> None:
        self._is_holding = False
        self._hold()

    def _check_place(self, offer: int, key: str) -> None:
        seconds = self.plans[key].place_seconds if self.has_hanging_files else 0.002
        worker, agent = self.worker, self.agent
        assert worker is not None
        assert agent is not None

        def checked() -> None:
            if agent is self.agent:
                agent.measured(self.load)
                self._do(lambda agent, now: agent.place_checked(offer, None, now))

        worker.wake(seconds, checked)

    def _plan_wake(self) -> None:
        assert self.agent is not None
        assert self.worker is not None
        at = self.agent.next_wake()
        if at is None or at == self._planned:
            return
        self._planned = at
        self._wake_turn += 1
        turn = self._wake_turn
        self.worker.wake(max(0.001, at - self.machine.boottime()), lambda: self._tick(turn))

    def _tick(self, turn: int) -> None:
        if turn == self._wake_turn:
            self._planned = None
            assert self.agent is not None
            self.agent.measured(self.load)
            self._do(lambda agent, now: agent.tick(now))
