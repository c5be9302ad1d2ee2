"""Ids as people name them."""

from __future__ import annotations

import time
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from kueue.core.queue import expand, fold

RANGES = st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 30)), max_size=5)


@settings(deadline=None)
@given(RANGES, st.integers(0, 20))
def test_expand_names_each_given_id_once_and_the_rest_as_ranges(ranges, next_job):
    ids, never = expand(ranges, next_job)
    wanted = [job for first, last in ranges for job in range(max(0, first), last + 1)]
    assert ids == list(dict.fromkeys(job for job in wanted if job < next_job))
    assert {job for first, last in never for job in range(first, last + 1)} == {j for j in wanted if j >= next_job}


def test_a_range_of_a_thousand_million_costs_nothing():
    begin = time.perf_counter()
    assert expand([(0, 10**9), (5, 10**12)], 3) == ([0, 1, 2], ((3, 10**9), (5, 10**12)))
    assert time.perf_counter() - begin < 0.5


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), unique=True))
def test_folded_ids_are_the_same_ids(ids):
    ranges = fold(ids)
    assert [job for first, last in ranges for job in range(first, last + 1)] == ids
    assert all(one[1] + 1 != other[0] for one, other in pairwise(ranges))
