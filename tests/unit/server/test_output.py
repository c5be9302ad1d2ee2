"""What jobs wrote: from the worker, from the record, and while it grows."""

from __future__ import annotations

import pytest
import trio

from kueue.model import Excerpt
from kueue.protocol import messages as m
from kueue.server import output
from kueue.storage.memory import MemoryStore
from tests.support.served import House, Worker, eventually, serving
from tests.support.server_program import end_record

pytestmark = pytest.mark.trio


class Machine:
    """A worker that runs one job and serves what it has written so far."""

    def __init__(self, worker: Worker, offer: m.Offer) -> None:
        self.worker = worker
        self.offer = offer
        self.text = b""
        self.fetches = 0
        self.piece = 1 << 20

    async def serve(self) -> None:
        while (message := await self.worker.hear()) is not None:
            if isinstance(message, m.FetchOutput):
                self.fetches += 1
                limit = min(message.limit, self.piece)
                data = self.text[message.offset : message.offset + limit]
                self.worker.say(
                    m.FetchedOutput(token=message.token, offset=message.offset, data=data, size=len(self.text))
                )

    def end(self, **fields: object) -> None:
        self.worker.say(m.AttemptEnded(offer=self.offer.offer, end=end_record(**fields)))


async def running(house: House, nursery: trio.Nursery) -> Machine:
    worker = await house.worker()
    offer = await worker.hear_a(m.Offer)
    worker.start(offer)
    machine = Machine(worker, offer)
    nursery.start_soon(machine.serve)
    return machine


async def heard(client, seq: int) -> m.Output:
    while True:
        piece = await client.hear_a(m.Output)
        if piece.seq == seq:
            return piece


async def read_to_end(client, seq: int) -> tuple[bytes, m.Output, list[str]]:
    """All data, the last piece, and the remarks."""
    data, notes = b"", []
    while True:
        piece = await heard(client, seq)
        data += piece.data
        if piece.note:
            notes.append(piece.note)
        if piece.end:
            return data, piece, notes


async def test_a_running_job_is_read_from_its_worker():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        client = await house.client()
        (job,) = await client.submit("x")
        waiting = await client.ask(m.ReadOutput, id=job)
        assert (waiting.source, waiting.data, waiting.end) == ("none", b"", True)
        assert "pending" in waiting.note
        machine = await running(house, nursery)
        machine.text = b"so far"
        piece = await client.ask(m.ReadOutput, id=job, offset=3)
        assert (piece.data, piece.offset, piece.state, piece.source) == (b"far", 3, "running", "worker")
        nursery.cancel_scope.cancel()


async def test_a_follower_sees_all_from_the_wait_to_the_end_with_the_state():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        client, asker = await house.client(), await house.client()
        (job,) = await client.submit("x")
        seq = client.put(m.ReadOutput, id=job, follow=True)
        first = await heard(client, seq)
        assert "pending" in first.note
        machine = await running(house, nursery)
        machine.text = b"one\n"
        assert (await heard(client, seq)).data == b"one\n"
        machine.text += b"two\n"
        with trio.fail_after(5):
            assert (await heard(client, seq)).data == b"two\n"
        machine.text += b"last\n"
        machine.end(code=3, stdout=Excerpt(size=13, head=machine.text))
        data, last, _ = await read_to_end(client, seq)
        assert (data, last.state, last.source) == (b"last\n", "failed", "worker")
        assert (await asker.ask(m.ReadOutput, id=job)).data == b"one\ntwo\nlast\n"
        nursery.cancel_scope.cancel()


async def test_a_follower_that_comes_back_to_another_attempt_begins_anew():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        client = await house.client()
        (job,) = await client.submit("x")
        machine = await running(house, nursery)
        machine.text = b"all of it\n"
        seq = client.put(m.ReadOutput, id=job, follow=True, offset=4, attempt=1)
        assert (await heard(client, seq)).data == b"of it\n"
        seq = client.put(m.ReadOutput, id=job, follow=True, offset=4, attempt=2)
        remark = await heard(client, seq)
        assert (remark.note, remark.offset) == ("attempt 1 of the job: the output begins anew", 0)
        assert (await heard(client, seq)).data == b"all of it\n"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_followers_at_one_place_cost_their_worker_one_look():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        (job,) = await (await house.client()).submit("x")
        machine = await running(house, nursery)
        clients = [await house.client() for _ in range(20)]
        for client in clients:
            client.put(m.ReadOutput, id=job, follow=True)
        await trio.sleep(2)
        # Twice a second for all together, and not for each.
        assert machine.fetches <= 12
        nursery.cancel_scope.cancel()


async def test_a_finished_job_whose_worker_is_away_is_read_from_the_record_with_its_gap():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        client = await house.client()
        (job,) = await client.submit("x")
        machine = await running(house, nursery)
        machine.end(stdout=Excerpt(size=1000, head=b"head", tail=b"tail"), stderr=Excerpt(size=3, head=b"err"))
        machine.worker.close()
        data, offset, notes = b"", 0, []
        while True:
            piece = await client.ask(m.ReadOutput, id=job, offset=offset)
            notes += [piece.note] if piece.note else []
            if not piece.data:
                break
            data += piece.data
            offset = piece.offset + len(piece.data)
        assert data == b"headtail"
        assert offset == 1000
        assert "992 bytes are left out" in notes[0]
        stderr = await client.ask(m.ReadOutput, id=job, stream="stderr")
        assert (stderr.data, stderr.source, stderr.end, stderr.note) == (b"err", "stored", True, "")


async def test_redirected_and_discarded_output_is_told():
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        client = await house.client()
        (job,) = await client.submit("x")
        machine = await running(house, nursery)
        machine.end(stdout=Excerpt(redirected="/data/out.txt"), stderr=Excerpt(discarded=True))
        machine.worker.close()
        client.put(m.WatchJobs, ids=((job, job),))
        await client.hear_a(m.JobEnded)
        assert "/data/out.txt" in (await client.ask(m.ReadOutput, id=job)).note
        assert "thrown away" in (await client.ask(m.ReadOutput, id=job, stream="stderr")).note


async def test_a_worker_that_does_not_answer_is_told_after_a_while(monkeypatch):
    monkeypatch.setattr(output, "FETCH_SECONDS", 0.2)
    async with serving(MemoryStore()) as house:
        client = await house.client()
        (job,) = await client.submit("x")
        worker = await house.worker()
        worker.start(await worker.hear_a(m.Offer))
        await trio.sleep(0.05)
        piece = await client.ask(m.ReadOutput, id=job)
        assert piece.source == "none"
        assert "did not answer within" in piece.note


@pytest.mark.slow
async def test_a_slow_follower_loses_the_middle_with_a_mark_and_delays_nobody(monkeypatch):
    monkeypatch.setattr(output, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(output, "LAG_MAX", 100_000)
    monkeypatch.setattr(output, "PIECE", 10_000)
    async with serving(MemoryStore()) as house, trio.open_nursery() as nursery:
        slow, fast = await house.client(without_buffer=True), await house.client()
        (job,) = await fast.submit("x")
        machine = await running(house, nursery)
        machine.text = bytes(5_000_000)
        seq = slow.put(m.ReadOutput, id=job, follow=True)
        # It reads the first piece only.
        await heard(slow, seq)
        await trio.sleep(0.3)
        quick = fast.put(m.ReadOutput, id=job, follow=True)
        await heard(fast, quick)
        for _ in range(100):
            await trio.sleep(0.2)
            if "left out" in (await heard(slow, seq)).note:
                break
        else:
            pytest.fail("no mark was seen")
        nursery.cancel_scope.cancel()


async def test_reading_stops_when_told():
    async with serving(MemoryStore()) as house:
        client = await house.client()
        (job,) = await client.submit("x")
        seq = client.put(m.ReadOutput, id=job, follow=True)
        await heard(client, seq)
        client.say(m.StopReading(seq=seq))
        session = next(iter(house.driver.sessions.values()))
        await eventually(lambda: not session._tasks)
