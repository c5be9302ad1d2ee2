"""Lines: attempts of which one at a time lives, in the room that they share."""

from __future__ import annotations

import json

from kueue.runner.actions import Kill, Pause, Start, Tell
from kueue.runner.attempt import Terms
from kueue.runner.policy import Policy


def leased(until=100.0):
    policy = Policy()
    policy.set_lease(until, 0.0)
    return policy


def in_line(policy, *offers, line=1, now=1.0):
    """The first one runs, the others are queued behind it."""
    first, *rest = offers
    assert policy.start(first, Terms(line=line if first != line else None), now) == [Start(first, policy.deadline)]
    policy.started(first, now)
    for offer in rest:
        assert policy.start(offer, Terms(line=line), now) == [Tell(offer, "queued")]
    return policy


def end(policy, offer, now=2.0):
    policy.exited(offer, 0, None, now)
    return policy.seen(offer, 0, 0, now)


def starts(actions):
    return [action.offer for action in actions if isinstance(action, Start)]


def test_the_next_one_starts_when_nothing_of_the_one_before_is_left():
    policy = in_line(leased(), 1, 2, 3)
    policy.exited(1, 0, None, 2.0)
    assert starts(policy.seen(1, 1, 1, 2.0)) == []
    assert starts(policy.seen(1, 0, 0, 2.1)) == [2]
    assert starts(end(policy, 2)) == [3]
    assert end(policy, 3)
    assert policy.lines == {}


def test_lines_know_nothing_of_each_other():
    policy = in_line(leased(), 1, 3)
    in_line(policy, 2, 4, line=2)
    assert starts(end(policy, 2)) == [4]
    assert policy.attempts[3].state == "queued"


def test_one_whose_line_is_empty_starts_at_once():
    policy = in_line(leased(), 1)
    end(policy, 1)
    assert starts(policy.start(5, Terms(line=1), 3.0)) == [5]


def test_a_lease_that_is_renewed_too_late_starts_what_waits_also_if_no_tick_came_between():
    policy = in_line(leased(until=10.0), 1, 2)
    assert starts(end(policy, 1, now=10.1)) == []
    assert starts(policy.set_lease(20.0, 10.2)) == [2]


def test_one_that_leaves_from_the_middle_frees_nothing_but_itself():
    policy = in_line(leased(), 1, 2, 3)
    assert policy.withdraw(2, 1.5) == [Tell(2, "withdrawn")]
    assert policy.attempts[3].state == "queued"
    assert starts(end(policy, 1)) == [3]


def test_one_that_is_stopped_while_it_waits_never_starts():
    policy = in_line(leased(), 1, 2, 3)
    assert policy.stop(2, kill=True, grace=1.0, now=1.5) == [Tell(2, "withdrawn")]
    assert starts(end(policy, 1)) == [3]


def test_an_older_one_that_comes_late_waits_for_the_younger_one_that_runs():
    policy = in_line(leased(), 9)
    assert policy.start(7, Terms(line=1), 1.5) == [Tell(7, "queued")]
    assert policy.start(8, Terms(line=1), 1.5) == [Tell(8, "queued")]
    assert starts(end(policy, 9)) == [7]


def test_a_start_that_was_refused_lets_the_next_one_start():
    policy = in_line(leased(), 1, 2)
    end(policy, 1)
    assert starts(policy.start_refused(2, "no process", 2.0)) == []
    policy = leased()
    policy.start(1, Terms(), 1.0)
    policy.start(2, Terms(line=1), 1.0)
    assert starts(policy.start_refused(1, "no process", 1.1)) == [2]


def test_without_a_lease_all_wait_and_what_runs_is_paused():
    policy = in_line(leased(10.0), 1, 2, 3)
    assert policy.tick(10.0) == [Pause(1)]
    assert starts(policy.stop(1, kill=True, grace=0.0, now=11.0)) == []
    policy.exited(1, None, 9, 11.0)
    assert starts(policy.seen(1, 0, 0, 11.0)) == []
    assert starts(policy.set_lease(50.0, 12.0)) == [2]


def test_a_new_lease_starts_nobody_before_the_turn():
    policy = in_line(leased(10.0), 1, 2)
    policy.tick(10.0)
    assert starts(policy.set_lease(50.0, 12.0)) == []


def test_nobody_starts_while_the_machine_goes_down():
    policy = in_line(leased(), 1, 2)
    policy.shut_down(1.5)
    policy.exited(1, None, 15, 1.6)
    assert starts(policy.seen(1, 0, 0, 1.6)) == []
    assert policy.start_refused(2, "told to end", 1.7) == [Tell(2, "refused", "told to end")]


def test_nobody_starts_in_a_runner_that_leaves_when_its_last_job_has_ended_at_last():
    policy = in_line(leased(600.0), 1, 2)
    policy.shut_down(1.5)
    policy.exited(1, 0, None, 500.0)
    assert starts(policy.seen(1, 0, 0, 500.0)) == []
    assert policy.start_refused(2, "told to end", 500.1) == [Tell(2, "refused", "told to end")]


def test_whoever_takes_over_knows_the_lines():
    before = in_line(leased(), 3, 4)
    rows = json.loads(json.dumps([before.row(offer) for offer in (3, 4)]))
    policy = leased()
    for row in rows:
        policy.adopt(row)
    assert policy.start(5, Terms(line=1), 2.0) == [Tell(5, "queued")]
    assert starts(end(policy, 3)) == [4]
    assert starts(end(policy, 4)) == [5]


def test_what_a_dead_runner_left_is_gone_before_another_of_its_line_starts():
    policy = leased()
    assert policy.inherit(3, Terms(line=1), None, 1.0) == [Kill(3)]
    assert policy.start(4, Terms(line=1), 1.0) == [Tell(4, "queued")]
    assert starts(policy.seen(3, 0, 0, 1.1)) == [4]


def test_an_end_that_is_decided_anew_holds_up_its_line_again():
    policy = in_line(leased(), 1)
    end(policy, 1)
    policy.reopen(1)
    assert policy.start(2, Terms(line=1), 2.0) == [Tell(2, "queued")]
    assert starts(policy.seen(1, 0, 0, 2.1)) == [2]
