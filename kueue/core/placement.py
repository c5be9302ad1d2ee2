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
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from kueue.core.state import GLOBAL_SLOTS, Job, State, counters_of
from kueue.core.waiting import Shape
from kueue.model import Allocation, MachineTotals, Request, Share


class Obstacle(NamedTuple):
    """Why a request does not start on a worker now. `kind` is for programs, `sentence()` for people."""

    kind: Literal["closed", "machine", "busy", "taken", "deferred"]
    what: str
    asked: int = 0
    there: int = 0

    @property
    def is_lasting(self) -> bool:
        """The machine itself is too small."""
        return self.kind == "machine"

    def sentence(self) -> str:
        match self.kind:
            case "closed" | "deferred":
                return self.what
            case "machine":
                return f"has {self.there} {self.what}, {self.asked} asked for"
            case "busy":
                return f"is busy with other work: {self.there} of the {self.asked} {self.what} wished for would be free"
            case "taken":
                return f"has {self.there} {self.what} free, {self.asked} asked for"


class CounterShort(NamedTuple):
    """A lab-wide counter that has not enough left."""

    name: str
    asked: int
    used: int
    total: int

    def sentence(self) -> str:
        if self.name == GLOBAL_SLOTS:
            return f"global_max_parallel_jobs: {self.used} of {self.total} slots used, {self.asked} asked for"
        if self.total == 0:
            return f"{self.name} is not configured on the server any more"
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
    declined_jobs: Collection[int] = ()
    deferred: Collection[Request] = ()
    """Requests it put off until its next report."""
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
        return Obstacle("busy", "cpus", min(request.cores, room.totals.cores), cores)
    if request.ram_is_wish and 2 * ram_mb < min(request.ram_mb, room.totals.ram_mb):
        return Obstacle("busy", "MB of memory", min(request.ram_mb, room.totals.ram_mb), ram_mb)
    if request.slots > room.slots:
        return Obstacle("taken", "job slots", request.slots, room.slots)
    if cores > room.cores:
        return Obstacle("taken", "cpus", cores, room.cores)
    if ram_mb > room.ram_mb:
        return Obstacle("taken", "MB of memory", ram_mb, room.ram_mb)
    for name, amount in request.named:
        free = len(room.named.get(name, ()))
        if amount > free:
            return Obstacle("taken", name, amount, free)
    if room.deferred and request in room.deferred:
        return Obstacle("deferred", "put it off until its next report")
    return None


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


class Entry(NamedTuple):
    """A candidate in the order of (priority, id). `stamp` tells when the node was found; -1: not looked for yet."""

    minus_priority: int
    job: int
    stamp: int
    node: int
    shape: Shape | None
    """None: one revocable job, not a shape."""


_NONE: Mapping[str, int] = {}


class Round:
    """Picks jobs until nothing more fits. After each pick the caller evolves the state and then calls `took`."""

    def __init__(self, state: State, rooms: Iterable[Room], totals: Mapping[str, int]) -> None:
        self.state = state
        self.rooms = {room.node: room for room in rooms if not room.closed}
        self.totals = totals
        self.stamp = 0
        self._serial = 0
        self._current: Shape | None = None
        self._heap: list[tuple[int, int, int, Entry]] = []
        if self.rooms:
            self._gather()

    def next(self) -> Pick | None:
        """The first job in the order that fits somewhere, and the best node for it."""
        while self._heap:
            *_, entry = heappop(self._heap)
            if entry.stamp == self.stamp:
                self._current = entry.shape
                return self._pick(entry)
            found = self._resolve_job(entry) if entry.shape is None else self._resolve_shape(entry.shape)
            if found is not None:
                self._push(found)
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
        self.stamp += 1
        shape = self._current
        first = shape.first() if shape is not None else None
        if shape is not None and first is not None:
            self._push(Entry(-shape.request.priority, first, -1, -1, shape))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _push(self, entry: Entry) -> None:
        self._serial += 1
        heappush(self._heap, (entry.minus_priority, entry.job, self._serial, entry))

    def _gather(self) -> None:
        slots = max(room.slots for room in self.rooms.values())
        cores = max(room.cores for room in self.rooms.values())
        ram_mb = max(room.ram_mb for room in self.rooms.values())
        heap = self._heap
        for group in self.state.waiting.groups.values():
            least = group.bound()
            if least[0] > slots or least[1] > cores or least[2] > ram_mb:
                continue
            wish_cores, wish_ram = self._wishes(group.shapes)
            for request, shape in group.shapes.items():
                if request.slots > slots or (request.cores > cores and not wish_cores):
                    continue
                if request.ram_mb > ram_mb and not wish_ram:
                    continue
                first = shape.first()
                if first is not None:
                    self._serial += 1
                    entry = Entry(-request.priority, first, -1, -1, shape)
                    heap.append((-request.priority, first, self._serial, entry))
        for job_id in self.state.revocable:
            self._serial += 1
            request = self.state.jobs[job_id].template.request
            heap.append((-request.priority, job_id, self._serial, Entry(-request.priority, job_id, -1, -1, None)))
        heapify(heap)

    @staticmethod
    def _wishes(shapes: Mapping[Request, Shape]) -> tuple[bool, bool]:
        request = next(iter(shapes))
        return request.cores_are_wish, request.ram_is_wish

    def _resolve_shape(self, shape: Shape) -> Entry | None:
        request = shape.request
        if short_counter(request, self.state.used, self.totals, _NONE) is not None:
            return None
        best: int | None = None
        nodes: list[Room] = []
        for room in self.rooms.values():
            if obstacle(request, room) is not None:
                continue
            job = shape.first(room.declined, room.declined_jobs)
            if job is None or (best is not None and job > best):
                continue
            if best is None or job < best:
                best = job
                nodes = []
            nodes.append(room)
        if best is None:
            return None
        return Entry(-request.priority, best, self.stamp, self._prefer(request, nodes), shape)

    def _resolve_job(self, entry: Entry) -> Entry | None:
        job = self.state.jobs.get(entry.job)
        if job is None or not job.may_be_given_away:
            return None
        request = job.template.request
        if short_counter(request, self.state.used, self.totals, held_by(job)) is not None:
            return None
        directory = job.template.directory
        nodes = [
            room
            for room in self.rooms.values()
            if obstacle(request, room) is None and directory not in room.declined and job.id not in room.declined_jobs
        ]
        if not nodes:
            return None
        return entry._replace(stamp=self.stamp, node=self._prefer(request, nodes))

    @staticmethod
    def _prefer(request: Request, nodes: list[Room]) -> int:
        def occupation(room: Room) -> tuple[float, int]:
            cores, ram_mb = taken(request, room)
            return room.occupation_with(request.slots, cores, ram_mb), room.node

        return min(nodes, key=occupation).node

    def _pick(self, entry: Entry) -> Pick:
        request = self.state.jobs[entry.job].template.request
        return Pick(entry.job, entry.node, allocate(request, self.rooms[entry.node]))


def held_by(job: Job) -> Mapping[str, int]:
    """The counters that a job's live attempt holds."""
    return dict(job.attempt.allocation.counters) if job.attempt is not None else {}


def allocate(request: Request, room: Room) -> Allocation:
    """What the request takes there; the units with the lowest numbers of each named resource."""
    cores, ram_mb = taken(request, room)
    named = tuple((name, tuple(sorted(room.named[name])[:amount])) for name, amount in request.named if amount)
    share = Share(node=room.node, slots=request.slots, cores=cores, ram_mb=ram_mb, named=named)
    return Allocation(shares=(share,), counters=tuple(sorted(counters_of(request).items())))
