"""Facts in words, and a store together with the state that it feeds."""

from __future__ import annotations

from typing import get_args

import pytest

from kueue.core import facts as f
from kueue.core.state import State
from kueue.core.story import event_of
from kueue.model import Canceled, Exited, NotStarted, Signaled
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import (
    WALL,
    answered,
    batch,
    cleaned,
    done,
    ending,
    job_range,
    node_changed,
    offered,
    returned,
    started,
    stop_asked,
    submitted,
)

STORIES = [
    (submitted(1), "operator: submitted by operator"),
    (submitted(1, job_range(2), job_range()), "operator: submitted by operator with 3 jobs, 1 to 3"),
    (f.JobHeld(job=1, principal="ada", wall=WALL), "ada: held by ada"),
    (f.JobReleased(job=1, principal="ada", wall=WALL), "ada: released by ada"),
    (offered(1, 5, node=3), "server: offered to worker 3"),
    (started(1, 5), "worker: started"),
    (returned(1, 5), "worker: given back: deferred: busy"),
    (f.OfferReturned(job=1, offer=5, how="withdrawn", reason="", wall=WALL), "worker: given back: withdrawn"),
    (f.OfferOverdue(job=1, offer=5, wall=WALL), "server: withdrawn: the worker does not answer"),
    (stop_asked(1), "operator: asked to be killed by operator"),
    (f.StopAsked(job=1, principal="ada", kill=False, wall=WALL), "ada: asked to be removed by ada"),
    (f.StopDropped(job=1, offer=5, started_wall=WALL, wall=WALL), "server: not removed: it runs already"),
    (f.AttemptSilenced(job=1, offer=5, wall=WALL), "server: its worker is silent"),
    (f.AttemptReturned(job=1, offer=5, started_wall=1.0, wall=WALL), "worker: its worker is back: it runs on"),
    (
        f.AttemptReturned(job=1, offer=5, started_wall=None, wall=WALL),
        "worker: its worker is back: it has yet to start",
    ),
    (f.AttemptLost(job=1, offer=5, reason="given away", wall=WALL), "server: attempt lost: given away"),
    (f.AttemptSuperseded(job=1, offer=5, text="exit 0", wall=WALL), "worker: an attempt given away before: exit 0"),
    (done(1), "worker: ended: exited with code 0"),
    (done(1, Exited(3)), "worker: ended: exited with code 3"),
    (done(1, Signaled(9)), "worker: ended: ended by signal 9 (SIGKILL)"),
    (done(1, NotStarted("no such file", "not_found")), "worker: ended: could not be started: no such file"),
    (done(1, Canceled(), by="operator"), "operator: canceled by operator"),
    (f.JobDone(job=1, outcome=Canceled("too late"), wall=WALL), "server: ended: canceled: too late"),
    (cleaned(1), "operator: 1 finished job dropped from the record"),
    (cleaned(1, 2), "operator: 2 finished jobs dropped from the record"),
    (node_changed(2, name="ralab02", offline=True), "worker: worker 2 is ralab02, taken out by hand"),
    (node_changed(2, name="ralab02", offline=True, by="ada"), "ada: worker 2 is ralab02, taken out by hand"),
    (node_changed(2, name="ralab02", by="ada"), "ada: worker 2 is ralab02, taken in again"),
    (node_changed(2, name="ralab02"), "worker: worker 2 is ralab02"),
    (
        f.NumbersRaised(next_job=9, next_offer=9, wall=WALL),
        "server: numbering goes on at job 9: a worker knows more than this record",
    ),
    (answered(1), ""),
    (f.TimeoutChanged(seconds=30.0, wall=WALL), ""),
    (f.JobsFolded(ids=((1, 2),)), ""),
]


@pytest.mark.parametrize(
    ("fact", "words"), STORIES, ids=[f"{type(fact).__name__}-{n}" for n, (fact, _) in enumerate(STORIES)]
)
def test_a_fact_is_told_in_words(fact, words):
    assert "".join(f"{event.who}: {event.what}" for event in event_of(fact)) == words


def test_every_fact_has_its_story():
    assert {type(fact) for fact, _ in STORIES} == set(get_args(f.AnyFact))


def test_a_state_rebuilt_from_the_store_is_the_one_that_committed(tmp_path):
    """The same facts go into a state and into the store; what comes back makes an equal state."""
    live = State()
    path = tmp_path / "state.sqlite"
    store = SqliteStore(path, wall=lambda: WALL, ballast_bytes=4096)

    def commit(*facts: f.AnyFact) -> None:
        for fact in facts:
            live.evolve(fact)
        over, live.finished[:] = tuple(live.finished), []
        store.commit(batch(*facts, finished=over))

    commit(node_changed(1), submitted(1, job_range(4), job_range(held=True)), submitted(6), answered(1))
    commit(offered(1, 1), started(1, 1), offered(2, 2), offered(3, 3), returned(3, 3))
    commit(offered(6, 4), stop_asked(6), returned(6, 4), f.JobDone(job=6, outcome=Canceled(), wall=WALL, by="operator"))
    commit(f.JobDone(job=2, outcome=Exited(0), wall=WALL, offer=2), offered(3, 5), stop_asked(3))
    store.close()
    store = SqliteStore(path, wall=lambda: WALL, ballast_bytes=4096)
    again = State()
    for fact in store.replay():
        again.evolve(fact)

    def told(state: State) -> dict:
        jobs = {job.id: (job.state, job.payload, job.template, job.past, job.stop) for job in state.jobs.values()}
        attempts = {
            offer: (held.job, held.node, held.allocation, held.started_wall) for offer, held in state.attempts.items()
        }
        nodes = {node.record: (node.slots, node.cores, node.ram_mb, node.named) for node in state.nodes.values()}
        return {"jobs": jobs, "attempts": attempts, "nodes": nodes, "used": state.used, "answers": state.answers}

    assert told(again) == told(live)
    assert [row.id for row in store.finished()] == [6, 2]
    store.commit(ending(1))
    store.close()
