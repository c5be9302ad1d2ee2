"""The people of the lab: they submit, cancel, hold, release and watch, and ask again word for word until answered.

Each question is one command: a connection of its own, the request id chosen once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kueue.protocol import messages as m
from tests.sim.network import End, Network
from tests.sim.oracle import Oracle
from tests.sim.world import Machine, Program, World

ANSWER_SECONDS = 20.0


class Command:
    """One question of one person, until it is answered."""

    def __init__(self, people: People, question: m.Message, answered: Callable[[m.Message], None]) -> None:
        self.people = people
        self.question = question
        self.answered = answered
        self.is_over = False
        self._end: End | None = None
        self._turn = 0
        self._connect()

    def _connect(self) -> None:
        if not self.is_over:
            self.people.network.connect(self.people.program, self._connected)

    def _connected(self, end: End | None) -> None:
        if end is None:
            self.people.program.wake(self.people.world.between(0.5, 2.0), self._connect)
            return
        self._end = end
        self._turn += 1
        turn = self._turn
        end.on_messages = lambda messages: self._hears(end, messages)
        end.on_closed = lambda: self._hung_up(end)
        end.send(m.ClientHello(), self.question)
        if not isinstance(self.question, m.WatchJobs):
            self.people.program.wake(ANSWER_SECONDS, lambda: self._impatient(turn))

    def _impatient(self, turn: int) -> None:
        if turn == self._turn and not self.is_over and self._end is not None:
            end = self._end
            end.close()
            self._hung_up(end)

    def _hung_up(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self._turn += 1
            self.people.program.wake(self.people.world.between(0.2, 1.0), self._connect)

    def _hears(self, end: End, messages: Sequence[m.Message]) -> None:
        for message in messages:
            if self.is_over or end is not self._end:
                return
            if isinstance(message, m.Goodbye):
                continue
            if isinstance(message, m.Failed) and "nothing was accepted" in message.error:
                end.close()
                self._hung_up(end)
                return
            self.answered(message)
            if self.is_over:
                end.close()

    def done(self) -> None:
        self.is_over = True


class People:
    """All commands of a world; they are typed on a machine whose clock nobody looks at."""

    def __init__(self, world: World, network: Network, oracle: Oracle) -> None:
        self.world = world
        self.network = network
        self.oracle = oracle
        self.machine = Machine(world, "desk")
        self.program = Program(self.machine, "commands")
        self.open: list[Command] = []
        self.jobs: list[int] = []
        """Ids that were acknowledged."""
        self._requests = 0

    @property
    def is_waiting(self) -> bool:
        self.open = [command for command in self.open if not command.is_over]
        return bool(self.open)

    def _request_id(self) -> str:
        self._requests += 1
        return f"{self._requests:032x}"

    def _ask(self, question: m.Message, answered: Callable[[Command, m.Message], None]) -> None:
        def hears(message: m.Message) -> None:
            answered(command, message)

        command = Command(self, question, hears)
        self.open.append(command)

    def submit(self, ranges) -> None:
        request_id = self._request_id()

        def answered(command: Command, message: m.Message) -> None:
            command.done()
            if isinstance(message, m.Submitted):
                self.world.tell(f"acknowledged: {message.ids}")
                self.oracle.submitted(request_id, message.ids)
                for first, last in message.ids:
                    self.jobs += range(first, last + 1)
            else:
                self.oracle.fail("engine", f"a submission was refused: {message}")

        self._ask(m.Submit(seq=1, request_id=request_id, ranges=tuple(ranges)), answered)

    def remove(self, job: int, *, kill: bool = False, force: bool = False) -> None:
        self.oracle.wanted_ended.add(job)
        if force:
            self.oracle.forced.add(job)
        self.world.tell(f"remove-job {job} kill={kill} force={force}", job)

        def answered(command: Command, message: m.Message) -> None:
            command.done()
            assert isinstance(message, m.Results), message
            for result in message.results:
                self.world.tell(f"told: {result.text}", result.id)
                if result.ok and "Canceled" in result.text:
                    self.oracle.canceled_at.setdefault(result.id, self.world.now)
                elif "will not be started again" in result.text and kill:
                    self.oracle.given_up_at.setdefault(result.id, self.world.now)

        question = m.RemoveJobs(seq=1, request_id=self._request_id(), ids=((job, job),), kill=kill, force=force)
        self._ask(question, answered)

    def hold(self, job: int) -> None:
        self._ask(m.HoldJobs(seq=1, request_id=self._request_id(), ids=((job, job),)), _done)

    def release(self, job: int) -> None:
        self.oracle.release_asked(job)

        def answered(command: Command, message: m.Message) -> None:
            del message
            command.done()
            self.oracle.release_answered(job)

        self._ask(m.ReleaseJobs(seq=1, request_id=self._request_id(), ids=((job, job),)), answered)

    def set_node(self, name: str, state, then: Callable[[], None] = lambda: None) -> None:
        self.world.tell(f"node {name} {state}")

        def answered(command: Command, message: m.Message) -> None:
            command.done()
            then()

        self._ask(m.SetNode(seq=1, request_id=self._request_id(), name=name, state=state, force=True), answered)

    def watch(self, job: int) -> None:
        def answered(command: Command, message: m.Message) -> None:
            if isinstance(message, m.JobEnded):
                command.done()
                self.oracle.ended(job, message.outcome)

        self._ask(m.WatchJobs(seq=1, ids=((job, job),)), answered)


def _done(command: Command, message: m.Message) -> None:
    del message
    command.done()
