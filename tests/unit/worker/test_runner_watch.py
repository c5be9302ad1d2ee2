"""Runners that do not answer, and a worker that has lost its directory to another: against real runner processes."""

from __future__ import annotations

import json
import os
import signal

import pytest
import trio

from kueue.model import Exited
from kueue.worker.machine import boot_id
from kueue.worker.orders import Attached, Ended, Refused, RunnerAnswers, RunnerMute, SetLease, Started
from kueue.worker.processes import read_stat
from kueue.worker.runner_disk import RunnerDisk
from tests.support.runner_lab import WAIT, boottime, hear, kill_runner, runner_pids, wait_until

pytestmark = [pytest.mark.trio, pytest.mark.slow]


async def test_a_runner_that_does_not_answer_is_told_of_once_and_gets_no_more_starts(lab, caplog):
    troubles = []
    async with lab.worker(answer_seconds=0.5, on_trouble=troubles.append) as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        ((keeper, *_),) = runner_pids(lab.state).values()
        os.kill(keeper, signal.SIGSTOP)
        await link.send(lab.order(2, "true"))  # nobody knows yet that it is stopped
        mute = await hear(link, RunnerMute)
        assert (set(mute.offers), mute.note) == ({1, 2}, f"a runner (pid {keeper}) does not answer")
        assert troubles == [mute.note]
        await link.send(lab.order(3, "true"))
        assert (await hear(link, Ended, 3)).end.outcome == Exited(0)
        (lab.work / "go").touch()
        os.kill(keeper, signal.SIGCONT)
        answers = await hear(link, RunnerAnswers)
        assert (set(answers.offers), answers.note) == ({1, 2}, "")
        assert {(await hear(link, Ended)).offer for _ in range(2)} == {1, 2}
        assert troubles[1:] == [""]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"`kill -CONT {keeper}`" in warning for warning in warnings] == [True]


async def test_a_keeper_that_dies_with_something_unread_is_not_called_mute(lab):
    async with lab.worker(answer_seconds=0.5) as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        ((keeper, *_),) = runner_pids(lab.state).values()
        await trio.sleep(1.0)  # longer than it may take to answer
        os.kill(keeper, signal.SIGSTOP)
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        os.kill(keeper, signal.SIGKILL)
        async for event in link.events:
            assert not isinstance(event, RunnerMute)
            if isinstance(event, Attached):
                break
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_a_process_of_another_boot_is_no_proof_of_life(tmp_path):
    folder = tmp_path / "runners" / "one"
    folder.mkdir(parents=True)
    own = [os.getpid(), read_stat(os.getpid()).start]
    for more, alive in (({}, True), ({"boot": boot_id()}, True), ({"boot": "another"}, False)):
        (folder / "info.json").write_text(json.dumps({"keeper": own, "spawners": [], **more}))
        assert RunnerDisk(tmp_path).is_alive("one") == alive


async def test_a_new_worker_tells_of_a_runner_that_does_not_answer(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    ((keeper, *_),) = runner_pids(lab.state).values()
    os.kill(keeper, signal.SIGSTOP)
    troubles = []
    async with lab.worker(answer_seconds=0.5, on_trouble=troubles.append) as link:
        assert (await hear(link, RunnerMute)).offers == (1,)
        assert f"(pid {keeper})" in troubles[-1]
        kill_runner(lab.state, next(iter(runner_pids(lab.state))))
        assert await hear(link, RunnerAnswers) == RunnerAnswers(offers=(), note="")
        assert troubles[-1] == ""


async def test_a_runner_whose_lock_was_removed_is_not_dead_as_long_as_a_process_of_it_lives(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    ((name, pids),) = runner_pids(lab.state).items()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # it cannot put its lock back
    lock = lab.state / "runners" / name / "lock"
    lock.unlink()
    async with lab.worker(answer_seconds=0.5) as link:
        assert [state.state for state in link.attempts()] == ["unknown"]
        assert lab.tree(1) != []
        lock.touch()
        assert link._disk.is_alive(name), "another file in its place proves nothing either"
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await wait_until(lambda: link.attempts()[0].state == "running")
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)
    kill_runner(lab.state, name)
    await wait_until(lambda: not link._disk.is_alive(name))


async def test_a_worker_that_has_lost_its_directory_has_nothing_started(lab):
    async with lab.worker(is_ours=lambda: False) as link:
        await link.send(lab.order(1, "true"))
        assert "lost its directory" in (await hear(link, Refused, 1)).reason
        assert runner_pids(lab.state) == {}


async def test_a_worker_that_has_lost_its_directory_leaves_the_runners_to_the_other(lab):
    is_ours = True
    async with lab.worker(is_ours=lambda: is_ours) as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        (before,) = runner_pids(lab.state).values()
        is_ours = False
        await link.send(lab.order(2, "touch", "made"))
        await hear(link, Refused, 2)
        async with lab.worker() as other:
            assert [state.state for state in other.attempts()] == ["running"]
            await wait_until(lambda: link.up == 0)
            await other.send(lab.order(3, "true"))
            assert (await hear(other, Ended, 3)).end.outcome == Exited(0)
            assert (link.up, other.up) == (0, 1)
            (lab.work / "go").touch()
            assert (await hear(other, Ended, 1)).end.outcome == Exited(7)
        assert list(runner_pids(lab.state).values()) == [before]
        assert not (lab.work / "made").exists()


async def test_a_worker_that_loses_its_directory_while_it_begins_does_not_wait_for_runners(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    async with lab.worker(is_ours=lambda: False, lease=None) as link:
        assert link.up == 0
    async with lab.worker() as link:
        assert [state.state for state in link.attempts()] == ["running"]
