"""The check of the state finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kueue.core import facts as f
from kueue.core import invariants
from kueue.core.state import State
from kueue.errors import Bug, IllegalTransition
from kueue.model import Allocation, JobRange, JobState, Lost, NodeRecord, Payload, Place, Request, Share

REQUEST = Request(cores=2, ram_mb=100, named=(("gpu", 1),), counters=(("lic", 1),))
ALLOCATION = Allocation(
    shares=(Share(node=0, slots=1, cores=2, ram_mb=100, named=(("gpu", (0,)),)),), counters=(("@slots", 1), ("lic", 1))
)


def a_state() -> State:
    """Job 0 runs, job 1 is unreachable, jobs 2 and 3 wait."""
    state = State()
    state.evolve(f.NodeChanged(node=NodeRecord(id=0, identity="i", name="w"), wall=0.0))
    entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd="/d"), request=REQUEST, count=4)
    state.evolve(f.JobsSubmitted(first_id=0, ranges=(entry,), principal="operator", wall=0.0))
    state.evolve(f.JobOffered(job=0, offer=0, node=0, allocation=ALLOCATION, wall=0.0))
    state.evolve(f.JobStarted(job=0, offer=0, started_wall=0.0, wall=0.0))
    other = Allocation(
        shares=(Share(node=0, slots=1, cores=2, ram_mb=100, named=(("gpu", (1,)),)),), counters=ALLOCATION.counters
    )
    state.evolve(f.JobOffered(job=1, offer=1, node=0, allocation=other, wall=0.0))
    state.evolve(f.AttemptSilenced(job=1, offer=1, wall=0.0))
    return state


def test_an_orderly_state_passes():
    invariants.check(a_state())


def _two_attempts(state: State) -> None:
    state.jobs[1].attempt = state.jobs[0].attempt


@pytest.mark.parametrize(
    "harm",
    [
        lambda s: s.by_state.update({JobState.RUNNING: 2}),
        lambda s: s.attempts.pop(0),
        lambda s: s.revocable.clear(),
        lambda s: s.waiting.discard(2, REQUEST, "/d"),
        lambda s: s.waiting.add(7, REQUEST, "/d"),
        lambda s: s.used.update(lic=1),
        lambda s: s.nodes[0].named["gpu"].discard(0),
        lambda s: setattr(s.nodes[0], "cores", 3),
        lambda s: setattr(s.nodes[0], "slots", 3),
        lambda s: setattr(s.nodes[0], "ram_mb", 3),
        lambda s: setattr(s.jobs[2], "state", JobState.RUNNING),
        lambda s: setattr(s.jobs[2], "state", JobState.DONE),
        lambda s: setattr(s.jobs[0], "attempt", None),
        lambda s: setattr(s.sums, "next_job", 3),
        lambda s: setattr(s.sums, "next_offer", 1),
        _two_attempts,
    ],
)
def test_a_broken_state_is_found(harm: Callable[[State], object]):
    state = a_state()
    harm(state)
    with pytest.raises(Bug):
        invariants.check(state)


def test_a_second_offer_of_a_job_that_may_run_cannot_happen():
    state = a_state()
    with pytest.raises(IllegalTransition):
        state.evolve(f.JobOffered(job=1, offer=2, node=0, allocation=ALLOCATION, wall=0.0))


def test_a_fact_about_an_older_offer_cannot_happen():
    state = a_state()
    with pytest.raises(Bug, match="not the live attempt"):
        state.evolve(f.AttemptLost(job=1, offer=0, reason="", wall=0.0))


def test_a_fact_about_a_job_that_is_over_cannot_happen():
    state = a_state()
    state.evolve(f.JobDone(job=0, outcome=Lost("gone"), wall=0.0))
    with pytest.raises(Bug, match="no live job"):
        state.evolve(f.JobHeld(job=0, principal="operator", wall=0.0))


@pytest.mark.parametrize("silenced", [False, True])
def test_a_returned_offer_leaves_no_trace_but_its_number(silenced: bool):
    """The store drops all facts of it, so a replay knows of nothing."""
    state, twin = a_state(), a_state()
    state.evolve(f.JobOffered(job=2, offer=2, node=0, allocation=ALLOCATION, wall=0.0))
    state.evolve(f.OfferOverdue(job=2, offer=2, wall=1.0))
    if silenced:
        state.evolve(f.AttemptSilenced(job=2, offer=2, wall=1.0))
        state.evolve(f.AttemptReturned(job=2, offer=2, started_wall=None, wall=1.0))
    state.evolve(f.OfferReturned(job=2, offer=2, how="withdrawn", reason="", wall=2.0))
    twin.sums.next_offer = 3
    job, other = state.jobs[2], twin.jobs[2]
    assert all(getattr(job, name) == getattr(other, name) for name in job.__slots__ if name != "template")
    assert state.sums == twin.sums
    assert state.used == twin.used
    assert (state.by_state, state.given_away, state.revocable) == (twin.by_state, twin.given_away, twin.revocable)
    assert set(state.attempts) == set(twin.attempts)
    assert state.waiting.shape(REQUEST).first() == twin.waiting.shape(REQUEST).first() == 2
