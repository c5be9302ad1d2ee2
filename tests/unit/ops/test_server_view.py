"""What the server says of the workers: asked once for many hosts, and never waited for long."""

from __future__ import annotations

import threading
import time

import pytest

from kueue.errors import Refused, Unreachable
from kueue_ops.server_view import ServerView


class Peer:
    """In the place of a client: answers after what it is told to do first."""

    def __init__(self, rows=(), before=lambda: None):
        self.rows = rows
        self.before = before
        self.asked = 0

    def __call__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def ask(self, kind):
        assert kind == "ListWorkers"
        self.asked += 1
        self.before()
        return {"type": "WorkerList", "workers": list(self.rows)}


def row(name, state="online", version="1.0"):
    return {"name": name, "state": state, "version": version}


@pytest.fixture
def told():
    return []


def view(peer, told, **more):
    return ServerView(peer, lambda *words: told.append(words), **more)


@pytest.mark.parametrize(
    ("state", "alive"),
    [("online", True), ("offline", True), ("set aside", True), ("silent", False), ("away", False)],
)
def test_a_connected_worker_is_alive(told, state, alive):
    word = view(Peer([row("w1", state)]), told).word("w1")
    assert word.is_reached
    assert word.sees_it is alive
    assert word.worker.offline is (state == "offline")


def test_of_two_workers_of_one_name_the_living_one_counts(told):
    rows = [row("w1", "away"), row("w1", "online", "1.1"), row("w1", "away")]
    word = view(Peer(rows), told).word("w1")
    assert word.sees_it
    assert word.worker.version == "1.1"


def test_a_worker_that_the_server_does_not_know_is_not_seen(told):
    word = view(Peer([row("w1")]), told).word("w2")
    assert word.is_reached
    assert not word.sees_it


def test_many_hosts_cost_one_question(told):
    peer = Peer([row("w1")], before=lambda: time.sleep(0.05))
    asked = view(peer, told)
    threads = [threading.Thread(target=asked.word, args=("w1",)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked.word("w1").sees_it
    assert peer.asked == 1


@pytest.mark.parametrize("error", [Unreachable("It is away."), Refused("Wrong secret."), TypeError("odd")])
def test_a_server_that_is_lost_is_said_once_and_so_is_its_return(told, error, monkeypatch):
    monkeypatch.setattr("kueue_ops.server_view.FRESH_SECONDS", 0.0)
    broken = True

    def before():
        if broken:
            raise error

    asked = view(Peer([row("w1")], before), told)
    for _ in range(3):
        assert not asked.word("w1").is_reached
    assert len(told) == 1
    broken = False
    for _ in range(3):
        assert asked.word("w1").sees_it
    assert told[1:] == [("The server answers again.", "")]


def test_a_server_that_swallows_everything_delays_one_host_and_not_each(told):
    gate = threading.Event()
    asked = view(Peer([row("w1")], gate.wait), told, answer_seconds=0.3)
    begun = time.monotonic()
    for _ in range(20):
        assert not asked.word("w1").is_reached
    assert time.monotonic() - begun < 3
    assert len(told) == 1
    gate.set()
    deadline = time.monotonic() + 20
    while not asked.word("w1").is_reached and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked.word("w1").sees_it


def test_a_question_for_which_there_was_no_thread_is_asked_the_next_time(told, monkeypatch):
    asked = view(Peer([row("w1")]), told)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        assert not asked.word("w1").is_reached
    assert asked.word("w1").sees_it
