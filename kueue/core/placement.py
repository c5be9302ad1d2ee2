"""Which job goes where: a total order of jobs, a filter of workers, a preference among those that pass.

Theory of operation
    order       priority (high first), then id. A job that fits nowhere is passed over by later ones.
    filter      `obstacle` for one worker, `short_counter` for the lab. The same two, asked about one job, are the
                reason it waits; there is no second opinion.
    preference  the worker that is least occupied afterwards, then the lowest id.

A *wish* (a size the user did not type) takes on each worker min(wish, what would be free there if kueue ran nothing),
at least one core, and starts there only if that is at least half of min(wish, the machine): a machine of the owner's
own work is not squeezed, and the default of 8 cores fits a laptop of 2.

A `Round` is one settling: rooms only shrink while it lasts, so what fitted nowhere is not looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal, NamedTuple, TypeAlias

from kueue.core.jobs import GLOBAL_SLOTS, Job, counters_of
from kueue.core.room import free_room
from kueue.core.state import State
from kueue.core.waiting import Group, Shape, smallest, turn_of
from kueue.model import Allocation, MachineLoad, MachineTotals, Request, Share

_MEASURED = frozenset({"job slots", "cpus", "MB of memory"})


class Obstacle(NamedTuple):
    """Why a request does not start on a worker now. `kind` is for programs, `sentence()` for people."""

    kind: Literal["closed", "machine", "busy", "taken", "deferred"]
    what: str
    asked: int = 0
    there: int = 0
    is_wish: bool = False
    """What was asked for is a wish."""
    others: int = 0
    """How much of `total`, what the machine gives, is in use by what is not kueue's."""
    total: int = 0

    def sentence(self) -> str:
        match self.kind:
            case "closed" | "deferred":
                return self.what
            case "machine":
                return f"has {self.there} {self.what}, {self.asked} asked for"
            case "busy":
                wanted = f"{self.asked} {self.what} {'wished' if self.is_wish else 'asked'} for"
                # The command knows these words and says what can be done (`kueue.cli.job_text.OTHER_WORK`).
                others = f"is busy with other work, which takes {self.others} of {self.total} {self.what}"
                return f"{others}: {self.there} of the {wanted} would be free"
            case "taken":
                return f"has {self.there} {self.what} free, {self.asked} asked for"

    def remedy(self) -> str:
        """How a machine is given what none has, in brackets after a blank; empty if that cannot be helped by words."""
        if self.kind != "machine" or self.there or self.what in _MEASURED:
            return ""
        return f' (a machine gives what its [worker_settings] name: resources = "{self.what}={self.asked}")'


class CounterShort(NamedTuple):
    """A lab-wide counter that has not enough left."""

    name: str
    asked: int
    used: int
    total: int

    def sentence(self) -> str:
        if self.name == GLOBAL_SLOTS:
            return f"global_max_parallel_jobs: {self.used} of {self.total} slots used, {self.asked} asked for"
        return f"{self.name}: {self.used} of {self.total} used, {self.asked} asked for"


@dataclass
class Room:
    """What a worker has to give in this round. Built by the engine, shrunk by `Round`."""

    node: int
    totals: MachineTotals
    slots: int
    cores: int
    ram_mb: int
    wish_cores: int
    """What would be free if kueue ran nothing there."""
    wish_ram_mb: int
    named: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Free units of each named resource."""
    declined: Collection[str] = ()
    """Directories that this worker said it cannot see, until asked again."""
    deferred: Mapping[Request, str] = field(default_factory=dict)
    """Requests it put off until its next report → why."""
    load: MachineLoad = MachineLoad()
    traceless: AbstractSet[int] = frozenset()
    """Offers of attempts that it has no trace of, so that it keeps no room for them."""
    closed: str = ""
    """Why it gets no jobs at all; empty: it does."""

    def occupation_with(self, slots: int, cores: int, ram_mb: int) -> float:
        """0…1: the largest share of slots, cores and memory in use, if this were added."""
        return max(
            _fraction(self.totals.slots - self.slots + slots, self.totals.slots),
            _fraction(self.totals.cores - self.cores + cores, self.totals.cores),
            _fraction(self.totals.ram_mb - self.ram_mb + ram_mb, self.totals.ram_mb),
        )


def _fraction(part: int, whole: int) -> float:
    return 1.0 if whole <= 0 else min(1.0, max(0.0, part / whole))


def taken(request: Request, room: Room) -> tuple[int, int]:
    """(cores, ram_mb) that the request would take there: what was typed, or what a wish comes down to."""
    cores, ram_mb = request.cores, request.ram_mb
    if request.cores_are_wish:
        cores = max(min(1, cores), min(cores, room.wish_cores))
    if request.ram_is_wish:
        ram_mb = min(ram_mb, room.wish_ram_mb)
    return cores, ram_mb


def obstacle(request: Request, room: Room) -> Obstacle | None:
    """What keeps the request from starting there now; None: it fits."""
    if room.closed:
        return Obstacle("closed", room.closed)
    lasting = too_small(request, room.totals)
    if lasting is not None:
        return lasting
    cores, ram_mb = taken(request, room)
    if request.cores_are_wish and 2 * cores < min(request.cores, room.totals.cores):
        return _busy_cores(request, room, cores)
    if request.ram_is_wish and 2 * ram_mb < min(request.ram_mb, room.totals.ram_mb):
        asked = min(request.ram_mb, room.totals.ram_mb)
        return _busy_memory(request, room, asked, ram_mb)
    if request.slots > room.slots:
        return Obstacle("taken", "job slots", request.slots, room.slots)
    if cores > room.cores:
        if cores > room.wish_cores:
            # Without this word a person looks in vain for the jobs that took the machine.
            return _busy_cores(request, room, room.wish_cores)
        return Obstacle("taken", "cpus", cores, room.cores)
    if ram_mb > room.ram_mb:
        if ram_mb > room.wish_ram_mb:
            return _busy_memory(request, room, ram_mb, room.wish_ram_mb)
        return Obstacle("taken", "MB of memory", ram_mb, room.ram_mb)
    for name, amount in request.named:
        free = len(room.named.get(name, ()))
        if amount > free:
            return Obstacle("taken", name, amount, free)
    if room.deferred and request in room.deferred:
        return Obstacle("deferred", f"put it off until its next report: {room.deferred[request]}")
    return None


def _busy_cores(request: Request, room: Room, there: int) -> Obstacle:
    total = room.totals.cores
    asked = min(request.cores, total)
    wish = request.cores_are_wish
    return Obstacle("busy", "cpus", asked, there, is_wish=wish, others=total - room.wish_cores, total=total)


def _busy_memory(request: Request, room: Room, asked: int, there: int) -> Obstacle:
    total, wish = room.totals.ram_mb, request.ram_is_wish
    others = total - room.wish_ram_mb
    return Obstacle("busy", "MB of memory", asked, there, is_wish=wish, others=others, total=total)


def too_small(request: Request, totals: MachineTotals) -> Obstacle | None:
    """What the machine can never give, whatever else runs there."""
    if request.slots > totals.slots:
        return Obstacle("machine", "job slots", request.slots, totals.slots)
    if not request.cores_are_wish and request.cores > totals.cores:
        return Obstacle("machine", "cpus", request.cores, totals.cores)
    if request.cores_are_wish and request.cores > 0 and totals.cores < 1:
        return Obstacle("machine", "cpus", 1, totals.cores)
    if not request.ram_is_wish and request.ram_mb > totals.ram_mb:
        return Obstacle("machine", "MB of memory", request.ram_mb, totals.ram_mb)
    if request.named:
        has = dict(totals.named)
        for name, amount in request.named:
            if amount > has.get(name, 0):
                return Obstacle("machine", name, amount, has.get(name, 0))
    return None


def short_counter(
    request: Request, used: Mapping[str, int], totals: Mapping[str, int], own: Mapping[str, int]
) -> CounterShort | None:
    """The first counter that has too little left. `own`: what the job's unreachable attempt would give back."""
    for name, amount in counters_of(request).items():
        total = totals.get(name, 0)
        in_use = used.get(name, 0) - own.get(name, 0)
        if in_use + amount > total:
            return CounterShort(name, amount, in_use, total)
    return None


class Pick(NamedTuple):
    """The next thing to do: offer this job to this node with this allocation."""

    job: int
    node: int
    allocation: Allocation
    frees_line: bool = False
    """For that, all that live of the line of its unreachable attempt are given up: it needs what they hold."""


Source: TypeAlias = Group | Shape | int
"""Where a pick comes from: a group; a shape of which a worker lacks directories; the id of a revocable job."""

_NONE: Mapping[str, int] = {}


class Round:
    """Picks jobs until nothing more fits. After each pick the caller evolves the state and then calls `took`.

    A heap holds the sources by the turn that is theirs at the earliest; rooms only shrink and jobs only leave, so turns
    only move back. A source that comes up is looked at anew: if its turn is still that one, it is picked, else it goes
    back with its later turn. So is a heap of workers for each request, by how occupied they would be at least.
    """

    def __init__(self, state: State, rooms: Iterable[Room], totals: Mapping[str, int]) -> None:
        self.state = state
        self.rooms = {room.node: room for room in rooms if not room.closed}
        self.totals = totals
        self._heap: list[tuple[int, int, int, Source]] = []
        self._serial = 0
        """Two sources may have one turn for a moment; they themselves are not compared."""
        self._current: Source = -1
        self._limits: dict[int, float] = {}
        """By identity of a group: no more memory than this is free wherever a member of it fits."""
        self._without: set[Request] = set()
        """Shapes that fit nowhere any more, or that stand in the heap apart from their group."""
        self._fitting: dict[Request, list[tuple[float, int]]] = {}
        """Heap of (occupation, node) of the rooms in which a request fitted when they were looked at last."""
        if self.rooms:
            self._gather()

    def next(self) -> Pick | None:
        """The first job in the order that fits somewhere, and the best node for it."""
        while self._heap:
            minus_priority, job, _, source = heappop(self._heap)
            if isinstance(source, int):
                pick = self._revocable(source)
            elif isinstance(source, Shape):
                pick = self._of_shape(source, (minus_priority, job))
            else:
                pick = self._of_group(source, (minus_priority, job))
            if pick is not None:
                self._current = source
                return pick
        return None

    def took(self, pick: Pick) -> None:
        """The pick has been offered: shrink that room, and let the next of its shape come up."""
        room = self.rooms[pick.node]
        for share in pick.allocation.shares:
            room.slots -= share.slots
            room.cores -= share.cores
            room.ram_mb -= share.ram_mb
            if share.named:
                room.named = {name: units - set(dict(share.named).get(name, ())) for name, units in room.named.items()}
        if room.slots <= 0 and room.cores <= 0 and room.ram_mb <= 0:
            del self.rooms[pick.node]
        self.skipped()

    def skipped(self) -> None:
        """The pick ended otherwise than by an offer: go on with what the state says now."""
        source = self._current
        if isinstance(source, Group):
            self._push_group(source)
        elif isinstance(source, Shape) and source:
            self._push(turn_of(source), source)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _push(self, turn: tuple[int, int, object], source: Source) -> None:
        self._serial += 1
        heappush(self._heap, (turn[0], turn[1], self._serial, source))

    def _push_group(self, group: Group) -> None:
        turn = group.first(self._limits[id(group)], self._without)
        if turn is not None:
            self._push(turn, group)

    def _gather(self) -> None:
        slots = max(room.slots for room in self.rooms.values())
        cores = max(room.cores for room in self.rooms.values())
        ram_mb = max(room.ram_mb for room in self.rooms.values())
        for group in self.state.waiting.groups.values():
            least = smallest(group.probe)
            if least[0] <= slots and least[1] <= cores:
                self._limits[id(group)] = float("inf") if group.probe.ram_is_wish else ram_mb
                self._push_group(group)
        for job_id in self.state.revocable:
            request = self.state.jobs[job_id].template.request
            self._push((-request.priority, job_id, None), job_id)

    def _revocable(self, job_id: int) -> Pick | None:
        job = self.state.jobs.get(job_id)
        if job is None or not job.may_be_given_away:
            return None
        request = job.template.request
        if short_counter(request, self.state.used, self.totals, held_by(self.state, job)) is not None:
            return None
        node, _ = self._best(request, job_id)
        frees_line = node is None or short_counter(request, self.state.used, self.totals, _NONE) is not None
        if node is None:
            node = self._in_its_own_place(job)
        return None if node is None else self._pick(job_id, node, frees_line=frees_line)

    def _in_its_own_place(self, job: Job) -> int | None:
        """Its own worker, if that is here without a trace of its line and has room when that is given up.

        Of what it merely cannot tell (its runner is mute) the worker keeps the room: given up, it would gain nothing.
        """
        assert job.attempt is not None
        share = job.attempt.share
        room = self.rooms.get(share.node)
        if room is None or not self.state.lines[job.attempt.line].keys() <= room.traceless:
            return None
        if not self.state.may_free(job.attempt) or job.template.directory in room.declined:
            return None
        freed = self._vacated(share, room)
        if obstacle(job.template.request, freed) is not None:
            return None
        self.rooms[share.node] = freed
        return share.node

    def _vacated(self, share: Share, room: Room) -> Room:
        """The room without that share, whose worker may have been lowered below what it has given."""
        node = self.state.nodes[share.node]
        rest = node.slots - share.slots, node.cores - share.cores, node.ram_mb - share.ram_mb
        slots, cores, ram_mb = free_room(room.totals, room.load, *rest)
        named = dict(room.named)
        for name, units in share.named:
            there = dict(room.totals.named).get(name, 0)
            named[name] = named.get(name, frozenset()) | {unit for unit in units if unit < there}
        return replace(room, slots=slots, cores=cores, ram_mb=ram_mb, named=named)

    def _of_group(self, group: Group, key: tuple[int, int]) -> Pick | None:
        # What is wanted lab-wide is the same for all members.
        if short_counter(group.probe, self.state.used, self.totals, _NONE) is not None:
            return None
        turn = group.first(self._limits[id(group)], self._without)
        if turn is None:
            return None
        if turn[:2] != key:
            self._push(turn, group)
            return None
        found = self._resolve(turn.shape)
        if found is not None and found[0] == turn.job:
            return self._pick(*found)
        self._without.add(turn.shape.request)
        if found is None:
            self._limits[id(group)] = min(self._limits[id(group)], self._most_memory(group))
        else:
            self._push((turn.minus_priority, found[0], None), turn.shape)
        self._push_group(group)
        return None

    def _of_shape(self, shape: Shape, key: tuple[int, int]) -> Pick | None:
        if not shape or short_counter(shape.request, self.state.used, self.totals, _NONE) is not None:
            return None
        found = self._resolve(shape)
        if found is None:
            return None
        if (key[0], found[0]) != key:
            self._push((key[0], found[0], None), shape)
            return None
        return self._pick(*found)

    def _most_memory(self, group: Group) -> float:
        # Put off is a shape, not what it has in common with others.
        found = ((room, obstacle(group.probe, room)) for room in self.rooms.values())
        rooms = [room for room, hinders in found if hinders is None or hinders.kind == "deferred"]
        if group.probe.ram_is_wish and rooms:
            return float("inf")
        return max((room.ram_mb for room in rooms), default=-1)

    def _resolve(self, shape: Shape) -> tuple[int, int] | None:
        """(job, node): the first job of the shape that a worker takes; None: none takes any."""
        first = shape.first()
        if first is None:
            return None
        node, others = self._best(shape.request, first)
        if node is not None:
            return first, node
        # Who has room lacks the directory of the first job; each of them has a first of its own.
        found: list[tuple[int, float, int]] = []
        for occupation, other in others:
            room = self.rooms[other]
            job = shape.first(room.declined)
            if job is not None:
                found.append((job, occupation, other))
        if not found:
            return None
        job, _, node = min(found)
        return job, node

    def _best(self, request: Request, job: int) -> tuple[int | None, list[tuple[float, int]]]:
        """Returns (the node, None if there is none; (occupation, node) of better ones that lack its directory)."""
        directory = self.state.jobs[job].template.directory
        fitting = self._fitting.get(request)
        if fitting is None:
            fitting = self._fitting[request] = [
                (_occupation(request, room), room.node)
                for room in self.rooms.values()
                if obstacle(request, room) is None
            ]
            heapify(fitting)
        declined: list[tuple[float, int]] = []
        best: int | None = None
        while fitting:
            occupation, node = fitting[0]
            room = self.rooms.get(node)
            if room is None or obstacle(request, room) is not None:
                heappop(fitting)
                continue
            now = _occupation(request, room)
            if now != occupation:
                heapreplace(fitting, (now, node))
            elif directory in room.declined:
                declined.append(heappop(fitting))
            else:
                best = node
                break
        for entry in declined:
            heappush(fitting, entry)
        return best, declined

    def _pick(self, job: int, node: int, *, frees_line: bool = False) -> Pick:
        request = self.state.jobs[job].template.request
        return Pick(job, node, allocate(request, self.rooms[node]), frees_line)


def _occupation(request: Request, room: Room) -> float:
    cores, ram_mb = taken(request, room)
    return room.occupation_with(request.slots, cores, ram_mb)


def held_by(state: State, job: Job) -> Mapping[str, int]:
    """The counters that are free when a job's live attempt is given up."""
    if job.attempt is None or not state.may_free(job.attempt):
        return {}
    return dict(job.attempt.allocation.counters)


def allocate(request: Request, room: Room) -> Allocation:
    """What the request takes there; the units with the lowest numbers of each named resource."""
    cores, ram_mb = taken(request, room)
    named = tuple((name, tuple(sorted(room.named[name])[:amount])) for name, amount in request.named if amount)
    share = Share(node=room.node, slots=request.slots, cores=cores, ram_mb=ram_mb, named=named)
    return Allocation(shares=(share,), counters=tuple(sorted(counters_of(request).items())))
