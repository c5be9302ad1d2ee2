"""The loop around the engine: stored first, said after, and what happens when the disk does not play along."""

from __future__ import annotations

import secrets
import threading
import time

import pytest
import trio
import trio.testing

from kueue import places
from kueue.core.settings import Settings
from kueue.errors import DiskFull, StorageError
from kueue.protocol import messages as m
from kueue.server.claim import Claim
from kueue.server.driver import Driver
from kueue.storage.memory import MemoryStore
from kueue.storage.sqlite import SqliteStore
from tests.support.served import eventually, serving
from tests.support.server_program import end_record, job_range

pytestmark = pytest.mark.trio


class SlowStore(MemoryStore):
    """Its commits take until `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.batches: list = []

    def commit(self, batch) -> None:
        self.waiting.set()
        assert self.gate.wait(20)
        super().commit(batch)
        self.batches.append(batch)


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    one = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "queue.sqlite")
    yield one
    one.close()


def submit(seq: int, *argv: str) -> m.Submit:
    return m.Submit(seq=seq, request_id=secrets.token_hex(16), ranges=(job_range(*argv),))


async def test_a_job_goes_its_way_through_driver_engine_and_store(store):
    async with serving(store) as house:
        client, worker = await house.client(), await house.worker()
        (job,) = await client.submit("true")
        offer = await worker.hear_a(m.Offer)
        worker.start(offer)
        worker.say(m.AttemptEnded(offer=offer.offer, end=end_record(3)))
        assert (await worker.hear_a(m.Acknowledge)).offers == (offer.offer,)
        listing = await client.ask(m.ListJobs)
        assert [(row.id, row.state, row.return_code) for row in listing.jobs] == [(job, "failed", 3)]
    assert store.finished_job(job) is not None


async def test_what_waits_during_a_commit_is_stored_together_by_the_next():
    store = SlowStore()
    async with serving(store) as house:
        client = await house.client()
        await eventually(lambda: store.batches)
        store.waiting.clear()
        store.gate.clear()
        client.put(m.Submit, ranges=(job_range("first"),))
        await trio.to_thread.run_sync(store.waiting.wait, 10)
        others = [await house.client() for _ in range(20)]
        for other in others:
            other.put(m.Submit, ranges=(job_range("other"),))
        await eventually(lambda: len(house.driver.mailbox._waiting) >= 20)
        store.gate.set()
        for peer in (client, *others):
            await peer.hear_a(m.Submitted)
    # The first is the time-out that workers may rely on.
    assert [len(batch.facts) for batch in store.batches] == [1, 2, 40]


async def test_nothing_is_said_before_it_is_stored():
    store = SlowStore()
    async with serving(store) as house:
        client = await house.client()
        await eventually(lambda: store.batches)
        store.waiting.clear()
        store.gate.clear()
        client.put(m.Submit, ranges=(job_range("x"),))
        question = client.put(m.ListJobs)
        await trio.to_thread.run_sync(store.waiting.wait, 10)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert client.stream.backlog == 0
        with trio.move_on_after(0.1) as patience:
            await client.hear()
        assert patience.cancelled_caught
        store.gate.set()
        assert isinstance(await client.hear(), m.Submitted)
        listing = await client.hear_a(m.JobList)
        assert (listing.seq, len(listing.jobs)) == (question, 1)


async def test_heartbeats_are_answered_while_a_commit_takes_long():
    store = SlowStore()
    async with serving(store) as house:
        client, worker = await house.client(), await house.worker()
        await eventually(lambda: store.batches)
        store.waiting.clear()
        store.gate.clear()
        client.put(m.Submit, ranges=(job_range("x"),))
        await trio.to_thread.run_sync(store.waiting.wait, 10)
        for number in range(1, 6):
            await worker.beat(number)
        assert not store.gate.is_set()
        store.gate.set()
        await client.hear_a(m.Submitted)


async def test_a_full_disk_refuses_keeps_leases_and_comes_back(store):
    async with serving(store) as house:
        client, worker, waiter = await house.client(), await house.worker(), await house.client()
        (job,) = await client.submit("kept")
        offer = await worker.hear_a(m.Offer)
        worker.start(offer)
        await eventually(lambda: house.driver.engine.state.jobs[job].attempt.started_wall)
        waiter.put(m.WatchJobs, ids=((job, job),))
        await waiter.hear_a(m.Watching)
        make_full(store)
        refused = await client.ask(m.Submit, ranges=(job_range("refused"),))
        assert isinstance(refused, m.Failed)
        assert refused.error == "disk full: nothing was accepted"
        assert refused.hint
        # Whoever watches must ask again: the watch was in the state that was thrown away.
        await waiter.end()
        # Questions and heartbeats go on; an end is not acknowledged.
        assert await client.states() == {job: "running"}
        assert (await client.ask(m.ServerInfo)).read_only
        worker.say(m.AttemptEnded(offer=offer.offer, end=end_record()))
        await worker.beat(7)
        assert await client.states() == {job: "running"}
        # A worker the record knows is taken in, for its leases; a new one has to wait.
        again = await house.worker()
        assert again.welcome.worker == worker.welcome.worker
        await again.beat(8)
        stranger = await house.worker("w2", welcome=False)
        assert not (await stranger.hear_a(m.Sorry)).lasting
        make_room(store)
        await worker.end()
        await again.end()
        assert not (await client.ask(m.ServerInfo)).read_only
        report = m.AttemptReport(
            offer=offer.offer, job=job, queue_id=store.queue_id, state="ended", started_wall=1.0, end=end_record()
        )
        back = await house.worker(attempts=(report,))
        await back.hear_a(m.Acknowledge)
        assert await client.submit("next") == [job + 1]
        assert (await client.states())[job] == "succeeded"


def make_full(store) -> None:
    if isinstance(store, MemoryStore):
        store.fail_with = DiskFull("the disk is full")
    else:
        store.commit = store.probe = _refuse


def make_room(store) -> None:
    if isinstance(store, MemoryStore):
        store.fail_with = None
    else:
        del store.commit, store.probe


def _refuse(*_: object) -> None:
    raise DiskFull("the disk is full")


async def test_finished_jobs_can_be_cleaned_while_the_disk_is_full():
    store = MemoryStore()
    async with serving(store) as house:
        client, worker = await house.client(), await house.worker()
        await client.submit("x")
        offer = await worker.hear_a(m.Offer)
        worker.start(offer)
        worker.say(m.AttemptEnded(offer=offer.offer, end=end_record()))
        await worker.hear_a(m.Acknowledge)
        store.fail_with = DiskFull("the disk is full")
        await client.ask(m.Submit, ranges=(job_range("refused"),))
        released = store.release_ballast

        def release() -> bool:
            store.fail_with = None
            return released()

        store.release_ballast = release
        answer = await client.ask(m.CleanJobs)
        assert isinstance(answer, m.Done), answer
        assert (answer.text, answer.count) == ("Removed finished and canceled jobs!", 1)
        assert await client.states() == {}


async def test_whoever_cannot_even_clean_on_a_full_disk_is_not_told_to_clean():
    store = MemoryStore()
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", held=True)
        await client.ask(m.RemoveJobs, ids=((0, 0),))
        store.fail_with = DiskFull("the disk is full")
        answer = await client.ask(m.CleanJobs)
        assert isinstance(answer, m.Failed), answer
        assert answer.error == "disk full: nothing was accepted"
        assert "clean-jobs" not in answer.hint


async def test_a_disk_without_room_for_the_ballast_is_told_at_the_start(caplog):
    store = MemoryStore()
    store.restore_ballast = lambda: False
    async with serving(store):
        await eventually(lambda: "no room for the 16 MB that are kept aside" in caplog.text, "it is told")


async def test_any_other_failure_of_the_store_ends_the_driver():
    store = MemoryStore()
    driver = Driver(store, Settings())
    await driver.load()
    store.fail_with = StorageError("the disk is broken")
    driver.opened()
    with pytest.raises(StorageError, match="the disk is broken"):
        await driver.run()


async def test_cleaning_goes_in_portions_and_is_answered_once(store):
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=1200, held=True)
        await client.ask(m.RemoveJobs, ids=((0, 1199),))
        question = m.CleanJobs(seq=77, request_id="c" * 32)
        client.say(question)
        first = await client.hear_a(m.Done)
        assert first.count == 1200
        again = await house.client()
        again.say(question)
        assert await again.hear_a(m.Done) == first
        assert await client.states() == {}
        assert house.driver.engine.aggregates().canceled == 0


async def test_cleaning_keeps_failed_jobs_unless_told_otherwise(store):
    async with serving(store) as house:
        client, worker = await house.client(), await house.worker()
        await client.submit("a")
        await client.submit("b")
        for code in (0, 1):
            offer = await worker.hear_a(m.Offer)
            worker.start(offer)
            worker.say(m.AttemptEnded(offer=offer.offer, end=end_record(code)))
        await worker.hear_a(m.Acknowledge)
        await eventually(lambda: not house.driver.engine.state.jobs)
        await client.ask(m.CleanJobs)
        assert list((await client.states()).values()) == ["failed"]
        await client.ask(m.CleanJobs, failed=True)
        assert await client.states() == {}


async def test_old_jobs_are_dropped_by_age(store):
    async with serving(store, Settings(job_cleanup_after_seconds=0.05)) as house:
        client = await house.client()
        (job,) = await client.submit("x", held=True)
        await client.ask(m.RemoveJobs, ids=((job, job),))
        await trio.sleep(0.1)
        assert await house.driver.upkeep.clean_old() == 1
        assert await client.states() == {}


async def test_a_bug_in_the_engine_costs_one_round_and_the_offender_only():
    store = MemoryStore()
    async with serving(store) as house:
        client, other = await house.client(), await house.client()
        await client.submit("kept")
        broken = house.driver.engine
        handle = broken.handle

        def explode(session, message, *more):
            if isinstance(message, m.Submit) and message.ranges[0].payload.argv == ("poison",):
                raise ZeroDivisionError
            return handle(session, message, *more)

        broken.handle = explode
        other.put(m.Submit, ranges=(job_range("poison"),))
        # What stands behind the poison in the same round is handled after the rebuild.
        third = await house.client()
        third.put(m.Submit, ranges=(job_range("next"),))
        await other.end()
        assert (await third.hear_a(m.Submitted)).ids == ((1, 1),)
        assert house.driver.engine is not broken


async def test_a_worker_is_given_up_only_after_its_time_and_its_session_ends():
    store = MemoryStore()
    async with serving(store, Settings(worker_timeout_seconds=1.0)) as house:
        # The setting itself is refused below ten seconds; the engine counts with what it gets.
        client, worker = await house.client(), await house.worker()
        (job,) = await client.submit("x")
        worker.start(await worker.hear_a(m.Offer))
        began = time.monotonic()
        await worker.end()
        assert time.monotonic() - began > 0.9
        assert "silent" in (await client.ask(m.ListJobs)).jobs[0].note
        assert job in house.driver.engine.state.revocable


async def test_a_lowered_timeout_counts_only_after_the_promised_one():
    store = MemoryStore()
    async with serving(store, Settings(worker_timeout_seconds=1.5)) as house:
        await house.worker()
    async with serving(store, Settings(worker_timeout_seconds=0.2)) as house:
        worker = await house.worker()
        began = time.monotonic()
        await worker.end()
        assert time.monotonic() - began > 1.2


@pytest.mark.slow
async def test_after_a_standstill_of_the_program_itself_nobody_is_silent():
    store = MemoryStore()
    settings = Settings(worker_timeout_seconds=2.0)
    async with serving(store, settings) as house:
        worker = await house.worker()
        time.sleep(2.5)  # noqa: ASYNC251  the very standstill
        await worker.beat(1)
        await worker.beat(2)


@pytest.mark.slow
async def test_silence_counts_anew_from_the_moment_that_the_lock_of_the_server_is_back(tmp_path):
    """A runner of this host that saw it free has prolonged its lease meanwhile."""
    lock = tmp_path / "lock"
    with Claim(places.lock_exclusive(str(lock))) as claim:
        async with serving(MemoryStore(), Settings(worker_timeout_seconds=1.0), stands=claim.stands) as house:
            worker = await house.worker()
            began = time.monotonic()
            lock.unlink()
            lock.touch()
            await worker.end()
            # Nobody else came: only the silence itself made it look, which then began anew.
            assert time.monotonic() - began > 1.9
            assert places.is_locked(str(lock))


@pytest.mark.slow
async def test_nobody_is_silent_while_another_holds_the_lock_of_the_server(tmp_path):
    lock = tmp_path / "lock"
    with Claim(places.lock_exclusive(str(lock))) as claim:
        async with serving(MemoryStore(), Settings(worker_timeout_seconds=0.5), stands=claim.stands) as house:
            worker = await house.worker()
            lock.unlink()
            with places.lock_exclusive(str(lock)):
                with trio.move_on_after(2.0) as patience:
                    await worker.end()
                assert patience.cancelled_caught, "it was sent away"
                assert any(one.session is not None for one in house.driver.engine.queue.workers.values())
            await worker.end()
            assert places.is_locked(str(lock))


@pytest.mark.parametrize("comes", ["a command", "a heartbeat", "the upkeep"])
async def test_the_lock_of_the_server_is_put_back_when(tmp_path, comes):
    lock = tmp_path / "lock"
    with Claim(places.lock_exclusive(str(lock))) as claim:
        async with serving(MemoryStore(), stands=claim.stands) as house:
            if comes == "the upkeep":
                house.driver.upkeep.interval_seconds = 0.05
                # It sleeps for the period of before.
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(house.driver.upkeep.run)
                    lock.unlink()
                    await eventually(lambda: places.is_locked(str(lock)))
                    nursery.cancel_scope.cancel()
                return
            worker = await house.worker()
            lock.unlink()
            if comes == "a command":
                await house.client()
            else:
                await worker.beat()
            assert places.is_locked(str(lock))


async def test_a_long_list_does_not_hold_up_others(store):
    async with serving(store) as house:
        client, other, worker = await house.client(), await house.client(), await house.worker()
        await client.submit("x", count=5000, held=True)
        await client.ask(m.RemoveJobs, ids=((0, 2999),))
        seq = client.put(m.ListJobs)
        slowest = 0.0
        for number in range(1, 30):
            began = time.monotonic()
            await worker.beat(number)
            await other.ask(m.ServerInfo)
            slowest = max(slowest, time.monotonic() - began)
        ids: list[int] = []
        while True:
            part = await client.hear_a(m.JobList)
            assert part.seq == seq
            ids += [row.id for row in part.jobs]
            if part.end:
                break
        assert ids == list(range(5000))
        assert slowest < 1


@pytest.mark.parametrize("limit", [0, 1, 7, 600])
async def test_the_limit_keeps_the_most_recent_of_live_and_finished_together(store, limit):
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=1500, held=True)
        await client.ask(m.RemoveJobs, ids=((0, 400), (700, 1496)))
        listing = await client.ask(m.ListJobs, limit=limit)
        assert [row.id for row in listing.jobs] == list(range(1500 - limit, 1500))
        assert dict(listing.counts)["canceled"] == 401 + 797
        some = await client.ask(m.ListJobs, limit=limit, states=("canceled",), ids=((100, 800), (50, 120)))
        expected = [*range(50, 401), *range(700, 801)]
        assert [row.id for row in some.jobs] == (expected[-limit:] if limit else [])


async def test_details_name_what_is_missing(store):
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=30, held=True)
        await client.ask(m.RemoveJobs, ids=((5, 9),))
        await client.ask(m.CleanJobs)
        answer = await client.ask(m.ShowJobs, ids=((0, 11), (28, 40)))
        assert [detail.row.id for detail in answer.jobs] == [*range(5), 10, 11, 28, 29]
        assert answer.missing == ((5, 9), (30, 40))


async def test_details_of_many_jobs_are_read_many_at_once(store, monkeypatch):
    async with serving(store) as house:
        client = await house.client()
        await client.submit("x", count=1000, held=True)
        await client.ask(m.RemoveJobs, ids=((0, 399),))
        reads = []
        read = house.driver.read
        monkeypatch.setattr(house.driver, "read", lambda question: reads.append(question) or read(question))
        seq = client.put(m.ShowJobs, ids=((0, 999),))
        details: list[m.JobDetail] = []
        while True:
            part = await client.hear_a(m.JobDetails)
            assert part.seq == seq
            details += part.jobs
            if part.end:
                break
        assert [detail.row.id for detail in details] == list(range(1000))
        assert [detail.row.state for detail in details] == ["canceled"] * 400 + ["held"] * 600
        # Two windows of ids, each read 32 jobs at a time.
        assert len(reads) == 2 * (1 + 16)


async def test_questions_about_what_is_not_there_fail_with_a_sentence(store):
    async with serving(store) as house:
        client = await house.client()
        for question in (m.ExplainJob, m.ReadOutput):
            answer = await client.ask(question, id=99)
            assert (type(answer), answer.error) == (m.Failed, "Job not found!")
        answer = await client.ask(m.ListWorkers, ids=((3, 4),))
        assert answer.missing == ((3, 4),)


async def test_watchers_hear_of_the_end_also_of_jobs_that_ended_before(store):
    async with serving(store) as house:
        client, watcher = await house.client(), await house.client()
        await client.submit("x", count=2, held=True)
        await client.ask(m.RemoveJobs, ids=((0, 0),))
        watcher.put(m.WatchJobs, ids=((0, 3),))
        assert (await watcher.hear_a(m.Watching)).missing == ((2, 3),)
        assert (await watcher.hear_a(m.JobEnded)).id == 0
        await client.ask(m.RemoveJobs, ids=((1, 1),))
        ended = await watcher.hear_a(m.JobEnded)
        assert (ended.id, ended.exit_code) == (1, 130)
