"""All of an engine's durable state as plain values, to compare a live one with a replayed one."""

from __future__ import annotations

from kueue.core.engine import Engine
from kueue.core.jobs import Attempt, Job

ATTEMPT = tuple(name for name in Attempt.__slots__ if name != "allocation")


def snapshot(engine: Engine) -> dict[str, object]:
    state = engine.state
    return {
        "jobs": {job.id: _job(job) for job in state.jobs.values()},
        "attempts": sorted(state.attempts),
        "lines": {line: sorted(members) for line, members in state.lines.items()},
        "nodes": {node.record.id: node.record for node in state.nodes.values()},
        "room": {
            node.record.id: (
                node.slots,
                node.cores,
                node.ram_mb,
                {name: units for name, units in node.named.items() if units},
            )
            for node in state.nodes.values()
        },
        "used": {name: amount for name, amount in state.used.items() if amount},
        "given away": state.given_away,
        "revocable": state.revocable,
        "sums": engine.aggregates(),
        "answers": sorted(state.answers),
    }


def _job(job: Job) -> tuple[object, ...]:
    attempt = job.attempt
    return (
        job.state,
        job.stop,
        job.past,
        job.numbered,
        job.lost,
        job.lost_workers,
        job.template,
        None if attempt is None else (attempt.allocation, *(getattr(attempt, name) for name in ATTEMPT)),
    )
