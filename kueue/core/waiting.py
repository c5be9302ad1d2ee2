"""The jobs that wait for a place, indexed by shape so that a decision does not walk them all.

Rules
- A *shape* is a `Request` (priority and counters included, the directory not). Jobs of one shape fit the same nodes.
- Inside a shape the jobs are kept per directory, since a worker may lack one: all jobs of it step aside together.
- Shapes are grouped by what they have in common besides sizes, so that a full lab is seen in one look per group.

Why this way
    100,000 jobs of 50 shapes cost 50 looks, not 100,000. Heaps with lazy removal are used instead of sorted lists:
    a job leaves from the middle only when it is canceled or held, and then its entry is skipped when it comes up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from kueue.model import Request

GroupKey = tuple[bool, bool, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]


class Shape:
    """The waiting jobs of one request, lowest id first."""

    __slots__ = ("_members", "_order", "_places", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self._members: set[int] = set()
        self._places: dict[str, list[int]] = {}
        """Directory → heap of ids; entries that are no members are stale."""
        self._order: list[tuple[int, str]] = []
        """Heap of (lowest id, directory); an entry is valid if it still tells the lowest id of its directory."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, job: int) -> bool:
        return job in self._members

    def add(self, job: int, place: str) -> None:
        self._members.add(job)
        heap = self._places.setdefault(place, [])
        heappush(heap, job)
        if heap[0] == job:
            heappush(self._order, (job, place))

    def discard(self, job: int, place: str) -> None:
        if job not in self._members:
            return
        was_first = self._first_of(place) == job
        self._members.remove(job)
        first = self._first_of(place)
        if was_first and first is not None:
            heappush(self._order, (first, place))

    def first(self, without: Collection[str] = (), without_jobs: Collection[int] = ()) -> int | None:
        """The lowest waiting id whose directory is not in `without`; None if there is none."""
        order = self._order
        while order and self._first_of(order[0][1]) != order[0][0]:
            heappop(order)
        if not order:
            return None
        if not without and not without_jobs:
            return order[0][0]
        return self._first_but(without, without_jobs)

    def count_of(self, place: str) -> int:
        """How many jobs of that directory wait; for people, walks them."""
        return sum(1 for job in set(self._places.get(place, ())) if job in self._members)

    def places(self) -> Iterator[str]:
        return iter(self._places)

    def _first_of(self, place: str) -> int | None:
        heap = self._places.get(place)
        if heap is None:
            return None
        while heap and heap[0] not in self._members:
            heappop(heap)
        if heap:
            return heap[0]
        del self._places[place]
        return None

    def _first_but(self, without: Collection[str], without_jobs: Collection[int]) -> int | None:
        # The heap is walked from its root in ascending order: as many steps as directories stand aside, not more.
        order = self._order
        todo: list[tuple[int, int]] = [(order[0][0], 0)]
        while todo:
            job, index = heappop(todo)
            place = order[index][1]
            if place not in without and self._first_of(place) == job:
                if job not in without_jobs:
                    return job
                others = [
                    other for other in self._places[place] if other in self._members and other not in without_jobs
                ]
                if others:
                    return min(others)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(order):
                    heappush(todo, (order[child][0], child))
        return None


class Group:
    """Shapes that differ in sizes and priority only, and the smallest of each size among them."""

    __slots__ = ("_bound", "shapes")

    def __init__(self) -> None:
        self.shapes: dict[Request, Shape] = {}
        self._bound: tuple[int, int, int] | None = None

    def added(self, request: Request) -> None:
        if self._bound is not None:
            slots, cores, ram_mb = self._bound
            sizes = smallest(request)
            self._bound = (min(slots, sizes[0]), min(cores, sizes[1]), min(ram_mb, sizes[2]))

    def removed(self) -> None:
        self._bound = None

    def bound(self) -> tuple[int, int, int]:
        """No member needs less than these slots, cores and megabytes."""
        if self._bound is None:
            sizes = [smallest(request) for request in self.shapes]
            self._bound = (min(s[0] for s in sizes), min(s[1] for s in sizes), min(s[2] for s in sizes))
        return self._bound


def smallest(request: Request) -> tuple[int, int, int]:
    """The least (slots, cores, ram_mb) with which this request may start on any machine."""
    cores = min(1, request.cores) if request.cores_are_wish else request.cores
    return request.slots, cores, 0 if request.ram_is_wish else request.ram_mb


class Waiting:
    """All waiting jobs."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey, Group] = {}

    def __len__(self) -> int:
        return sum(len(shape) for group in self.groups.values() for shape in group.shapes.values())

    def __contains__(self, entry: tuple[int, Request]) -> bool:
        job, request = entry
        shape = self.shape(request)
        return shape is not None and job in shape

    def shape(self, request: Request) -> Shape | None:
        group = self.groups.get(_key(request))
        return None if group is None else group.shapes.get(request)

    def add(self, job: int, request: Request, place: str) -> None:
        key = _key(request)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group()
        shape = group.shapes.get(request)
        if shape is None:
            shape = group.shapes[request] = Shape(request)
            group.added(request)
        shape.add(job, place)

    def discard(self, job: int, request: Request, place: str) -> None:
        key = _key(request)
        group = self.groups.get(key)
        shape = None if group is None else group.shapes.get(request)
        if group is None or shape is None:
            return
        shape.discard(job, place)
        if not shape:
            del group.shapes[request]
            group.removed()
            if not group.shapes:
                del self.groups[key]


def _key(request: Request) -> GroupKey:
    return request.cores_are_wish, request.ram_is_wish, request.named, request.counters
