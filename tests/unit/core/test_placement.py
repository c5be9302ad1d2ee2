"""A round of placement against a plain loop over all jobs and all workers."""

from __future__ import annotations

from copy import copy

import hypothesis.strategies as st
from hypothesis import given, settings

from kueue.core import facts as f
from kueue.core.placement import Room, Round, allocate, obstacle, taken
from kueue.core.state import State
from kueue.model import JobRange, MachineTotals, NodeRecord, Payload, Place, Request

REQUESTS = st.builds(
    Request,
    slots=st.sampled_from([0, 1, 1, 3]),
    cores=st.sampled_from([0, 1, 2, 6]),
    ram_mb=st.integers(0, 12).map(lambda n: 100 * n),
    cores_are_wish=st.booleans(),
    ram_is_wish=st.booleans(),
    named=st.sampled_from([(), (), (("gpu", 1),)]),
    counters=st.sampled_from([(), (), (("lic", 1),)]),
    priority=st.sampled_from([10, 10, 20]),
)
JOBS = st.lists(st.tuples(REQUESTS, st.sampled_from(["/a", "/b", "/c"])), max_size=25)


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    found = []
    for node in range(draw(st.integers(0, 4))):
        totals = MachineTotals(slots=4, cores=draw(st.sampled_from([2, 8])), ram_mb=1000, named=(("gpu", 2),))
        found.append(
            Room(
                node=node,
                totals=totals,
                slots=draw(st.integers(0, 4)),
                cores=draw(st.integers(0, totals.cores)),
                ram_mb=draw(st.integers(0, 10)) * 100,
                wish_cores=draw(st.integers(0, totals.cores)),
                wish_ram_mb=draw(st.integers(0, 10)) * 100,
                named={"gpu": frozenset(draw(st.sets(st.integers(0, 1))))},
                declined=draw(st.sets(st.sampled_from(["/a", "/b", "/c"]), max_size=2)),
                closed=draw(st.sampled_from(["", "", "", "is offline"])),
            )
        )
    return found


def state_of(jobs: list[tuple[Request, str]], nodes: int) -> State:
    state = State()
    for node in range(nodes):
        state.evolve(f.NodeChanged(node=NodeRecord(id=node, identity=str(node), name=str(node)), wall=0.0))
    ranges = tuple(
        JobRange(payload=Payload(argv=("true",)), place=Place(cwd=cwd), request=request) for request, cwd in jobs
    )
    state.evolve(f.JobsSubmitted(first_id=0, ranges=ranges, principal="operator", wall=0.0))
    return state


def by_hand(jobs: list[tuple[Request, str]], found: list[Room], cap: int, licences: int) -> list[tuple[int, int]]:
    """(job, node) in the order in which they are placed: all jobs, all workers, again and again."""
    open_rooms = [room for room in found if not room.closed]
    waiting = dict(enumerate(jobs))
    used_slots = used_licences = 0
    placed = []
    for job, (request, cwd) in sorted(waiting.items(), key=lambda entry: (-entry[1][0].priority, entry[0])):
        if used_slots + request.slots > cap or used_licences + dict(request.counters).get("lic", 0) > licences:
            continue
        fitting = []
        for room in open_rooms:
            if obstacle(request, room) is None and cwd not in room.declined:
                cores, ram_mb = taken(request, room)
                fitting.append((room.occupation_with(request.slots, cores, ram_mb), room.node, room))
        if not fitting:
            continue
        *_, room = min(fitting, key=lambda entry: entry[:2])
        share = allocate(request, room).shares[0]
        room.slots -= share.slots
        room.cores -= share.cores
        room.ram_mb -= share.ram_mb
        room.named = {"gpu": room.named["gpu"] - set(dict(share.named).get("gpu", ()))}
        used_slots += request.slots
        used_licences += dict(request.counters).get("lic", 0)
        placed.append((job, room.node))
    return placed


@settings(max_examples=150, deadline=None)
@given(JOBS, rooms(), st.sets(st.integers(0, 24), max_size=4), st.integers(0, 12), st.integers(0, 3))
def test_a_round_places_what_a_plain_loop_places_in_the_same_order(jobs, found, put_off, cap, licences):
    for room in found:
        room.deferred = {jobs[number][0]: "busy" for number in put_off if number < len(jobs)}
    expected = by_hand(jobs, [copy(room) for room in found], cap, licences)
    state = state_of(jobs, len(found))
    placing = Round(state, found, {"@slots": cap, "lic": licences})
    placed = []
    while (pick := placing.next()) is not None:
        placed.append((pick.job, pick.node))
        offered = f.JobOffered(job=pick.job, offer=len(placed), node=pick.node, allocation=pick.allocation, wall=0.0)
        state.evolve(offered)
        placing.took(pick)
    assert placed == expected


def a_room(**changes: object) -> Room:
    room = Room(
        node=0,
        totals=MachineTotals(slots=4, cores=8, ram_mb=1000),
        slots=4,
        cores=8,
        ram_mb=1000,
        wish_cores=8,
        wish_ram_mb=1000,
    )
    for name, value in changes.items():
        setattr(room, name, value)
    return room


def test_a_wish_takes_the_whole_of_a_small_machine():
    assert taken(Request(cores=64, cores_are_wish=True, ram_mb=9000, ram_is_wish=True), a_room()) == (8, 1000)


def test_a_wish_takes_at_least_one_core():
    assert taken(Request(cores=2, cores_are_wish=True), a_room(wish_cores=0)) == (1, 0)


def test_a_wish_for_no_cores_takes_none():
    assert taken(Request(cores=0, cores_are_wish=True), a_room()) == (0, 0)


def test_a_wish_does_not_start_where_less_than_half_of_it_would_be_free():
    wish = Request(cores=8, cores_are_wish=True)
    assert obstacle(wish, a_room(wish_cores=4, cores=4)) is None
    found = obstacle(wish, a_room(wish_cores=3, cores=3))
    assert found is not None
    assert found.sentence() == (
        "is busy with other work, which takes 5 of 8 cpus: 3 of the 8 cpus wished for would be free"
    )


def test_what_the_machine_can_never_give_is_said_before_what_is_taken():
    found = obstacle(Request(cores=9), a_room(cores=0))
    assert found is not None
    assert found.kind == "machine"
    assert found.sentence() == "has 8 cpus, 9 asked for"
