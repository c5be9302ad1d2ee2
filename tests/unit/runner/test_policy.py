"""What the keeper decides, without a process: the clock is a number here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kueue.runner.actions import Continue, Finish, Kill, Look, Pause, PauseDone, Start, Tell, Terminate
from kueue.runner.attempt import Attempt, Terms
from kueue.runner.policy import Policy


def leased(deadline=100.0):
    policy = Policy()
    assert policy.set_lease(deadline, 0.0) == []
    return policy


def running(policy, offer=1, now=1.0, **terms):
    assert Start(offer, policy.deadline) in policy.start(offer, Terms(**terms), now)
    assert policy.started(offer, now) == [Tell(offer, "running")]
    return policy


def kinds(actions):
    return [type(action) for action in actions]


def test_a_start_needs_a_lease_that_has_not_ended():
    policy = Policy()
    assert policy.start(1, Terms(), 0.0) == [Tell(1, "refused", "the worker has no lease")]
    policy = leased(10.0)
    assert kinds(policy.start(1, Terms(), 10.0)) == [Tell]
    assert policy.start(2, Terms(), 9.9) == [Start(2, 10.0)]


def test_what_another_keeper_had_begun_is_taken_up_without_a_lease_and_by_a_runner_that_ends():
    policy = Policy()
    policy.shut_down(0.0)
    policy.take_up(1, Terms(), 1.0)
    assert policy.started(1, 1.0) == [Tell(1, "running")]
    assert policy.exited(1, 0, None, 2.0) == [Look(1)]


def test_an_attempt_that_ends_is_over_when_nothing_of_it_is_left():
    policy = running(leased())
    assert policy.exited(1, 3, None, 2.0) == [Look(1)]
    assert policy.seen(1, 0, 0, 2.0) == [Finish(1, "exited", 3)]
    assert policy.attempts[1].state == "ended"
    assert policy.next_wake(3.0) is None


def test_leftovers_get_a_moment_then_the_signals_in_their_order():
    policy = running(leased(), grace_seconds=5.0)
    policy.exited(1, 0, None, 2.0)
    assert policy.seen(1, 2, 2, 2.0) == []
    assert policy.next_wake(2.0) == pytest.approx(2.02)
    assert policy.tick(2.6) == [Look(1)]
    assert policy.seen(1, 2, 2, 2.6) == [Tell(1, "stopping"), Terminate(1)]
    policy.signalled(1, False, 2.6)
    assert policy.tick(7.5) == [Look(1)]
    assert policy.seen(1, 1, 1, 7.5) == []
    assert Kill(1) in policy.tick(7.7)
    assert policy.seen(1, 0, 0, 7.7) == [Finish(1, "exited", 0, leftovers=2)]


def test_background_processes_may_stay():
    policy = running(leased(), keep_background=True)
    assert policy.exited(1, 0, None, 2.0) == [Finish(1, "exited", 0)]


def test_a_stop_is_a_signal_a_grace_a_kill_and_a_proof():
    policy = running(leased())
    assert policy.stop(1, kill=False, grace=10.0, now=2.0) == [Tell(1, "stopping"), Terminate(1)]
    policy.signalled(1, True, 2.0)
    policy.seen(1, 1, 1, 2.0)
    assert Kill not in kinds(policy.tick(11.9))
    assert Kill in kinds(policy.tick(12.0))
    assert policy.seen(1, 1, 1, 12.0) == []
    assert policy.exited(1, None, 9, 12.1) == [Look(1)]
    assert policy.seen(1, 1, 1, 12.1) == []
    assert policy.seen(1, 0, 0, 12.2) == [Finish(1, "canceled")]


def test_an_end_before_our_first_signal_is_the_jobs_own():
    policy = running(leased())
    policy.stop(1, kill=False, grace=10.0, now=2.0)
    policy.signalled(1, False, 2.0)
    policy.exited(1, 5, None, 2.0)
    assert policy.seen(1, 0, 0, 2.0) == [Finish(1, "exited", 5)]


@pytest.mark.parametrize("keep_background", [False, True])
@pytest.mark.parametrize(("code", "signal"), [(None, 15), (143, None), (None, 1)])
def test_who_ends_with_the_machine_or_session_is_gone_and_has_not_failed(code, signal, keep_background):
    policy = running(leased(), keep_background=keep_background)
    policy.shut_down(2.0)
    actions = policy.exited(1, code, signal, 2.0)
    (end,) = actions if keep_background else policy.seen(1, 0, 0, 2.3)
    assert end.kind == "gone"
    assert policy.attempts[1].state == "gone"


@pytest.mark.parametrize("keep_background", [False, True])
@pytest.mark.parametrize(("code", "signal"), [(None, 15), (143, None), (None, 1)])
def test_the_signal_of_a_shutdown_may_reach_the_job_before_its_keeper(code, signal, keep_background):
    policy = running(leased(), keep_background=keep_background)
    assert policy.exited(1, code, signal, 2.0) == []
    policy.shut_down(2.1)
    assert policy.next_wake(2.1) == pytest.approx(2.2)
    assert policy.tick(2.2) == [Look(1)]
    (end,) = policy.seen(1, int(keep_background), int(keep_background), 2.2)
    assert end.kind == "gone"


def test_who_crashed_before_the_shutdown_has_failed_though_something_of_it_was_left_until_then():
    policy = running(leased())
    policy.exited(1, None, 11, 1.0)
    policy.tick(1.2)
    policy.seen(1, 1, 1, 1.2)
    policy.shut_down(5.0)
    assert policy.seen(1, 0, 0, 6.0) == [Finish(1, "signaled", 11)]


def test_who_was_shot_in_a_shutdown_is_gone_also_if_a_second_one_is_told_before_all_of_it_is():
    policy = running(leased())
    policy.shut_down(2.0)
    policy.exited(1, None, 15, 2.1)
    policy.seen(1, 1, 1, 2.1)
    policy.shut_down(10.0)
    assert policy.seen(1, 0, 0, 10.1)[0].kind == "gone"


def test_a_runner_that_is_to_end_starts_nothing_new():
    policy = running(leased())
    policy.shut_down(2.0)
    assert policy.start(2, Terms(), 500.0) == [Tell(2, "refused", "the worker has no lease")]
    policy.set_lease(1000.0, 500.0)
    assert policy.start(2, Terms(), 500.0) == [Tell(2, "refused", "the runner is ending")]
    assert policy.start(1, Terms(), 500.0) == [Tell(1, "running")]


def test_what_may_stay_in_the_background_goes_on_when_its_paused_job_was_shot():
    policy = running(leased(10.0), keep_background=True)
    assert Pause(1) in policy.tick(10.0)
    policy.seen(1, 2, 0, 10.0)
    policy.exited(1, None, 9, 11.0)
    assert policy.tick(11.2) == [Pause(1)]
    continued, end = policy.seen(1, 1, 0, 11.2)
    assert continued == Continue(1)
    assert (end.kind, end.number, end.paused_seconds) == ("signaled", 9, pytest.approx(1.2))


def test_the_end_of_who_was_shot_is_seen_also_if_a_lease_comes_before_it():
    policy = running(leased(10.0))
    policy.tick(10.0)
    policy.seen(1, 2, 0, 10.0)
    assert policy.exited(1, None, 9, 11.0) == []
    assert Continue(1) in policy.set_lease(100.0, 11.1)
    assert policy.tick(11.2) == [Look(1)]
    assert policy.seen(1, 0, 0, 11.2)[0].kind == "signaled"


def test_what_may_stay_is_not_killed_by_the_end_of_a_lease_in_the_moment_after_its_job_was_shot():
    policy = running(leased(2.1), keep_background=True)
    policy.exited(1, None, 15, 2.0)
    assert policy.tick(2.1) == [PauseDone(2.1)]
    assert policy.tick(2.2) == [Look(1)]
    assert policy.seen(1, 1, 1, 2.2) == [Finish(1, "signaled", 15)]


@pytest.mark.parametrize(
    ("code", "signal", "kind"), [(0, None, "exited"), (7, None, "exited"), (143, None, "gone"), (None, 9, "gone")]
)
def test_only_the_jobs_own_word_counts_while_the_machine_shuts_down(code, signal, kind):
    policy = leased()
    running(policy)
    policy.shut_down(2.0)
    policy.exited(1, code, signal, 3.0)
    assert policy.seen(1, 0, 0, 3.1)[0].kind == kind


def test_an_end_long_after_a_shutdown_that_did_not_come_is_the_jobs_own():
    policy = leased(1000.0)
    running(policy)
    policy.shut_down(2.0)
    policy.exited(1, None, 9, 500.0)
    assert policy.seen(1, 0, 0, 500.1)[0].kind == "signaled"


def test_an_exit_code_after_nothing_but_a_kill_is_the_jobs_own():
    policy = running(leased())
    assert policy.stop(1, kill=True, grace=0.0, now=2.0)[-1] == Kill(1)
    policy.signalled(1, True, 2.0)
    policy.exited(1, 5, None, 2.0)
    assert policy.seen(1, 0, 0, 2.0) == [Finish(1, "exited", 5)]


def test_what_was_killed_and_does_not_end_is_said_once():
    policy = running(leased())
    policy.stop(1, kill=True, grace=0.0, now=2.0)
    policy.signalled(1, True, 2.0)
    told = []
    for tenth in range(20, 60):
        policy.tick(tenth / 10)
        told += policy.seen(1, 2, 2, tenth / 10)
    assert [tell.word for tell in told] == ["stopping"]
    assert "2 of its processes" in told[0].note
    assert policy.attempts[1].state == "stopping"


def test_a_second_stop_with_kill_ends_the_grace():
    policy = running(leased())
    policy.stop(1, kill=False, grace=1000.0, now=2.0)
    policy.signalled(1, True, 2.0)
    assert policy.stop(1, kill=False, grace=10.0, now=3.0) == [Tell(1, "stopping")]
    assert policy.stop(1, kill=True, grace=10.0, now=3.0) == [Kill(1)]


def test_at_the_deadline_the_rest_is_paused_killed_or_left_alone():
    policy = leased(10.0)
    running(policy, 1)
    running(policy, 2, on_lost="wait")
    running(policy, 3, on_lost="fail")
    running(policy, 4, on_lost="wait")
    policy.stop(4, kill=False, grace=1000.0, now=5.0)
    policy.signalled(4, True, 5.0)
    assert policy.next_wake(5.0) <= 10.0
    assert [a for a in policy.tick(10.0) if isinstance(a, Pause | Kill)] == [Pause(1), Kill(4)]
    assert policy.seen(1, 2, 1, 10.0) == []
    assert policy.seen(1, 2, 0, 10.1) == [Tell(1, "paused")]
    policy.exited(4, None, 9, 10.1)
    assert policy.seen(4, 0, 0, 10.1) == [Finish(4, "canceled"), PauseDone(10.0)]
    assert [policy.attempts[n].state for n in (1, 2, 3)] == ["paused", "running", "running"]


def test_what_is_paused_is_looked_at_again_each_second():
    policy = running(leased(10.0))
    policy.tick(10.0)
    policy.seen(1, 1, 0, 10.0)
    assert policy.next_wake(10.0) == 11.0
    assert policy.tick(11.0) == [Pause(1)]


def test_a_newer_lease_continues_and_the_time_out_did_not_run():
    policy = running(leased(10.0), now=1.0, timeout_seconds=20.0)
    policy.tick(10.0)
    policy.seen(1, 1, 0, 10.0)
    assert policy.set_lease(1000.0, 110.0) == [Continue(1), Tell(1, "running", "continues")]
    assert policy.next_wake(110.0) == 121.0
    assert Terminate(1) in policy.tick(121.0)
    policy.signalled(1, True, 121.0)
    policy.exited(1, None, 15, 121.0)
    end = policy.seen(1, 0, 0, 121.0)
    assert end == [Finish(1, "timed_out", after_seconds=20.0, paused_seconds=100.0)]


def test_the_stop_of_a_paused_attempt_is_a_kill_without_a_continue():
    policy = running(leased(10.0))
    policy.tick(10.0)
    policy.seen(1, 1, 0, 10.0)
    assert policy.stop(1, kill=False, grace=10.0, now=11.0) == [Tell(1, "stopping"), Kill(1)]
    policy.signalled(1, True, 11.0)
    assert policy.set_lease(100.0, 12.0) == []
    policy.exited(1, None, 9, 12.0)
    assert policy.seen(1, 0, 0, 12.0)[0].kind == "canceled"


def test_a_lease_already_over_pauses_at_once():
    policy = running(leased())
    assert Pause(1) in policy.set_lease(1.5, 2.0)


def test_an_attempt_whose_process_is_still_being_made_is_paused_too():
    policy = leased(10.0)
    policy.start(1, Terms(), 9.0)
    assert Pause(1) in policy.tick(10.0)
    assert policy.seen(1, 0, 0, 10.0) == []  # none yet is no proof
    assert policy.start_refused(1, "the lease ended", 10.1) == [Tell(1, "refused", "the lease ended"), PauseDone(10.0)]


def test_what_could_not_be_executed_says_why():
    policy = leased()
    policy.start(1, Terms(), 1.0)
    assert policy.not_started(1, "not_found", "no such file", 1.1) == [
        Finish(1, "not_started", cause="not_found", reason="no such file")
    ]


def test_a_start_that_hangs_is_said_once():
    policy = leased(1000.0)
    policy.start(1, Terms(), 1.0)
    assert policy.next_wake(1.0) == 11.0
    (tell,) = policy.tick(11.0)
    assert tell.word == "starting"
    assert "does not answer" in tell.note
    assert policy.tick(12.0) == []


def test_queued_attempts_follow_and_wait_for_the_lease():
    policy = running(leased(10.0))
    assert policy.start(2, Terms(line=1), 2.0) == [Tell(2, "queued")]
    policy.tick(10.0)
    policy.exited(1, 0, None, 11.0)
    assert Start not in kinds(policy.seen(1, 0, 0, 11.0))
    assert policy.set_lease(50.0, 12.0) == [Start(2, 50.0)]


def test_a_withdrawn_offer_never_starts():
    policy = leased()
    assert policy.withdraw(1, 1.0) == [Tell(1, "withdrawn")]
    assert policy.start(1, Terms(), 2.0) == [Tell(1, "withdrawn")]
    assert policy.forget(1)


def test_only_what_is_over_is_forgotten():
    policy = running(leased())
    assert not policy.forget(1)
    policy.exited(1, 0, None, 2.0)
    policy.seen(1, 0, 0, 2.0)
    assert policy.forget(1)
    assert policy.attempts == {}


def test_what_a_dead_runner_left_is_killed_and_gone():
    policy = Policy()
    assert policy.inherit(1, Terms(), None, 1.0) == [Kill(1)]
    assert policy.seen(1, 2, 2, 1.0) == []
    assert policy.tick(1.1) == [Kill(1)]
    assert policy.seen(1, 0, 0, 1.1)[0].kind == "gone"
    assert policy.attempts[1].state == "gone"


def test_an_end_that_a_dead_runner_wrote_down_counts():
    policy = Policy()
    assert policy.inherit(1, Terms(), (4, None), 1.0) == [Kill(1)]
    assert policy.seen(1, 0, 0, 1.0) == [Finish(1, "exited", 4)]


def test_what_a_dead_runner_left_paused_and_may_stay_goes_on():
    policy = Policy()
    assert policy.inherit(1, Terms(keep_background=True), (4, None), 1.0) == [Continue(1), Finish(1, "exited", 4)]


def test_a_main_process_that_vanished_is_gone_and_a_cancel_stays_a_cancel():
    policy = running(leased())
    policy.exited(1, None, None, 2.0)
    assert policy.seen(1, 0, 0, 2.0)[0].kind == "gone"
    running(policy, 2)
    policy.stop(2, kill=True, grace=0.0, now=3.0)
    policy.signalled(2, True, 3.0)
    policy.exited(2, None, None, 3.0)
    assert policy.seen(2, 0, 0, 3.0)[0].kind == "canceled"


# Every order of events: what holds always.

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "lease",
                "short",
                "start",
                "started",
                "refused",
                "failed",
                "exit",
                "shot",
                "look",
                "stop",
                "kill",
                "withdraw",
                "wait",
            ]
        ),
        st.integers(1, 4),
        st.floats(0.01, 20.0),
    ),
    max_size=60,
)


class World:
    """A tree for each offer, obeying the actions."""

    def __init__(self):
        self.now = 0.0
        self.policy = Policy()
        self.trees = {}
        self.started = set()
        self.finished = {}

    def do(self, actions):
        for action in actions:
            match action:
                case Start(offer, not_after):
                    assert self.now < not_after
                    assert offer not in self.started
                    self.started.add(offer)
                    self.trees[offer] = {"main": True, "rest": 1, "stopped": False}
                case Pause(offer):
                    assert self.policy.attempts[offer].terms.on_lost == "rerun"
                    self.tree(offer)["stopped"] = True
                    self.look(offer)
                case Continue(offer):
                    may_stay = self.policy.attempts[offer].terms.keep_background and not self.tree(offer)["main"]
                    assert may_stay or self.now < self.policy.deadline
                    self.tree(offer)["stopped"] = False
                case Terminate(offer):
                    assert not self.tree(offer)["stopped"]
                    self.do(self.policy.signalled(offer, self.tree(offer)["main"], self.now))
                    self.look(offer)
                case Kill(offer):
                    tree = self.tree(offer)
                    self.do(self.policy.signalled(offer, tree["main"], self.now))
                    tree["rest"] = 0
                    if tree["main"]:
                        tree["main"] = False
                        self.do(self.policy.exited(offer, None, 9, self.now))
                    self.look(offer)
                case Look(offer):
                    self.look(offer)
                case Finish(offer):
                    assert offer not in self.finished
                    assert not self.tree(offer)["main"]
                    assert not self.tree(offer)["rest"] or self.policy.attempts[offer].terms.keep_background
                    self.finished[offer] = action
                case _:
                    pass

    def tree(self, offer):
        return self.trees.setdefault(offer, {"main": False, "rest": 0, "stopped": False})

    def look(self, offer):
        tree = self.tree(offer)
        living = tree["main"] + tree["rest"]
        self.do(self.policy.seen(offer, living, 0 if tree["stopped"] else living, self.now))

    def step(self, what, offer, seconds):
        policy, now = self.policy, self.now
        tree = self.tree(offer)
        is_starting = offer in policy.attempts and policy.attempts[offer].phase == "starting"
        match what:
            case "lease":
                self.do(policy.set_lease(now + 100 * seconds, now))
            case "short":
                self.do(policy.set_lease(now + seconds / 10, now))
            case "start" if offer not in self.started:
                terms = Terms(
                    on_lost=("rerun", "wait", "fail", "rerun")[offer - 1],
                    timeout_seconds=50 * seconds,
                    keep_background=offer in (2, 4),
                )
                self.do(policy.start(offer, terms, now))
            case "started" if is_starting and tree["main"]:
                self.do(policy.started(offer, now))
            case "failed" if is_starting and tree["main"]:
                tree.update(main=False, rest=0)
                self.do(policy.not_started(offer, "other", "no", now))
            case "exit" if tree["main"] and not is_starting and not tree["stopped"]:
                tree["main"] = False
                self.do(policy.exited(offer, 0, None, now))
            case "shot" if tree["main"] and not is_starting:
                tree["main"] = False
                self.do(policy.exited(offer, None, 15, now))
            case "look" if not tree["main"] and not tree["stopped"]:
                tree["rest"] = 0
            case "stop" | "kill":
                self.do(policy.stop(offer, what == "kill", 5.0, now))
            case "withdraw":
                self.do(policy.withdraw(offer, now))
            case "wait":
                until = now + seconds
                for _ in range(1000):
                    wake = policy.next_wake(self.now)
                    if wake is None or wake > until:
                        break
                    self.now = max(self.now, wake)
                    self.do(policy.tick(self.now))
                self.now = until
                self.do(policy.tick(self.now))
            case _:
                pass
        self.check()

    def check(self):
        for offer, attempt in self.policy.attempts.items():
            if self.policy.lapsed and attempt.lives and attempt.terms.on_lost == "rerun":
                tree = self.tree(offer)
                assert tree["stopped"] or not tree["main"] or attempt.killing
            copy = Policy()
            copy.adopt(self.policy.row(offer))
            assert isinstance(copy.attempts[offer], Attempt)
            assert copy.attempts[offer].state == attempt.state


@given(STEPS)
def test_whatever_happens_nothing_runs_without_a_lease_and_every_end_comes_once(steps):
    world = World()
    for step in steps:
        world.step(*step)
    # In the end everything can be brought to an end.
    for offer in list(world.policy.attempts):
        world.do(world.policy.stop(offer, True, 0.0, world.now))
        world.step("wait", offer, 20.0)
    assert not [attempt for attempt in world.policy.attempts.values() if attempt.lives]


def test_a_successor_that_pauses_once_more_keeps_the_time_that_was_paused_before():
    policy = running(leased(10.0), timeout_seconds=30.0)
    assert Pause(1) in policy.tick(10.0)
    policy.lapsed = False  # as `take_over` does when it knows less of one attempt than of the others
    assert Pause(1) not in policy.tick(15.0)
    policy.set_lease(100.0, 20.0)
    assert policy.next_wake(20.0) == 41.0
    assert policy.attempts[1].paused_seconds == 10.0
