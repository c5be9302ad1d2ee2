"""The simulated world: one real time, machines with clocks of their own, programs that can stand still or die.

Rules
- One `random.Random(seed)` and one queue ordered by (time, serial): a seed replays exactly. Nothing may iterate over a
  set of strings or objects, for their order differs from run to run.
- Real time is known to the world and the oracle alone. A program sees the clocks of its machine.
- A program that stands still (stopped, or its machine sleeps) finds all that came meanwhile when it goes on, in order;
  one that died finds nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

WALL_BASE = 1_700_000_000.0
WAKE_SECONDS = 0.02
"""Between the end of a standstill and the first instruction of a program, at most."""

STEPS_MAX = 300_000
"""Far above what a world needs that does not turn in circles."""

Act = Callable[[], None]


class World:
    """Time and chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.wall_offset = 0.0
        self.story: deque[tuple[float, int | None, str]] = deque(maxlen=4000)
        """(time, job or None, what)."""
        self._queue: list[tuple[float, int, Act]] = []
        self._serial = 0

    def at(self, when: float, act: Act) -> None:
        self._serial += 1
        heappush(self._queue, (max(when, self.now), self._serial, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> bool:
        """Run to that moment. Returns True at once when `enough` holds (asked twice per second)."""
        asked = self.now
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heappop(self._queue)
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise RuntimeError(f"more than {STEPS_MAX} steps: something turns in circles")
            act()
            if enough is not None and self.now >= asked + 0.5:
                asked = self.now
                if enough():
                    return True
        self.now = until
        return enough is not None and enough()

    def wall(self) -> float:
        return WALL_BASE + self.now + self.wall_offset

    def tell(self, text: str, job: int | None = None) -> None:
        self.story.append((self.now, job, text))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()


class Machine:
    """A computer: powered or not, awake or asleep, with clocks that go a little wrong."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rate = world.between(0.99, 1.01)
        """Seconds of its clocks per real second."""
        self.is_up = True
        self.is_awake = True
        self.boots = 1
        self.programs: list[Program] = []
        self.woken_at = float("-inf")
        """Real time of the last end of a sleep."""
        self.on_wake: list[Act] = []
        self.on_sleep: list[Act] = []
        self._booted_at = world.now - world.between(10.0, 10_000.0)
        self._slept_seconds = 0.0
        self._asleep_since = 0.0

    @property
    def is_running(self) -> bool:
        return self.is_up and self.is_awake

    def boottime(self) -> float:
        """CLOCK_BOOTTIME: goes on while the machine sleeps."""
        return (self.world.now - self._booted_at) * self.rate

    def monotonic(self) -> float:
        """CLOCK_MONOTONIC: stands still while the machine sleeps."""
        until = self.world.now if self.is_awake else self._asleep_since
        return (until - self._booted_at - self._slept_seconds) * self.rate

    def real_seconds(self, local: float) -> float:
        return local / self.rate

    def sleep(self) -> None:
        if self.is_running:
            self.is_awake = False
            self._asleep_since = self.world.now
            for act in self.on_sleep:
                act()

    def wake(self) -> None:
        if not self.is_up or self.is_awake:
            return
        self.is_awake = True
        self._slept_seconds += self.world.now - self._asleep_since
        self.woken_at = self.world.now
        for act in self.on_wake:
            act()
        for program in list(self.programs):
            program.went_on()

    def power_off(self) -> None:
        """All processes are gone at once; nobody is told."""
        self.is_up = False
        self.is_awake = True
        for program in list(self.programs):
            program.die(is_told=False)

    def boot(self) -> None:
        self.is_up = True
        self.is_awake = True
        self.boots += 1
        self._booted_at = self.world.now
        self._slept_seconds = 0.0


class Program:
    """One life of a process. `post` hands it what arrives; `wake` is its timer."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.world = machine.world
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.stopped_since: float | None = None
        self.on_death: list[Callable[[bool], None]] = []
        """Called with: are its peers told (by the kernel that closes its sockets)?"""
        self.on_continue: list[Callable[[], None]] = []
        self._waiting: deque[Act] = deque()
        self._is_waking = False
        machine.programs.append(self)

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_stopped and self.machine.is_running

    def post(self, act: Act) -> None:
        if not self.is_alive:
            return
        if self.is_running and not self._waiting and not self._is_waking:
            act()
        else:
            self._waiting.append(act)

    def wake(self, local_seconds: float, act: Act) -> None:
        """Call `act` when so much time has passed on this machine."""
        self.world.after(self.machine.real_seconds(max(0.0, local_seconds)), lambda: self.post(act))

    def stop(self) -> None:
        """SIGSTOP."""
        if self.is_alive and not self.is_stopped:
            self.is_stopped = True
            self.stopped_since = self.machine.monotonic()

    def go_on(self) -> None:
        """SIGCONT."""
        if self.is_alive and self.is_stopped:
            self.is_stopped = False
            self.went_on()

    def went_on(self) -> None:
        if not self.is_running:
            return
        self._is_waking = True
        self.world.after(self.world.between(0.0, WAKE_SECONDS), self._drain)

    def die(self, *, is_told: bool = True) -> None:
        """SIGKILL, or the power went."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._waiting.clear()
        self.machine.programs.remove(self)
        for act in self.on_death:
            act(is_told)

    def _drain(self) -> None:
        if not self.is_running:
            self._is_waking = False
            return
        if self._is_waking:
            self._is_waking = False
            for told in self.on_continue:
                told()
        while self._waiting and self.is_running:
            self._waiting.popleft()()
