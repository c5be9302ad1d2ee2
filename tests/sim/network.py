"""TCP as programs meet it: ordered and reliable per connection until it breaks; between connections no order at all.

Rules
- Each direction of a connection delivers in order, each piece after a delay of the link.
- While a link is cut nothing arrives; when it heals the kernels send again, each connection after a pause of its own, so
  that a newer connection may well be faster than what was under way on an older one.
- What a program had sent before it closed its end still arrives, then the end. A peer that is not there any more
  answers with a reset. A machine without power answers nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from kueue.protocol.messages import Message
from tests.sim.world import Machine, Program, World

CONNECT_SECONDS = 10.0
"""A connection that is not made by then is given up."""
RETRANSMIT_SECONDS = 25.0
"""Longest pause between two tries of a kernel that has been trying for a minute (RFC 6298 doubles it each time)."""


class Mark(Enum):
    """What ends a direction."""

    END = "end"
    RESET = "reset"


class Link:
    """The way between the server's machine and another one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_cut = False
        self.is_half_cut = False
        """Nothing arrives at the server, all still arrives from it."""
        self.delay_seconds = (0.0002, 0.003)
        self.back_seconds: tuple[float, float] | None = None
        """Of the way from the server, if that is another."""
        self.is_calm = False
        """The faults have stopped; what was planned before does not strike any more."""
        self.pipes: list[Pipe] = []
        self._cut_at = 0.0

    def delay(self, *, is_back: bool = False) -> float:
        seconds = self.back_seconds if is_back and self.back_seconds else self.delay_seconds
        return self.world.between(*seconds)

    def quicken(self) -> None:
        self.delay_seconds = (0.0002, 0.003)
        self.back_seconds = None

    def cut(self) -> None:
        if not self.is_cut and not self.is_calm:
            self.is_cut = True
            self._cut_at = self.world.now

    def half_cut(self) -> None:
        if not self.is_cut and not self.is_calm:
            self.is_half_cut = True
            self._cut_at = self.world.now

    def blocks(self, *, is_back: bool) -> bool:
        return self.is_cut or (self.is_half_cut and not is_back)

    def heal(self) -> None:
        if not self.is_cut and not self.is_half_cut:
            return
        self.is_cut = self.is_half_cut = False
        longest = min(RETRANSMIT_SECONDS, self.world.now - self._cut_at)
        self.pipes = [pipe for pipe in self.pipes if not pipe.is_over]
        for pipe in self.pipes:
            if pipe.held:
                self.world.after(self.world.between(0.0, longest), pipe.retransmit)


class Pipe:
    """One direction of a connection."""

    def __init__(self, link: Link, *, is_back: bool) -> None:
        self.link = link
        self.world = link.world
        self.is_back = is_back
        self.to: End | None = None
        self.held = 0
        """Pieces that reached the cut and wait for the kernel to try again."""
        self.is_lost = False
        """The way forgot this connection: nothing arrives, nobody is told."""
        self.is_over = False
        self._under_way: deque[Sequence[Message] | Mark] = deque()
        self._last = 0.0
        link.pipes.append(self)

    def put(self, piece: Sequence[Message] | Mark) -> None:
        self._last = max(self._last, self.world.now + self.link.delay(is_back=self.is_back))
        self._under_way.append(piece)
        self.world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if not self._under_way:
            return
        if self.held or self.link.blocks(is_back=self.is_back):
            self.held += 1
            return
        self._deliver()

    def _deliver(self) -> None:
        piece = self._under_way.popleft()
        if isinstance(piece, Mark):
            self.is_over = True
        if not self.is_lost and self.to is not None:
            self.to.arrives(piece)

    def retransmit(self) -> None:
        if self.link.blocks(is_back=self.is_back):
            return
        while self.held and self._under_way:
            self.held -= 1
            self._deliver()
        self.held = 0


class End:
    """One end of a connection, in the hands of one program."""

    def __init__(self, program: Program, out: Pipe) -> None:
        self.program = program
        self.out = out
        self.is_open = True
        self.on_messages: Callable[[Sequence[Message]], None] = lambda _: None
        self.on_closed: Callable[[], None] = lambda: None
        program.on_death.append(self._orphaned)

    def send(self, *messages: Message) -> None:
        if self.is_open:
            self.out.put(messages)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.out.put(Mark.END)

    def _orphaned(self, is_told: bool) -> None:
        if self.is_open:
            self.is_open = False
            if is_told:
                self.out.put(Mark.END)

    def arrives(self, piece: Sequence[Message] | Mark) -> None:
        if not self.program.machine.is_up:
            return
        if not self.program.is_alive:
            if not isinstance(piece, Mark):
                self.out.put(Mark.RESET)
            return
        self.program.post(lambda: self._take(piece))

    def _take(self, piece: Sequence[Message] | Mark) -> None:
        if not self.is_open:
            if not isinstance(piece, Mark):
                self.out.put(Mark.RESET)
            return
        if isinstance(piece, Mark):
            self.is_open = False
            if piece is Mark.END:
                self.out.put(Mark.END)
            self.on_closed()
        else:
            self.on_messages(piece)


class Network:
    """All links to the server, and the door behind which it listens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[str, Link] = {}
        self.listener: Callable[[], Program | None] = lambda: None
        """The server's program if it listens now."""
        self.server_machine: Machine | None = None
        self.accept: Callable[[End], None] = lambda _: None

    def link(self, machine: Machine) -> Link:
        if machine.name not in self.links:
            self.links[machine.name] = Link(self.world)
        return self.links[machine.name]

    def connect(self, program: Program, made: Callable[[End | None], None]) -> None:
        """Call `made` with a connection to the server, or with None when there is none."""
        link = self.link(program.machine)
        answer = _Once(made, program)
        program.wake(CONNECT_SECONDS, lambda: answer.give(None))
        self.world.after(link.delay(), lambda: self._knock(program, link, answer))

    def _knock(self, program: Program, link: Link, answer: _Once) -> None:
        assert self.server_machine is not None
        if link.blocks(is_back=False) or not self.server_machine.is_running:
            return
        server = self.listener()
        if server is None:
            self.world.after(link.delay(), lambda: program.post(lambda: answer.give(None)))
            return
        server.post(lambda: self._shake_hands(program, server, link, answer))

    def _shake_hands(self, program: Program, server: Program, link: Link, answer: _Once) -> None:
        if link.blocks(is_back=False) or answer.is_given or not program.is_alive or self.listener() is not server:
            return
        there, back = Pipe(link, is_back=False), Pipe(link, is_back=True)
        ours, theirs = End(program, there), End(server, back)
        there.to, back.to = theirs, ours
        self.accept(theirs)
        self.world.after(link.delay(), lambda: program.post(lambda: answer.give(ours)))


class _Once:
    """An answer that comes from several sides; the first counts."""

    def __init__(self, made: Callable[[End | None], None], program: Program) -> None:
        self._made = made
        self._program = program
        self.is_given = False

    def give(self, end: End | None) -> None:
        if self.is_given:
            if end is not None:
                end.close()
            return
        self.is_given = True
        self._made(end)


def lose(end: End) -> None:
    """A box on the way forgets this connection: both ends believe in it until they give up."""
    end.out.is_lost = True
    if end.out.to is not None:
        end.out.to.out.is_lost = True
