"""Average run time and the time that the remaining jobs will take, in whole seconds.

Source: kueue's documented figures. R = seconds that running jobs have run, F = run times of finished ones that are in
the record (succeeded and failed); offered jobs count nowhere. All divisions truncate.
"""

from __future__ import annotations

from collections.abc import Sequence


def average(finished: int, finished_seconds: int, running: Sequence[int]) -> int:
    """`finished`: how many; `finished_seconds`: their sum; `running`: seconds each running job has run."""
    if finished > 0:
        return max(finished_seconds // finished, (sum(running) + finished_seconds) // (len(running) + finished))
    return max(running, default=0)


def remaining(average_seconds: int, running: Sequence[int], pending: int) -> int:
    """Seconds until all running and `pending` jobs are through, if they behave like the average."""
    eta_running = max(0, average_seconds - min(running)) if running else 0
    if pending > len(running):
        eta_pending = pending * average_seconds // len(running) if running else pending * average_seconds
    else:
        eta_pending = average_seconds if pending else 0
    return eta_running + eta_pending
