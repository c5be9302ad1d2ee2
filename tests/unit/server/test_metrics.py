"""The figures of the server: what they say, that they are few, and that nothing in them tells of a job."""

from __future__ import annotations

import re
import shutil
import time

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from kueue import exposition
from kueue.core import facts as f
from kueue.core.workers import SET_ASIDE_SECONDS
from kueue.model import (
    EndRecord,
    Exited,
    NotStarted,
    Outcome,
    Request,
    Signaled,
    TimedOut,
)
from kueue.protocol import messages as m
from kueue.server import metrics
from kueue.server.measures import Measures
from kueue.server.metrics import REASONS, Disk, Sight, families
from tests.support.large_lab import LargeLab

pytestmark = pytest.mark.trio

SMALL = Request(cores=1, ram_mb=100)


def sight(lab: LargeLab, **more) -> Sight:
    return Sight(lab.engine, lab.now, lab.measures, disk=Disk(1000, 2000), **more)


async def page(lab: LargeLab, accept: str = "", **more) -> str:
    _, body = await exposition.rendered(families(sight(lab, **more)), accept)
    return body.decode()


async def figures(lab: LargeLab, **more) -> dict[str, float]:
    """Series (``name{label="value"}``, labels in the order of their names) to value."""
    found = {}
    for family in text_string_to_metric_families(await page(lab, **more)):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            series = sample.name + (f"{{{labels}}}" if labels else "")
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def end(lab: LargeLab, at: int, outcome: Outcome, run_seconds: float = 30.0) -> None:
    """The attempt of the offer that was made as number `at` is over."""
    session, offer = lab.offers[at]
    record = EndRecord(outcome=outcome, started_wall=lab.now.wall, ended_wall=lab.now.wall, run_seconds=run_seconds)
    lab.say(session, m.AttemptEnded(offer=offer.offer, end=record))


# --- jobs -------------------------------------------------------------------------------------------------------------


async def test_jobs_are_counted_by_state_and_room_by_worker():
    lab = LargeLab(workers=1)
    lab.submit(Request(cores=2, ram_mb=100, named=(("gpu", 3),)), Request(cores=1000, ram_mb=1))
    lab.settle()
    lab.start_all()
    found = await figures(lab)
    assert found['kueue_jobs{state="running"}'] == 1
    assert found['kueue_jobs{state="pending"}'] == 1
    assert found['kueue_worker_cpus_used{worker="worker0000"}'] == 2
    assert found['kueue_worker_cpus{worker="worker0000"}'] == 32
    assert found['kueue_worker_ram_used_bytes{worker="worker0000"}'] == 100 * 2**20
    assert found['kueue_worker_slots_used{worker="worker0000"}'] == 1
    assert found['kueue_worker_resource_used{resource="gpu",worker="worker0000"}'] == 3
    assert found['kueue_worker_resource_limit{resource="gpu",worker="worker0000"}'] == 4
    assert found['kueue_worker_load1{worker="worker0000"}'] == 1.5
    assert found["kueue_jobs_submitted_total"] == 2


async def test_an_offer_is_outstanding_until_its_worker_answers():
    lab = LargeLab(workers=1)
    lab.submit(SMALL, count=3)
    lab.settle()
    assert (await figures(lab))["kueue_offers_outstanding"] == 3
    lab.start_all()
    assert (await figures(lab))["kueue_offers_outstanding"] == 0


TOLD = {
    "succeeded": Exited(0),
    "failed": Exited(7),
    "signaled": Signaled(11),
    "timed_out": TimedOut(1.0),
    "not_started": NotStarted("no such file", "not_found"),
}
"""What a worker tells of an attempt that ended by itself."""
OUTCOMES = (*TOLD, "canceled", "lost")


def finished(found):
    return {word: found[f'kueue_jobs_finished_total{{outcome="{word}"}}'] for word in OUTCOMES}


async def test_finished_jobs_are_counted_by_outcome():
    lab = LargeLab(workers=1)
    lab.submit(SMALL, count=len(TOLD))
    lab.settle()
    lab.start_all()
    for at, outcome in enumerate(TOLD.values()):
        end(lab, at, outcome)
        assert sum(finished(await figures(lab)).values()) == at + 1
    found = await figures(lab)
    assert finished(found) == {**dict.fromkeys(TOLD, 1), "canceled": 0, "lost": 0}
    assert found['kueue_jobs_kept{outcome="failed"}'] == 4
    assert found["kueue_job_run_seconds_count"] == len(TOLD)
    assert found["kueue_job_run_seconds_sum"] == 30 * len(TOLD)


async def test_the_wait_is_that_for_the_first_start_and_a_start_counts_once():
    lab = LargeLab(workers=1)
    lab.submit(SMALL)
    lab.settle()
    lab.later(40)
    lab.start_all()
    lab.start_all()  # a worker that reports it again
    found = await figures(lab)
    assert found["kueue_attempts_started_total"] == 1
    assert found["kueue_job_wait_seconds_count"] == 1
    assert found["kueue_job_wait_seconds_sum"] == 40


async def test_a_job_whose_start_was_never_reported_counts_as_started_at_its_end():
    lab = LargeLab(workers=1)
    lab.submit(SMALL)
    lab.settle()
    lab.later(2)
    end(lab, 0, Exited(0), run_seconds=0.01)
    found = await figures(lab)
    assert found["kueue_attempts_started_total"] == 1
    assert found["kueue_job_wait_seconds_sum"] == 2


async def test_a_second_attempt_is_one_more_start_but_no_second_wait():
    lab = LargeLab(workers=1)
    lab.submit(SMALL)
    lab.settle()
    lab.start_all()
    session, offer = lab.offers[0]
    lab.say(session, m.AttemptGone(offer=offer.offer, reason="the machine restarted"))
    lab.later(10)
    lab.settle()
    assert len(lab.offers) == 2
    lab.offers = lab.offers[1:]
    lab.start_all()
    found = await figures(lab)
    assert found["kueue_attempts_lost_total"] == 1
    assert found["kueue_attempts_started_total"] == 2
    assert found["kueue_job_wait_seconds_count"] == 1


async def test_a_clock_that_went_back_makes_no_negative_wait():
    lab = LargeLab(workers=1)
    lab.submit(SMALL)
    lab.settle()
    session, offer = lab.offers[0]
    lab.say(session, m.AttemptStarted(offer=offer.offer, started_wall=1.0))
    assert (await figures(lab))["kueue_job_wait_seconds_sum"] == 0


async def test_what_runs_when_the_server_starts_is_not_counted_as_started_again():
    lab = LargeLab(workers=1)
    lab.submit(SMALL)
    lab.settle()
    lab.start_all()
    lab.measures = Measures()
    lab.measures.began(lab.engine)
    end(lab, 0, Exited(0))
    found = await figures(lab)
    assert found["kueue_attempts_started_total"] == 0
    assert found["kueue_jobs_submitted_total"] == 1
    assert found['kueue_jobs_finished_total{outcome="succeeded"}'] == 1


async def test_what_is_not_stored_moves_no_counter():
    lab = LargeLab(workers=1)
    before = await page(lab)
    lab.engine.queue.decide(f.JobsSubmitted(first_id=0, ranges=(), principal="operator", wall=1.0))
    lab.engine.state.sums.submitted_total = 17
    assert await page(lab) == before


# --- why jobs wait ----------------------------------------------------------------------------------------------------


async def reasons_of(lab: LargeLab) -> dict[str, float]:
    found = await figures(lab)
    counts = {word: found[f'kueue_pending_by_reason{{reason="{word}"}}'] for word in REASONS}
    assert sum(counts.values()) == found['kueue_jobs{state="pending"}']
    return {word: count for word, count in counts.items() if count}


async def test_jobs_wait_for_a_worker():
    lab = LargeLab()
    lab.submit(SMALL, count=3)
    assert await reasons_of(lab) == {"no_worker": 3}


async def test_jobs_wait_for_room_for_a_licence_and_for_a_larger_machine():
    lab = LargeLab(workers=1, counters={"genus": 1})
    lab.submit(
        Request(cores=32, ram_mb=1, counters=(("genus", 1),)),
        Request(cores=1, ram_mb=1, counters=(("genus", 1),)),
        Request(cores=2, ram_mb=1),
        Request(cores=33, ram_mb=1),
    )
    lab.settle()
    assert await reasons_of(lab) == {"resource": 1, "busy": 1, "too_large": 1}
    found = await figures(lab)
    assert found['kueue_resource_used{resource="genus"}'] == 1
    assert found['kueue_resource_limit{resource="genus"}'] == 1
    assert found['kueue_resource_used{resource="global_max_parallel_jobs"}'] == 1


async def test_the_slot_limit_of_the_lab_is_a_resource():
    lab = LargeLab(workers=1, cap=1)
    lab.submit(SMALL, count=4)
    lab.settle()
    assert await reasons_of(lab) == {"resource": 3}
    assert (await figures(lab))['kueue_resource_limit{resource="global_max_parallel_jobs"}'] == 1


async def test_a_licence_with_the_name_of_the_slot_limit_makes_no_second_series_of_it():
    lab = LargeLab(cap=5, counters={"global_max_parallel_jobs": 3})
    assert (await figures(lab))['kueue_resource_limit{resource="global_max_parallel_jobs"}'] == 5


async def test_jobs_that_would_fit_and_are_not_offered_are_runnable():
    lab = LargeLab(workers=2)
    lab.submit(SMALL, count=5)  # nothing has been settled yet
    assert await reasons_of(lab) == {"runnable": 5}


async def test_jobs_of_a_directory_that_no_worker_sees_wait_for_it():
    lab = LargeLab(workers=1)
    lab.submit(SMALL, cwd="/nowhere")
    lab.settle()
    session, offer = lab.offers[0]
    lab.say(session, m.OfferRejected(offer=offer.offer, reason="no such directory"))
    lab.settle()
    assert await reasons_of(lab) == {"directory": 1}


async def test_more_kinds_of_jobs_than_there_is_time_for_are_said_to_be_unexamined(monkeypatch):
    monkeypatch.setattr(metrics, "REASONS_SECONDS", 0.0)
    lab = LargeLab(workers=1)
    lab.submit(SMALL, count=5)
    assert await reasons_of(lab) == {"unexamined": 5}


# --- workers ----------------------------------------------------------------------------------------------------------


def series_of_workers(found: dict[str, float]) -> list[str]:
    return [series for series in found if 'worker="' in series]


async def test_a_worker_that_left_is_down_until_the_time_out_and_then_has_no_series():
    lab = LargeLab(workers=1, worker_timeout_seconds=300.0)
    lab.take(lab.engine.session_closed(0, lab.now))
    lab.later(299)
    assert (await figures(lab))['kueue_worker_up{worker="worker0000"}'] == 0
    lab.later(2)
    found = await figures(lab)
    assert series_of_workers(found) == []
    assert found['kueue_workers{state="away"}'] == 1


async def test_a_silent_worker_has_no_series_although_it_holds_jobs():
    lab = LargeLab(workers=1, worker_timeout_seconds=300.0)
    lab.submit(SMALL)
    lab.settle()
    lab.start_all()
    lab.later(301)
    lab.take(lab.engine.tick(lab.now))
    lab.later(1)
    lab.take(lab.engine.tick(lab.now))
    found = await figures(lab)
    assert found['kueue_workers{state="silent"}'] == 1
    assert found['kueue_jobs{state="unreachable"}'] == 1
    assert series_of_workers(found) == []


async def test_after_a_start_only_workers_that_hold_jobs_are_missed():
    lab = LargeLab(workers=2)
    lab.submit(SMALL)
    lab.settle()
    for worker in lab.engine.queue.workers.values():
        worker.session = worker.heard = None
    lab.engine.opened(lab.now)
    found = await figures(lab)
    assert [series for series in found if series.startswith("kueue_worker_up")] == [
        'kueue_worker_up{worker="worker0000"}'
    ]


async def test_two_workers_of_one_name_are_one_series_and_the_connected_one_counts():
    lab = LargeLab()
    lab.join("twin", session=1, identity="old", slots=3)
    lab.take(lab.engine.session_closed(1, lab.now))
    lab.join("twin", session=2, identity="new", slots=5)
    found = await figures(lab)
    assert found['kueue_worker_up{worker="twin"}'] == 1
    assert found['kueue_worker_slots{worker="twin"}'] == 5
    assert found["kueue_workers_left_out"] == 1


async def test_a_worker_may_be_called_anything():
    lab = LargeLab()
    name = 'a "b"\\c\nd\ud800é{}'
    lab.join(name, session=1)
    assert (await figures(lab))["kueue_workers_left_out"] == 0
    assert 'kueue_worker_up{worker="a \\"b\\"\\\\c\\nd?é{}"} 1.0' in await page(lab)


async def test_workers_beyond_the_bound_are_counted_but_have_no_series(monkeypatch):
    monkeypatch.setattr(metrics, "WORKERS_MAX", 3)
    lab = LargeLab(workers=5)
    found = await figures(lab)
    assert len([series for series in found if series.startswith("kueue_worker_up")]) == 3
    assert found["kueue_workers_left_out"] == 2
    assert found['kueue_workers{state="online"}'] == 5


async def test_named_resources_beyond_the_bound_have_no_series(monkeypatch):
    monkeypatch.setattr(metrics, "RESOURCES_MAX", 3)
    lab = LargeLab()
    for number in range(2):
        lab.join(f"w{number}", session=number, named=(("cpld", 1), ("fpga", 1)))
    assert len([series for series in await figures(lab) if series.startswith("kueue_worker_resource_limit")]) == 3


async def test_workers_are_counted_by_state():
    lab = LargeLab(workers=3)
    worker = lab.engine.queue.workers[0]
    worker.set_aside(lab.now.steady, "fails")
    lab.say(1_000_000, m.SetNode(seq=1, request_id="f" * 32, name="worker0001", state="offline"))
    found = await figures(lab)
    assert found['kueue_workers{state="set_aside"}'] == 1
    assert found['kueue_workers{state="offline"}'] == 1
    lab.later(SET_ASIDE_SECONDS + 1)
    assert (await figures(lab))['kueue_workers{state="set_aside"}'] == 0


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_many_jobs_make_no_more_series_than_few_and_nothing_tells_of_them():
    lab = LargeLab(workers=3)
    lab.submit(SMALL, count=3)
    lab.settle()
    few = await figures(lab)
    for number in range(300):
        lab.submit(
            Request(cores=1 + number % 7, ram_mb=100 + number),
            words=(f"secret-command-{number}", "--when", f"2026-01-01T00:{number:05}"),
            cwd=f"/home/somebody/{number}",
        )
    lab.settle()
    lab.start_all()
    text = await page(lab)
    many = await figures(lab)
    assert many['kueue_jobs{state="running"}'] >= 20
    assert set(many) == set(few)
    assert not re.search(r"secret-command|somebody|2026-", text)


async def test_a_large_lab_is_a_page_of_less_than_a_megabyte_and_a_tenth_of_a_second():
    lab = LargeLab(workers=200)
    for number in range(100):
        lab.submit(Request(cores=1 + number % 32, ram_mb=100 + number), count=100)
    lab.settle()
    lab.start_all()
    for accept in ("", "application/openmetrics-text"):
        took = []
        for _ in range(3):
            began = time.process_time()  # what else runs on the machine must not decide
            text = await page(lab, accept)
            took.append(time.process_time() - began)
        assert text.count("kueue_worker_up{") == 200
        assert len(text) < 1_000_000
        assert min(took) < 0.1


async def test_the_jobs_are_not_walked():
    lab = LargeLab(workers=2)
    lab.submit(SMALL, count=100)
    lab.settle()

    class NotWalked(dict):
        def __iter__(self):
            raise AssertionError("somebody walks the jobs")

        keys = values = items = __iter__

    lab.engine.state.jobs = NotWalked(lab.engine.state.jobs)
    assert families(sight(lab))


async def test_rendering_lets_others_run_between_families():
    lab = LargeLab(workers=1)
    found = families(sight(lab))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await exposition.rendered(found)
        nursery.cancel_scope.cancel()
    assert turns > len(found) / 2


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_nothing_to_say():
    lab = LargeLab(workers=2)
    lab.submit(SMALL, count=30)
    lab.settle()
    text = await page(lab, connections={"worker": 2})
    done = await trio.run_process(
        ["promtool", "check", "metrics"], stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_every_family_has_a_help_of_a_sentence_and_open_metrics_ends_as_it_must():
    lab = LargeLab(workers=1)
    for family in families(sight(lab)):
        assert family.documentation[0].isupper()
        assert family.documentation.endswith(".")
        assert family.name.startswith("kueue_")
    text = await page(lab, "application/openmetrics-text; version=1.0.0")
    assert text.count("# EOF") == 1
    assert text.endswith("# EOF\n")
