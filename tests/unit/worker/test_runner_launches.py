"""The start of a runner that fails, takes too long or is not needed: what waits for it, and what never does."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kueue.model import Canceled, Exited
from kueue.worker import runner_program
from kueue.worker.known import Memo, write_memo
from kueue.worker.orders import Changed, Ended, Gone, PauseDone, Queued, Refused, SetLease, Started, StopOrder
from kueue.worker.runner_program import RunnerProgram
from tests.unit.worker.test_runner_link import QUEUE, WAIT, Lab, boottime, hear, kill_runner, runner_pids, wait_until

pytestmark = pytest.mark.trio


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


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


async def test_what_a_dead_runner_left_is_unknown_while_no_other_can_be_started(lab, obstacle):
    is_left_behind(lab, 5, 6)
    async with lab.worker() as link:
        assert [(one.offer, one.state) for one in link.attempts()] == [(5, "unknown")]
        obstacle.rmdir()
        assert (await hear(link, Ended, 5)).end.outcome == Exited(6)


async def test_what_a_dead_runner_left_is_taken_in_by_one_that_lives_already(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    is_left_behind(lab, 5, 6)
    async with lab.worker() as link:
        assert (await hear(link, Ended, 5)).end.outcome == Exited(6)
        assert len(runner_pids(lab.state)) == 1


@pytest.mark.slow
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
        assert (await hear(link, Ended, 1)).end.outcome == Canceled()
        await hear(link, Ended, 2)


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
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_a_pause_is_told_with_those_that_wait_in_lines(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7065"))
        await hear(link, Started, 1)
        await link.send(lab.order(2, "sleep", "7066", line=1, memo=write_memo(Memo(line=1))))
        await hear(link, Queued, 2)
        await link.send(SetLease(deadline_boottime=boottime() + 0.1))
        assert (await hear(link, PauseDone)).waiting == (2,)


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
        assert {(await hear(link, Gone)).offer for _ in range(2)} == {1, 2}
        assert lab.tree(1) == lab.tree(2) == []
