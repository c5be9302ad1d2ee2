"""A spawner that somebody has stopped is replaced although nothing was asked of it."""

import os
import selectors
import signal

import pytest
from runner_bench import is_alive, wait_until

from kueue.runner.spawners import MUTE_SECONDS, Spawners
from kueue.runner.tree import status


@pytest.mark.slow
def test_a_job_whose_spawner_it_has_stopped_ends_with_its_true_code(desk, bench):
    mute = bench.spawner()
    desk.start(1, "sh", "-c", "kill -STOP $PPID; exit 6")
    wait_until(lambda: (desk.drain(), bench.spawner())[1] != mute)  # it looks when it is awake
    assert desk.end(1)["outcome"] == {"type": "exited", "code": 6}
    assert bench.spawner() != mute
    assert desk.run(2, "sh", "-c", "exit 2")["outcome"] == {"type": "exited", "code": 2}


@pytest.fixture
def spawners():
    selector = selectors.DefaultSelector()
    told = []
    spawners = Spawners(selector, told.append, lambda sock, _shared: sock.recv(1), lambda: None)
    spawners.told = told
    spawners.make()
    yield spawners
    for child in spawners.all:
        if is_alive(child.pid):
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.lines.close()
    selector.close()


def send(spawners, number, *, is_stopped):
    pid = spawners.current.pid
    os.kill(pid, number)
    wait_until(lambda: status(pid).is_stopped == is_stopped)


def test_one_that_stays_stopped_is_replaced(spawners):
    first = spawners.current
    send(spawners, signal.SIGSTOP, is_stopped=True)
    spawners.look(100.0)
    assert spawners.due == 100.0 + MUTE_SECONDS
    spawners.look(105.0)
    spawners.replace_mute(99.9 + MUTE_SECONDS)
    assert spawners.current is first
    spawners.replace_mute(100.0 + MUTE_SECONDS)
    assert spawners.current is not first
    assert spawners.due is None
    wait_until(lambda: not is_alive(first.pid))
    assert len(spawners.told) == 1


def test_one_that_goes_on_is_kept(spawners):
    first = spawners.current
    send(spawners, signal.SIGSTOP, is_stopped=True)
    spawners.look(100.0)
    send(spawners, signal.SIGCONT, is_stopped=False)
    spawners.replace_mute(100.0 + MUTE_SECONDS)
    assert (spawners.current, spawners.due) == (first, None)
    spawners.look(200.0)
    spawners.replace_mute(10000.0)  # a night of suspend
    assert (spawners.current, spawners.told) == (first, [])


def test_a_stopped_one_for_which_no_other_can_be_made_is_waited_for_by_nobody(spawners, monkeypatch):
    first = spawners.current
    send(spawners, signal.SIGSTOP, is_stopped=True)
    spawners.look(100.0)

    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    spawners.replace_mute(100.0 + MUTE_SECONDS)
    assert (spawners.current, spawners.due) == (None, None)
    wait_until(lambda: not is_alive(first.pid))
    spawners.look(200.0)
    assert spawners.due is None
