"""What stands in the body of a row: the stored forms of ranges and finished jobs, and their JSON.

Rules
- A place, and a request with its terms, stand in a table of their own, once for each content: an environment of some
  kilobytes is common to thousands of jobs.
- Fields that equal their default are not written, so a new field costs old rows nothing.
"""

from __future__ import annotations

import hashlib
import sqlite3

import msgspec
from msgspec import Struct

from kueue.core.facts import Aggregates, AnyFact, AttemptPast, FinishedJob
from kueue.model import EndRecord, JobRange, OsText, Outcome, Payload, Place, Request, Terms


class Settings(Struct, frozen=True):
    """What a job asks for and how it may end."""

    request: Request
    terms: Terms


class RangeBody(Struct, frozen=True, omit_defaults=True):
    """A `JobRange` without its place and settings."""

    payload: Payload
    held: bool = False
    count: int = 1
    argvs: tuple[tuple[OsText, ...], ...] = ()


class FinishedBody(Struct, frozen=True, omit_defaults=True):
    """A `FinishedJob` without place, settings, payload, end record, and what has a column of its own."""

    principal: str
    outcome: Outcome
    issued_wall: float
    started_wall: float | None = None
    worker: str | None = None
    taken_cores: int | None = None
    taken_ram_mb: int | None = None
    ended_by: str = ""
    ended_by_request: str = ""
    also_asked_by: tuple[str, ...] = ()
    attempts: tuple[AttemptPast, ...] = ()


encode = msgspec.json.Encoder().encode
decode_fact = msgspec.json.Decoder(AnyFact).decode
decode_aggregates = msgspec.json.Decoder(Aggregates).decode
decode_place = msgspec.json.Decoder(Place).decode
decode_settings = msgspec.json.Decoder(Settings).decode
decode_range = msgspec.json.Decoder(RangeBody).decode
decode_finished = msgspec.json.Decoder(FinishedBody).decode
decode_end = msgspec.json.Decoder(EndRecord).decode


def digest(body: bytes) -> bytes:
    """What a content is found by."""
    return hashlib.blake2b(body, digest_size=16).digest()


def aggregates(connection: sqlite3.Connection) -> Aggregates:
    """The sums of a state file. Raises what `DAMAGE` lists."""
    (body,) = connection.execute("SELECT body FROM aggregates").fetchone() or (None,)
    if not isinstance(body, bytes):
        # The same error as SQLite's own for what cannot be: the edge names the file and the way out.
        raise sqlite3.DatabaseError("malformed: the sums are missing")
    return decode_aggregates(body)


def range_body(submitted: JobRange) -> RangeBody:
    return RangeBody(submitted.payload, submitted.held, submitted.count, submitted.argvs)


def job_range(body: RangeBody, place: Place, settings: Settings) -> JobRange:
    return JobRange(
        payload=body.payload,
        place=place,
        request=settings.request,
        terms=settings.terms,
        held=body.held,
        count=body.count,
        argvs=body.argvs,
    )


def finished_body(row: FinishedJob) -> FinishedBody:
    return FinishedBody(
        principal=row.principal,
        outcome=row.outcome,
        issued_wall=row.issued_wall,
        started_wall=row.started_wall,
        worker=row.worker,
        taken_cores=row.taken_cores,
        taken_ram_mb=row.taken_ram_mb,
        ended_by=row.ended_by,
        ended_by_request=row.ended_by_request,
        also_asked_by=row.also_asked_by,
        attempts=row.attempts,
    )


def finished_job(
    columns: tuple[int, float, float, bytes], body: FinishedBody, place: Place, settings: Settings
) -> FinishedJob:
    """The finished job of (id, ended, run_seconds, payload) and the rest, without its end record."""
    job, ended, run_seconds, payload = columns
    return FinishedJob(
        id=job,
        principal=body.principal,
        payload=payload,
        place=place,
        request=settings.request,
        terms=settings.terms,
        outcome=body.outcome,
        issued_wall=body.issued_wall,
        started_wall=body.started_wall,
        ended_wall=ended,
        run_seconds=run_seconds,
        worker=body.worker,
        taken_cores=body.taken_cores,
        taken_ram_mb=body.taken_ram_mb,
        ended_by=body.ended_by,
        ended_by_request=body.ended_by_request,
        also_asked_by=body.also_asked_by,
        attempts=body.attempts,
    )
