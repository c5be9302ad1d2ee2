"""A server whose account may start no more threads."""

from __future__ import annotations

import os
import threading
import time

import pytest
import trio

from kueue.errors import UserError
from kueue.protocol import messages as m
from kueue.server.threads import KeptThread, in_thread
from tests.support.served import eventually, serving
from tests.support.server_program import end_record

pytestmark = pytest.mark.trio


@pytest.fixture
def at_the_limit(monkeypatch):
    """Call it, and there is no thread to be had; what trio keeps for some seconds is gone as well."""

    def refused(*_, **__):
        raise RuntimeError("can't start new thread")

    def begin():
        monkeypatch.setattr(threading.Thread, "start", refused)
        monkeypatch.setattr("trio._threads.start_thread_soon", refused)

    return begin


async def test_a_server_that_gets_no_thread_stores_reads_and_looks_as_before(store, at_the_limit):
    async with serving(store) as house:
        client, worker = await house.client(), await house.worker()
        at_the_limit()
        (first, second) = await client.submit("x", count=2, held=True)
        assert isinstance(await client.ask(m.ReleaseJobs, ids=((first, first),)), m.Results)
        offer = await worker.hear_a(m.Offer)
        worker.start(offer)
        worker.say(m.AttemptEnded(offer=offer.offer, end=end_record()))
        await worker.hear_a(m.Acknowledge)
        assert await client.states() == {first: "succeeded", second: "held"}


async def test_a_backup_that_gets_no_thread_fails_alone_and_leaves_nothing(store, at_the_limit, tmp_path):
    async with serving(store) as house:
        client, other = await house.client(uid=os.getuid()), await house.client()
        at_the_limit()
        client.put(m.Backup, path=str(tmp_path / "copy"))
        assert "limit of processes" in (await client.hear_a(m.Failed)).error
        assert await other.submit("x") == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


async def test_a_copy_that_gets_no_thread_of_its_own_fails_alone_and_leaves_nothing(store, tmp_path, monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "kueue-backup":
            raise RuntimeError("can't start new thread")
        start(thread)

    async with serving(store) as house:
        client, other = await house.client(uid=os.getuid()), await house.client()
        monkeypatch.setattr(threading.Thread, "start", refused)
        client.put(m.Backup, path=str(tmp_path / "copy"))
        assert "no thread left for the backup" in (await client.hear_a(m.Failed)).error
        assert await other.submit("x") == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


async def test_a_kept_thread_carries_calls_out_one_by_one_and_hands_over_what_they_raise():
    thread = KeptThread("kept")
    thread.start()
    assert await thread.run(threading.get_ident) == await thread.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    thread.end()
    await eventually(lambda: "kept" not in {one.name for one in threading.enumerate()})


async def test_a_call_that_a_kept_thread_has_begun_is_waited_for_although_cancelled():
    thread, done = KeptThread("kept"), []
    thread.start()

    def slow():
        time.sleep(0.1)
        done.append(True)

    with trio.CancelScope() as scope:
        scope.deadline = trio.current_time() + 0.02
        await thread.run(slow)
    thread.end()
    assert done
    with trio.CancelScope() as scope:
        scope.cancel()
        await thread.run(slow)
    assert scope.cancelled_caught
    assert len(done) == 1


async def test_only_the_want_of_a_thread_becomes_a_sentence(at_the_limit):
    def bug():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        await in_thread(bug, purpose="answer")
    at_the_limit()
    with pytest.raises(UserError, match="limit of processes"):
        await in_thread(time.time, purpose="answer")
    with pytest.raises(UserError, match="limit of processes"):
        KeptThread("kept").start()
