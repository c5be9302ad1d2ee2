"""The jobs that wait for a place, indexed by shape so that a decision does not walk them all.

Rules
- A *shape* is a `Request` (priority and counters included, the directory not). Jobs of one shape fit the same nodes.
- Inside a shape the jobs are kept per directory, since a worker may lack one: all jobs of it step aside together.
- Shapes are grouped by what they have in common besides memory and priority, so that a full lab is seen in one look
  per group.

Why this way
    100,000 jobs of 50 shapes cost 50 looks, not 100,000. Heaps with lazy removal are used instead of sorted lists:
    a job leaves from the middle only when it is canceled or held, or when those before it fit nowhere, and then its
    entry is skipped when it comes up. What does not come up is swept before it outnumbers what is valid.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from kueue.core.declines import Declines
from kueue.model import Request

Entry: TypeAlias = tuple[int, str]
"""(lowest id, directory)"""

GroupKey = tuple[int, int, bool, bool, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]

FEW = 16
"""A worker that lacks no more directories than these is worth no heap of its own, however few there are."""
WALKED = 128
"""Nor where it lacks less than every so many-th directory of a shape: these are passed over in a walk. Since all heaps
of a shape share their entries, this bounds them to about 1 KiB for each directory that is lacking."""
SLACK = 16
"""So many stale entries are not worth sweeping, however few others there are."""
BLOCK = 64
"""Most shapes of a block: the root of the 10,000 sizes that a lab may bring, roughly."""


class View:
    """The directories of a shape that one worker may be asked for."""

    __slots__ = ("declines", "gone", "heap", "read")

    def __init__(self, heap: list[Entry], declines: Declines) -> None:
        self.heap = heap
        """As `Shape._order`; an entry whose directory the worker declined is stale, too."""
        self.declines = declines
        self.gone = declines.gone
        """What the worker may be asked for again."""
        self.read = len(self.gone)

    @property
    def is_outdated(self) -> bool:
        return self.gone is not self.declines.gone


class Shape:
    """The waiting jobs of one request, lowest id first."""

    __slots__ = ("_gone", "_highest", "_members", "_order", "_places", "_views", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self._members: set[int] = set()
        self._places: dict[str, list[int]] = {}
        """Directory → heap of ids; those in `_gone` are stale, the first never is."""
        self._highest = -1
        """No job above it was ever here."""
        self._gone: set[int] = set()
        """Ids that left from the middle of a heap and still stand there."""
        self._order: list[Entry] = []
        """Heap with an entry for each directory and stale ones; valid is what tells the lowest id of its directory."""
        self._views: dict[int, View] = {}
        """By identity of the declines of a worker that lacks many directories."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, job: int) -> bool:
        return job in self._members

    def add(self, job: int, place: str) -> None:
        self._members.add(job)
        self._highest = max(self._highest, job)
        heap = self._places.setdefault(place, [])
        if job in self._gone:
            self._gone.remove(job)
        else:
            heappush(heap, job)
        if heap[0] == job:
            self._list(job, place)
            self._sweep()

    def add_row(self, jobs: range, place: str) -> None:
        """Add jobs in a row, which need no sorting when they are the newest, as new ones are."""
        if jobs.start <= self._highest:
            for job in jobs:
                self.add(job, place)
            return
        self._highest = jobs[-1]
        self._members.update(jobs)
        heap = self._places.setdefault(place, [])
        heap.extend(jobs)
        if heap[0] == jobs.start:
            self._list(jobs.start, place)
            self._sweep()

    def discard(self, job: int, place: str) -> None:
        if job not in self._members:
            return
        self._members.remove(job)
        heap = self._places[place]
        if heap[0] != job:
            self._gone.add(job)
        else:
            heappop(heap)
            while heap and heap[0] in self._gone:
                self._gone.remove(heappop(heap))
            if heap:
                self._list(heap[0], place)
            else:
                del self._places[place]
        self._sweep()

    def first(self, without: Collection[str] = ()) -> int | None:
        """The lowest waiting id whose directory is not in `without`; None if there is none."""
        if isinstance(without, Declines) and len(without) > max(FEW, len(self._places) // WALKED):
            return self._first_in_view(without)
        order = self._order
        passed: list[Entry] = []
        while order and ((is_stale := not self._is_valid(order[0])) or order[0][1] in without):
            entry = heappop(order)
            # The same one may stand there twice.
            if not is_stale and not (passed and entry == passed[-1]):
                passed.append(entry)
        first = order[0][0] if order else None
        for entry in passed:
            heappush(order, entry)
        return first

    def _first_in_view(self, declines: Declines) -> int | None:
        view = self._views.get(id(declines))
        if view is None or view.is_outdated:
            entries = [entry for entry in self._order if entry[1] not in declines and self._is_valid(entry)]
            heapify(entries)
            view = self._views[id(declines)] = View(entries, declines)
        heap = view.heap
        for place in view.gone[view.read :]:
            if place in self._places:
                heappush(heap, (self._places[place][0], place))
        view.read = len(view.gone)
        while heap and (heap[0][1] in declines or not self._is_valid(heap[0])):
            heappop(heap)
        return heap[0][0] if heap else None

    def _list(self, job: int, place: str) -> None:
        entry = job, place
        heappush(self._order, entry)
        for view in self._views.values():
            heappush(view.heap, entry)

    def _is_valid(self, entry: Entry) -> bool:
        heap = self._places.get(entry[1])
        return heap is not None and heap[0] == entry[0]

    def _sweep(self) -> None:
        """Take out what is stale where it is most: behind a job that fits nowhere it does not come up."""
        if len(self._gone) > len(self._members) + SLACK:
            for heap in self._places.values():
                heap[:] = [job for job in heap if job not in self._gone]
                heapify(heap)
            self._gone.clear()
        bound = 2 * len(self._places) + SLACK
        if len(self._order) > bound:
            self._order = list({entry for entry in self._order if self._is_valid(entry)})
            heapify(self._order)
        stale = [key for key, view in self._views.items() if view.is_outdated or len(view.heap) > bound]
        for key in stale:
            del self._views[key]


class Block:
    """Some shapes of a group, neighbours in size, and the one of them whose turn is first."""

    __slots__ = ("_first", "shapes")

    def __init__(self, shapes: list[Shape]) -> None:
        self.shapes = shapes
        """Ascending `ram_mb`, never empty."""
        self._first: Turn | None = None

    @property
    def least(self) -> int:
        return self.shapes[0].request.ram_mb

    @property
    def most(self) -> int:
        return self.shapes[-1].request.ram_mb

    def changed(self) -> None:
        self._first = None

    def first(self) -> Turn:
        if self._first is None:
            self._first = min(map(turn_of, self.shapes))
        return self._first


class Group:
    """Shapes that differ in memory and priority only, in blocks by memory: no question walks them all."""

    __slots__ = ("blocks", "probe", "shapes")

    def __init__(self, request: Request) -> None:
        self.shapes: dict[Request, Shape] = {}
        self.probe = replace(request, ram_mb=0)
        """What fits wherever a member fits but for its memory."""
        self.blocks: list[Block] = []

    def add(self, shape: Shape) -> None:
        self.shapes[shape.request] = shape
        ram_mb = shape.request.ram_mb
        at = min(bisect_left(self.blocks, ram_mb, key=_most), len(self.blocks) - 1)
        if at < 0:
            self.blocks.append(Block([shape]))
            return
        block = self.blocks[at]
        insort(block.shapes, shape, key=_ram_mb)
        block.changed()
        if len(block.shapes) > BLOCK:
            half = len(block.shapes) // 2
            self.blocks[at : at + 1] = [Block(block.shapes[:half]), Block(block.shapes[half:])]

    def discard(self, shape: Shape) -> None:
        del self.shapes[shape.request]
        at = self._block_of(shape)
        block = self.blocks[at]
        block.shapes.remove(shape)
        block.changed()
        if not block.shapes:
            del self.blocks[at]

    def changed(self, shape: Shape) -> None:
        """Another job of the shape is its first now."""
        self.blocks[self._block_of(shape)].changed()

    def first(self, ram_mb: float, without: Collection[Request]) -> Turn | None:
        """The turn that is first among the shapes of at most so much memory that are not in `without`."""
        best: Turn | None = None
        for block in self.blocks:
            if block.least > ram_mb:
                break
            turn: Turn | None = block.first() if block.most <= ram_mb else None
            if turn is None or turn.shape.request in without:
                small = (shape for shape in block.shapes if shape.request.ram_mb <= ram_mb)
                turn = min((turn_of(shape) for shape in small if shape.request not in without), default=None)
            if turn is not None and (best is None or turn < best):
                best = turn
        return best

    def _block_of(self, shape: Shape) -> int:
        at = bisect_left(self.blocks, shape.request.ram_mb, key=_most)
        # Shapes of one size (they differ in priority) may stand in neighbouring blocks.
        while shape not in self.blocks[at].shapes:
            at += 1
        return at


class Turn(NamedTuple):
    """When it is whose turn: the order in which jobs are placed."""

    minus_priority: int
    job: int
    """The lowest waiting id of the shape: no two shapes have the same."""
    shape: Shape


def turn_of(shape: Shape) -> Turn:
    """Of a shape in which jobs wait."""
    job = shape.first()
    assert job is not None
    return Turn(-shape.request.priority, job, shape)


def _most(block: Block) -> int:
    return block.most


def _ram_mb(shape: Shape) -> int:
    return shape.request.ram_mb


def smallest(request: Request) -> tuple[int, int]:
    """The least (slots, cores) with which this request may start on any machine."""
    return request.slots, min(1, request.cores) if request.cores_are_wish else request.cores


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
        self.add_row(range(job, job + 1), request, place)

    def add_row(self, jobs: range, request: Request, place: str) -> None:
        """Add jobs with consecutive ids, one at least."""
        key = _key(request)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(request)
        shape = group.shapes.get(request)
        if shape is not None:
            shape.add_row(jobs, place)
            if shape.first() == jobs.start:
                group.changed(shape)
            return
        shape = Shape(request)
        shape.add_row(jobs, place)
        group.add(shape)

    def discard(self, job: int, request: Request, place: str) -> None:
        key = _key(request)
        group = self.groups.get(key)
        shape = None if group is None else group.shapes.get(request)
        if group is None or shape is None:
            return
        was_first = shape.first() == job
        shape.discard(job, place)
        if not shape:
            group.discard(shape)
            if not group.shapes:
                del self.groups[key]
        elif was_first:
            group.changed(shape)


def _key(request: Request) -> GroupKey:
    return (
        request.slots,
        request.cores,
        request.cores_are_wish,
        request.ram_is_wish,
        request.named,
        request.counters,
    )
