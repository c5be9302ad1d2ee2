"""The table of a job's life."""

from __future__ import annotations

from typing import get_args

import pytest

from kueue.core import facts as f
from kueue.core.lifecycle import TABLE, step
from kueue.errors import IllegalTransition
from kueue.model import JobState

OF_JOBS = {fact for fact in get_args(f.AnyFact) if "job" in fact.__struct_fields__}
WITH_ATTEMPT = {JobState.OFFERED, JobState.RUNNING, JobState.STOPPING, JobState.UNREACHABLE}
ENDS_AN_ATTEMPT = {f.OfferReturned, f.AttemptLost}


def test_every_fact_about_a_job_has_a_place_in_the_table():
    assert {fact for _, fact in TABLE} == OF_JOBS


def test_nothing_happens_to_a_job_that_is_done():
    assert not [state for state, _ in TABLE if state is JobState.DONE]


def test_every_live_job_can_end():
    assert {state for state, fact in TABLE if fact is f.JobDone} == set(JobState) - {JobState.DONE}


def test_every_job_with_an_attempt_can_lose_it_and_then_waits():
    for state in WITH_ATTEMPT:
        for fact in ENDS_AN_ATTEMPT:
            assert TABLE.get((state, fact), JobState.PENDING) is JobState.PENDING
        assert (state, f.AttemptLost) in TABLE


def test_only_a_job_without_an_attempt_is_offered():
    assert [state for state, fact in TABLE if fact is f.JobOffered] == [JobState.PENDING]


def test_no_fact_but_the_end_of_an_attempt_leads_from_one_to_none():
    for (state, fact), new in TABLE.items():
        if state in WITH_ATTEMPT and new not in WITH_ATTEMPT:
            assert fact in {*ENDS_AN_ATTEMPT, f.JobDone}


def test_a_missing_entry_raises():
    with pytest.raises(IllegalTransition, match="held"):
        step(JobState.HELD, f.JobHeld(job=1, principal="operator", wall=0.0))
