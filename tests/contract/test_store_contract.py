"""What every store promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kueue.core import facts as f
from kueue.core.story import Event
from kueue.errors import Bug
from kueue.model import Canceled, Exited, Request, Signaled
from kueue.storage.memory import MemoryStore
from kueue.storage.sqlite import SqliteStore
from kueue.storage.store import Store
from tests.support.storage_rows import (
    OTHER_PLACE,
    PLACE,
    WALL,
    answered,
    batch,
    cleaned,
    done,
    ending,
    finished,
    job_range,
    live_ids,
    node_changed,
    offered,
    returned,
    started,
    stop_asked,
    submitted,
)


class Bench:
    """A store of one kind that can be closed and opened again; `now` is its wall clock."""

    def __init__(self, kind: str, path) -> None:
        self.now = WALL
        self._kind = kind
        self._path = path
        self.store: Store = self._open(None)

    def _open(self, old):
        if self._kind == "memory":
            return old.copy() if old else MemoryStore(wall=lambda: self.now)
        return SqliteStore(
            self._path, wall=lambda: self.now, is_network=self._kind == "sqlite on a network", ballast_bytes=4096
        )

    def reopen(self) -> Store:
        self.store.close()
        self.store = self._open(self.store)
        return self.store


@pytest.fixture(params=["memory", "sqlite", "sqlite on a network"])
def bench(request, tmp_path):
    made = Bench(request.param, tmp_path / "state.sqlite")
    yield made
    made.store.close()


def test_a_new_store_is_empty_and_has_an_identity_of_its_own(bench):
    assert list(bench.store.replay()) == []
    assert bench.store.aggregates() == f.Aggregates()
    assert bench.store.finished() == []
    assert len(bytes.fromhex(bench.store.queue_id)) == 16


def test_the_identity_and_the_sums_survive(bench):
    identity = bench.store.queue_id
    bench.store.commit(batch(submitted(1), next_job=2, submitted_total=1, run_seconds=7))
    store = bench.reopen()
    assert store.queue_id == identity
    assert store.aggregates() == f.Aggregates(next_job=2, submitted_total=1, run_seconds=7)


def test_live_jobs_come_back_with_nodes_and_answers_first_and_their_facts_in_order(bench):
    one, two = submitted(1), submitted(2, job_range(held=True, place=OTHER_PLACE, request=Request(cores=4)))
    bench.store.commit(batch(one, answered(1), node_changed(2)))
    bench.store.commit(batch(offered(1, 1), node_changed(1), two))
    release = f.JobReleased(job=2, principal="operator", wall=WALL)
    bench.store.commit(batch(started(1, 1), release, stop_asked(1)))
    facts = list(bench.reopen().replay())
    assert sorted(facts[:2], key=lambda fact: fact.node.id) == [node_changed(1), node_changed(2)]
    assert facts[2:] == [answered(1), one, offered(1, 1), two, started(1, 1), release, stop_asked(1)]


def test_a_submission_stands_before_what_its_own_batch_decided(bench):
    bench.store.commit(batch(submitted(1), offered(1, 1), submitted(2), offered(2, 2)))
    assert list(bench.reopen().replay()) == [submitted(1), offered(1, 1), submitted(2), offered(2, 2)]


def test_every_kind_of_fact_about_a_live_job_comes_back_as_it_was(bench):
    facts = [
        f.JobHeld(job=1, principal="operator", wall=1.5),
        f.JobReleased(job=1, principal="operator", wall=2.5),
        offered(1, 1),
        f.OfferOverdue(job=1, offer=1, wall=3.5),
        f.AttemptSilenced(job=1, offer=1, wall=4.5),
        f.AttemptReturned(job=1, offer=1, started_wall=None, wall=5.5),
        f.AttemptLost(job=1, offer=1, reason="gone", wall=6.5),
        offered(1, 2),
        f.AttemptSuperseded(job=1, offer=1, text="exit 0", wall=7.5),
        stop_asked(1),
        f.StopDropped(job=1, offer=2, started_wall=8.25, wall=8.5),
    ]
    bench.store.commit(batch(submitted(1), *facts))
    assert list(bench.reopen().replay()) == [submitted(1), *facts]


def test_only_the_newest_record_of_a_node_counts(bench):
    bench.store.commit(batch(node_changed(1, name="old"), node_changed(1, name="newer")))
    bench.store.commit(batch(node_changed(1, name="newest", offline=True)))
    assert list(bench.reopen().replay()) == [node_changed(1, name="newest", offline=True)]


def test_ranges_of_one_submission_keep_their_ids(bench):
    ranges = (job_range(2), job_range(argvs=(("a",), ("b",), ("c",))), job_range(place=OTHER_PLACE))
    bench.store.commit(batch(submitted(5, *ranges)))
    facts = list(bench.reopen().replay())
    assert live_ids(facts) == [5, 6, 7, 8, 9, 10]
    assert [(fact.first_id, fact.ranges[0].place) for fact in facts] == [(5, PLACE), (7, PLACE), (10, OTHER_PLACE)]
    assert facts[1].ranges[0].argvs == (("a",), ("b",), ("c",))


def test_a_job_that_is_done_leaves_the_replay_and_becomes_a_finished_one(bench):
    bench.store.commit(batch(submitted(1, job_range(3)), offered(2, 1), started(2, 1)))
    bench.store.commit(ending(2))
    store = bench.reopen()
    facts = list(store.replay())
    assert facts == [submitted(1, job_range(3)), f.JobsFolded(ids=((2, 2),))]
    assert store.finished_job(2) == finished(2)
    assert store.finished_job(1) is None


def test_a_submission_goes_with_its_last_job(bench):
    bench.store.commit(batch(submitted(1, job_range(2), job_range(2)), submitted(5)))
    bench.store.commit(ending(1, 4, 5))
    assert live_ids(bench.reopen().replay()) == [2, 3]
    bench.store.commit(ending(2))
    assert [type(fact) for fact in bench.reopen().replay()] == [f.JobsSubmitted, f.JobsFolded]
    bench.store.commit(ending(3))
    assert list(bench.reopen().replay()) == []
    assert [row.id for row in bench.store.finished()] == [5, 4, 3, 2, 1]


def test_a_job_may_come_and_end_in_one_batch(bench):
    bench.store.commit(
        batch(submitted(1), offered(1, 1), started(1, 1), done(1), submitted(2), finished=(finished(1),))
    )
    assert list(bench.reopen().replay()) == [submitted(2)]
    assert bench.store.finished_job(1) == finished(1)


def test_a_job_that_was_cleaned_stays_gone_while_its_siblings_live(bench):
    bench.store.commit(batch(submitted(1, job_range(3))))
    bench.store.commit(ending(1, 2))
    bench.store.commit(batch(cleaned(1)))
    store = bench.reopen()
    assert [row.id for row in store.finished()] == [2]
    assert store.finished_job(1) is None
    assert live_ids(store.replay()) == [3]


def test_a_returned_offer_leaves_no_trace_but_events(bench):
    bench.store.commit(batch(submitted(1), submitted(2), offered(2, 7)))
    for offer in range(10, 20):
        bench.store.commit(batch(offered(1, offer)))
        bench.store.commit(batch(f.AttemptSilenced(job=1, offer=offer, wall=WALL), returned(1, offer)))
    bench.store.commit(batch(offered(1, 20), returned(1, 20), offered(1, 21)))
    assert list(bench.reopen().replay()) == [submitted(1), submitted(2), offered(2, 7), offered(1, 21)]
    assert len([event for event in bench.store.events(job=1) if event.what.startswith("given back")]) == 11


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stop_that_met_a_returned_offer_is_not_replayed_on_a_pending_job(bench, batches):
    facts = [f.JobReleased(job=1, principal="operator", wall=WALL), offered(1, 1), stop_asked(1), returned(1, 1)]
    bench.store.commit(batch(submitted(1, job_range(held=True))))
    for at in range(batches):
        size = -(-len(facts) // batches)
        bench.store.commit(batch(*facts[at * size : (at + 1) * size]))
    assert list(bench.reopen().replay()) == [submitted(1, job_range(held=True)), facts[0]]


def test_finished_jobs_are_paged_downwards_without_excerpts(bench):
    bench.store.commit(batch(submitted(1, job_range(9))))
    bench.store.commit(ending(*range(1, 10)))
    first = bench.store.finished(limit=4)
    assert [row.id for row in first] == [9, 8, 7, 6]
    assert first[0] == msgspec.structs.replace(finished(9), end=None)
    assert [row.id for row in bench.store.finished(limit=4, below=6)] == [5, 4, 3, 2]
    assert [row.id for row in bench.store.finished(limit=4, below=2)] == [1]
    assert bench.store.finished(below=1) == []


def test_finished_jobs_are_chosen_by_kind_and_by_ids(bench):
    bench.store.commit(batch(submitted(1, job_range(9))))
    bench.store.commit(ending(1, 2, 3))
    bench.store.commit(ending(4, 5, 6, outcome=Signaled(9)))
    bench.store.commit(ending(7, 8, 9, outcome=Canceled()))

    def ids(**how) -> list[int]:
        return [row.id for row in bench.store.finished(**how)]

    assert ids(kinds=["failed"]) == [6, 5, 4]
    assert ids(kinds=["canceled", "succeeded"], limit=4) == [9, 8, 7, 3]
    assert ids(kinds=["succeeded", "failed", "canceled"]) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert ids(ids=[(2, 4), (8, 8), (3, 5), (40, 50)]) == [8, 5, 4, 3, 2]
    assert ids(ids=[(2, 4), (8, 8)], kinds=["succeeded"], below=3) == [2]
    assert ids(ids=[(1, 9), (4, 4)], limit=2, below=6) == [5, 4]


def test_numbers_that_nobody_has_are_simply_not_found(bench):
    bench.store.commit(batch(submitted(1)))
    bench.store.commit(ending(1))
    for number in (-(10**30), -1, 2, 10**30):
        assert bench.store.finished_job(number) is None
        assert bench.store.events(job=number) == []
        assert bench.store.finished(ids=[(number, number)]) == []
    assert [row.id for row in bench.store.finished(ids=[(-(10**30), 10**30)], below=10**30)] == [1]
    assert bench.store.finished(below=-(10**30)) == []


def test_what_may_be_cleaned_comes_oldest_end_first(bench):
    bench.store.commit(batch(submitted(1, job_range(6))))
    for age, job in enumerate((3, 1, 2)):
        bench.store.commit(ending(job, wall=WALL + age))
    bench.store.commit(ending(4, wall=WALL + 0.5, outcome=Exited(1)))

    def ids(*kinds, before=None, limit=500) -> list[int]:
        return [row.id for row in bench.store.cleanable(kinds=kinds, ended_before=before, limit=limit)]

    assert ids("succeeded") == [3, 1, 2]
    assert ids("succeeded", "failed") == [3, 4, 1, 2]
    assert ids("succeeded", "failed", before=WALL + 1) == [3, 4]
    assert ids("failed", "succeeded", limit=2) == [3, 4]
    assert ids("canceled") == []
    assert bench.store.cleanable(kinds=["failed"], ended_before=None)[0].end is None


def test_answers_of_more_than_an_hour_ago_are_not_replayed_and_then_dropped(bench):
    bench.store.commit(batch(answered(1, wall=WALL), answered(2, wall=WALL + 600)))
    bench.now = WALL + 3601
    assert list(bench.store.replay()) == [answered(2, wall=WALL + 600)]
    bench.store.tidy()
    bench.now = WALL
    assert list(bench.reopen().replay()) == [answered(2, wall=WALL + 600)]


def test_a_canceled_job_keeps_the_question_that_ended_it(bench):
    row = msgspec.structs.replace(finished(1, Canceled()), ended_by="operator", ended_by_request="ab" * 16)
    bench.store.commit(batch(submitted(1)))
    bench.store.commit(batch(done(1, Canceled(), by="operator"), finished=(row,)))
    assert bench.reopen().finished(ids=[(1, 1)]) == [msgspec.structs.replace(row, end=None)]


def test_events_tell_a_job_s_story_and_that_of_its_submission(bench):
    bench.store.commit(batch(submitted(1, job_range(3)), submitted(4)))
    bench.store.commit(batch(offered(2, 1, node=3), returned(2, 1), offered(2, 2, node=3), started(2, 2)))
    bench.store.commit(ending(2))
    bench.store.commit(batch(done(3, Canceled(), by="operator"), finished=(finished(3, Canceled()),)))
    told = [event.what for event in bench.reopen().events(job=2)]
    assert told == [
        "submitted by operator with 3 jobs, 1 to 3",
        "offered to worker 3",
        "given back: deferred: busy",
        "offered to worker 3",
        "started",
        "ended: exited with code 0",
    ]
    assert bench.store.events(job=2, limit=1) == [
        Event(wall=WALL, who="worker", what="ended: exited with code 0", job=2)
    ]
    assert [event.what for event in bench.store.events(job=3)][1:] == ["canceled by operator"]
    assert [event.what for event in bench.store.events(job=4)] == ["submitted by operator"]
    assert bench.store.events(job=5) == []
    assert [event.job for event in bench.store.events(limit=3)] == [2, 2, 3]


def test_events_of_more_than_a_month_ago_are_dropped(bench):
    bench.store.commit(batch(submitted(1, wall=WALL), submitted(2, wall=WALL + 86400)))
    bench.now = WALL + 30.5 * 86400
    bench.store.tidy()
    assert [event.job for event in bench.reopen().events()] == [2]


def test_a_batch_that_contradicts_itself_changes_nothing(bench):
    bench.store.commit(batch(submitted(1)))
    for wrong in (
        batch(done(1), submitted(2)),
        batch(submitted(2), finished=(finished(1),)),
        batch(done(1), started(1, 1), finished=(finished(1),)),
        batch(submitted(2), f.JobsFolded(ids=((1, 1),))),
    ):
        with pytest.raises(Bug):
            bench.store.commit(wrong)
    assert list(bench.reopen().replay()) == [submitted(1)]
    assert bench.store.finished() == []


def test_a_job_that_does_not_live_cannot_end(bench):
    bench.store.commit(batch(submitted(1, job_range(2))))
    bench.store.commit(ending(1))
    for job in (1, 3):
        with pytest.raises(Bug):
            bench.store.commit(ending(job))


def test_a_raised_number_is_kept_by_the_sums(bench):
    bench.store.commit(batch(f.NumbersRaised(next_job=50, next_offer=90, wall=WALL), next_job=50, next_offer=90))
    assert list(bench.reopen().replay()) == []
    assert bench.store.aggregates().next_job == 50


def test_probing_and_the_ballast_leave_the_record_alone(bench):
    bench.store.commit(batch(submitted(1)))
    bench.store.probe()
    assert bench.store.release_ballast()
    assert not bench.store.release_ballast()
    assert bench.store.restore_ballast()
    assert bench.store.restore_ballast()
    assert list(bench.reopen().replay()) == [submitted(1)]


class Model:
    """Draws a legal history of a few ranges of jobs, one batch at a time."""

    def __init__(self, draw: Callable) -> None:
        self.draw = draw
        self.next_job = 1
        self.next_offer = 1
        self.open: dict[int, int | None] = {}
        self.over: list[int] = []

    def batch(self):
        facts: list[f.AnyFact] = []
        rows: list[f.FinishedJob] = []
        for _ in range(self.draw(st.integers(1, 6))):
            self.step(self.draw(st.sampled_from(["submit", "offer", "return", "end", "clean", "answer"])), facts, rows)
        return batch(*facts, finished=tuple(rows), next_job=self.next_job, next_offer=self.next_offer)

    def step(self, what: str, facts: list, rows: list) -> None:
        free = sorted(job for job, offer in self.open.items() if offer is None)
        taken = sorted(job for job, offer in self.open.items() if offer is not None)
        if what == "submit":
            sizes = self.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
            places = [self.draw(st.sampled_from([PLACE, OTHER_PLACE])) for _ in sizes]
            facts.append(submitted(self.next_job, *(job_range(n, place=p) for n, p in zip(sizes, places, strict=True))))
            self.open.update(dict.fromkeys(range(self.next_job, self.next_job + sum(sizes))))
            self.next_job += sum(sizes)
        elif what == "offer" and free:
            job = self.draw(st.sampled_from(free))
            facts.append(offered(job, self.next_offer))
            self.open[job] = self.next_offer
            self.next_offer += 1
        elif what == "return" and taken:
            job = self.draw(st.sampled_from(taken))
            facts.append(returned(job, self.open[job]))
            self.open[job] = None
        elif what == "end" and self.open:
            job = self.draw(st.sampled_from(sorted(self.open)))
            outcome = self.draw(st.sampled_from([Exited(0), Exited(3), Canceled()]))
            wall = WALL + self.draw(st.integers(0, 5))
            facts.append(done(job, outcome, wall=wall))
            rows.append(finished(job, outcome, wall=wall, place=self.draw(st.sampled_from([PLACE, OTHER_PLACE]))))
            del self.open[job]
            self.over.append(job)
        elif what == "clean" and self.over:
            job = self.draw(st.sampled_from(self.over))
            self.over.remove(job)
            facts.append(cleaned(job))
        elif what == "answer":
            facts.append(answered(len(facts)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_both_stores_tell_the_same_after_any_history(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "state.sqlite"
    memory = MemoryStore(wall=lambda: WALL)
    disk = SqliteStore(path, wall=lambda: WALL, ballast_bytes=4096)
    model = Model(data.draw)
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            drawn = model.batch()
            memory.commit(drawn)
            disk.commit(drawn)
            if data.draw(st.booleans()):
                disk.close()
                disk = SqliteStore(path, wall=lambda: WALL, ballast_bytes=4096)
            assert list(disk.replay()) == list(memory.replay())
            assert live_ids(memory.replay()) == sorted(model.open)
            assert disk.aggregates() == memory.aggregates() == drawn.aggregates
            assert disk.events() == memory.events()
            kinds = data.draw(st.lists(st.sampled_from(["succeeded", "failed", "canceled"]), unique=True))
            limit = data.draw(st.integers(1, 5))
            pick = {"kinds": kinds, "limit": limit, "below": data.draw(st.none() | st.integers(1, 20))}
            assert disk.finished(**pick) == memory.finished(**pick)
            clean = {"kinds": kinds, "limit": limit, "ended_before": data.draw(st.none() | st.just(WALL + 2))}
            assert disk.cleanable(**clean) == memory.cleanable(**clean)
            for job in model.over:
                assert disk.finished_job(job) == memory.finished_job(job)
    finally:
        disk.close()
