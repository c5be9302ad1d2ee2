"""The start of a runner that fails, takes too long or is not needed: what waits for it, and what never does."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kueue.model import Canceled, Exited
from kueue.worker import runner_link, runner_program
from kueue.worker.known import Memo, write_memo
from kueue.worker.orders import (
    Attached,
    Changed,
    Ended,
    Gone,
    Pong,
    ProvenStill,
    Queued,
    Refused,
    SetLease,
    Started,
    StopOrder,
    Unknown,
    Withdrawn,
    WithdrawOrder,
)
from kueue.worker.runner_program import RunnerProgram
from tests.support.runner_lab import QUEUE, WAIT, boottime, hear, kill_runner, runner_pids, wait_until

pytestmark = [pytest.mark.trio, pytest.mark.slow]


@pytest.fixture
def obstacle(lab, tmp_path):
    """What takes the place of the runner's file, as a full disk would."""
    (tmp_path / "other").mkdir()
    RunnerProgram(tmp_path / "other", "i", scopes=None, linger_seconds=1.0).prepare()
    (name,) = (path.name for path in (tmp_path / "other").glob("runner-*"))
    path = lab.state / name
    path.mkdir()
    return path


def is_left_behind(lab, offer, code):
    """A runner has died whole, just after it wrote the end of this attempt."""
    folder = lab.state / "spool" / str(offer)
    folder.mkdir(parents=True)
    start = {
        "offer": offer, "job": offer, "queue_id": QUEUE, "tag": (77 << 32) | offer, "cgroup": "", "runner": "dead",
        "memo": "", "ordered_wall": 1.0, "on_lost": "rerun", "keep_background": False, "grace_seconds": 1,
        "timeout_seconds": None, "line": None,
    }  # fmt: skip
    end = {
        "outcome": {"type": "exited", "code": code}, "started_wall": 1.0, "ended_wall": 2.0, "run_seconds": 1.0,
        "cpu_seconds": 0.1, "max_rss_mb": 1, "leftovers_stopped": 0, "notes": [],
    }  # fmt: skip
    (folder / "start.json").write_text(json.dumps(start))
    (folder / "exit.json").write_text(json.dumps(end))


def starts_by(monkeypatch, *commands):
    """The next runners are started by these in place of Python, each with the real command as its arguments."""
    real = RunnerProgram._python
    todo = list(commands)

    def python(program):
        return [*todo.pop(0), *real(program)] if todo else real(program)

    monkeypatch.setattr(RunnerProgram, "_python", python)


async def test_a_runner_that_cannot_be_written_refuses_starts_until_it_can(lab, obstacle):
    async with lab.worker() as link:
        await link.send(lab.order(1, "true"))
        assert f"{obstacle} cannot be written: " in (await hear(link, Refused, 1)).reason
        obstacle.rmdir()
        await link.send(lab.order(2, "sh", "-c", "exit 3"))
        assert (await hear(link, Ended, 2)).end.outcome == Exited(3)


async def test_what_a_dead_runner_left_is_known_by_its_end_or_unknown_while_no_other_can_be_started(lab, obstacle):
    is_left_behind(lab, 5, 6)
    is_left_behind(lab, 7, 8)
    (lab.state / "spool" / "7" / "exit.json").unlink()
    async with lab.worker() as link:
        assert {one.offer: one.state for one in link.attempts()} == {5: "ended", 7: "unknown"}
        obstacle.rmdir()
        assert {(await hear(link, (Ended, Gone))).offer for _ in range(2)} == {5, 7}
        states = {one.offer: one for one in link.attempts()}
        assert (states[5].end.outcome, states[7].state) == (Exited(6), "gone")


async def test_what_a_dead_runner_left_is_taken_in_by_one_that_lives_already(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    is_left_behind(lab, 5, 6)
    async with lab.worker() as link:
        assert (await hear(link, Ended, 5)).end.outcome == Exited(6)
        assert len(runner_pids(lab.state)) == 1


async def test_a_runner_whose_start_took_too_long_is_found_when_it_is_there(lab, monkeypatch):
    is_left_behind(lab, 5, 6)
    slowly = ["sh", "-c", '(sleep 1; exec "$@") & wait', "sh"]
    starts_by(monkeypatch, slowly, *[["false"]] * 20)
    monkeypatch.setattr(runner_program, "LAUNCH_SECONDS", 0.5)
    async with lab.worker() as link:
        assert (await hear(link, Ended, 5)).end.outcome == Exited(6)
        assert len(runner_pids(lab.state)) == 1
        await link.send(lab.order(1, "true"))
        await hear(link, Ended, 1)


async def test_neither_leases_nor_stops_wait_for_the_start_of_a_runner(lab, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(runner_program, "__version__", "0.0.9")
        async with lab.worker() as link:
            await link.send(lab.order(1, "sleep", "7062"))
            await hear(link, Started, 1)
    slowly = f"echo >> {lab.work}/launched; while [ ! -e {lab.work}/go ]; do sleep 0.02; done; exit 1"
    starts_by(monkeypatch, ["sh", "-c", slowly])
    async with lab.worker() as link:
        for offer in (2, 3, 4):
            await link.send(lab.order(offer, "true"))
        await link.send(StopOrder(offer=3))
        await wait_until((lab.work / "launched").exists)
        await link.send(SetLease(deadline_boottime=boottime() + 0.1))
        await hear(link, Changed, 1)
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        await link.send(StopOrder(offer=1))
        assert (await hear(link, Ended, 1)).end.outcome == Canceled()
        (lab.work / "go").touch()
        assert [(await hear(link, Refused)).offer for _ in range(3)] == [2, 3, 4]
        assert (lab.work / "launched").read_text() == "\n"
        await link.send(lab.order(5, "true"))
        await hear(link, Ended, 5)


async def test_orders_that_wait_for_a_runner_keep_their_order(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7063"))
        await link.send(StopOrder(offer=1, kill=True))
        await link.send(lab.order(2, "true"))
        ends = [await hear(link, Ended) for _ in range(2)]  # the second may end first
        assert {one.offer: one.end.outcome for one in ends} == {1: Canceled(), 2: Exited(0)}


async def test_orders_that_waited_for_a_runner_are_said_again_when_its_connection_breaks(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7069"), more=True)
        await link.send(StopOrder(offer=1), more=True)
        await link.send(WithdrawOrder(offer=1))
        await wait_until(lambda: 1 in link._handed)
        assert link._handed[1].stop == StopOrder(offer=1)
        assert link._handed[1].withdraw == WithdrawOrder(offer=1)


async def test_orders_that_wait_go_to_the_next_runner_when_theirs_dies_meanwhile(lab, monkeypatch):
    monkeypatch.setattr(runner_link, "EVENT_BUFFER", 3)
    with monkeypatch.context() as earlier:
        earlier.setattr(runner_program, "__version__", "0.0.9")
        async with lab.worker() as link:
            await link.send(lab.order(1, *WAIT))
            await hear(link, Started, 1)
            (old,) = runner_pids(lab.state)
    async with lab.worker(answer_seconds=60.0) as link:
        await hear(link, Attached)
        for _ in range(2):  # there is room left for the `Attached` of the new runner: the refusal of 2 has to wait
            link._events.send_nowait(Pong())
        await link.send(lab.order(2, "true", line=1))
        await link.send(lab.order(3, "sh", "-c", "exit 3"))
        await wait_until(lambda: link._events.statistics().tasks_waiting_send)
        (fresh,) = link._runners.keys() - {old}
        runner = link._runners[fresh]
        kill_runner(lab.state, fresh)
        await wait_until(lambda: runner.is_dead)
        assert (await hear(link, Refused, 2)).reason.endswith("is with another runner")
        assert (await hear(link, Ended, 3)).end.outcome == Exited(3)


async def test_nobody_is_asked_to_end_what_it_has_not_taken_in_yet(lab, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(runner_program, "__version__", "0.0.9")
        async with lab.worker() as link:
            await link.send(lab.order(1, "sleep", "7070"))
            await hear(link, Started, 1)
    (old,) = runner_pids(lab.state)
    async with lab.worker(answer_seconds=1.0) as link:
        await link.send(lab.order(2, "sleep", "7071"))
        await hear(link, Started, 2)
        (fresh,) = runner_pids(lab.state).keys() - {old}
        log = lab.state / "runners" / fresh / "log"
        (lab.state / "spool").rename(lab.state / "away")
        (lab.state / "spool").touch()  # as a disk that cannot be read
        kill_runner(lab.state, old)
        await wait_until(lambda: "cannot be read" in log.read_text())
        await link.send(StopOrder(offer=1))
        await link.send(WithdrawOrder(offer=1))
        await link.send(StopOrder(offer=2))
        async for event in link.events:
            assert not isinstance(event, Unknown | Withdrawn)
            if isinstance(event, Changed) and event.offer == 2:
                break
        (lab.state / "spool").unlink()
        (lab.state / "away").rename(lab.state / "spool")
        await hear(link, Gone, 1)
        assert lab.tree(1) == []


async def test_a_runner_that_is_ending_gets_nothing_more(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        ((keeper, *_),) = runner_pids(lab.state).values()
        os.kill(keeper, signal.SIGTERM)
        refused = 0
        while True:  # the signal may come later than the next order
            await link.send(lab.order(2 + refused, "sleep", "7064"))
            event = await link.events.receive()
            while not isinstance(event, Started | Refused):
                event = await link.events.receive()
            if isinstance(event, Refused):
                assert event.leaving
                break
            refused += 1
        await link.send(lab.order(100, "sh", "-c", "exit 4"))
        assert (await hear(link, Ended, 100)).end.outcome == Exited(4)
        assert len(runner_pids(lab.state)) == 2
    async with lab.worker() as link:
        assert sorted(runner.is_leaving for runner in link._runners.values()) == [False, True]
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_a_pause_is_told_with_those_that_wait_in_lines(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7065"))
        await hear(link, Started, 1)
        await link.send(lab.order(2, "sleep", "7066", line=1, memo=write_memo(Memo(line=1))))
        await hear(link, Queued, 2)
        deadline = boottime() + 0.1
        await link.send(SetLease(deadline_boottime=deadline))
        assert await hear(link, ProvenStill) == ProvenStill(deadline_boottime=deadline, offers=(2,))


async def test_the_attempts_of_two_runners_that_die_are_gone(lab, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(runner_program, "__version__", "0.0.9")
        async with lab.worker() as link:
            await link.send(lab.order(1, "sleep", "7067"))
            await hear(link, Started, 1)
    async with lab.worker() as link:
        await link.send(lab.order(2, "sleep", "7068"))
        await hear(link, Started, 2)
    for name in list(runner_pids(lab.state)):
        kill_runner(lab.state, name)
    async with lab.worker() as link:
        gone = set()
        while gone != {1, 2}:  # what is gone is told again when another is taken in
            gone.add((await hear(link, Gone)).offer)
        assert lab.tree(1) == lab.tree(2) == []
