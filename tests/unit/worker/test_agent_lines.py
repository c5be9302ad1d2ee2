"""Offers ahead, as the agent takes them: in the room of their line, and never behind what it cannot see."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kueue.protocol.messages import AttemptQueued, OfferDeferred, OfferRejected, OfferWithdrawn, WithdrawOffer
from kueue.worker.actions import PauseTrees
from kueue.worker.known import Memo, read_memo, write_memo
from kueue.worker.orders import Changed, Ended, PauseDone, ProvenStill, Queued, Refused, Withdrawn, WithdrawOrder
from tests.unit.worker.test_agent import DONE, NODE, QUEUE, Bench, offer, ordered, said, state


@pytest.fixture
def bench():
    bench = Bench()
    bench.runner_attaches()
    bench.opens()
    return bench


def ahead(number, line, **more):
    return replace(offer(number, **more), line=line)


def takes(bench, number, line, **more):
    """Hand an offer ahead to the runner, which has it wait."""
    bench.hears(ahead(number, line, **more))
    orders = ordered(bench.checked(number))
    bench.event(Queued(offer=number))
    return orders


def test_the_hello_says_that_lines_are_understood(bench):
    assert bench.says_hello().lines


def test_an_offer_ahead_goes_to_the_runner_although_the_machine_is_full(bench):
    bench.starts(1, slots=4, named=(("gpu", (0, 1)),))
    (start,) = takes(bench, 2, 1, slots=4, named=(("gpu", (0, 1)),))
    assert (start.offer, start.line) == (2, 1)
    assert read_memo(start.memo).line == 1


def test_the_server_is_told_that_it_waits(bench):
    bench.starts(1)
    bench.hears(ahead(2, 1))
    bench.checked(2)
    assert said(bench.event(Queued(offer=2))) == [AttemptQueued(offer=2)]


def test_a_line_takes_its_room_once(bench):
    bench.starts(1, slots=2)
    takes(bench, 2, 1, slots=2)
    takes(bench, 3, 1, slots=2)
    bench.hears(offer(4, slots=2))
    assert ordered(bench.checked(4))
    bench.hears(offer(5))
    (answer,) = said(bench.checked(5))
    assert answer.reason == "0 of 4 job slots free, 1 wanted"


def test_the_room_stays_taken_until_the_last_of_the_line_has_ended(bench):
    bench.starts(1, slots=4)
    takes(bench, 2, 1, slots=4)
    bench.event(Ended(offer=1, job=1, end=DONE))
    bench.hears(offer(3))
    assert isinstance(said(bench.checked(3))[0], OfferDeferred)
    bench.event(Withdrawn(offer=2))
    bench.hears(offer(4))
    assert ordered(bench.checked(4))


def test_the_room_of_a_line_is_known_to_a_worker_that_was_started_anew():
    bench = Bench()
    memos = [write_memo(Memo(offer(n, slots=4).allocation.shares[0], line=line)) for n, line in ((1, None), (2, 1))]
    bench.runner_attaches(state(1, "running", started_wall=1.0, memo=memos[0]), state(2, "queued", memo=memos[1]))
    assert [(one.offer, one.state) for one in bench.says_hello().attempts] == [(1, "running"), (2, "queued")]
    bench.opens()
    (start,) = takes(bench, 3, 1, slots=4)
    assert start.line == 1
    bench.hears(offer(4))
    assert said(bench.checked(4))[0].reason == "0 of 4 job slots free, 1 wanted"


def test_equal_numbers_of_two_queues_are_two_lines(bench):
    share = offer(1, slots=2).allocation.shares[0]
    assert share.node == NODE
    bench.runner_attaches(state(1, "running", "b" * 32, started_wall=1.0, memo=write_memo(Memo(share))))
    assert bench.agent.attempts[1].line != (QUEUE, 1)


def test_an_offer_ahead_of_which_nothing_is_left_starts_in_the_room_that_it_took_over(bench):
    (start,) = takes(bench, 9, 1, slots=4)
    assert start.line == 1


def test_nothing_waits_behind_an_attempt_whose_runner_does_not_answer(bench):
    bench.agent.session_closed()
    bench.runner_is_mute(1)
    bench.opens()
    bench.hears(ahead(2, 1))
    (answer,) = said(bench.checked(2))
    assert isinstance(answer, OfferDeferred)
    assert answer.reason == "the runner of attempt 1, which it waits for, does not answer"


def test_a_missing_directory_rejects_an_offer_ahead_too(bench):
    bench.starts(1)
    bench.hears(ahead(2, 1))
    assert said(bench.checked(2, "no such directory")) == [OfferRejected(offer=2, reason="no such directory")]


def test_a_worker_that_stops_takes_no_offer_ahead(bench):
    bench.starts(1)
    bench.agent.stop()
    assert [type(one) for one in said(bench.hears(ahead(2, 1)))] == [OfferDeferred]


def test_an_offer_ahead_without_a_lease_waits_for_it(bench):
    bench.starts(1)
    bench.now += 61.0
    bench.hears(ahead(2, 1))
    assert bench.checked(2) == []


def test_a_late_one_is_asked_back_from_its_runner(bench):
    bench.starts(1)
    takes(bench, 2, 1)
    assert ordered(bench.hears(WithdrawOffer(offer=2))) == [WithdrawOrder(offer=2)]
    assert said(bench.event(Withdrawn(offer=2))) == [OfferWithdrawn(offer=2)]
    assert said(bench.hears(ahead(2, 1))) == [OfferWithdrawn(offer=2)]


def test_one_that_its_runner_refuses_is_put_off(bench):
    bench.starts(1)
    takes(bench, 2, 1)
    (answer,) = said(bench.event(Refused(offer=2, reason="attempt 1, which it waits for, is with another runner")))
    assert isinstance(answer, OfferDeferred)


def test_what_waits_in_a_line_is_left_alone_once_its_runner_has_paused_all(bench):
    bench.starts(1)
    takes(bench, 2, 1)
    bench.agent.session_closed()
    bench.now += 60.0
    bench.event(Changed(offer=1, state="paused"))
    bench.event(ProvenStill(deadline_boottime=1060.0, offers=(2,)))
    assert bench.turns(10.0) == []
    assert bench.agent.next_wake() is None


@pytest.mark.parametrize(
    "told", [[], [PauseDone(deadline_boottime=1060.0)], [ProvenStill(deadline_boottime=1050.0, offers=(2,))]]
)
def test_what_waits_in_a_line_is_stopped_if_its_runner_may_have_started_it(bench, told):
    bench.starts(1)
    takes(bench, 2, 1)
    bench.agent.session_closed()
    bench.now += 60.0
    bench.event(Changed(offer=1, state="paused"))
    for event in told:
        bench.event(event)
    assert bench.turns(10.0) == [PauseTrees((2,))]


def test_a_new_lease_ends_the_proof_that_one_in_a_line_does_not_run(bench):
    bench.starts(1)
    takes(bench, 2, 1)
    bench.agent.session_closed()
    bench.now += 60.0
    bench.event(ProvenStill(deadline_boottime=1060.0, offers=(2,)))
    bench.event(Changed(offer=1, state="paused"))
    bench.opens()
    bench.agent.session_closed()
    assert bench.turns(70.0) == [PauseTrees((2,))]
