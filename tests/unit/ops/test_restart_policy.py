"""What becomes of a host's worker, decided from made-up looks: no host, no server, no clock."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kueue_ops.restart_decision import Limits, spoken
from kueue_ops.restart_policy import HostHistory, Scene, acted, decide
from kueue_ops.restart_turns import Turns
from kueue_ops.sight import UNIT, HostSight, ScreenSession, ServerWord, Service, Trouble, WorkerSight
from kueue_ops.version import is_older

ALIVE = ServerWord(is_reached=True, worker=WorkerSight("w1", is_alive=True, version="1.0"))
DEAD = ServerWord(is_reached=True, worker=WorkerSight("w1", is_alive=False))
UNKNOWN = ServerWord(is_reached=True)
AWAY = ServerWord(is_reached=False)
SESSION = (ScreenSession(pid=10, is_dead=False),)
DEAD_SESSION = (ScreenSession(pid=10, is_dead=True),)
LIMITS = Limits()


def look(**changes):
    found = HostSight(
        host_name="h1",
        boot_id="boot-1",
        sessions=(),
        has_screen=True,
        command="kueue_worker",
        version="1.0",
        worker_name="w1",
    )
    return msgspec.structs.replace(found, **changes)


UP = look(sessions=SESSION, worker_pid=17, worker_version="1.0")
OLD = look(sessions=SESSION, worker_pid=17, worker_version="0.9")
NEW = look(sessions=SESSION, worker_pid=17, worker_version="1.1")
DOWN = look()


class Host:
    """A host over time: each `see` is a look, and what is decided is carried out as told."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 1000.0
        self.history = HostHistory()
        self.limits = limits
        self.turns = Turns()
        self.stamp = "s1"

    @property
    def scene(self) -> Scene:
        return Scene(self.now, "h1", self.stamp, self.turns, self.limits)

    def see(self, found, word=UNKNOWN, *, trouble: Trouble | None = None):
        decision, self.history = decide(self.history, found, word, self.scene)
        if decision.action in {"start", "renew"}:
            self.history = acted(self.history, found, trouble, self.scene)
        return decision

    def after(self, seconds: float) -> Host:
        self.now += seconds
        return self


# --- leave ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [(), SESSION, DEAD_SESSION, SESSION + DEAD_SESSION])
@pytest.mark.parametrize("pid", [None, 17])
def test_a_worker_that_the_server_sees_is_left_alone_whatever_screen_says(sessions, pid):
    decision = Host().see(look(sessions=sessions, worker_pid=pid, worker_version="1.0" if pid else ""), ALIVE)
    assert (decision.action, decision.has_worker) == ("leave", True)


def test_a_worker_taken_offline_by_hand_is_left_alone_and_said_to_be():
    word = ServerWord(is_reached=True, worker=WorkerSight("w1", is_alive=True, version="1.0", offline=True))
    decision = Host().see(UP, word)
    assert decision.action == "leave"
    assert "offline" in decision.sentence


@pytest.mark.parametrize("seconds", [0, 60, 3600, 10**6])
def test_a_worker_that_lives_is_never_touched_because_the_server_is_away(seconds):
    host = Host()
    for _ in range(20):
        decision = host.see(UP, AWAY)
        assert (decision.action, decision.has_worker) == ("leave", True)
        host.after(seconds)


def test_an_old_worker_is_not_renewed_while_the_server_is_away():
    assert Host().see(OLD, AWAY).action == "leave"


def test_a_host_never_seen_before_whose_worker_the_server_knows_of_an_earlier_boot_gets_one_at_once():
    word = ServerWord(is_reached=True, worker=WorkerSight("w1", is_alive=True, version="1.0", boot_id="boot-1"))
    assert Host().see(look(boot_id="boot-2"), word).action == "start"
    assert Host().see(look(boot_id="boot-1"), word).action == "leave"


def test_a_worker_that_came_up_by_itself_after_our_start_of_an_earlier_boot_is_the_latest_that_is_known():
    host = Host()
    assert host.see(DOWN).action == "start"
    host.see(look(boot_id="boot-2", sessions=SESSION, worker_pid=17), DEAD)
    assert host.see(look(boot_id="boot-2"), ALIVE).action == "leave"


def test_after_a_power_loss_the_host_is_looked_at_often_until_the_server_has_noticed():
    host = Host()
    looks = []
    while True:
        decision = host.see(DOWN, ALIVE)
        assert decision.action == "leave"
        looks.append(host.now)
        if decision.look_again_seconds is None:
            break
        host.after(decision.look_again_seconds)
    assert looks[-1] - looks[0] >= LIMITS.stale_seconds
    assert all(later - earlier <= 30 for earlier, later in itertools.pairwise(looks))
    assert host.after(1).see(DOWN, DEAD).action == "start"


def test_a_worker_from_before_the_last_boot_is_gone_though_the_server_has_not_noticed():
    host = Host()
    host.see(UP, ALIVE)
    rebooted = look(boot_id="boot-2")
    assert host.after(60).see(rebooted, ALIVE, trouble=Trouble("died", "it died")).action == "start"
    assert host.after(5).see(rebooted, ALIVE).action == "back_off"
    assert host.after(60).see(rebooted, ALIVE).action == "start"
    up = msgspec.structs.replace(UP, boot_id="boot-2")
    assert host.after(5).see(up, ALIVE).has_worker
    assert host.after(60).see(rebooted, ALIVE).action == "leave"


def test_a_worker_that_was_started_before_the_last_boot_is_gone_though_nobody_looked_in_between():
    host = Host()
    assert host.see(DOWN).action == "start"
    assert host.after(2).see(Trouble("no_route", "no way"), AWAY).action == "trouble"
    assert host.after(3).see(look(boot_id="boot-2"), ALIVE).action == "start"


# --- start and renew --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [UNKNOWN, DEAD, AWAY])
def test_a_host_without_a_worker_gets_one(word):
    assert Host().see(DOWN, word).action == "start"


@pytest.mark.parametrize("sessions", [SESSION, DEAD_SESSION])
@pytest.mark.parametrize("word", [UNKNOWN, DEAD, AWAY])
def test_a_session_without_a_worker_is_renewed(sessions, word):
    decision = Host().see(look(sessions=sessions), word)
    assert (decision.action, decision.cause) == ("renew", "session")


def test_a_worker_that_lives_but_that_the_server_does_not_see_gets_time_and_is_renewed_then():
    host = Host()
    first = host.see(UP, UNKNOWN)
    assert (first.action, first.is_settled) == ("leave", False)
    assert first.look_again_seconds == LIMITS.unseen_seconds
    assert host.after(LIMITS.unseen_seconds / 2).see(UP, DEAD).action == "leave"
    second = host.after(LIMITS.unseen_seconds / 2).see(UP, DEAD)
    assert (second.action, second.cause) == ("renew", "unseen")


@pytest.mark.parametrize("between", [(UP, ALIVE), (UP, AWAY), (Trouble("timeout", "no answer"), AWAY)])
def test_only_what_was_unseen_all_the_time_counts_as_unseen(between):
    host = Host()
    host.see(UP, UNKNOWN)
    host.after(80).see(*between)
    assert host.after(80).see(UP, UNKNOWN).action == "leave"


def test_a_fresh_worker_gets_time_to_register():
    host = Host()
    host.see(DOWN)
    first = host.after(5).see(UP, UNKNOWN)
    assert (first.action, first.look_again_seconds) == ("leave", LIMITS.confirm_seconds)
    assert host.after(5).see(UP, ALIVE).has_worker


def test_a_session_without_a_worker_right_after_a_start_is_a_worker_that_is_starting():
    host = Host()
    host.see(DOWN)
    decision = host.after(2).see(look(sessions=SESSION))
    assert (decision.action, decision.is_settled) == ("leave", False)


def test_a_worker_of_an_older_version_is_renewed():
    decision = Host().see(OLD, ALIVE)
    assert (decision.action, decision.cause) == ("renew", "version")
    assert "0.9" in decision.sentence
    assert "1.0" in decision.sentence


def test_a_worker_of_a_newer_version_is_renewed_as_well_when_the_laboratory_goes_back():
    decision = Host().see(NEW, ALIVE)
    assert (decision.action, decision.cause) == ("renew", "version")


@pytest.mark.parametrize(("running", "installed"), [("1.0", "1.0.0"), ("1.0+local", "1.0"), ("?", "1.0"), ("1.0", "")])
def test_a_version_that_is_the_same_or_cannot_be_read_is_no_reason_to_renew(running, installed):
    found = look(sessions=SESSION, worker_pid=17, worker_version=running, version=installed)
    assert Host().see(found, ALIVE).action == "leave"


def test_each_host_is_compared_with_what_is_installed_on_itself():
    """Two hosts without a common home, one of which was upgraded: neither is ever renewed to the other's version."""
    for version in ("1.0", "1.1"):
        up = look(sessions=SESSION, worker_pid=17, worker_version=version, version=version)
        host = Host()
        assert {host.after(3600).see(up, ALIVE).action for _ in range(50)} == {"leave"}


def test_where_two_installations_are_on_one_host_its_worker_is_not_renewed_to_and_fro():
    """The unit starts 1.1, the program that is found is 1.0: one renewal tells, and nothing else until that changes."""
    host = Host()
    assert host.see(NEW, ALIVE).action == "renew"
    for _ in range(200):
        decision = host.after(3600).see(NEW, ALIVE)
        assert (decision.action, decision.has_worker, decision.is_settled) == ("leave", True, True)
        assert "two installations" in decision.more
    found = msgspec.structs.replace(NEW, command="/opt/kueue/bin/kueue_worker")
    assert host.after(5).see(found, ALIVE).action == "renew"


def test_the_version_that_the_server_knows_counts_when_the_host_does_not_tell():
    word = ServerWord(is_reached=True, worker=WorkerSight("w1", is_alive=True, version="0.9"))
    assert Host().see(look(sessions=SESSION, worker_pid=17), word).action == "renew"


def test_without_a_known_program_nothing_is_started_and_it_is_said_where_it_was_looked_for():
    decision = Host().see(look(command="", tried=("PATH", "~/.local/bin")))
    assert decision.action == "trouble"
    assert "~/.local/bin" in decision.sentence
    assert "worker_command" in decision.hint


def test_an_old_worker_is_not_stopped_where_no_program_is_found_to_start_the_new_one():
    gone = look(command="", sessions=SESSION, worker_pid=17, worker_version="0.9")
    assert Host().see(gone, ALIVE).action == "leave"
    host = Host()
    host.see(gone, UNKNOWN)
    assert host.after(200).see(gone, UNKNOWN).action == "trouble"


def test_trouble_on_the_way_is_passed_on_and_says_nothing_against_the_worker():
    host = Host()
    decision = host.see(Trouble("refused", "nobody listens there", "start sshd"))
    assert (decision.action, decision.sentence, decision.hint) == ("trouble", "nobody listens there", "start sshd")
    assert host.history.failures == 0


# --- back-off and giving up -------------------------------------------------------------------------------------------


CRASHED = look(last_words="ImportError: no module named kueue")


def crash_until_given_up(host: Host) -> list[float]:
    """Plays a worker that ends at once; returns the moments of the starts."""
    starts = []
    for _ in range(100):
        decision = host.see(CRASHED)
        if decision.action == "start":
            starts.append(host.now)
            host.after(LIMITS.confirm_seconds)
        elif decision.action == "back_off":
            assert decision.look_again_seconds is not None
            host.after(decision.look_again_seconds)
        else:
            assert decision.action == "give_up"
            assert "ImportError" in decision.sentence
            return starts
    raise AssertionError("never given up")


def test_a_worker_that_crashes_at_once_is_started_after_doubling_pauses_and_then_given_up():
    starts = crash_until_given_up(Host())
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([65, 125, 245, 485])


def test_with_a_short_recheck_the_pauses_are_short_too():
    starts = crash_until_given_up(Host(Limits(recheck_seconds=6)))
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([11, 17, 29, 53])


def test_what_failed_to_start_counts_like_a_crash():
    host = Host()
    for _ in range(LIMITS.tries):
        assert host.see(DOWN, trouble=Trouble("disk", "The disk is full.")).action == "start"
        assert host.after(1).see(DOWN).action in {"back_off", "give_up"}
        host.after(4000)
    decision = host.see(DOWN)
    assert decision.action == "give_up"
    assert "The disk is full." in decision.sentence


@pytest.mark.parametrize(
    "change",
    [{"version": "1.1"}, {"boot_id": "boot-2"}, {"command": "/opt/kueue/bin/kueue_worker"}, "settings"],
)
def test_a_host_that_was_given_up_is_tried_again_when_something_changes(change):
    host = Host()
    crash_until_given_up(host)
    assert host.after(3600).see(CRASHED).action == "give_up"
    if change == "settings":
        host.stamp = "s2"
        change = {}
    assert host.after(3600).see(msgspec.structs.replace(CRASHED, **change)).action == "start"


def test_a_host_that_was_given_up_gets_one_try_a_day():
    host = Host()
    crash_until_given_up(host)
    assert host.after(LIMITS.given_up_seconds - 3600).see(CRASHED).action == "give_up"
    assert host.after(3600).see(CRASHED).action == "start"
    assert host.after(5).see(CRASHED).action == "give_up"
    assert host.after(3600).see(CRASHED).action == "give_up"
    assert host.after(LIMITS.given_up_seconds).see(CRASHED).action == "start"


def test_giving_up_is_said_in_the_same_words_each_time():
    host = Host()
    crash_until_given_up(host)
    assert host.see(CRASHED).sentence == host.after(3600).see(CRASHED).sentence


def test_a_worker_that_was_seen_clears_the_record():
    host = Host()
    for _ in range(LIMITS.tries - 1):
        host.see(CRASHED)
        host.after(5).see(CRASHED)
        host.after(4000)
    host.see(CRASHED)
    assert host.after(5).see(UP, ALIVE).has_worker
    assert host.history == HostHistory(worker_boot="boot-1")
    assert host.after(3600).see(CRASHED).action == "start"
    assert host.after(5).see(CRASHED).action == "back_off"


def test_a_worker_that_dies_hours_after_its_start_is_started_at_once():
    host = Host()
    host.see(DOWN)
    host.after(5).see(UP, ALIVE)
    assert host.after(7200).see(DOWN).action == "start"


def test_a_machine_that_was_started_anew_proves_nothing_against_its_worker():
    host = Host()
    host.see(DOWN)
    assert host.after(60).see(look(boot_id="boot-2")).action == "start"
    assert host.history.failures == 0


def test_a_worker_that_was_not_looked_at_for_long_has_not_crashed_at_once():
    host = Host()
    host.see(DOWN)
    host.after(5).see(Trouble("timeout", "no answer"), AWAY)
    assert host.after(3600).see(DOWN).action == "start"
    assert host.history.failures == 0


def test_a_worker_that_lives_for_a_while_without_a_server_is_proven():
    host = Host()
    host.see(DOWN, AWAY)
    host.after(LIMITS.settle_seconds).see(UP, AWAY)
    assert host.history == HostHistory(worker_boot="boot-1")


def test_a_worker_that_the_server_never_sees_is_given_up_and_left_running():
    host = Host()
    for _ in range(200):
        decision = host.see(UP, UNKNOWN)
        if decision.action == "give_up":
            break
        host.after(decision.look_again_seconds or LIMITS.confirm_seconds)
    assert decision.action == "give_up"
    assert "does not see it" in decision.sentence
    assert host.after(3600).see(UP, UNKNOWN).action == "give_up"
    assert host.after(3600).see(UP, ALIVE).has_worker


def test_a_renewal_that_does_not_bring_the_new_version_is_not_repeated_for_ever():
    host = Host()
    renewals = 0
    for _ in range(100):
        decision = host.see(OLD, ALIVE)
        renewals += decision.action == "renew"
        assert decision.has_worker
        host.after(3600)
    assert 5 <= renewals <= 5 + 100 / 24 + 1


@given(st.integers(1, 10**6), st.floats(1, 1e8))
def test_the_pause_is_never_nothing_and_never_endless(failures, recheck):
    pause = Limits(recheck_seconds=recheck).pause(failures)
    assert 1 <= pause <= max(3600, recheck)


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_only_one_host_at_a_time_is_renewed_and_the_others_keep_their_worker_meanwhile():
    turns = Turns().taken("h2", "version", 1000, LIMITS)
    host = Host()
    host.turns = turns
    decision = host.see(OLD, ALIVE)
    assert (decision.action, decision.waits_for_turn, decision.has_worker) == ("leave", True, True)
    host.turns = Turns()
    assert host.see(OLD, ALIVE).action == "renew"


def test_the_turn_ends_when_the_renewed_worker_is_seen():
    host = Host()
    turns = Turns().taken("h1", "version", host.now, LIMITS)
    decision = host.see(UP, ALIVE)
    turns = turns.after("h1", decision, "1.0", host.history.failures, host.now, LIMITS)
    assert turns == Turns()


def test_the_turn_of_a_host_that_cannot_be_reached_any_more_ends():
    turns = Turns().taken("h1", "version", 0, LIMITS)
    decision = Host().see(Trouble("timeout", "no answer"))
    assert turns.after("h1", decision, "", 0, 1, LIMITS) == Turns()


def test_a_look_at_another_host_does_not_end_the_turn():
    turns = Turns().taken("h2", "version", 0, LIMITS)
    assert turns.after("h1", Host().see(UP, ALIVE), "1.0", 0, 1, LIMITS) == turns


def test_a_turn_does_not_last_for_ever():
    turns = Turns().taken("h2", "version", 0, LIMITS)
    assert not turns.is_free("h1", "version", "1.0", LIMITS.turn_seconds - 1)
    assert turns.is_free("h1", "version", "1.0", LIMITS.turn_seconds)


def test_a_version_that_does_not_come_up_on_one_host_is_kept_from_the_others():
    host = Host()
    turns = Turns().taken("h2", "version", host.now, LIMITS)
    bad = Host()
    bad.see(OLD, ALIVE)
    decision = bad.after(5).see(CRASHED)
    turns = turns.after("h2", decision, "1.0", bad.history.failures, bad.now, LIMITS)
    host.turns = turns
    kept = host.see(OLD, ALIVE)
    assert (kept.action, kept.has_worker, kept.is_settled) == ("leave", True, True)
    assert "did not come up on h2" in kept.more
    # A repaired version is another one; and so is the word of the host itself that it works now.
    repaired = msgspec.structs.replace(OLD, version="1.0.1")
    assert host.see(repaired, ALIVE).action == "renew"
    host = Host()
    host.turns = turns.after("h2", Host().see(UP, ALIVE), "1.0", 0, host.now, LIMITS)
    assert host.see(OLD, ALIVE).action == "renew"


def test_a_worker_that_is_down_is_started_whoever_has_the_turn():
    host = Host()
    host.turns = Turns().taken("h2", "version", host.now, LIMITS)
    assert host.see(DOWN).action == "start"
    host = Host()
    host.turns = Turns().taken("h2", "version", host.now, LIMITS)
    assert host.see(look(sessions=DEAD_SESSION)).action == "renew"


# --- sweeps -----------------------------------------------------------------------------------------------------------

SIGHTS = st.builds(
    look,
    sessions=st.sampled_from([(), SESSION, DEAD_SESSION]),
    worker_pid=st.sampled_from([None, 17]),
    worker_version=st.sampled_from(["", "0.9", "1.0", "1.1"]),
    version=st.sampled_from(["", "1.0"]),
    command=st.sampled_from(["", "kueue_worker"]),
    boot_id=st.sampled_from(["boot-1", "boot-2"]),
    last_words=st.sampled_from(["", "boom"]),
)
LOOKS = st.one_of(SIGHTS, st.just(Trouble("timeout", "no answer")))
WORDS = st.sampled_from([ALIVE, DEAD, UNKNOWN, AWAY])
STEPS = st.lists(st.tuples(LOOKS, WORDS, st.floats(0, 1e5), st.booleans()), max_size=30)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_is_seen_no_worker_that_works_is_touched_and_nothing_is_started_twice(steps):
    host = Host()
    last_boot = last_start = None
    for found, word, pause, has_failed in steps:
        host.after(pause)
        decision = host.see(found, word, trouble=Trouble("died", "it died") if has_failed else None)
        if isinstance(found, Trouble):
            assert decision.action == "trouble"
            continue
        if decision.action == "start":
            assert found.worker_pid is None
            assert not found.sessions
        if decision.action in {"start", "renew"}:
            assert found.command
        if found.worker_pid is not None:
            last_boot, last_start = found.boot_id, None
        is_of_this_boot = found.boot_id == last_boot and last_start in {None, found.boot_id}
        if word.sees_it and (found.worker_pid is not None or is_of_this_boot):
            assert decision.has_worker
            assert decision.action == "leave" or decision.cause == "version"
        if decision.action in {"start", "renew"} and not has_failed:
            last_start = found.boot_id
        if found.worker_pid is not None and not word.is_reached:
            assert decision.action == "leave"
        if decision.look_again_seconds is not None:
            assert decision.look_again_seconds >= 1
        assert host.history.failures <= LIMITS.tries


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), SIGHTS, WORDS, st.floats(0, 50)), max_size=60))
def test_whatever_is_seen_no_two_hosts_are_renewed_at_once(steps):
    histories = [HostHistory() for _ in range(5)]
    turns, now, being_renewed = Turns(), 0.0, None
    for index, found, word, pause in steps:
        now += pause
        name = f"h{index}"
        scene = Scene(now, name, "s", turns, LIMITS)
        decision, histories[index] = decide(histories[index], found, word, scene)
        turns = turns.after(name, decision, found.version, histories[index].failures, now, LIMITS)
        if being_renewed == name and turns.host != name:
            being_renewed = None
        if decision.action == "renew" and found.worker_pid is not None:
            expired = being_renewed is not None and now >= turns.until
            assert being_renewed in {None, name} or expired
            turns = turns.taken(name, decision.cause, now, LIMITS)
            being_renewed = name
            histories[index] = acted(histories[index], found, None, scene)


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "installed", "expected"),
    [
        ("0.9", "1.0", True),
        ("0.9", "0.10", True),
        ("1.0", "1.0.0", False),
        ("1.0.1", "1.0", False),
        ("1.0rc1", "1.0", True),
        ("1.0.dev3", "1.0rc1", True),
        ("1.0rc1", "1.0rc2", True),
        ("1.0rc9", "1.0rc10", True),
        ("1.0.dev9999999", "1.0.dev20250101", True),
        ("9" * 100_000, "1.0", False),
        ("1.0", "1.0.post1", True),
        ("1.0+local", "1.0", False),
        ("", "1.0", False),
        ("1.0", "", False),
        ("unknown", "1.0", False),
    ],
)
def test_versions_are_compared_as_numbers(running, installed, expected):
    assert is_older(running, installed) is expected


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (40, "40 s"), (120, "2 min"), (10800, "3.0 h")])
def test_lengths_of_time_are_short_words(seconds, text):
    assert spoken(seconds) == text


# --- a unit, and sessions of somebody else ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "action", "words"),
    [
        (Service("inactive", is_enabled=True, pid=None), "start", f"No worker runs; {UNIT} is inactive."),
        (Service("failed", is_enabled=True, pid=None, why="x"), "start", f"No worker runs; {UNIT} is failed."),
        (Service("active", is_enabled=False, pid=9), "renew", f"{UNIT} is active and has no worker that works."),
        (Service("activating", is_enabled=True, pid=9), "renew", f"{UNIT} is activating and has no worker that works."),
    ],
)
def test_where_a_unit_is_for_the_worker_it_is_said_so(service, action, words):
    decision, _ = decide(HostHistory(), look(service=service), UNKNOWN, Scene(now=1.0, host="h1"))
    assert (decision.action, decision.sentence) == (action, words)


def test_a_unit_that_was_just_started_is_given_time_and_one_that_failed_tells_why():
    starting = look(service=Service("activating", is_enabled=True, pid=9))
    history = acted(HostHistory(), starting, None, Scene(now=100.0, host="h1"))
    decision, history = decide(history, starting, UNKNOWN, Scene(now=105.0, host="h1"))
    assert (decision.action, decision.is_settled) == ("leave", False)
    failed = look(
        service=Service("failed", is_enabled=True, pid=None, why="cores must be at least 0"), last_words="old"
    )
    decision, _ = decide(history, failed, UNKNOWN, Scene(now=110.0, host="h1"))
    assert decision.action == "back_off"
    assert decision.sentence.endswith(f"{UNIT}: cores must be at least 0")


def test_a_session_in_which_somebody_does_something_else_counts_as_none():
    vim = ScreenSession(pid=10, is_dead=False, program="vim")
    decision, _ = decide(HostHistory(), look(sessions=(vim,)), UNKNOWN, Scene(now=1.0, host="h1"))
    assert decision.action == "start"
    decision, _ = decide(HostHistory(), look(sessions=(vim, *SESSION)), UNKNOWN, Scene(now=1.0, host="h1"))
    assert decision.action == "renew"
