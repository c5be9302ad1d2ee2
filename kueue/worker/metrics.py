"""The figures of one worker about itself; what the server knows of workers too is among the server's figures.

Rules
- Names begin with ``kueue_worker_`` and none of them is one of the server's: a sum over both would count twice.
- No label tells of a job.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kueue import exposition
from kueue.worker.body import Body

STATES = ("queued", "running", "paused", "stopping", "ended", "gone", "unknown")
"""Of attempts; ``starting`` is over in milliseconds and counts as queued, as it does for the server."""


class Disk(NamedTuple):
    """Of the spool and its file system; bytes."""

    spool_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Sight:
    """All that is looked at, at one moment; `boottime` in seconds of that clock."""

    body: Body
    boottime: float
    disk: Disk | None = None
    """None: not known."""


def families(sight: Sight) -> list[Metric]:
    """All families of ``kueue_worker_…``."""
    agent, body = sight.body.agent, sight.body
    states: Counter[str] = Counter(
        "queued" if one.state == "starting" else one.state for one in agent.attempts.values()
    )
    attempts = GaugeMetricFamily(
        "kueue_worker_attempts",
        "Attempts whose end the server has not stored, by state; ended and gone ones wait for its acknowledgement.",
        labels=("state",),
    )
    for state in STATES:
        attempts.add_metric((state,), states[state])
    found = [
        exposition.build_info("kueue_worker_build_info"),
        attempts,
        GaugeMetricFamily(
            "kueue_worker_connected", "Whether the server has taken this worker in.", value=agent.is_welcome
        ),
        CounterMetricFamily(
            "kueue_worker_sessions",
            "Sessions in which the server took this worker in; each but the first is a reconnect.",
            value=body.sessions,
        ),
        GaugeMetricFamily(
            "kueue_worker_lease_remaining_seconds",
            "How long attempts may go on without the server before they are paused.",
            value=max(0.0, (agent.lease_until or 0.0) - sight.boottime),
        ),
        GaugeMetricFamily(
            "kueue_worker_runners",
            "Runners that answer; none are needed while there are no jobs.",
            value=body.runners.up,
        ),
        CounterMetricFamily(
            "kueue_worker_output_punched_bytes",
            "Output of jobs that the size limit took out of the middle. Counted since the worker was started.",
            value=body.spool.punched_bytes,
        ),
    ]
    if sight.disk is not None:
        free = GaugeMetricFamily(
            "kueue_worker_disk_free_bytes", "Free space of the file system, by what is kept there.", labels=("of",)
        )
        free.add_metric(("spool",), sight.disk.free_bytes)
        found += [
            GaugeMetricFamily(
                "kueue_worker_spool_bytes",
                "What output and exit records of attempts take on the disk.",
                value=sight.disk.spool_bytes,
            ),
            free,
        ]
    return found


def look_at_disk(spool: str) -> Disk | None:
    """Walks the spool: to be called in a thread, and not often. None if it cannot be read."""
    size = 0
    try:
        found = os.statvfs(spool)
        for folder, _, names in os.walk(spool):
            for name in names:
                try:
                    # 512: the unit of st_blocks whatever the file system's block size is (stat(2)).
                    size += os.lstat(f"{folder}/{name}").st_blocks * 512
                except FileNotFoundError:  # noqa: PERF203  jobs end meanwhile
                    continue
    except OSError:
        return None
    return Disk(size, found.f_bavail * found.f_frsize)
