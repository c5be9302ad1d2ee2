"""The figures of the server, read off its state when somebody asks; names and units by the conventions of Prometheus.

Rules
- Labels are words of a fixed set, names of workers that are known and bounded in number, and names of resources of the
  configuration: never an id, a command, a directory, a sentence.
- A worker that has not been heard of for the time-out has no series any more.
- Nothing here walks the jobs; what is counted by job is counted when it happens.

Why this way: gauges that are set where things change forget to be unset; what is read off the state cannot be stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kueue import exposition
from kueue.core.engine import Engine
from kueue.core.facts import Aggregates
from kueue.core.jobs import GLOBAL_SLOTS
from kueue.core.placement import Room, obstacle, short_counter, too_small
from kueue.core.queries import worker_state
from kueue.core.queue import Queue
from kueue.core.silence import last_sign
from kueue.core.state import Node
from kueue.core.waiting import Shape
from kueue.core.workers import Worker
from kueue.exposition import histogram, label
from kueue.model import JobState, MachineTotals, Now
from kueue.server.measures import Measures

CAP_NAME = "global_max_parallel_jobs"
"""The counter behind that setting, as people know it."""
LIVE_STATES = tuple(state for state in JobState if state is not JobState.DONE)
WORKER_STATES = ("online", "offline", "set_aside", "silent", "away")
REASONS = ("resource", "no_worker", "too_large", "busy", "directory", "runnable", "unexamined")
WORKERS_MAX = 1_000
"""Workers with series of their own."""
RESOURCES_MAX = 2_000
"""Series of named resources of workers, in all."""
REASONS_SECONDS = 0.01
"""To find out why jobs wait; ten thousand kinds of jobs on two hundred machines would take seconds."""
DURABLE = "Survives a restart of the server."
SINCE_START = "Counted since the server was started."
_NONE: Mapping[str, int] = {}


class Disk(NamedTuple):
    """Of the file system with the state; bytes."""

    store_bytes: int
    free_bytes: int


@dataclass
class Sight:
    """All that is looked at, at one moment."""

    engine: Engine
    now: Now
    measures: Measures
    read_only: bool = False
    connections: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    refused_total: int = 0
    disk: Disk | None = None
    """None: it does not answer."""
    started_wall: float = 0.0
    """Of the server, Unix seconds."""


def families(sight: Sight) -> list[Metric]:
    """All families of ``kueue_…`` at one moment."""
    queue = sight.engine.queue
    return [
        exposition.build_info("kueue_build_info"),
        *_jobs(sight),
        *_workers(queue, sight.now),
        *_resources(queue),
        *_program(sight),
    ]


# --- jobs ------------------------------------------------------------------------------------------------------------


def _jobs(sight: Sight) -> Iterator[Metric]:
    queue, measures, state = sight.engine.queue, sight.measures, sight.engine.state
    sums = measures.sums
    yield _gauges(
        "kueue_jobs",
        "Jobs that are not done, by state; finished ones are in kueue_jobs_kept.",
        "state",
        {one.value: state.by_state[one] for one in LIVE_STATES},
    )
    yield _gauges(
        "kueue_jobs_kept",
        "Finished jobs that are still in the record, by outcome; failed is all but succeeded and canceled.",
        "outcome",
        {"succeeded": sums.succeeded, "failed": sums.failed, "canceled": sums.canceled},
    )
    yield _gauges(
        "kueue_pending_by_reason",
        "Pending jobs by why they wait: resource (a licence or the slot limit of the lab), no_worker (none is "
        "connected), too_large (for every connected worker), busy (workers have no room or take none now), directory "
        "(workers with room do not see it), runnable (would fit; stuck if that lasts), unexamined (too many kinds).",
        "reason",
        _pending(queue, sight.now),
    )
    yield _counter("kueue_jobs_submitted", f"Jobs that were submitted. {DURABLE}", sums.submitted_total)
    yield _counters(
        "kueue_jobs_finished",
        f"Jobs that are done, by outcome; failed is an exit status other than 0. {DURABLE}",
        "outcome",
        _finished(sums),
    )
    yield histogram(
        "kueue_job_wait_seconds",
        f"From the submission of a job to the start of its first attempt, time on hold included. {SINCE_START}",
        measures.wait,
    )
    yield histogram(
        "kueue_job_run_seconds",
        f"How long the last attempt of a finished job ran, pauses included. {SINCE_START}",
        measures.run,
    )
    yield _gauge("kueue_offers_outstanding", "Offers that no worker has answered yet.", len(queue.offered_at))
    yield _counter(
        "kueue_attempts_lost",
        f"Attempts that were given away because their worker was silent, or are proven gone. {DURABLE}",
        sums.lost_attempts_total,
    )
    yield _counter("kueue_attempts_started", f"Attempts that began to run. {SINCE_START}", measures.attempts_started)


def _finished(sums: Aggregates) -> dict[str, int]:
    others = {
        "signaled": sums.signaled_total,
        "timed_out": sums.timed_out_total,
        "lost": sums.lost_total,
        "not_started": sums.not_started_total,
    }
    return {
        "succeeded": sums.succeeded_total,
        "failed": sums.failed_total - sum(others.values()),
        "canceled": sums.canceled_total,
        **others,
    }


def _pending(queue: Queue, now: Now) -> dict[str, int]:
    """Pending jobs by `REASONS`; a look at each shape, for `REASONS_SECONDS`."""
    until = perf_counter() + REASONS_SECONDS
    counts = dict.fromkeys(REASONS, 0)
    groups = queue.state.waiting.groups.values()
    connected = [worker for worker in queue.workers.values() if worker.session is not None]
    rooms = [worker.room(queue.node(worker.id), now.steady) for worker in connected] if groups else []
    totals = {room.totals for room in rooms}
    open_rooms = [room for room in rooms if not room.closed]
    counters = queue.counter_totals()
    for group in groups:
        is_short = short_counter(group.probe, queue.state.used, counters, _NONE) is not None
        for shape in group.shapes.values():
            if is_short:
                reason = "resource"
            elif not rooms:
                reason = "no_worker"
            elif perf_counter() > until:
                reason = "unexamined"
            else:
                reason = _reason(shape, open_rooms, totals)
            counts[reason] += len(shape)
    return counts


def _reason(shape: Shape, rooms: Sequence[Room], totals: Iterable[MachineTotals]) -> str:
    is_declined = False
    for room in rooms:
        if obstacle(shape.request, room) is None:
            if shape.first(room.declined) is not None:
                return "runnable"
            is_declined = True
    if is_declined:
        return "directory"
    return "busy" if any(too_small(shape.request, each) is None for each in totals) else "too_large"


# --- workers ---------------------------------------------------------------------------------------------------------


def _workers(queue: Queue, now: Now) -> Iterator[Metric]:
    states = Counter(worker_state(queue, worker, now)[0].replace(" ", "_") for worker in queue.workers.values())
    yield _gauges(
        "kueue_workers",
        "Workers by state, all that the server remembers: silent ones hold jobs, away ones hold none.",
        "state",
        {state: states[state] for state in WORKER_STATES},
    )
    shown, left_out = _shown(queue, now)
    yield _gauge(
        "kueue_workers_left_out",
        f"Workers without series of their own: more than {WORKERS_MAX}, or with the name of another.",
        left_out,
    )
    up = _by_worker("kueue_worker_up", "Whether the worker is connected (1) or not, and not yet given up (0).")
    slots = _by_worker("kueue_worker_slots", "Job slots of the worker.")
    slots_used = _by_worker("kueue_worker_slots_used", "Job slots that attempts hold.")
    cpus = _by_worker("kueue_worker_cpus", "Processor cores of the worker that jobs may have.")
    cpus_used = _by_worker("kueue_worker_cpus_used", "Processor cores that attempts hold, whatever they do with them.")
    ram = _by_worker("kueue_worker_ram_bytes", "Memory of the worker that jobs may have.")
    ram_used = _by_worker("kueue_worker_ram_used_bytes", "Memory that attempts hold, whatever they do with it.")
    load = _by_worker("kueue_worker_load1", "Load average over one minute, as the worker reported it last.")
    limits = _by_worker("kueue_worker_resource_limit", "Units of a named resource of the worker.", "resource")
    used = _by_worker("kueue_worker_resource_used", "Units of a named resource that attempts hold.", "resource")
    resources = 0
    for name, worker, node in shown:
        totals = node.record.totals
        for family, value in (
            (up, queue.answers(worker)),
            (slots, totals.slots),
            (slots_used, node.slots),
            (cpus, totals.cores),
            (cpus_used, node.cores),
            (ram, totals.ram_mb << 20),
            (ram_used, node.ram_mb << 20),
            (load, worker.load.load[0]),
        ):
            family.add_metric((name,), float(value))
        for resource, amount in dict(totals.named).items():
            resources += 1
            if resources <= RESOURCES_MAX:
                limits.add_metric((name, label(resource)), amount)
                used.add_metric((name, label(resource)), len(node.named.get(resource, ())))
    yield from (up, slots, slots_used, cpus, cpus_used, ram, ram_used, load, limits, used)


def _shown(queue: Queue, now: Now) -> tuple[list[tuple[str, Worker, Node]], int]:
    """(name, worker, node) of those that have series, each name once; and how many were left out."""
    known = [worker for worker in queue.workers.values() if _is_here(queue, worker, now)]
    # Of two with one name the connected one counts, then the one that is newer.
    known.sort(key=lambda worker: (worker.session is None, -worker.id))
    shown: dict[str, tuple[str, Worker, Node]] = {}
    for worker in known:
        node = queue.node(worker.id)
        name = label(node.record.name)
        if len(shown) < WORKERS_MAX and name not in shown:
            shown[name] = name, worker, node
    return [shown[name] for name in sorted(shown)], len(known) - len(shown)


def _is_here(queue: Queue, worker: Worker, now: Now) -> bool:
    if queue.answers(worker):
        return True
    # After a start of the server nobody misses those that hold nothing: they may have left years ago.
    is_missed = worker.heard is not None or bool(queue.node(worker.id).attempts)
    is_gone = worker.is_silent or now.steady - last_sign(queue, worker) > queue.settings.worker_timeout_seconds
    return is_missed and not is_gone


def _resources(queue: Queue) -> Iterator[Metric]:
    totals = queue.counter_totals()
    # A licence that is called like the limit would be a second series of one name.
    names = {name: name for name in totals if name != CAP_NAME} | {GLOBAL_SLOTS: CAP_NAME}
    used = {names[name]: queue.state.used.get(name, 0) for name in totals if name in names}
    limits = {names[name]: amount for name, amount in totals.items() if name in names}
    yield _gauges(
        "kueue_resource_used",
        "Units of a licence or other counter of the lab that attempts hold; global_max_parallel_jobs counts job slots.",
        "resource",
        used,
    )
    yield _gauges(
        "kueue_resource_limit", "Units of a licence or other counter of the lab that there are.", "resource", limits
    )


# --- the program -----------------------------------------------------------------------------------------------------


def _program(sight: Sight) -> Iterator[Metric]:
    measures = sight.measures
    # The process_… of the page are not in the file for node_exporter.
    yield _gauge("kueue_start_time_seconds", "Since when the server runs, Unix time.", sight.started_wall)
    yield _counter(
        "kueue_worker_connects", f"Sessions of workers that were taken in. {SINCE_START}", measures.worker_connects
    )
    yield _gauges("kueue_connections", "Open connections by who is at the other end.", "kind", sight.connections)
    yield _counter(
        "kueue_connections_refused",
        f"Connections that ended before their peer had proven the secret and said hello. {SINCE_START}",
        sight.refused_total,
    )
    yield _gauge(
        "kueue_read_only", "Whether the server accepts and offers nothing because its disk is full.", sight.read_only
    )
    yield histogram(
        "kueue_store_commit_seconds",
        f"How long it took to have a batch of facts on the disk. {SINCE_START}",
        measures.commit,
    )
    yield histogram(
        "kueue_event_loop_lag_seconds",
        f"How much later than due a task of the server ran, sampled every few seconds. {SINCE_START}",
        measures.lag,
    )
    if sight.disk is not None:
        yield _gauge("kueue_store_bytes", "Size of the files of the store.", sight.disk.store_bytes)
        yield _gauges(
            "kueue_disk_free_bytes",
            "Free space of the file system, by what is kept there.",
            "of",
            {"state": sight.disk.free_bytes},
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, key: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(key,))
    for word, value in values.items():
        family.add_metric((label(word),), value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters(name: str, text: str, key: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(key,))
    for word, value in values.items():
        family.add_metric((word,), value)
    return family


def _by_worker(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=("worker", *more))
