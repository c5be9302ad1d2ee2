"""While the disk is full a lease is given only where nothing would have to be written down first."""

from __future__ import annotations

import msgspec
import pytest

from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.model import Allocation, JobRange, MachineTotals, NodeRecord, Payload, Place, Request, Share
from kueue.protocol import messages as m
from kueue.server import outage

QUEUE = "q" * 32
TOTALS = MachineTotals(4, 8, 1000)
RUNS = m.AttemptReport(offer=0, job=0, queue_id=QUEUE, state="running", started_wall=1.0)


def engine_with(*facts: f.AnyFact) -> Engine:
    """One worker that runs job 0 by offer 0."""
    engine = Engine(Settings(), queue_id=QUEUE)
    job = JobRange(payload=Payload(argv=("x",)), place=Place(cwd="/"), request=Request())
    share = Share(node=0, slots=1, cores=1, ram_mb=0)
    offered = f.JobOffered(job=0, offer=0, node=0, allocation=Allocation((share,), (("@slots", 1),)), wall=1.0)
    node = NodeRecord(id=0, identity="i", name="w", machine_id="m", boot_id="b", totals=TOTALS)
    begun = (
        f.NodeChanged(node=node, wall=0.0),
        f.JobsSubmitted(first_id=0, ranges=(job,), principal="operator", wall=0.0),
        offered,
        f.JobStarted(job=0, offer=0, started_wall=1.0, wall=1.0),
    )
    for fact in (*begun, *facts):
        engine.state.evolve(fact)
    return engine


def reply_to(engine: Engine, **changes: object) -> m.Message | None:
    hello = m.WorkerHello(identity="i", name="w", machine_id="m", boot_id="b", totals=TOTALS, attempts=(RUNS,))
    return outage.answer(msgspec.structs.replace(hello, **changes), engine, Settings(), QUEUE)


def test_a_known_worker_with_a_live_attempt_gets_its_lease():
    assert isinstance(reply_to(engine_with()), m.WorkerWelcome)


@pytest.mark.parametrize(
    "facts",
    [
        [f.AttemptSilenced(job=0, offer=0, wall=2.0)],
        [f.AttemptSilenced(job=0, offer=0, wall=2.0), f.AttemptLost(job=0, offer=0, reason="r", wall=3.0)],
    ],
    ids=["silenced", "given away"],
)
def test_a_worker_whose_attempt_may_be_elsewhere_gets_none_for_now(facts):
    reply = reply_to(engine_with(*facts))
    assert isinstance(reply, m.Sorry)
    assert not reply.lasting


@pytest.mark.parametrize("changes", [{"identity": "unknown"}, {"machine_id": "another"}])
def test_a_worker_that_is_not_written_down_comes_again(changes):
    reply = reply_to(engine_with(), **changes)
    assert isinstance(reply, m.Sorry)
    assert not reply.lasting
