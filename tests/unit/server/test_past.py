"""What is looked up for a question that names finished jobs, and what is not."""

from __future__ import annotations

import threading

import pytest
import trio

from kueue.core import queue
from kueue.protocol import messages as m
from kueue.server import answers, past
from kueue.storage.memory import MemoryStore
from tests.support.served import eventually, serving

pytestmark = pytest.mark.trio

CHANGES = [m.RemoveJobs, m.HoldJobs, m.ReleaseJobs]


class WatchedStore(MemoryStore):
    """Notes what is read of it; the read that begins at the id `stop_at` waits until `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list = []
        self.stop_at = -1
        self.waiting = threading.Event()
        self.gate = threading.Event()

    def finished(self, **fields):
        self.reads.append(fields["ids"])
        if fields["ids"] and fields["ids"][0][0] == self.stop_at:
            self.waiting.set()
            assert self.gate.wait(20)
        return super().finished(**fields)


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.mark.parametrize("question", CHANGES)
async def test_nothing_is_looked_up_for_a_question_that_is_refused(store, monkeypatch, question):
    monkeypatch.setattr(queue, "IDS_AT_ONCE", 100)
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=101, held=True)
        store.reads.clear()
        others = tuple((job, job) for job in range(1000, 1202, 2))
        for ids, named in ((((0, 10**9),), 102), (((0, 40), (0, 70)), 112), (others, 101)):
            answer = await client.ask(question, ids=ids)
            assert isinstance(answer, m.Failed)
            assert answer.error == f"{named} jobs are named; at most 100 are taken in one question"
        assert not store.reads
        assert len((await client.ask(question, ids=((0, 98), (10**9, 10**10)))).results) == 100


def ends(messages: list, seq: int) -> list[int]:
    return [message.id for message in messages if isinstance(message, m.JobEnded) and message.seq == seq]


async def test_a_watch_of_very_many_jobs_is_told_once_of_each_and_first_of_what_is_missing(store):
    async with serving(store) as house:
        client, watcher = await house.client(), await house.client()
        await client.submit("x", count=4000, held=True)
        await client.ask(m.RemoveJobs, ids=((500, 1299),))
        await client.ask(m.CleanJobs)
        await client.ask(m.RemoveJobs, ids=((1300, 2499), (3999, 3999)))
        store.reads.clear()
        store.stop_at = 1500
        seq = watcher.put(m.WatchJobs, ids=((0, 2600), (2500, 5000), (10**9, 10**10), (7, 3)))
        await trio.to_thread.run_sync(store.waiting.wait, 10)
        # These end while it is still looked up which of the others are over.
        client.put(m.RemoveJobs, ids=((0, 1), (3998, 3998)))
        await eventually(lambda: house.driver.mailbox)
        store.gate.set()
        heard = [await watcher.hear()]
        assert heard[0] == m.Watching(seq=seq, missing=((500, 1299), (4000, 5000), (10**9, 10**10)))
        over = {0, 1, *range(1300, 2500), 3998, 3999}
        while len(heard) <= len(over):
            heard.append(await watcher.hear())
        assert sorted(ends(heard, seq)) == sorted(over)
        await client.ask(m.RemoveJobs, ids=((3000, 3000),))
        assert (await watcher.hear()).id == 3000
        assert max(last - first for ((first, last),) in store.reads) <= 16 * 500
        assert not house.driver.engine.queue.held_back


async def test_who_hangs_up_while_its_watch_is_looked_up_leaves_nothing_behind(store):
    async with serving(store) as house:
        client, watcher = await house.client(), await house.client()
        await client.submit("x", count=past.PORTION + 1, held=True)
        store.stop_at = 500
        watcher.put(m.WatchJobs, ids=((0, past.PORTION),))
        await trio.to_thread.run_sync(store.waiting.wait, 10)
        assert house.driver.engine.queue.held_back
        watcher.close()
        store.gate.set()
        await eventually(lambda: len(house.driver.sessions) == 1)
        assert not house.driver.engine.queue.held_back
        assert not house.driver.engine.queue.watchers


async def test_nothing_is_noted_for_a_watch_whose_asker_has_left(store):
    """In the step in which it leaves its tasks are cancelled but not over, and the driver may come first."""
    async with serving(store) as house:
        client, watcher = await house.client(), await house.client()
        await client.submit("x", count=past.PORTION + 1, held=True)
        (session,) = [one for number, one in house.driver.sessions.items() if number == 2]
        watcher.close()
        await eventually(lambda: len(house.driver.sessions) == 1)
        await answers.answer(session, m.WatchJobs(seq=1, ids=((0, past.PORTION),)))
        assert not house.driver.engine.queue.held_back
        assert not house.driver.engine.queue.watched


async def test_a_watch_of_few_jobs_is_answered_with_one_look(store):
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=past.PORTION, held=True)
        await client.ask(m.RemoveJobs, ids=((0, past.PORTION - 1),))
        store.reads.clear()
        client.put(m.WatchJobs, ids=((0, past.PORTION - 1),))
        assert await client.hear_a(m.Watching)
        assert [(await client.hear_a(m.JobEnded)).id for _ in range(past.PORTION)] == list(range(past.PORTION))
        assert {tuple(ids) for ids in store.reads} == {((0, past.PORTION - 1),)}
