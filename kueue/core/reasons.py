"""Why a waiting job waits, from the filter that places jobs (`placement.obstacle`, `placement.short_counter`)."""

from __future__ import annotations

from collections.abc import Iterator

from kueue.core.jobs import Job
from kueue.core.placement import Obstacle, Room, held_by, obstacle, short_counter, too_small
from kueue.core.queue import Queue
from kueue.core.state import Node
from kueue.model import JobState, Now, Request

READ_ONLY = "read-only: the server's disk is full, nothing is offered"


class Sight:
    """The workers as they are at one moment, looked at once for all jobs that are shown."""

    def __init__(self, queue: Queue, now: Now) -> None:
        self.queue = queue
        self.now = now
        self.nodes = [node for node in queue.state.nodes.values() if queue.worker(node.record.id).session is not None]
        """Those that are connected."""
        self.counters = queue.counter_totals()
        self._rooms: dict[int, Room] = {}
        self._able: dict[Request, tuple[list[Node], Obstacle | None]] = {}

    def room(self, node: Node) -> Room:
        room = self._rooms.get(node.record.id)
        if room is None:
            worker = self.queue.worker(node.record.id)
            room = self._rooms[node.record.id] = worker.room(node, self.now.steady)
        return room

    def able(self, request: Request) -> tuple[list[Node], Obstacle | None]:
        """(Those of `nodes` that can take the request some time; if there are none, what the largest lacks for it)."""
        found = self._able.get(request)
        if found is None:
            lasting = [too_small(request, node.record.totals) for node in self.nodes]
            able = [node for node, small in zip(self.nodes, lasting, strict=True) if small is None]
            best = max((o for o in lasting if o is not None), key=lambda o: o.there, default=None)
            found = self._able[request] = able, None if able else best
        return found


def reasons(sight: Sight, job: Job) -> list[str]:
    """Why a waiting job waits: the most telling sentence first; never empty."""
    return list(_reasons(sight, job))


def first_reason(sight: Sight, job: Job) -> str:
    return next(_reasons(sight, job))


def _reasons(sight: Sight, job: Job) -> Iterator[str]:
    """As `reasons`: a listing takes the first and leaves the others unasked."""
    queue = sight.queue
    if job.state is JobState.HELD:
        yield "held; `kueue release` lets it start"
        return
    request = job.template.request
    short = short_counter(request, queue.state.used, sight.counters, held_by(queue.state, job))
    waits: list[str] = []
    if short is not None:
        waits = [f"waiting for {short.sentence()}" if short.name in sight.counters else gone(short.name)]
    if not sight.nodes:
        yield from (*waits, READ_ONLY if queue.answering else "no worker is connected")
        return
    able, best = sight.able(request)
    if best is not None:
        yield f"no worker has {best.asked} {best.what}; the largest has {best.there}{best.remedy()}"
        yield from waits
        return
    directory = job.template.directory
    if all(directory in queue.worker(node.record.id).declined for node in able):
        said = queue.worker(able[0].record.id).declined[directory].reason
        yield f"directory {directory} is seen by no worker ({said})"
        yield from waits
        return
    yield from waits
    is_about_to_be_offered = not waits
    for node in able:
        fits, sentence = on_worker(sight, job, node)
        if not fits:
            yield f"worker {node.record.name} {sentence}"
            is_about_to_be_offered = False
    if is_about_to_be_offered:
        yield "about to be offered"


def gone(counter: str) -> str:
    """What holds up a job that asks for a counter that a reload has taken away."""
    return f"the server has no {counter} any more: [global_resources] of its settings does not name it"


def on_worker(sight: Sight, job: Job, node: Node) -> tuple[bool, str]:
    """(would it fit on that worker, a predicate to the worker's name)."""
    found = obstacle(job.template.request, sight.room(node))
    if found is not None:
        return False, found.sentence()
    worker = sight.queue.worker(node.record.id)
    decline = worker.declined.get(job.template.directory)
    if decline is not None:
        return False, f"does not take it: {decline.reason}"
    return True, "would fit"


def next_in_line(worker: str) -> str:
    """Why a job waits that was offered ahead."""
    return f"next in line behind a short job on {worker}"
