"""Builders of facts, finished jobs and batches for the tests of the stores."""

from __future__ import annotations

from kueue.core import facts as f
from kueue.model import (
    Allocation,
    EndRecord,
    Excerpt,
    Exited,
    JobRange,
    MachineTotals,
    NodeRecord,
    Outcome,
    Payload,
    Place,
    Raw,
    Request,
    Share,
    Terms,
    kind_of,
)
from kueue.storage.store import Batch

WALL = 1_700_000_000.0
PLACE = Place(
    "/home/ada/work", "/home/ada/link", (("LANG", "C.UTF-8"), ("ODD", Raw("/w==")), ("PATH", "/usr/bin")), 0o027
)
OTHER_PLACE = Place("/home/ada/other")
PLAIN = Request()
GOOD = Exited(0)


def job_range(
    count: int = 1, *, place: Place = PLACE, request: Request = PLAIN, held: bool = False, argvs=()
) -> JobRange:
    return JobRange(Payload(("./run.sh", "a b")), place, request, Terms(timeout_seconds=60.0), held, count, argvs)


def submitted(first: int, *ranges: JobRange, wall: float = WALL) -> f.JobsSubmitted:
    return f.JobsSubmitted(first_id=first, ranges=ranges or (job_range(),), principal="operator", wall=wall)


def offered(job: int, offer: int, *, node: int = 1, wall: float = WALL) -> f.JobOffered:
    allocation = Allocation((Share(node, 1, 2, 512, (("gpu", (0, 3)),)),), (("genus", 1),))
    return f.JobOffered(job=job, offer=offer, node=node, allocation=allocation, wall=wall)


def started(job: int, offer: int, *, wall: float = WALL) -> f.JobStarted:
    return f.JobStarted(job=job, offer=offer, started_wall=wall, wall=wall)


def returned(job: int, offer: int, *, wall: float = WALL) -> f.OfferReturned:
    return f.OfferReturned(job=job, offer=offer, how="deferred", reason="busy", wall=wall)


def stop_asked(job: int, *, wall: float = WALL) -> f.StopAsked:
    return f.StopAsked(job=job, principal="operator", kill=True, wall=wall)


def node_changed(
    node: int = 1, *, name: str = "ralab01", offline: bool = False, wall: float = WALL, by: str = ""
) -> f.NodeChanged:
    record = NodeRecord(
        node, f"identity-{node}", name, "machine", "boot", offline, MachineTotals(4, 8, 16000, (("gpu", 4),))
    )
    return f.NodeChanged(node=record, wall=wall, by=by)


def answered(number: int, *, wall: float = WALL) -> f.RequestAnswered:
    return f.RequestAnswered(
        request_id=f"{number:032x}", principal="operator", answer=b'{"type":"Done"}\xff', wall=wall
    )


def end_record(outcome: Outcome = GOOD, *, wall: float = WALL, text: bytes = b"hello \xff\n") -> EndRecord:
    return EndRecord(
        outcome, wall - 2, wall, 2.5, 1.5, 40, 1, ("a note",), Excerpt(len(text), text), Excerpt(9, b"a", b"z")
    )


def done(job: int, outcome: Outcome = GOOD, *, wall: float = WALL, by: str = "") -> f.JobDone:
    return f.JobDone(job=job, outcome=outcome, wall=wall, offer=job + 1000, end=end_record(outcome, wall=wall), by=by)


def finished(
    job: int, outcome: Outcome = GOOD, *, wall: float = WALL, place: Place = PLACE, request: Request = PLAIN
) -> f.FinishedJob:
    past = f.AttemptPast(
        offer=job + 1000,
        number=1,
        node=1,
        worker="ralab01",
        offered_wall=wall - 3,
        started_wall=wall - 2,
        ended_wall=wall,
        end="over",
    )
    return f.FinishedJob(
        id=job,
        principal="operator",
        payload=b'{"argv":["./run.sh","a b"]}',
        place=place,
        request=request,
        terms=Terms(timeout_seconds=60.0),
        outcome=outcome,
        issued_wall=wall - 10,
        started_wall=wall - 2,
        ended_wall=wall,
        run_seconds=2.5,
        worker="ralab01",
        taken_cores=2,
        taken_ram_mb=512,
        attempts=(past,),
        end=end_record(outcome, wall=wall),
    )


def cleaned(*jobs: int, outcome: Outcome = GOOD) -> f.JobsCleaned:
    return f.JobsCleaned(jobs=tuple((job, kind_of(outcome), 2.5) for job in jobs), by="operator", wall=WALL)


def batch(*facts: f.AnyFact, finished: tuple[f.FinishedJob, ...] = (), **sums) -> Batch:
    return Batch(facts=facts, finished=finished, aggregates=f.Aggregates(**sums), wall=WALL)


def ending(*jobs: int, outcome: Outcome = GOOD, wall: float = WALL, place: Place = PLACE) -> Batch:
    """A batch in which these jobs end."""
    return batch(
        *(done(job, outcome, wall=wall) for job in jobs),
        finished=tuple(finished(job, outcome, wall=wall, place=place) for job in jobs),
    )


def live_ids(facts) -> list[int]:
    """The jobs that a replay leaves live."""
    ids: set[int] = set()
    for fact in facts:
        if isinstance(fact, f.JobsSubmitted):
            count = sum(entry.size for entry in fact.ranges)
            ids |= set(range(fact.first_id, fact.first_id + count))
        elif isinstance(fact, f.JobsFolded):
            ids -= {job for first, last in fact.ids for job in range(first, last + 1)}
    return sorted(ids)
