"""The life of a job as one literal table: (state, fact) → state. A missing entry raises.

Rules
- Every fact that names a job passes through here, also those that leave the state as it is.
- Nothing but the state and the kind of the fact decides the next state; what hangs on data is two facts.

Theory of operation
    held ⇄ pending → offered → running → done          the usual life
    offered → pending                                  the worker gave the offer back
    offered, running → stopping → done                 a person ends it; room is kept until the end is proven
    stopping → running                                 a stop without ``kill`` came after the start
    offered, running → unreachable                     its worker is silent
    unreachable → running                              ... and came back before another worker took the job, where it
                                                       may have yet to start (→ running) or be given back (→ pending)
    unreachable → pending → offered                    ... and did not: that attempt is lost, the next worker has it
"""

from __future__ import annotations

from typing import Final

from kueue.core import facts as f
from kueue.errors import IllegalTransition
from kueue.model import JobState

HELD, PENDING, OFFERED = JobState.HELD, JobState.PENDING, JobState.OFFERED
RUNNING, STOPPING, UNREACHABLE, DONE = JobState.RUNNING, JobState.STOPPING, JobState.UNREACHABLE, JobState.DONE

TABLE: Final[dict[tuple[JobState, type[f.Fact]], JobState]] = {
    (HELD, f.JobReleased): PENDING,
    (HELD, f.JobDone): DONE,
    (HELD, f.AttemptSuperseded): HELD,
    (PENDING, f.JobHeld): HELD,
    (PENDING, f.JobOffered): OFFERED,
    (PENDING, f.JobDone): DONE,
    (PENDING, f.AttemptSuperseded): PENDING,
    (OFFERED, f.JobStarted): RUNNING,
    (OFFERED, f.OfferReturned): PENDING,
    (OFFERED, f.OfferOverdue): OFFERED,
    (OFFERED, f.StopAsked): STOPPING,
    (OFFERED, f.AttemptSilenced): UNREACHABLE,
    (OFFERED, f.AttemptLost): PENDING,
    (OFFERED, f.JobDone): DONE,
    (OFFERED, f.AttemptSuperseded): OFFERED,
    (RUNNING, f.JobStarted): RUNNING,
    (RUNNING, f.OfferReturned): PENDING,
    (RUNNING, f.StopAsked): STOPPING,
    (RUNNING, f.AttemptSilenced): UNREACHABLE,
    (RUNNING, f.AttemptLost): PENDING,
    (RUNNING, f.JobDone): DONE,
    (RUNNING, f.AttemptSuperseded): RUNNING,
    (STOPPING, f.JobStarted): STOPPING,
    (STOPPING, f.OfferReturned): PENDING,
    (STOPPING, f.OfferOverdue): STOPPING,
    (STOPPING, f.StopAsked): STOPPING,
    (STOPPING, f.StopDropped): RUNNING,
    (STOPPING, f.AttemptSilenced): STOPPING,
    (STOPPING, f.AttemptReturned): STOPPING,
    (STOPPING, f.AttemptLost): PENDING,
    (STOPPING, f.JobDone): DONE,
    (STOPPING, f.AttemptSuperseded): STOPPING,
    (UNREACHABLE, f.AttemptReturned): RUNNING,
    (UNREACHABLE, f.OfferReturned): PENDING,
    (UNREACHABLE, f.StopAsked): STOPPING,
    (UNREACHABLE, f.AttemptLost): PENDING,
    (UNREACHABLE, f.JobDone): DONE,
    (UNREACHABLE, f.AttemptSuperseded): UNREACHABLE,
}


def step(state: JobState, fact: f.Fact) -> JobState:
    """The state after `fact`. Raises `IllegalTransition` where the table has no entry."""
    try:
        return TABLE[state, type(fact)]
    except KeyError:
        raise IllegalTransition(f"a job that is {state.value} cannot meet {fact!r}") from None
