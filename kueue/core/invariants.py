"""What must hold after every step, counted afresh and never through the code that is checked. For tests only."""

from __future__ import annotations

from collections import Counter

from kueue.core.jobs import Attempt, Job, counters_of
from kueue.core.state import State
from kueue.errors import Bug
from kueue.model import JobState

WITH_ATTEMPT = {JobState.OFFERED, JobState.RUNNING, JobState.STOPPING, JobState.UNREACHABLE}


def check(state: State) -> None:
    """Raises `Bug` naming the first thing that is wrong."""
    _attempts(state)
    _lines(state)
    _room(state)
    _waiting(state)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise Bug(sentence)


def _attempts(state: State) -> None:
    seen: set[int] = set()
    for job in state.jobs.values():
        _require(job.id < state.sums.next_job, f"job {job.id} is above the next id")
        _require(job.state is not JobState.DONE, f"job {job.id} is done and lives")
        _require(
            (job.attempt is not None) == (job.state in WITH_ATTEMPT), f"job {job.id} is {job.state} with {job.attempt}"
        )
        if job.attempt is not None:
            offer = job.attempt.offer
            _require(offer not in seen, f"offer {offer} stands twice")
            _require(state.attempts.get(offer) is job.attempt, f"offer {offer} is not indexed")
            _require(job.attempt.job == job.id, f"offer {offer} names job {job.attempt.job}, not {job.id}")
            _require(offer < state.sums.next_offer, f"offer {offer} is above the next number")
            seen.add(offer)
        _require(
            (job.stop is not None) <= (job.state in {JobState.STOPPING, JobState.PENDING}), f"job {job.id}: stray stop"
        )
    _require(seen == set(state.attempts), "attempts without a job")
    counts = Counter(job.state for job in state.jobs.values())
    _require(all(state.by_state[s] == counts.get(s, 0) for s in JobState), "the counts by state are wrong")


def _lines(state: State) -> None:
    members: dict[int, list[tuple[Job, Attempt]]] = {}
    for job in state.jobs.values():
        if job.attempt is not None:
            members.setdefault(job.attempt.line, []).append((job, job.attempt))
    indexed = {line: sorted(attempts) for line, attempts in state.lines.items()}
    counted = {line: sorted(attempt.offer for _, attempt in line_up) for line, line_up in members.items()}
    _require(indexed == counted, "the index of lines is wrong")
    for line, line_up in members.items():
        first_job, first = line_up[0]
        for job, attempt in line_up:
            _require(attempt.offer >= line, f"offer {attempt.offer} is older than its line {line}")
            same = (attempt.node, attempt.allocation) == (first.node, first.allocation)
            _require(same, f"the allocations of line {line} differ")
            _require(job.template.request == first_job.template.request, f"the requests of line {line} differ")


def _room(state: State) -> None:
    used: Counter[str] = Counter()
    slots: Counter[int] = Counter()
    cores: Counter[int] = Counter()
    ram_mb: Counter[int] = Counter()
    units: dict[tuple[int, str], list[int]] = {}
    lines: set[int] = set()
    for job in state.jobs.values():
        if job.attempt is None:
            continue
        expected = counters_of(job.template.request)
        _require(
            dict(job.attempt.allocation.counters) == expected, f"job {job.id} holds other counters than it asked for"
        )
        if job.attempt.line in lines:
            continue
        lines.add(job.attempt.line)
        used.update(dict(job.attempt.allocation.counters))
        for share in job.attempt.allocation.shares:
            slots[share.node] += share.slots
            cores[share.node] += share.cores
            ram_mb[share.node] += share.ram_mb
            for name, indices in share.named:
                units.setdefault((share.node, name), []).extend(indices)
    for node_id, node in state.nodes.items():
        sums = (slots[node_id], cores[node_id], ram_mb[node_id])
        _require((node.slots, node.cores, node.ram_mb) == sums, f"the sums of node {node_id} are wrong")
        for name, taken in node.named.items():
            counted = units.get((node_id, name), [])
            _require(len(counted) == len(set(counted)), f"a unit of {name} on node {node_id} is given twice")
            _require(taken == set(counted), f"the units of {name} on node {node_id} are wrong")
    _require({k: v for k, v in state.used.items() if v} == {k: v for k, v in used.items() if v}, "counters are wrong")


def _waiting(state: State) -> None:
    pending = {job.id for job in state.jobs.values() if job.state is JobState.PENDING}
    _require(len(state.waiting) == len(pending), "the waiting index has another size than there are pending jobs")
    for job_id in pending:
        request = state.jobs[job_id].template.request
        _require((job_id, request) in state.waiting, f"job {job_id} is pending and not in the index")
    revocable = {job.id for job in state.jobs.values() if job.may_be_given_away}
    _require(revocable == state.revocable, "the index of jobs that may be given away is wrong")
