"""The index of waiting jobs against plain lists."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kueue.core.waiting import BLOCK, Group, Shape, Waiting, turn_of
from kueue.model import Request

PLACES = ["/a", "/b", "/c"]


class ShapeHistories(RuleBasedStateMachine):
    """Jobs come, are offered, and come back; the lowest of those that are allowed is first."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = Shape(Request())
        self.model: dict[int, str] = {}

    @rule(job=st.integers(0, 12))
    def add(self, job: int) -> None:
        if job not in self.model:
            self.model[job] = PLACES[job % 3]
            self.shape.add(job, PLACES[job % 3])

    @rule(job=st.integers(0, 12))
    def discard(self, job: int) -> None:
        self.model.pop(job, None)
        self.shape.discard(job, PLACES[job % 3])

    @rule(places=st.sets(st.sampled_from(PLACES), max_size=2), jobs=st.sets(st.integers(0, 12), max_size=4))
    def first_but(self, places: set[str], jobs: set[int]) -> None:
        allowed = [job for job, place in self.model.items() if place not in places and job not in jobs]
        assert self.shape.first(places, jobs) == min(allowed, default=None)

    @invariant()
    def first(self) -> None:
        assert self.shape.first() == min(self.model, default=None)
        assert len(self.shape) == len(self.model)


TestShapeHistories = ShapeHistories.TestCase
TestShapeHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_job_that_is_offered_and_given_back_for_days_does_not_grow_the_index():
    shape = Shape(Request())
    for job in range(5):
        shape.add(job, "/d")
    for _ in range(1000):
        for job in (0, 1):
            shape.discard(job, "/d")
        assert shape.first() == 2
        for job in (1, 0):
            shape.add(job, "/d")
        shape.discard(3, "/d")
        shape.add(3, "/d")
    assert len(shape._order) <= 5
    assert len(shape._places["/d"]) == 5


SHAPES = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from([10, 20])), min_size=1, max_size=3 * BLOCK, unique=True
)


@settings(deadline=None)
@given(SHAPES, st.integers(-1, 410), st.data())
def test_a_group_finds_the_first_turn_below_a_size(sizes, limit, data):
    group = Group(Request())
    shapes = []
    for job, (ram_mb, priority) in enumerate(data.draw(st.permutations(sizes))):
        shape = Shape(Request(ram_mb=ram_mb, priority=priority))
        shape.add(job, "/d")
        group.add(shape)
        shapes.append(shape)
    gone = data.draw(st.sets(st.sampled_from(range(len(shapes)))))
    for index in gone:
        group.discard(shapes[index])
    left = [shape for index, shape in enumerate(shapes) if index not in gone]
    without = {shape.request for shape in left if data.draw(st.booleans())}
    expected = [turn_of(s) for s in left if s.request.ram_mb <= limit and s.request not in without]
    assert group.first(limit, without) == min(expected, default=None)
    assert sorted(s.request.ram_mb for s in left) == [s.request.ram_mb for b in group.blocks for s in b.shapes]
    assert all(block.shapes for block in group.blocks)


def test_a_shape_that_gets_a_lower_id_comes_up_with_it():
    waiting = Waiting()
    small, large = Request(ram_mb=1), Request(ram_mb=2)
    waiting.add(5, small, "/d")
    waiting.add(7, large, "/d")
    (group,) = waiting.groups.values()
    assert group.first(10, ()).job == 5
    waiting.add(3, large, "/d")
    assert group.first(10, ()).job == 3
    waiting.discard(3, large, "/d")
    waiting.discard(5, small, "/d")
    assert group.first(10, ()).job == 7
    assert len(waiting) == 1
    waiting.discard(7, large, "/d")
    assert not waiting.groups
