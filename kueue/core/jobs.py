"""Live jobs and their attempts, and how a submission becomes jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from kueue.core import facts as f
from kueue.model import JobRange, JobState, Payload, Place, Request, Share, Terms, from_os_text

GLOBAL_SLOTS = "@slots"
"""The counter behind `global_max_parallel_jobs`; licence names cannot begin with ``@``."""


_encode = msgspec.json.Encoder().encode
_decode_payload = msgspec.json.Decoder(Payload).decode


@dataclass(frozen=True)
class Template:
    """What all jobs of one submitted range share."""

    place: Place
    directory: str
    """`place.cwd` as text."""
    request: Request
    terms: Terms
    principal: str
    issued_wall: float


@dataclass(frozen=True)
class StopWish:
    """A person wants the job ended."""

    principal: str
    kill: bool
    wall: float
    request_ids: tuple[str, ...]
    """Of the questions that ask for it, the newest last."""


class Attempt:
    """One live attempt, or an offer that may become one."""

    __slots__ = (
        "allocation",
        "job",
        "line",
        "node",
        "number",
        "offer",
        "offered_wall",
        "overdue",
        "silent",
        "started_wall",
    )

    def __init__(self, made: f.JobOffered) -> None:
        self.offer = made.offer
        self.job = made.job
        self.node = made.node
        self.allocation = made.allocation
        self.offered_wall = made.wall
        self.line = made.offer if made.line is None else made.line
        """The first offer of its line: all members have one allocation, and one of them at a time runs."""
        self.number: int | None = None
        self.started_wall: float | None = None
        self.overdue = False
        """The offer was withdrawn for want of an answer and may run all the same."""
        self.silent = False
        """Its worker is silent: the room and the job are in doubt."""

    @property
    def share(self) -> Share:
        return self.allocation.shares[0]

    @property
    def is_chained(self) -> bool:
        """It was offered ahead, behind another one."""
        return self.line != self.offer

    def waits_in_line(self, state: JobState) -> bool:
        """Offered ahead and not started, as far as is known. `state`: of its job, which may be back from a silence."""
        return self.is_chained and self.started_wall is None and state in {JobState.OFFERED, JobState.RUNNING}


class Job(msgspec.Struct, eq=False, gc=False):
    """A live job. Nothing that it refers to leads back to it, so the collector need not walk millions of them."""

    id: int
    template: Template
    payload: bytes
    """JSON of `model.Payload`; decoded only when offered or shown."""
    state: JobState
    attempt: Attempt | None = None
    past: tuple[f.AttemptPast, ...] = ()
    numbered: int = 0
    """Attempts that have a number."""
    lost: int = 0
    lost_workers: tuple[str, ...] = ()
    stop: StopWish | None = None

    @property
    def may_be_given_away(self) -> bool:
        """Unreachable, and of the kind that runs elsewhere."""
        return self.state is JobState.UNREACHABLE and self.template.terms.on_lost == "rerun"


class Newcomers:
    """The jobs of a submission that comes into being, made in portions: a million of them takes a second or two."""

    def __init__(
        self,
        ranges: tuple[JobRange, ...],
        first_id: int,
        principal: str,
        wall: float,
        intern: Callable[[Any], Any],
    ) -> None:
        self.ranges = ranges
        self.principal = principal
        self.wall = wall
        self.first_id = first_id
        self.jobs: list[Job] = []
        self.rows: list[tuple[Template, JobState, int]] = []
        """Template, state, number: of jobs in a row."""
        self._intern = intern
        self._number = sum(entry.size for entry in ranges)
        self._left = self._made()

    def grow(self, portion: int | None = None) -> bool:
        """Make so many more (None: all). Returns whether all are there."""
        self.jobs.extend(islice(self._left, portion))
        return len(self.jobs) == self._number

    def begin_at(self, first_id: int) -> None:
        """Give them other ids than was thought, for others came in between."""
        if first_id != self.first_id:
            self.first_id = first_id
            for number, job in enumerate(self.jobs, first_id):
                job.id = number

    def _made(self) -> Iterator[Job]:
        number = self.first_id
        for entry in self.ranges:
            template, state = self._template(entry), JobState.HELD if entry.held else JobState.PENDING
            if self.rows and self.rows[-1][0] is template and self.rows[-1][1] is state:
                self.rows[-1] = (template, state, self.rows[-1][2] + entry.size)
            else:
                self.rows.append((template, state, entry.size))
            for payload in payloads(entry):
                yield Job(number, template, payload, state)
                number += 1

    def _template(self, entry: JobRange) -> Template:
        """A long list of commands comes in many ranges alike: they share one."""
        intern = self._intern
        place: Place = intern(entry.place)
        request: Request = intern(entry.request)
        terms: Terms = intern(entry.terms)
        if self.rows:
            last = self.rows[-1][0]
            if last.place is place and last.request is request and last.terms is terms:
                return last
        return Template(place, from_os_text(place.cwd), request, terms, self.principal, self.wall)


def payloads(entry: JobRange) -> Iterator[bytes]:
    """The payload of each job of a range, as stored bytes; equal ones are one object."""
    if entry.argvs:
        for argv in entry.argvs:
            yield _encode(msgspec.structs.replace(entry.payload, argv=argv))
    else:
        payload = _encode(entry.payload)
        for _ in range(entry.count):
            yield payload


def payload_of(data: bytes) -> Payload:
    return _decode_payload(data)


def counters_of(request: Request) -> Mapping[str, int]:
    """All counters that an attempt of this request takes, the global slot cap included."""
    amounts = dict(request.counters)
    if request.slots:
        amounts[GLOBAL_SLOTS] = request.slots
    return amounts
