"""What has happened to the queue: the only things that change its state, and the only things that are stored.

Rules
- A fact is decided by the engine, applied by `state.evolve` (live and on replay alike), and stored before anybody is
  told.
- A fact about one job has the field ``job``; the store keeps it until that job is done and then folds it into one
  `FinishedJob`.
- ``offer`` is the fencing number of an attempt; numbers grow and are never used twice.
- ``wall`` is UTC seconds, for the record only: nothing is decided by it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from kueue.model import Allocation, EndRecord, JobRange, NodeRecord, Outcome, Place, Request, Terms

Kind: TypeAlias = Literal["succeeded", "failed", "canceled"]
HowReturned: TypeAlias = Literal["deferred", "rejected", "withdrawn", "never received"]


class Fact(Struct, frozen=True, tag=True, tag_field="fact"):
    """Base of all facts."""


class JobsSubmitted(Fact, frozen=True, kw_only=True):
    """Jobs ``first_id`` … came into being, in the order of the ranges."""

    first_id: int
    ranges: tuple[JobRange, ...]
    principal: str
    wall: float


class JobsFolded(Fact, frozen=True, kw_only=True):
    """On replay only: these jobs of the submission just replayed are done (their rows are in the store)."""

    ids: tuple[tuple[int, int], ...]


class JobHeld(Fact, frozen=True, kw_only=True):
    """A pending job was told to wait until released."""

    job: int
    principal: str
    wall: float


class JobReleased(Fact, frozen=True, kw_only=True):
    """A held job may start."""

    job: int
    principal: str
    wall: float


class JobOffered(Fact, frozen=True, kw_only=True):
    """A worker may run the job. An unreachable attempt of it is ended first, by `AttemptLost` in the same turn."""

    job: int
    offer: int
    node: int
    allocation: Allocation
    wall: float
    line: int | None = None
    """The first offer of its line, whose allocation it shares; none: it begins a line of its own."""


class JobStarted(Fact, frozen=True, kw_only=True):
    """The worker reports that the process runs."""

    job: int
    offer: int
    started_wall: float
    wall: float


class OfferReturned(Fact, frozen=True, kw_only=True):
    """Certain: this offer never started and never will. The job waits again. It leaves no trace but events: the store
    drops all facts of this offer, so that a job that is declined for days does not grow.
    """

    job: int
    offer: int
    how: HowReturned
    reason: str
    wall: float


class OfferOverdue(Fact, frozen=True, kw_only=True):
    """The worker did not answer in time. The offer is withdrawn, but it may have started: the job stays where it is."""

    job: int
    offer: int
    wall: float


class StopAsked(Fact, frozen=True, kw_only=True):
    """A person wants the job ended. With ``kill`` also if it runs already."""

    job: int
    principal: str
    kill: bool
    wall: float
    request_id: str = ""
    """Of the question that asked for it."""


class StopDropped(Fact, frozen=True, kw_only=True):
    """A stop without ``kill`` came too late: the job runs and goes on."""

    job: int
    offer: int
    started_wall: float
    wall: float


class AttemptSilenced(Fact, frozen=True, kw_only=True):
    """The worker is silent (or does not know the attempt); a `rerun` job may now be given away."""

    job: int
    offer: int
    wall: float


class AttemptReturned(Fact, frozen=True, kw_only=True):
    """The worker is back and the attempt still lives there."""

    job: int
    offer: int
    started_wall: float | None
    wall: float


class AttemptLost(Fact, frozen=True, kw_only=True):
    """Given away or proven gone without an end record. Counts towards ``max_attempts``. The job waits again."""

    job: int
    offer: int
    reason: str
    wall: float


class JobDone(Fact, frozen=True, kw_only=True):
    """The job is over. ``offer`` and ``end`` tell of the attempt that decided it; both are none if none did."""

    job: int
    outcome: Outcome
    wall: float
    offer: int | None = None
    end: EndRecord | None = None
    by: str = ""
    """Who ended it, if a person did."""
    request_id: str = ""
    """By which question."""


class JobsCleaned(Fact, frozen=True, kw_only=True):
    """Finished jobs were dropped from the record. Entries: (id, kind, run_seconds)."""

    jobs: tuple[tuple[int, Kind, float], ...]
    by: str
    wall: float


class AttemptSuperseded(Fact, frozen=True, kw_only=True):
    """A given-away attempt of a live job reported how it ended; kept in the history, decides nothing."""

    job: int
    offer: int
    text: str
    wall: float


class NumbersRaised(Fact, frozen=True, kw_only=True):
    """A worker holds attempts numbered above all that this store gave (a restored copy): numbering goes on above."""

    next_job: int
    next_offer: int
    wall: float


class TimeoutChanged(Fact, frozen=True, kw_only=True):
    """The `worker_timeout_seconds` on which workers may rely from now on. Kept in the sums: a server that is started
    again with a lower one must first let the old one pass.
    """

    seconds: float
    wall: float


class NodeChanged(Fact, frozen=True, kw_only=True):
    """All that is remembered of a worker, whole; the newest of an id counts."""

    node: NodeRecord
    wall: float
    by: str = ""
    """Who took it out or in again, if a person did."""


class RequestAnswered(Fact, frozen=True, kw_only=True):
    """A state-changing question was answered; a repetition gets the same bytes (one JSON message) again."""

    request_id: str
    principal: str
    answer: bytes
    wall: float


AnyFact: TypeAlias = (
    JobsSubmitted
    | JobsFolded
    | JobHeld
    | JobReleased
    | JobOffered
    | JobStarted
    | OfferReturned
    | OfferOverdue
    | StopAsked
    | StopDropped
    | AttemptSilenced
    | AttemptReturned
    | AttemptLost
    | JobDone
    | AttemptSuperseded
    | NumbersRaised
    | TimeoutChanged
    | JobsCleaned
    | NodeChanged
    | RequestAnswered
)


class AttemptPast(Struct, frozen=True, kw_only=True):
    """One attempt in the history of a job."""

    offer: int
    number: int | None
    """None if it certainly never started."""
    node: int
    worker: str
    """The worker's name at that time."""
    offered_wall: float
    started_wall: float | None = None
    ended_wall: float | None = None
    end: str = ""
    """In words."""


class FinishedJob(Struct, frozen=True, kw_only=True):
    """All that is kept of a job that is done: one row of the store."""

    id: int
    principal: str
    payload: bytes
    """JSON of `model.Payload`."""
    place: Place
    request: Request
    terms: Terms
    outcome: Outcome
    issued_wall: float
    started_wall: float | None
    ended_wall: float
    run_seconds: float
    worker: str | None
    taken_cores: int | None = None
    taken_ram_mb: int | None = None
    ended_by: str = ""
    ended_by_request: str = ""
    """``request_id`` of the question that canceled it: its repetition gets the same answer, whatever lies between."""
    also_asked_by: tuple[str, ...] = ()
    """Of other questions that had asked for it before: so do their repetitions."""
    attempts: tuple[AttemptPast, ...] = ()
    end: EndRecord | None = None
    """With the output excerpts; None in rows read for a listing."""


class Aggregates(Struct, frozen=True, kw_only=True):
    """Sums over all that was, kept in one row so that a start need not read history."""

    next_job: int = 0
    next_offer: int = 0
    next_node: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    run_seconds: int = 0
    """Sum over succeeded and failed jobs that are still in the record, whole seconds each."""
    submitted_total: int = 0
    succeeded_total: int = 0
    failed_total: int = 0
    canceled_total: int = 0
    lost_attempts_total: int = 0
    signaled_total: int = 0
    """As the three below, of `failed_total`; the rest of that are exit statuses other than 0."""
    timed_out_total: int = 0
    not_started_total: int = 0
    lost_total: int = 0
    """The ``_total`` ones only grow; cleaning leaves them."""
    timeout_seconds: float = 0.0
    """The `worker_timeout_seconds` on which workers may rely."""
    never_given: tuple[tuple[int, int], ...] = ()
    """Inclusive ranges of offer numbers that were passed over because another life of this queue gave them."""
