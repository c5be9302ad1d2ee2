"""The index of waiting jobs against plain lists."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kueue.core import declines as declines_module
from kueue.core.declines import Declines
from kueue.core.waiting import BLOCK, FEW, SLACK, WALKED, Group, Shape, Waiting, turn_of
from kueue.core.workers import Worker
from kueue.model import Request

PLACES = ["/a", "/b", "/c"]


class ShapeHistories(RuleBasedStateMachine):
    """Jobs come, are offered, and come back; the lowest of those that are allowed is first."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = Shape(Request())
        self.model: dict[int, str] = {}
        self.declines: Declines = Declines()
        self.clear()

    @rule()
    def clear(self) -> None:
        self.declines.clear()
        for number in range(FEW):
            self.declines.add(f"/elsewhere/{number}", "", 1.0)

    @rule(job=st.integers(0, 12))
    def add(self, job: int) -> None:
        if job not in self.model:
            self.model[job] = PLACES[job % 3]
            self.shape.add(job, PLACES[job % 3])

    @rule(job=st.integers(0, 12))
    def discard(self, job: int) -> None:
        self.model.pop(job, None)
        self.shape.discard(job, PLACES[job % 3])

    @rule(places=st.sets(st.sampled_from(PLACES), max_size=2))
    def first_but(self, places: set[str]) -> None:
        allowed = [job for job, place in self.model.items() if place not in places]
        assert self.shape.first(places) == min(allowed, default=None)

    @rule(place=st.sampled_from(PLACES))
    def decline(self, place: str) -> None:
        self.declines.add(place, "no such directory", 1.0)

    @rule(place=st.sampled_from(PLACES))
    def is_there_now(self, place: str) -> None:
        self.declines.drop(place)

    @rule()
    def first_of_one_that_lacks_many(self) -> None:
        allowed = [job for job, place in self.model.items() if place not in self.declines]
        assert self.shape.first(self.declines) == min(allowed, default=None)

    @invariant()
    def first(self) -> None:
        assert self.shape.first() == min(self.model, default=None)
        assert len(self.shape) == len(self.model)


TestShapeHistories = ShapeHistories.TestCase
TestShapeHistories.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


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
    assert len(shape._order) <= 2 + SLACK
    assert len(shape._places["/d"]) == 5


STUCK = {"/missing/0", "/missing/1"}


@pytest.fixture
def stuck() -> Shape:
    """Two jobs that no worker takes."""
    shape = Shape(Request())
    for job, place in enumerate(sorted(STUCK)):
        shape.add(job, place)
    return shape


@pytest.mark.parametrize("is_asked", [False, True])
def test_jobs_that_pass_one_that_is_stuck_leave_nothing_in_the_index(stuck, is_asked):
    for job in range(2, 2002):
        stuck.add(job, f"/d/{job}")
    for job in range(2, 2002):
        if is_asked:
            assert stuck.first(STUCK) == job
        stuck.discard(job, f"/d/{job}")
        assert len(stuck._order) <= 2 * len(stuck) + SLACK
    assert stuck.first() == 0


def test_what_has_passed_one_that_is_stuck_is_not_looked_at_again(stuck, monkeypatch):
    looks = 0
    is_valid = Shape._is_valid

    def counted(shape, entry):
        nonlocal looks
        looks += 1
        return is_valid(shape, entry)

    monkeypatch.setattr(Shape, "_is_valid", counted)
    for job in range(2, 2002):
        stuck.add(job, f"/d/{job}")
    for job in range(2, 2002):
        assert stuck.first(STUCK) == job
        stuck.discard(job, f"/d/{job}")
    assert looks < 10 * 2000


def test_jobs_that_left_from_the_middle_of_a_directory_are_swept():
    shape = Shape(Request())
    shape.add(0, "/d")
    for job in range(1, 1001):
        shape.add(job, "/d")
        shape.add(1000 + job, "/e")
        shape.discard(job, "/d")
        shape.discard(1000 + job, "/e")
        assert sum(map(len, shape._places.values())) <= 2 * len(shape) + SLACK
    assert shape.first() == 0
    shape.add(5, "/d")
    shape.discard(0, "/d")
    assert shape.first() == 5


class Counted(Declines):
    """Counts how often it is asked whether it holds a directory."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


def test_a_worker_that_lacks_every_directory_but_the_last_finds_it_without_a_look_at_all_of_them_each_time():
    shape, declines = Shape(Request()), Counted()
    many = 3000
    for job in range(many):
        shape.add(job, f"/d/{job}")
    for job in range(many):
        assert shape.first(declines) == job
        declines.add(f"/d/{job}", "no such directory", 5.0)
    assert shape.first(declines) is None
    assert shape.first(declines) is None
    # A pause that ends brings back that one; a new directory comes up at once.
    declines.drop("/d/7")
    assert shape.first(declines) == 7
    shape.discard(7, "/d/7")
    shape.add(many, "/new")
    assert shape.first(declines) == many
    assert declines.looks < 10 * many


def test_a_worker_that_looks_no_more_costs_no_memory():
    shape, declines = Shape(Request()), Declines()
    for number in range(FEW + 1):
        declines.add(f"/elsewhere/{number}", "no such directory", 5.0)
    shape.add(0, "/d")
    assert shape.first(declines) == 0
    assert shape._views
    for job in range(1, 1000):
        shape.add(job, f"/d/{job}")
        shape.discard(job, f"/d/{job}")
    assert not shape._views
    assert shape.first(declines) == 0


def test_a_worker_that_has_left_costs_no_memory():
    shape, worker = Shape(Request()), Worker(0, session=1)
    for number in range(FEW + 1):
        worker.decline_place(f"/elsewhere/{number}", "no such directory", 5.0)
    shape.add(0, "/d")
    assert shape.first(worker.declined) == 0
    assert shape._views
    worker.hung_up()
    shape.add(1, "/e")
    assert not shape._views


@pytest.fixture
def wide() -> Shape:
    """Jobs of very many directories."""
    shape = Shape(Request())
    for job in range(10_000):
        shape.add(job, f"/d/{job}")
    return shape


@pytest.mark.parametrize(("lacking", "views"), [(17, 0), (10_000 // WALKED, 0), (10_000 // WALKED + 1, 1)])
def test_only_a_worker_that_lacks_a_fair_part_of_the_directories_has_an_index_of_its_own(wide, lacking, views):
    declines = Declines()
    for job in range(lacking):
        declines.add(f"/d/{job}", "no such directory", 5.0)
    assert wide.first(declines) == lacking
    assert len(wide._views) == views


def test_the_indices_of_many_workers_share_their_entries(wide):
    entries = set(map(id, wide._order))
    for _ in range(3):
        declines = Declines()
        for job in range(1000):
            declines.add(f"/d/{job}", "no such directory", 5.0)
        assert wide.first(declines) == 1000
    # What the sweeping leaves is the same still.
    for job in range(9000):
        wide.discard(job, f"/d/{job}")
        wide.add(job, f"/d/{job}")
    assert len(wide._views) == 3
    assert {id(entry) for view in wide._views.values() for entry in view.heap if entry[0] >= 9000} <= entries
    assert {id(entry) for entry in wide._order if entry[0] >= 9000} <= entries


def test_what_left_the_declines_is_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(declines_module, "GONE_KEPT", 3)
    shape, declines = Shape(Request()), Declines()
    shape.add(0, "/d")
    for number in range(FEW + 1):
        declines.add(f"/elsewhere/{number}", "no such directory", 5.0)
    for _ in range(100):
        declines.add("/d", "no such directory", 5.0)
        assert shape.first(declines) is None
        declines.drop("/d")
        assert shape.first(declines) == 0
    assert len(declines.gone) <= FEW + 1


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
