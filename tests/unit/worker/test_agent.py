"""Dialogues of the agent with the server and its runner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kueue.model import (
    Allocation,
    Canceled,
    EndRecord,
    Exited,
    MachineLoad,
    MachineTotals,
    NotStarted,
    Payload,
    Place,
    Request,
    Share,
    Terms,
)
from kueue.protocol.messages import (
    Acknowledge,
    AttemptChanged,
    AttemptEnded,
    AttemptGone,
    AttemptStarted,
    FetchedOutput,
    FetchOutput,
    ForgetOutput,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Offer,
    OfferDeferred,
    OfferRejected,
    OfferWithdrawn,
    Report,
    Sorry,
    StopAttempt,
    WithdrawOffer,
    WorkerWelcome,
)
from kueue.worker.actions import CheckPlace, Close, ContinueTrees, DropOutput, Fetch, Instruct, PauseTrees, Say
from kueue.worker.agent import REFUSED_KEPT, Agent, AgentSettings
from kueue.worker.known import Memo, write_memo
from kueue.worker.orders import (
    Attached,
    AttemptState,
    Changed,
    Ended,
    ForgetAttempts,
    Gone,
    PauseDone,
    Queued,
    Refused,
    RunnerAnswers,
    RunnerMute,
    SetLease,
    StartAttempt,
    Started,
    StopOrder,
    Unknown,
    Withdrawn,
    WithdrawOrder,
)

QUEUE, OTHER_QUEUE = "a" * 32, "b" * 32
RUNNER = "r1"
NODE = 3
TOTALS = MachineTotals(slots=4, cores=8, ram_mb=1000, named=(("gpu", 2),))
DONE = EndRecord(outcome=Exited(0), started_wall=100.0, ended_wall=110.0)


class Bench:
    """An agent whose clock stands still unless it is turned."""

    def __init__(self, lease_seconds=60.0, timeout_seconds=100.0):
        self.agent = Agent(
            AgentSettings(
                identity="i" * 32,
                name="lab1",
                machine_id="m",
                boot_id="b",
                base_environment={"PATH": "/bin", "HOME": "/home/u"},
                kill_grace_seconds=7.0,
                report_interval_seconds=50.0,
            ),
            TOTALS,
        )
        self.now = 1000.0
        self.lease_seconds = lease_seconds
        self.timeout_seconds = timeout_seconds

    def runner_attaches(self, *attempts, runner=RUNNER, deadline=None):
        attached = Attached(
            protocol=1, version="1", runner=runner, pid=7, attempts=attempts, lease_deadline_boottime=deadline
        )
        return self.event(attached)

    def runner_is_mute(self, *offers):
        self.agent.runners_stand([state(offer, "unknown") for offer in offers])

    def says_hello(self):
        return self.agent.hello(self.now)

    def hears(self, message):
        return self.agent.hears(message, self.now)

    def event(self, event):
        return self.agent.runner_event(event, self.now)

    def checked(self, offer, problem=None):
        return self.agent.place_checked(offer, problem, self.now)

    def is_welcomed(self, queue_id=QUEUE):
        return self.hears(
            WorkerWelcome(
                protocol=1,
                version="1",
                queue_id=queue_id,
                worker=NODE,
                worker_timeout_seconds=self.timeout_seconds,
                lease_seconds=self.lease_seconds,
                cleanup_after_seconds=3600.0,
            )
        )

    def opens(self):
        """A session with a lease."""
        self.says_hello()
        actions = self.is_welcomed()
        beat = next(one for one in said(actions) if isinstance(one, Heartbeat))
        return self.hears(HeartbeatAnswer(number=beat.number, lease_seconds=self.lease_seconds))

    def starts(self, number, **terms):
        self.hears(offer(number, **terms))
        actions = self.checked(number)
        self.event(Started(offer=number, job=number, started_wall=100.0, pid=70 + number))
        return actions

    def turns(self, seconds):
        self.now += seconds
        return self.agent.tick(self.now)


def said(actions):
    return [action.message for action in actions if isinstance(action, Say)]


def ordered(actions):
    return [action.order for action in actions if isinstance(action, Instruct)]


def offer(number, *, cores=1, ram_mb=10, slots=1, named=(), on_lost="rerun", env=(), node=NODE, job=None):
    share = Share(node=node, slots=slots, cores=cores, ram_mb=ram_mb, named=named)
    return Offer(
        offer=number,
        job=number if job is None else job,
        attempt=2,
        payload=Payload(argv=("true",), stdout="out.txt"),
        place=Place(cwd="/work", pwd="/link", env=env, umask=0o027),
        request=Request(),
        terms=Terms(on_lost=on_lost, timeout_seconds=5.0),
        allocation=Allocation(shares=(share,)),
    )


def state(number, word, queue_id=QUEUE, **more):
    return AttemptState(offer=number, job=number, queue_id=queue_id, state=word, **more)


@pytest.fixture
def bench():
    bench = Bench()
    bench.runner_attaches()
    return bench


# --- hello -----------------------------------------------------------------------------------------------------------


def test_the_hello_tells_every_attempt_that_is_not_acknowledged(bench):
    bench.runner_attaches(
        state(4, "running", started_wall=90.0), state(2, "ended", end=DONE, started_wall=80.0), state(9, "starting")
    )
    told = bench.says_hello().attempts
    assert [(one.offer, one.state, one.started_wall) for one in told] == [
        (2, "ended", 80.0),
        (4, "running", 90.0),
        (9, "queued", None),
    ]


def test_an_end_follows_right_after_the_welcome(bench):
    bench.runner_attaches(state(2, "ended", end=DONE, started_wall=80.0))
    bench.says_hello()
    assert AttemptEnded(offer=2, end=DONE) in said(bench.is_welcomed())


def test_before_the_welcome_nothing_but_the_hello_is_said(bench):
    bench.opens()
    bench.starts(1)
    bench.agent.session_closed()
    bench.says_hello()
    assert bench.event(Ended(offer=1, job=1, end=DONE)) == []
    assert said(bench.is_welcomed()).count(AttemptEnded(offer=1, end=DONE)) == 1


def test_an_offer_that_was_not_handed_over_is_forgotten_with_its_session(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.agent.session_closed()
    assert bench.says_hello().attempts == ()
    bench.is_welcomed()
    assert bench.checked(1) == []


def test_what_was_handed_over_is_told_in_the_next_hello(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    bench.agent.session_closed()
    assert [(one.offer, one.state) for one in bench.says_hello().attempts] == [(1, "queued")]


def test_a_silent_runner_has_unknown_attempts_and_its_answer_makes_a_new_session(bench):
    bench.runner_is_mute(5)
    assert [(one.offer, one.state) for one in bench.says_hello().attempts] == [(5, "unknown")]
    bench.is_welcomed()
    actions = bench.runner_attaches(state(5, "running", started_wall=3.0), runner="r0")
    assert isinstance(actions[-1], Close)
    assert SetLease not in [type(order) for order in ordered(actions)]
    bench.agent.session_closed()
    assert [(one.offer, one.state) for one in bench.says_hello().attempts] == [(5, "running")]


def test_a_new_runner_without_attempts_gets_the_lease_of_the_session(bench):
    bench.opens()
    assert ordered(bench.runner_attaches(runner="r2")) == [SetLease(deadline_boottime=1060.0)]


def test_no_welcome_in_time_ends_the_session(bench):
    bench.says_hello()
    assert bench.turns(29.0) == []
    assert isinstance(bench.turns(2.0)[0], Close)


def test_a_refusal_closes_with_its_reason(bench):
    bench.says_hello()
    refusal = Sorry(reason="copied disk", hint="delete identity", lasting=True)
    assert bench.hears(refusal) == [Close("copied disk", "delete identity", lasting=True)]


# --- offers ----------------------------------------------------------------------------------------------------------


def test_an_offer_is_checked_and_handed_to_the_runner_with_its_environment(bench):
    bench.opens()
    assert bench.hears(offer(1, env=(("PATH", "/opt/bin"), ("FOO", "1")))) == [
        CheckPlace(1, offer(1, env=(("PATH", "/opt/bin"), ("FOO", "1"))).place)
    ]
    (start,) = ordered(bench.checked(1))
    assert isinstance(start, StartAttempt)
    assert (start.offer, start.queue_id, start.cwd, start.pwd, start.umask) == (1, QUEUE, "/work", "/link", 0o027)
    assert (start.stdout, start.timeout_seconds, start.grace_seconds) == ("out.txt", 5.0, 7.0)
    env = dict(start.env)
    assert env["PATH"] == "/opt/bin"
    assert env["HOME"] == "/home/u"
    assert env["FOO"] == "1"
    assert {key: env[key] for key in env if key.startswith("KUEUE")} == {
        "KUEUE_JOB_ID": "1",
        "KUEUE_ATTEMPT": "2",
        "KUEUE_CPUS": "1",
        "KUEUE_RAM_MB": "10",
        "KUEUE_SLOTS": "1",
        "KUEUE_WORKER": "lab1",
    }
    assert said(bench.event(Started(offer=1, job=1, started_wall=5.0))) == [AttemptStarted(offer=1, started_wall=5.0)]


def test_a_job_with_gpus_is_told_which(bench):
    bench.opens()
    bench.hears(offer(1, named=(("gpu", (0, 1)),)))
    (start,) = ordered(bench.checked(1))
    assert dict(start.env)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_gpu_in_use_defers_the_offer(bench):
    bench.opens()
    bench.starts(1, named=(("gpu", (0,)),))
    bench.hears(offer(2, named=(("gpu", (0,)),)))
    (answer,) = said(bench.checked(2))
    assert isinstance(answer, OfferDeferred)
    assert "gpu" in answer.reason


def test_a_missing_directory_rejects_the_offer(bench):
    bench.opens()
    bench.hears(offer(1))
    assert said(bench.checked(1, "/work: no such directory")) == [
        OfferRejected(offer=1, reason="/work: no such directory")
    ]


def test_a_directory_that_does_not_answer_rejects_the_offer_after_five_seconds(bench):
    bench.opens()
    bench.hears(offer(1))
    assert not [one for one in said(bench.turns(4.9)) if isinstance(one, OfferRejected)]
    answers = [one for one in said(bench.turns(0.2)) if isinstance(one, OfferRejected)]
    assert [one.offer for one in answers] == [1]
    assert "does not answer" in answers[0].reason
    assert bench.checked(1) == []  # the late answer starts nothing


@pytest.mark.parametrize(
    ("wanted", "word"), [({"slots": 5}, "slots"), ({"cores": 9}, "cores"), ({"ram_mb": 1001}, "MB")]
)
def test_an_offer_without_room_is_deferred_with_the_reason_and_fresh_load(bench, wanted, word):
    bench.opens()
    load = MachineLoad(busy_cores=1, available_ram_mb=1000)
    bench.agent.measured(load)
    bench.hears(offer(1, **wanted))
    (answer,) = said(bench.checked(1))
    assert (type(answer), answer.load) == (OfferDeferred, load)
    assert word in answer.reason


def test_room_is_what_attempts_and_load_leave(bench):
    bench.opens()
    bench.starts(1, cores=5, ram_mb=900)
    bench.hears(offer(2, cores=3, ram_mb=100))
    assert ordered(bench.checked(2))
    bench.hears(offer(3, cores=1, ram_mb=0))
    assert isinstance(said(bench.checked(3))[0], OfferDeferred)


def test_an_ended_attempt_gives_its_room_back(bench):
    bench.opens()
    bench.starts(1, cores=8)
    bench.event(Ended(offer=1, job=1, end=DONE))
    bench.hears(offer(2, cores=8))
    assert ordered(bench.checked(2))


def test_a_restarted_worker_knows_what_its_attempts_hold():
    bench = Bench()
    memo = write_memo(Memo(share=Share(node=NODE, slots=1, cores=8, ram_mb=0)))
    bench.runner_attaches(state(1, "running", started_wall=1.0, memo=memo))
    bench.opens()
    bench.hears(offer(2, cores=1))
    assert isinstance(said(bench.checked(2))[0], OfferDeferred)


def test_a_deferral_brings_a_newer_load_soon(bench):
    bench.opens()
    bench.hears(offer(1, cores=9))
    bench.checked(1)
    reports = [one for one in said(bench.turns(5.1)) if isinstance(one, Report)]
    assert len(reports) == 1


def test_without_a_lease_an_offer_waits_for_the_answer_to_the_heartbeat(bench):
    bench.says_hello()
    bench.is_welcomed()
    bench.hears(offer(1))
    assert bench.checked(1) == []
    lease, start = ordered(bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0)))
    assert isinstance(lease, SetLease)
    assert isinstance(start, StartAttempt)


def test_an_offer_with_a_known_number_starts_nothing(bench):
    bench.opens()
    bench.starts(1)
    assert bench.hears(offer(1)) == [Say(AttemptStarted(offer=1, started_wall=100.0))]
    bench.event(Ended(offer=1, job=1, end=DONE))
    assert bench.hears(offer(1)) == [Say(AttemptEnded(offer=1, end=DONE))]


def test_a_number_that_was_withdrawn_is_never_started(bench):
    bench.opens()
    assert said(bench.hears(WithdrawOffer(offer=1))) == [OfferWithdrawn(offer=1)]
    assert bench.hears(offer(1)) == [Say(OfferWithdrawn(offer=1))]


def test_a_number_of_another_queues_attempt_is_not_used(bench):
    bench.runner_attaches(state(1, "running", OTHER_QUEUE, started_wall=1.0))
    bench.opens()
    (answer,) = said(bench.hears(offer(1)))
    assert isinstance(answer, OfferDeferred)
    assert bench.hears(StopAttempt(offer=1, kill=True)) == []


HAPPENS = [
    Started(offer=1, job=1, started_wall=1.0),
    Queued(offer=1),
    Changed(offer=1, state="paused"),
    Ended(offer=1, job=1, end=DONE),
    Gone(offer=1, job=1, queue_id=OTHER_QUEUE, reason="its runner died with it"),
    Refused(offer=1, reason="no lease"),
    Withdrawn(offer=1),
    Unknown(offer=1),
]


def kinds(events):
    return [type(event).__name__ for event in events]


@pytest.mark.parametrize("event", HAPPENS, ids=kinds(HAPPENS))
def test_a_server_hears_nothing_of_the_attempts_of_another_queue(bench, event):
    bench.runner_attaches(state(1, "queued", OTHER_QUEUE))
    bench.opens()
    assert said(bench.event(event)) == []
    bench.agent.session_closed()
    bench.runner_attaches(state(1, "queued", OTHER_QUEUE))
    bench.says_hello()
    bench.event(event)
    assert {type(one) for one in said(bench.is_welcomed())} <= {Heartbeat, Report}


@pytest.mark.parametrize("word", ["running", "ended", "gone"])
def test_no_answer_to_a_server_takes_the_attempt_of_another_queue_for_its_own(bench, word):
    attempt = state(1, word, OTHER_QUEUE, started_wall=1.0, end=DONE if word == "ended" else None)
    bench.runner_attaches(attempt)
    bench.says_hello()
    assert [type(one) for one in said(bench.is_welcomed())] == [Heartbeat]
    bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0))
    assert said(bench.hears(WithdrawOffer(offer=1))) == []
    assert bench.hears(StopAttempt(offer=1, kill=True)) == []
    assert said(bench.runner_attaches(attempt)) == []
    assert bench.hears(Acknowledge(offers=(1,))) == []
    assert bench.hears(ForgetOutput(offers=(1, 2))) == [DropOutput((2,))]
    (answer,) = said(bench.hears(FetchOutput(token=5, offer=1, stream="stdout", offset=3)))
    assert answer == FetchedOutput(token=5, offset=3, error="the output is not kept any more")
    bench.agent.session_closed()
    bench.says_hello()
    told = said(bench.is_welcomed(OTHER_QUEUE))
    assert (AttemptEnded(offer=1, end=DONE) in told) == (word == "ended")


def test_a_report_follows_an_offer_that_is_put_off_for_its_number(bench):
    bench.runner_attaches(state(1, "running", OTHER_QUEUE, started_wall=1.0))
    bench.opens()
    bench.hears(offer(1))
    assert bench.agent.next_wake() <= bench.now + 5.0


def test_a_report_follows_an_offer_that_is_put_off_for_a_change_of_runners(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    assert isinstance(said(bench.event(Unknown(offer=1)))[0], OfferDeferred)
    assert bench.agent.next_wake() <= bench.now + 5.0


def test_of_very_many_withdrawn_numbers_the_newest_are_remembered(bench):
    bench.opens()
    for number in range(10_000):
        bench.hears(WithdrawOffer(offer=number))
    assert len(bench.agent._refused) == REFUSED_KEPT
    assert bench.hears(offer(9_999)) == [Say(OfferWithdrawn(offer=9_999))]


def test_an_offer_refused_by_the_runner_is_deferred(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    (answer,) = said(bench.event(Refused(offer=1, reason="no lease")))
    assert (type(answer), answer.reason) == (OfferDeferred, "no lease")
    assert bench.agent.attempts == {}


def test_a_job_that_cannot_start_has_ended(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    end = EndRecord(outcome=NotStarted("no such program", "not_found"), started_wall=None, ended_wall=9.0)
    assert said(bench.event(Ended(offer=1, job=1, end=end))) == [AttemptEnded(offer=1, end=end)]


# --- withdrawing and stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [WithdrawOffer(offer=1), StopAttempt(offer=1), StopAttempt(offer=1, kill=True)])
def test_an_offer_not_yet_handed_over_is_withdrawn_at_once(bench, order):
    bench.opens()
    bench.hears(offer(1))
    assert said(bench.hears(order)) == [OfferWithdrawn(offer=1)]
    assert bench.checked(1) == []


@pytest.mark.parametrize("order", [WithdrawOffer(offer=7), StopAttempt(offer=7)])
def test_an_offer_never_seen_is_withdrawn(bench, order):
    bench.opens()
    assert said(bench.hears(order)) == [OfferWithdrawn(offer=7)]


def test_after_the_hand_over_the_runner_is_asked_and_its_truth_is_said(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    assert bench.hears(WithdrawOffer(offer=1)) == [Instruct(WithdrawOrder(offer=1))]
    assert said(bench.event(Withdrawn(offer=1))) == [OfferWithdrawn(offer=1)]
    assert bench.agent.attempts == {}


def test_a_withdrawal_that_comes_too_late_is_answered_with_the_start(bench):
    bench.opens()
    bench.starts(1)
    assert bench.hears(WithdrawOffer(offer=1)) == [Say(AttemptStarted(offer=1, started_wall=100.0))]


def test_a_running_attempt_is_stopped_with_the_configured_grace(bench):
    bench.opens()
    bench.starts(1)
    assert ordered(bench.hears(StopAttempt(offer=1))) == [StopOrder(offer=1, kill=False, grace_seconds=7.0)]
    assert ordered(bench.hears(StopAttempt(offer=1, kill=True))) == [StopOrder(offer=1, kill=True, grace_seconds=7.0)]
    end = replace_outcome(DONE, Canceled())
    assert said(bench.event(Ended(offer=1, job=1, end=end))) == [AttemptEnded(offer=1, end=end)]


def replace_outcome(end, outcome):
    return EndRecord(outcome=outcome, started_wall=end.started_wall, ended_wall=end.ended_wall)


def test_a_stop_is_repeated_to_a_runner_that_comes_back(bench):
    bench.opens()
    bench.starts(1)
    bench.hears(StopAttempt(offer=1, kill=True))
    bench.runner_is_mute(1)
    actions = bench.runner_attaches(state(1, "running", started_wall=100.0))
    assert StopOrder(offer=1, kill=True, grace_seconds=7.0) in ordered(actions)


def test_an_order_to_stop_what_the_runner_does_not_have_withdraws_it(bench):
    bench.opens()
    bench.hears(offer(1))
    bench.checked(1)
    bench.hears(StopAttempt(offer=1))
    assert said(bench.event(Unknown(offer=1))) == [OfferWithdrawn(offer=1)]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_an_end_is_repeated_until_it_is_acknowledged(bench):
    bench.opens()
    bench.starts(1)
    bench.event(Ended(offer=1, job=1, end=DONE))
    bench.agent.session_closed()
    assert [one.state for one in bench.says_hello().attempts] == ["ended"]
    assert AttemptEnded(offer=1, end=DONE) in said(bench.is_welcomed())
    assert bench.hears(Acknowledge(offers=(1,))) == [Instruct(ForgetAttempts(offers=(1,)))]
    bench.agent.session_closed()
    assert bench.says_hello().attempts == ()


def test_a_running_attempt_cannot_be_acknowledged_away(bench):
    bench.opens()
    bench.starts(1)
    assert bench.hears(Acknowledge(offers=(1,))) == []
    assert 1 in bench.agent.attempts


def test_a_proof_that_nothing_is_left_is_told(bench):
    bench.opens()
    bench.starts(1)
    assert said(bench.event(Gone(offer=1, job=1, queue_id=QUEUE, reason="the runner died"))) == [
        AttemptGone(offer=1, reason="the runner died")
    ]
    assert [one.state for one in bench.says_hello().attempts] == ["gone"]


def test_a_pause_is_told(bench):
    bench.opens()
    bench.starts(1)
    assert said(bench.event(Changed(offer=1, state="paused", note="paused"))) == [
        AttemptChanged(offer=1, note="paused")
    ]
    assert [one.state for one in bench.says_hello().attempts] == ["paused"]


def test_that_its_runner_does_not_answer_is_told_of_an_attempt_until_it_does(bench):
    bench.opens()
    bench.starts(1)
    bench.starts(2)
    bench.event(Changed(offer=2, state="paused", note="paused"))
    bench.starts(3)
    bench.event(Ended(offer=3, job=3, end=DONE))
    mute = "its runner does not answer"
    assert said(bench.event(RunnerMute(offers=(1, 2, 3, 4)))) == [
        AttemptChanged(offer=1, note=mute),
        AttemptChanged(offer=2, note=mute),
    ]
    assert said(bench.event(RunnerAnswers(offers=(1, 2)))) == [
        AttemptChanged(offer=1, note=""),
        AttemptChanged(offer=2, note="paused"),
    ]


def test_that_a_runner_does_not_answer_is_told_of_the_worker_in_each_session_until_it_does(bench):
    bench.opens()
    bench.event(RunnerMute(offers=(), note="a runner (pid 7) does not answer"))
    assert [one.note for one in said(bench.turns(2.0)) if isinstance(one, Report)] == [
        "a runner (pid 7) does not answer"
    ]
    bench.agent.session_closed()
    bench.opens()
    assert [one.note for one in said(bench.turns(2.0)) if isinstance(one, Report)] == [
        "a runner (pid 7) does not answer"
    ]
    bench.event(RunnerAnswers(offers=()))
    assert [one.note for one in said(bench.turns(2.0)) if isinstance(one, Report)] == [""]


def test_of_what_the_hello_called_unknown_nothing_is_said_that_counts_as_a_word_on_it(bench):
    """The server waits for such a word only for a time."""
    bench.runner_is_mute(5)
    bench.opens()
    assert bench.event(RunnerMute(offers=(5,))) == []


def test_questions_about_output_go_to_the_edge(bench):
    bench.opens()
    question = FetchOutput(token=1, offer=1, stream="stdout", offset=0)
    assert bench.hears(question) == [Fetch(question)]
    assert bench.hears(ForgetOutput(offers=(1, 2))) == [DropOutput((1, 2))]


# --- the lease -------------------------------------------------------------------------------------------------------


def test_the_lease_counts_from_before_the_heartbeat_was_sent(bench):
    bench.says_hello()
    assert said(bench.is_welcomed())[-1:] == [Heartbeat(number=1)]
    bench.now += 3.0
    assert ordered(bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0))) == [SetLease(deadline_boottime=1060.0)]


def test_an_answer_to_a_heartbeat_of_another_session_sets_nothing(bench):
    bench.opens()
    bench.turns(10.0)
    bench.agent.session_closed()
    bench.says_hello()
    bench.is_welcomed()
    assert bench.hears(HeartbeatAnswer(number=2, lease_seconds=60.0)) == []


def test_an_answer_is_taken_once(bench):
    bench.opens()
    assert bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0)) == []


@pytest.mark.parametrize(("lease", "beat"), [(60.0, 10.0), (24.0, 4.0), (270.0, 10.0)])
def test_heartbeats_come_every_sixth_of_the_lease_and_at_least_every_ten_seconds(lease, beat):
    bench = Bench(lease_seconds=lease)
    bench.opens()
    assert bench.turns(beat - 0.01) == []
    assert said(bench.turns(0.02)) == [Heartbeat(number=2)]


def test_a_heartbeat_without_an_answer_ends_the_session(bench):
    bench.opens()
    bench.turns(10.0)
    assert not any(isinstance(one, Close) for one in bench.turns(10.0))
    assert any(isinstance(one, Close) for one in bench.turns(10.1))


def test_a_runner_that_does_not_confirm_its_pause_is_overruled(bench):
    bench.opens()
    bench.starts(1)
    bench.starts(2, on_lost="wait")
    bench.agent.session_closed()
    assert bench.turns(60.0) == []
    assert bench.turns(2.4) == []  # a quarter of the margin of 10 s has not passed
    assert bench.turns(0.2) == [PauseTrees((1,))]
    assert bench.turns(5.0) == []  # once


def test_a_runner_that_proves_its_pause_is_left_alone(bench):
    bench.opens()
    bench.starts(1)
    bench.agent.session_closed()
    bench.turns(60.0)
    bench.event(Changed(offer=1, state="paused", note=""))
    bench.event(PauseDone(deadline_boottime=1060.0))
    assert bench.turns(10.0) == []


def test_what_continued_is_guarded_again(bench):
    bench.opens()
    bench.starts(1)
    bench.event(Changed(offer=1, state="paused", note=""))
    bench.turns(10.0)
    bench.hears(HeartbeatAnswer(number=2, lease_seconds=60.0))
    bench.event(Changed(offer=1, state="running", note=""))
    bench.agent.session_closed()
    assert bench.turns(60.0) == []
    assert bench.turns(3.0) == [PauseTrees((1,))]


def test_the_attempts_of_a_silent_runner_are_not_renewed(bench):
    bench.opens()
    bench.starts(1)
    bench.starts(2)
    bench.agent.session_closed()
    bench.runner_is_mute(1)
    bench.opens()
    assert [type(one) for one in bench.turns(10.0)] == [Say]
    bench.hears(HeartbeatAnswer(number=2, lease_seconds=60.0))
    bench.now += 52.6
    assert bench.agent.tick(bench.now)[0] == PauseTrees((1,))


def test_what_the_guard_stopped_continues_with_the_next_lease_unless_it_is_to_be_killed(bench):
    bench.opens()
    bench.starts(1)
    bench.starts(2)
    bench.agent.session_closed()
    bench.turns(70.0)
    bench.says_hello()
    bench.is_welcomed()
    bench.hears(StopAttempt(offer=2, kill=True))
    actions = bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0))
    assert [one for one in actions if isinstance(one, ContinueTrees)] == [ContinueTrees((1,))]


def test_attempts_of_a_runner_that_never_answered_are_stopped_when_their_lease_must_be_over():
    bench = Bench()
    bench.runner_is_mute(1)
    bench.opens()
    bench.agent.session_closed()
    assert bench.turns(60.0) == []
    assert bench.turns(3.0) == [PauseTrees((1,))]


def test_a_free_server_lock_prolongs_the_guards_deadline_too(bench):
    bench.opens()
    bench.starts(1)
    bench.agent.session_closed()
    bench.now += 50.0
    bench.agent.no_server(bench.now + 60.0)
    assert bench.turns(61.0) == []
    assert bench.turns(2.0) == [PauseTrees((1,))]


def test_a_restarted_worker_guards_the_lease_its_runner_told():
    bench = Bench()
    bench.runner_attaches(state(1, "running", started_wall=1.0), deadline=1005.0)
    assert bench.turns(5.0) == []
    assert bench.turns(1.0) == [PauseTrees((1,))]


# --- reports ---------------------------------------------------------------------------------------------------------


def test_an_idle_worker_reports_once_an_interval(bench):
    bench.opens()
    count = 0
    for _ in range(100):
        actions = bench.turns(1.0)
        for message in said(actions):
            if isinstance(message, Heartbeat):
                bench.hears(HeartbeatAnswer(number=message.number, lease_seconds=60.0))
            count += isinstance(message, Report)
    assert count == 2


def test_many_short_jobs_make_one_report_a_second(bench):
    bench.opens()
    bench.turns(1.0)
    count = 0
    for number in range(100):
        bench.starts(number + 1)
        bench.event(Ended(offer=number + 1, job=number + 1, end=DONE))
        count += sum(isinstance(message, Report) for message in said(bench.turns(0.01)))
    assert 1 <= count <= 2


def test_changed_totals_go_with_the_next_report(bench):
    bench.opens()
    more = MachineTotals(slots=9, cores=9, ram_mb=9)
    bench.agent.measured(MachineLoad(), more)
    bench.agent.configure(lambda settings: replace(settings, report_interval_seconds=20.0), bench.now)
    reports = [one for one in said(bench.turns(1.0)) if isinstance(one, Report)]
    assert [one.totals for one in reports] == [more]
    bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0))
    reports = [one for one in said(bench.turns(20.0)) if isinstance(one, Report)]
    assert [one.totals for one in reports] == [None]


# --- the orderly stop ------------------------------------------------------------------------------------------------


def test_an_orderly_stop_gives_back_what_was_not_handed_over_and_takes_nothing_more(bench):
    bench.opens()
    bench.starts(1)
    bench.hears(offer(2))
    returned, goodbye = said(bench.agent.stop())
    assert (type(returned), returned.offer) == (OfferDeferred, 2)
    assert isinstance(goodbye, Goodbye)
    assert isinstance(said(bench.hears(offer(3)))[0], OfferDeferred)
    assert not bench.agent.is_seen_off
    assert bench.hears(Goodbye()) == []  # the connection stays until the last deferral is out
    assert bench.agent.is_seen_off
    assert 1 in bench.agent.attempts


def test_the_next_wake_is_when_something_is_due(bench):
    assert bench.agent.next_wake() is None
    bench.says_hello()
    assert bench.agent.next_wake() == 1030.0
    bench.is_welcomed()
    bench.hears(HeartbeatAnswer(number=1, lease_seconds=60.0))
    assert bench.agent.next_wake() == 1010.0
    bench.hears(offer(1))
    assert bench.agent.next_wake() == 1005.0


def test_what_a_silent_runner_has_in_its_care_is_stopped_although_no_session_can_be_made():
    bench = Bench()
    bench.agent.begins([state(4, "unknown", memo=write_memo(Memo()))], bench.now)
    assert bench.agent.next_wake() <= bench.now
    assert bench.agent.tick(bench.now) == [PauseTrees((4,))]
    assert bench.agent.tick(bench.now) == []


def test_what_an_answering_runner_has_in_its_care_is_left_to_it_at_the_start():
    bench = Bench()
    bench.agent.begins([state(4, "running", memo=write_memo(Memo()))], bench.now)
    bench.now += 10.0
    assert bench.agent.tick(bench.now) == []
