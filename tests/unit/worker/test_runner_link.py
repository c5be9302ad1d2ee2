"""The worker's side of its runners, against real runner processes that die and go mute."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import threading

import pytest
import trio

from kueue.model import Canceled, Exited
from kueue.worker import runner_disk
from kueue.worker.attachment import Attachment
from kueue.worker.known import Memo, write_memo
from kueue.worker.one_runner import Runner
from kueue.worker.orders import (
    Attached,
    Changed,
    Ended,
    ForgetAttempts,
    Gone,
    PauseDone,
    Ping,
    Pong,
    Queued,
    Refused,
    SetLease,
    Started,
    StopOrder,
    Withdrawn,
    WithdrawOrder,
)
from kueue.worker.runner_disk import start_records
from kueue.worker.runner_link import RunnerSet
from tests.support.runner_lab import (
    PATIENCE_SECONDS,
    QUEUE,
    WAIT,
    boottime,
    hear,
    kill_runner,
    runner_pids,
    wait_until,
)

pytestmark = [pytest.mark.trio, pytest.mark.slow]


async def test_a_runner_is_started_when_there_is_something_to_run_and_leaves_when_there_is_not(lab):
    async with lab.worker(linger_seconds=2.0) as link:
        assert runner_pids(lab.state) == {}
        await link.send(lab.order(1, "sh", "-c", "exit 3"))
        await hear(link, Started, 1)
        assert (await hear(link, Ended, 1)).end.outcome == Exited(3)
        (state,) = link.attempts()
        assert (state.state, state.end.outcome) == ("ended", Exited(3))
        await link.send(ForgetAttempts(offers=(1,)))
        assert link.attempts() == ()
    with trio.fail_after(PATIENCE_SECONDS):
        await wait_until(lambda: not list((lab.state / "runners").iterdir()))


async def test_jobs_outlive_the_worker_and_the_next_one_finds_them(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT, memo="four cores"))
        started = await hear(link, Started, 1)
    async with lab.worker() as link:
        (state,) = link.attempts()
        assert (state.state, state.memo, state.started_wall) == ("running", "four cores", started.started_wall)
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_an_end_that_nobody_heard_is_told_to_the_next_worker(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    (lab.work / "go").touch()
    await wait_until((lab.state / "spool" / "1" / "exit.json").exists)
    async with lab.worker() as link:
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_the_lease_is_carried_and_an_attempt_paused_and_continued(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7050"))
        await hear(link, Started, 1)
        await link.send(SetLease(deadline_boottime=boottime() + 0.1))
        await hear(link, PauseDone)
        assert link.attempts()[0].state == "paused"
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        assert (await hear(link, Changed, 1)).state == "running"
        await link.send(StopOrder(offer=1))
        assert (await hear(link, Ended, 1)).end.outcome == Canceled()


async def test_without_a_lease_a_start_is_refused_and_forgotten(lab):
    async with lab.worker(lease=None) as link:
        await link.send(lab.order(1, "true"))
        await hear(link, Refused, 1)
        assert link.attempts() == ()


async def test_an_offer_unknown_everywhere_can_be_withdrawn(lab):
    async with lab.worker() as link:
        await link.send(WithdrawOrder(offer=4))
        await hear(link, Withdrawn, 4)
        await link.send(lab.order(4, "true"))
        await hear(link, Withdrawn, 4)
        assert link.attempts() == ()


async def test_the_death_of_a_keeper_loses_neither_attempts_nor_orders(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await link.send(lab.order(2, "sleep", "7051"))
        # In either order: whose program is executed first is for the kernel to say.
        assert {(await hear(link, Started)).offer for _ in range(2)} == {1, 2}
        ((keeper, *_),) = runner_pids(lab.state).values()
        os.kill(keeper, signal.SIGKILL)
        await link.send(StopOrder(offer=2))
        assert (await hear(link, Ended, 2)).end.outcome == Canceled()
        assert [state.state for state in link.attempts() if state.offer == 1] == ["running"]
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_attempts_of_a_runner_that_died_whole_are_killed_and_gone(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sh", "-c", "setsid sleep 7052 & sleep 7053"))
        await hear(link, Started, 1)
        (name,) = runner_pids(lab.state)
        kill_runner(lab.state, name)
        gone = await hear(link, Gone, 1)
        assert (gone.job, gone.queue_id) == (1, QUEUE)
        assert lab.tree(1) == []
        assert [state.state for state in link.attempts()] == ["gone"]
        await link.send(lab.order(2, "true"))
        assert (await hear(link, Ended, 2)).end.outcome == Exited(0)
        await link.send(ForgetAttempts(offers=(1, 2)))
        await wait_until(lambda: not (lab.state / "spool" / "1").exists())


@pytest.mark.parametrize("removed", [["spool/1/start.json"], ["spool/1/start.json", "runners/*/mains-*"], ["spool/1"]])
async def test_what_a_dead_runner_left_without_its_records_is_killed_before_it_is_called_gone(lab, removed):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sh", "-c", "setsid sleep 7076 & sleep 7077"))
        await hear(link, Started, 1)
        await wait_until(lambda: len(lab.tree(1)) == 3)
        (name,) = runner_pids(lab.state)
        for path in [path for pattern in removed for path in lab.state.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kill_runner(lab.state, name)
        gone = await hear(link, Gone, 1)
        assert (gone.job, gone.queue_id) == (1, QUEUE)
        assert lab.tree(1) == []


async def test_a_worker_that_comes_after_the_death_of_its_runner_learns_the_same(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7054"))
        await hear(link, Started, 1)
    (name,) = runner_pids(lab.state)
    kill_runner(lab.state, name)
    async with lab.worker() as link:
        await hear(link, Gone, 1)
        assert lab.tree(1) == []


async def test_a_spool_that_is_slow_to_read_does_not_hold_the_worker_up(lab, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()

    def slowly(spool):
        reading.set()
        assert go_on.wait(10), "nothing else went on meanwhile"
        return start_records(spool)

    async def meanwhile():
        await wait_until(reading.is_set)
        go_on.set()

    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7061"))
        await hear(link, Started, 1)
    (name,) = runner_pids(lab.state)
    kill_runner(lab.state, name)
    monkeypatch.setattr(runner_disk, "start_records", slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meanwhile)
        async with lab.worker() as link:
            await hear(link, Gone, 1)


async def test_attempts_of_a_mute_runner_are_unknown_until_it_answers(lab):
    async with lab.worker(answer_seconds=0.5) as link:
        await link.send(lab.order(1, "sleep", "7055"))
        await hear(link, Started, 1)
        (pids,) = runner_pids(lab.state).values()
        os.kill(pids[0], signal.SIGSTOP)
        await wait_until(lambda: link.attempts()[0].state == "unknown")
        # Others do not wait for it.
        await link.send(lab.order(2, "true"))
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        assert (await hear(link, Ended, 2)).end.outcome == Exited(0)
        os.kill(pids[0], signal.SIGCONT)
        await wait_until(lambda: link.attempts()[0].state == "running")


async def test_a_runner_whose_lock_cannot_be_looked_at_is_not_taken_for_dead(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7058"))
        await hear(link, Started, 1)
        (name,) = runner_pids(lab.state)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert link._disk.is_alive(name)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_new_worker_knows_the_attempts_of_a_runner_that_is_mute(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7056"))
        await hear(link, Started, 1)
    (pids,) = runner_pids(lab.state).values()
    os.kill(pids[0], signal.SIGSTOP)
    async with lab.worker(answer_seconds=0.5) as link:
        assert [(state.offer, state.state) for state in link.attempts()] == [(1, "unknown")]
        os.kill(pids[0], signal.SIGCONT)
        await wait_until(lambda: link.attempts()[0].state == "running")


async def test_what_has_ended_by_its_record_is_over_although_its_runner_is_mute(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await link.send(lab.order(2, "sleep", "7059"))
        await hear(link, Started, 2)
    (pids,) = runner_pids(lab.state).values()
    (lab.work / "go").touch()
    await wait_until((lab.state / "spool" / "1" / "exit.json").exists)
    os.kill(pids[0], signal.SIGSTOP)
    async with lab.worker(answer_seconds=0.5) as link:
        states = {state.offer: state for state in link.attempts()}
        assert (states[1].state, states[1].end.outcome, states[2].state) == ("ended", Exited(7), "unknown")
        await link.send(ForgetAttempts(offers=(1,)))
        os.kill(pids[0], signal.SIGCONT)
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)  # it was never told to forget it
        await link.send(ForgetAttempts(offers=(1,)))
        await wait_until(lambda: not (lab.state / "spool" / "1" / "start.json").exists())


async def test_an_end_is_told_by_its_record_where_its_runner_cannot_be_reached(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    (name,) = runner_pids(lab.state)
    socket = lab.state / "runners" / name / "socket"
    socket.unlink()
    socket.mkdir()
    async with lab.worker(answer_seconds=0.5) as link:
        assert [state.state for state in link.attempts()] == ["unknown"]
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_a_runner_that_is_found_after_the_hello_gets_no_lease_before_the_next_one(lab):
    async with lab.worker() as link:
        await link.send(lab.order(1, "sleep", "7060"))
        await hear(link, Started, 1)
        await link.send(SetLease(deadline_boottime=boottime() + 0.1))
        await hear(link, PauseDone)
    ((name, (keeper, *_)),) = runner_pids(lab.state).items()
    os.kill(keeper, signal.SIGSTOP)
    for file in ("lock", "info.json"):
        (lab.state / "runners" / name / file).unlink()
    async with lab.worker(answer_seconds=0.5, lease=None) as link:
        assert [state.state for state in link.attempts()] == ["unknown"]
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        os.kill(keeper, signal.SIGCONT)
        while not (await hear(link, Attached)).attempts:
            pass
        await link.send(Ping())
        for _ in range(link.up):  # behind the pong comes what followed from a lease
            await hear(link, Pong)
        (state,) = link.attempts()
        assert state.state == "paused"
        await link.send(SetLease(deadline_boottime=boottime() + 3600))
        assert (await hear(link, Changed, 1)).state == "running"
        await link.send(StopOrder(offer=1))
        assert (await hear(link, Ended, 1)).end.outcome == Canceled()


async def test_a_runner_of_an_older_release_is_served_and_gets_nothing_new(lab, monkeypatch):
    from kueue.worker import runner_program

    archive = runner_program.runner_archive
    monkeypatch.setattr(runner_program, "__version__", "0.0.9")
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
    monkeypatch.undo()
    assert runner_program.runner_archive is archive
    async with lab.worker() as link:
        assert link.attempts()[0].state == "running"
        await link.send(lab.order(2, "true"))
        await hear(link, Ended, 2)
        assert len(runner_pids(lab.state)) == 2
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)


async def test_nothing_waits_in_a_line_behind_an_attempt_that_another_runner_has(lab, monkeypatch):
    from kueue.worker import runner_program

    monkeypatch.setattr(runner_program, "__version__", "0.0.9")
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        await link.send(lab.order(2, *WAIT, line=1, memo=write_memo(Memo(line=1))))
        await hear(link, Queued, 2)
    monkeypatch.undo()
    async with lab.worker() as link:
        await link.send(lab.order(3, "touch", "made", line=1))
        assert "with another runner" in (await hear(link, Refused, 3)).reason
        await link.send(lab.order(4, "touch", "made", line=4))
        await hear(link, Ended, 4)
        (lab.work / "go").touch()
        assert (await hear(link, Ended, 1)).end.outcome == Exited(7)
        assert (await hear(link, Ended, 2)).end.outcome == Exited(7)
        await link.send(lab.order(6, "true", line=1))
        await hear(link, Ended, 6)


async def test_a_runner_that_takes_nothing_keeps_no_other_from_its_orders(tmp_path):
    link = RunnerSet(tmp_path, str(tmp_path))
    ends = {}
    for name in ("mute", "well"):
        ours, ends[name] = trio.socket.socketpair()
        runner = link._runners[name] = Runner(tmp_path / name)
        runner.connection = Attachment(trio.SocketStream(ours), PATIENCE_SECONDS * 2)
        if name == "mute":
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(ours.fileno(), bytes(65536))
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as link._nursery:
            for number in (17.5, 18.5):
                await link.send(SetLease(deadline_boottime=number))
                assert b"%.1f" % number in await ends["well"].recv(1000)
            link._nursery.cancel_scope.cancel()
    for name, theirs in ends.items():
        theirs.close()
        await link._runners[name].connection.close()


@pytest.fixture
def without_descriptors():
    """Call it, and this process can open nothing; what it returns undoes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))

        def give_back():
            for handle in held:
                os.close(handle)
            held.clear()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return give_back

    return take


async def test_without_a_descriptor_a_start_is_refused_and_the_next_one_succeeds(lab, without_descriptors):
    async with lab.worker() as link:
        give_back = without_descriptors()
        try:
            await link.send(lab.order(1, "true"))
            assert "Too many open files" in (await hear(link, Refused, 1)).reason
        finally:
            give_back()
        await link.send(lab.order(2, "true"))
        await hear(link, Ended, 2)


async def test_while_the_spool_cannot_be_read_nothing_of_a_dead_runner_is_gone(lab, monkeypatch):
    async with lab.worker() as link:
        await link.send(lab.order(1, *WAIT))
        await hear(link, Started, 1)
        (name,) = runner_pids(lab.state)
        looks = []

        def unreadable(folder):
            looks.append(folder)
            if len(looks) <= 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
            return start_records(folder)

        monkeypatch.setattr(runner_disk, "start_records", unreadable)
        kill_runner(lab.state, name)
        await hear(link, Gone, 1)
        assert len(looks) > 2
        assert lab.tree(1) == []


async def test_without_a_thread_for_the_new_process_a_start_is_refused(lab, monkeypatch):
    real, refused = trio.to_thread.run_sync, []

    async def run_sync(call, *arguments, **more):
        if getattr(call, "func", call) is subprocess.Popen and not refused:
            refused.append(call)
            raise RuntimeError("can't start new thread")
        return await real(call, *arguments, **more)

    async with lab.worker() as link:
        monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
        await link.send(lab.order(1, "true"))
        assert "limit of processes" in (await hear(link, Refused, 1)).reason
        await link.send(lab.order(2, "true"))
        await hear(link, Ended, 2)


async def test_a_state_directory_with_a_very_long_path_works(lab):
    lab.state = lab.work / ("d" * 120) / "state"
    lab.state.mkdir(parents=True)
    async with lab.worker() as link:
        await link.send(lab.order(1, "true"))
        assert (await hear(link, Ended, 1)).end.outcome == Exited(0)


async def test_a_worker_killed_hard_is_brought_back_with_its_command(lab):
    command = ["/bin/sh", "-c", f"echo came >> {lab.work}/came"]
    async with lab.worker(orderly=False, restart_command=command, restart_env={"PATH": "/bin"}) as link:
        # As if this process were another one, and gone.
        link._attach = type(link._attach)(
            restart_command=link._attach.restart_command, restart_env=link._attach.restart_env
        )
        await link.send(lab.order(1, "sleep", "7058"))
        await hear(link, Attached)
        await hear(link, Started, 1)
    with trio.fail_after(PATIENCE_SECONDS):
        await wait_until((lab.work / "came").exists)


async def test_the_runner_does_not_inherit_what_systemd_meant_for_the_worker(lab, monkeypatch):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "INVOCATION_ID", "JOURNAL_STREAM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("STAYS", "1")
    async with lab.worker() as link:
        await link.send(lab.order(1, "true"))
        await hear(link, Ended, 1)
        ((keeper, *_),) = runner_pids(lab.state).values()
        names = {line.split("=")[0] for line in (await trio.Path(f"/proc/{keeper}/environ").read_text()).split("\0")}
        assert "STAYS" in names
        assert not names & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "INVOCATION_ID", "JOURNAL_STREAM"}
        assert os.readlink(f"/proc/{keeper}/cwd") == "/"
