"""Connections that say the wrong thing, or nothing, or do not listen."""

from __future__ import annotations

import itertools

import pytest
import trio

from kueue.protocol import messages as m
from kueue.server import client_session, session
from kueue.storage.memory import MemoryStore
from tests.support.served import eventually, serving
from tests.support.server_program import job_range

pytestmark = pytest.mark.trio


async def test_a_peer_that_reads_nothing_for_a_minute_is_dropped(monkeypatch):
    monkeypatch.setattr(session, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr("kueue.server.driver.UNREAD_STEP_SECONDS", 0.05)
    async with serving(MemoryStore()) as house:
        deaf, other = await house.client(without_buffer=True), await house.client()
        await other.submit("x" * 1000, count=2000, held=True)
        deaf.put(m.ListJobs)
        await eventually(lambda: len(house.driver.sessions) == 1, "the deaf one is gone")
        assert len(await other.states()) == 2000


@pytest.mark.slow
async def test_a_slow_reader_is_not_dropped_while_it_reads(monkeypatch):
    monkeypatch.setattr(session, "UNREAD_SECONDS", 0.5)
    monkeypatch.setattr("kueue.server.driver.UNREAD_STEP_SECONDS", 0.05)
    async with serving(MemoryStore()) as house:
        slow, other = await house.client(without_buffer=True), await house.client()
        await other.submit("x" * 1000, count=2000, held=True)
        slow.put(m.ListJobs)
        ids: list[int] = []
        while True:
            await trio.sleep(0.1)
            part = await slow.hear_a(m.JobList)
            ids += [row.id for row in part.jobs]
            if part.end:
                break
        assert ids == list(range(2000))


async def test_a_second_hello_ends_the_connection():
    async with serving(MemoryStore()) as house:
        client = await house.client()
        client.say(m.ClientHello())
        await client.end()


async def test_questions_beyond_the_bound_are_refused_and_the_others_answered(monkeypatch):
    monkeypatch.setattr(client_session, "TASKS_MAX", 2)
    async with serving(MemoryStore()) as house:
        client = await house.client()
        (job,) = await client.submit("x")
        for _ in range(2):
            client.put(m.ReadOutput, id=job, follow=True)
        refused = await client.ask(m.ListJobs)
        assert "Too many questions" in refused.error


async def test_a_second_hello_of_one_identity_ends_the_older_session_of_a_dead_worker():
    async with serving(MemoryStore()) as house:
        client, first = await house.client(), await house.worker()
        await client.submit("x")
        await first.hear_a(m.Offer)
        first.close()
        await eventually(lambda: len(house.driver.sessions) == 1)
        again = await house.worker()
        assert again.welcome.worker == first.welcome.worker
        # The offer was in no hello: it never was handed to a runner, and is made again.
        assert (await again.hear_a(m.Offer)).job == 0


async def test_a_submission_in_parts_is_stored_whole_or_not_at_all():
    async with serving(MemoryStore()) as house:
        client, other = await house.client(), await house.client()
        request = "d" * 32
        client.say(m.Submit(seq=1, request_id=request, ranges=(job_range("a"),), part=0, last=False))
        assert await other.states() == {}
        client.say(m.Submit(seq=1, request_id=request, ranges=(job_range("b"),), part=1, last=True))
        assert (await client.hear_a(m.Submitted)).ids == ((0, 1),)
        assert list(await other.states()) == [0, 1]


async def test_a_session_that_the_driver_knows_can_be_asked_until_it_has_left():
    """Its peer hangs up, and in any of the steps until it is gone the driver comes to what the peer had asked last."""
    async with serving(MemoryStore()) as house:
        client = await house.client()
        (asked,) = house.driver.sessions.values()
        client.close()
        asks = 0
        for seq in itertools.count(1):
            if asked.number not in house.driver.sessions:
                break
            asked.ask(m.ServerInfo(seq=seq))
            asks += 1
            await trio.lowlevel.checkpoint()
        assert asks > 1
        await (await house.client()).ask(m.ServerInfo)


async def test_more_requests_to_clean_than_can_wait_are_refused_and_nobody_else_is_troubled():
    async with serving(MemoryStore()) as house:
        client, other = await house.client(), await house.client()
        questions = [m.CleanJobs(seq=seq, request_id=f"{seq:032x}") for seq in range(150)]
        client.say(*questions)
        answers = [await client.hear() for _ in questions]
        assert sorted(answer.seq for answer in answers) == list(range(150))
        refused = [answer for answer in answers if isinstance(answer, m.Failed)]
        assert refused
        assert all("busy cleaning" in answer.error for answer in refused)
        assert await other.submit("x") == [0]


async def test_a_read_that_meets_a_bug_ends_its_own_connection_alone(monkeypatch):
    def broken(*_):
        raise KeyError("x")

    store = MemoryStore()
    async with serving(store) as house:
        client, other = await house.client(), await house.client()
        monkeypatch.setattr(store, "finished_job", broken)
        client.put(m.ExplainJob, id=7)
        await client.end()
        assert await other.submit("x") == [0]


async def test_a_question_that_meets_a_bug_ends_its_own_connection_alone(monkeypatch):
    def broken(*_):
        raise AssertionError

    async with serving(MemoryStore()) as house:
        client, other = await house.client(), await house.client()
        monkeypatch.setattr(house.driver.upkeep, "ask", broken)
        client.put(m.CleanJobs)
        await client.end()
        assert await other.submit("x") == [0]
