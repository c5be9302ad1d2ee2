"""Every message that kueue's programs say to one another, in four blocks.

A frame is a 4-byte big-endian length and a JSON array of messages; a message is an object whose ``type`` names
its class here. Unknown fields are skipped and new fields have defaults, so that neighbours of one protocol number
understand each other. `docs/protocol.md` is generated from this module.

Rules
- ``seq`` is chosen by the client, unique on its connection, and stands in every answer to that question.
- ``request_id`` (32 hex digits) marks a question that changes something. The server stores it with its answer for an
  hour: a client that lost its connection repeats the question word for word and gets the first answer.
- ``offer`` is the fencing number of an attempt: it grows, is never used twice, and names the attempt everywhere.
- Times are UTC seconds (``..._wall``); durations are seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from kueue.model import (
    Allocation,
    Amount,
    EndRecord,
    JobRange,
    MachineInfo,
    MachineLoad,
    MachineTotals,
    Mark,
    Name,
    Number,
    OsText,
    Outcome,
    Payload,
    Place,
    Remark,
    Request,
    Seconds,
    Terms,
    Wall,
)

PROTOCOL = 1
"""Grows by one when an older neighbour could misunderstand."""

FRAME_LIMIT_BEFORE_HELLO = 64 * 1024
FRAME_LIMIT = 16 * 1024 * 1024

Stream: TypeAlias = Literal["stdout", "stderr"]
JobFilter: TypeAlias = Literal["held", "pending", "offered", "running", "succeeded", "failed", "canceled"]
RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Version: TypeAlias = Annotated[str, Meta(max_length=64)]
WorkerState: TypeAlias = Literal["online", "offline", "silent", "away", "set aside"]


class Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Base of all messages."""


# === client → server =================================================================================================


class ClientHello(Message, frozen=True, kw_only=True):
    """First message of a command. Answered by `Welcome` or `Sorry`."""

    protocol: int = PROTOCOL
    version: Version = ""


class Submit(Message, frozen=True, kw_only=True):
    """Make jobs; all or none, at most 2,000,000. Answered by `Submitted` or `Failed`.

    A submission above the frame limit goes in parts with one ``request_id``; only the last has ``last = true`` and
    only it is answered. Parts are stored together when the last has come.
    """

    seq: int
    request_id: RequestId
    ranges: tuple[JobRange, ...]
    part: int = 0
    last: bool = True
    refuse_impossible: bool = False
    """Refuse when no worker known now could ever run one of the jobs."""


class ListJobs(Message, frozen=True, kw_only=True):
    """Answered by `JobList`. The summary counts all jobs, whatever the filter."""

    seq: int
    states: tuple[JobFilter, ...] = ()
    """Empty: all."""
    limit: Amount | None = None
    """The most recent so many of those selected."""
    ids: tuple[tuple[int, int], ...] = ()
    """Inclusive ranges; empty: all."""


class ShowJobs(Message, frozen=True, kw_only=True):
    """Answered by `JobDetails`."""

    seq: int
    ids: tuple[tuple[int, int], ...]


class WatchJobs(Message, frozen=True, kw_only=True):
    """Answered by `Watching`, then by one `JobEnded` for each job when it is done.

    `Watching` comes at once; of very many jobs, when it is known which of them are in the record.
    """

    seq: int
    ids: tuple[tuple[int, int], ...]


class RemoveJobs(Message, frozen=True, kw_only=True):
    """Cancel jobs. Answered by `Results` within 10 s; what is not proven by then has ``ok = false``.

    Of thousands of jobs the 10 s begin when the last of them was told to end.
    """

    seq: int
    request_id: RequestId
    ids: tuple[tuple[int, int], ...]
    kill: bool = False
    """Also jobs that run."""
    force: bool = False
    """End them in the record at once, whatever their worker says (implies kill)."""


class CleanJobs(Message, frozen=True, kw_only=True):
    """Forget succeeded and canceled jobs, with ``failed`` those that failed too. Answered by `Done`."""

    seq: int
    request_id: RequestId
    failed: bool = False


class HoldJobs(Message, frozen=True, kw_only=True):
    """Keep pending jobs from starting. Answered by `Results`."""

    seq: int
    request_id: RequestId
    ids: tuple[tuple[int, int], ...]


class ReleaseJobs(Message, frozen=True, kw_only=True):
    """Let held jobs start. Answered by `Results`."""

    seq: int
    request_id: RequestId
    ids: tuple[tuple[int, int], ...]


class ExplainJob(Message, frozen=True, kw_only=True):
    """Why does this job wait? Answered by `Explanation` or `Failed`."""

    seq: int
    id: int


class ListWorkers(Message, frozen=True, kw_only=True):
    """Answered by `WorkerList`."""

    seq: int
    ids: tuple[tuple[int, int], ...] = ()
    """Empty: all."""


class ListResources(Message, frozen=True, kw_only=True):
    """Answered by `ResourceList`."""

    seq: int


class SetNode(Message, frozen=True, kw_only=True):
    """Take workers out, back in, or declare them dead. Answered by `Results` (one entry, ``id`` = the worker's).

    ``dead`` is a person's word that nothing runs there any more: its attempts are proven gone. Of a worker that was
    heard just now it is refused unless `force` is set: it would stop jobs that run well.
    """

    seq: int
    request_id: RequestId
    name: str
    """The worker's name, or its id in digits."""
    state: Literal["online", "offline", "dead"]
    force: bool = False


class ReadOutput(Message, frozen=True, kw_only=True):
    """Read one stream of a job. Answered by one `Output`, whose ``end`` says that the stream ends with it.

    With ``follow`` it is answered by many, of which the last has ``end = true``.
    """

    seq: int
    id: int
    stream: Stream = "stdout"
    offset: Amount = 0
    follow: bool = False
    attempt: Amount = 0
    """With ``follow``: the attempt whose output was read up to ``offset``; of another one all is sent. 0: not known."""


class StopReading(Message, frozen=True, kw_only=True):
    """No more `Output` for that ``seq``. Not answered."""

    seq: int


class ServerInfo(Message, frozen=True, kw_only=True):
    """Answered by `Info`."""

    seq: int


class Backup(Message, frozen=True, kw_only=True):
    """Copy the server's state to a file of its machine. Answered by `BackedUp`; taken at the local socket only."""

    seq: int
    path: OsText
    """Absolute."""
    force: bool = False
    """Replace a file that is there."""


# === server → client =================================================================================================


class Welcome(Message, frozen=True, kw_only=True):
    """The secret was proven and the versions fit."""

    protocol: int
    version: str
    queue_id: str
    principal: str
    """Who the server takes the caller for; now always ``operator``."""


class Sorry(Message, frozen=True, kw_only=True):
    """The peer cannot be served: version, identity, overload. The connection is closed after it."""

    reason: str
    hint: str = ""
    lasting: bool = True
    """Trying again without a change is useless."""


class Failed(Message, frozen=True, kw_only=True):
    """The question was refused; nothing changed."""

    seq: int
    error: str
    hint: str = ""
    exit_code: int = 1


class Done(Message, frozen=True, kw_only=True):
    """The question was carried out."""

    seq: int
    text: str = ""
    count: int = 0


class Submitted(Message, frozen=True, kw_only=True):
    """The jobs are stored; ``ids`` are inclusive ranges in the order of the submission."""

    seq: int
    ids: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...] = ()
    """For people: for example that no worker can ever run the job."""


class JobRow(Struct, frozen=True, kw_only=True):
    """A job in a listing."""

    id: int
    state: JobFilter
    payload: Payload
    cwd: OsText
    request: Request
    taken_cores: int | None = None
    """What a wish took, while there is an allocation or an end."""
    taken_ram_mb: int | None = None
    worker: str | None = None
    issued_wall: float
    offered_wall: float | None = None
    started_wall: float | None = None
    ended_wall: float | None = None
    run_seconds: float | None = None
    return_code: int | None = None
    outcome: Outcome | None = None
    attempt: int = 0
    note: str = ""
    """Beside the state: ``stopping``, ``worker ralab04 silent since 14:02``, the reason it waits."""
    stopping: bool = False


class AttemptRow(Struct, frozen=True, kw_only=True):
    """One attempt in a job's history."""

    number: int | None
    """None for an offer that certainly never started."""
    offer: int
    worker: str
    offered_wall: float
    started_wall: float | None = None
    ended_wall: float | None = None
    end: str = ""
    """In words: ``exited with code 0``, ``lost: ralab04 was silent and the job was given away``."""


class JobDetail(Struct, frozen=True, kw_only=True):
    """All that is known of a job."""

    row: JobRow
    place: Place
    terms: Terms
    principal: str
    comment: str = ""
    attempts: tuple[AttemptRow, ...] = ()
    end: EndRecord | None = None
    waits: tuple[str, ...] = ()
    """Why it waits, one sentence each."""
    events: tuple[tuple[float, str, str], ...] = ()
    """(wall, who, what)."""


class JobList(Message, frozen=True, kw_only=True):
    """Answer to `ListJobs`, ascending ids; long ones come in several, the last with ``end``."""

    seq: int
    jobs: tuple[JobRow, ...]
    counts: tuple[tuple[str, int], ...] = ()
    """State word → number of all jobs; in the last part."""
    average_seconds: int = 0
    eta_seconds: int = 0
    end: bool = True


class JobDetails(Message, frozen=True, kw_only=True):
    """Answer to `ShowJobs`."""

    seq: int
    jobs: tuple[JobDetail, ...]
    missing: tuple[tuple[int, int], ...] = ()
    end: bool = True


class Watching(Message, frozen=True, kw_only=True):
    """These ids are watched; ``missing`` do not exist."""

    seq: int
    missing: tuple[tuple[int, int], ...] = ()


class JobEnded(Message, frozen=True, kw_only=True):
    """A watched job is done; its output is stored already."""

    seq: int
    id: int
    outcome: Outcome | None
    """None: the job was cleaned away before anybody could say how it ended."""
    return_code: int = 0
    exit_code: int = 0


class Result(Struct, frozen=True, kw_only=True):
    """What became of one of the things named in a question."""

    id: int
    ok: bool
    text: str
    hint: str = ""


class Results(Message, frozen=True, kw_only=True):
    """One entry for each thing named."""

    seq: int
    results: tuple[Result, ...]


class Explanation(Message, frozen=True, kw_only=True):
    """Why a job waits: one sentence per worker and counter; ``verdict`` in one sentence for all."""

    seq: int
    id: int
    verdict: str
    workers: tuple[tuple[str, bool, str], ...] = ()
    """(worker, would fit, sentence)."""
    counters: tuple[tuple[str, bool, str], ...] = ()


class WorkerRow(Struct, frozen=True, kw_only=True):
    """A worker as the server sees it."""

    id: int
    name: str
    state: WorkerState
    note: str = ""
    version: str = ""
    connected_wall: float | None = None
    updated_wall: float | None = None
    info: MachineInfo = MachineInfo()
    totals: MachineTotals
    load: MachineLoad = MachineLoad()
    free_slots: int = 0
    free_cores: int = 0
    free_ram_mb: int = 0
    occupation: float = 0.0
    """0…1, the largest of slots, cores and memory."""
    offered: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    boot_id: str = ""
    """Of the machine's boot in which the worker said hello; what is older than the machine's present one is over."""


class WorkerList(Message, frozen=True, kw_only=True):
    """Answer to `ListWorkers`, ascending ids."""

    seq: int
    workers: tuple[WorkerRow, ...]
    missing: tuple[tuple[int, int], ...] = ()


class ResourceRow(Struct, frozen=True, kw_only=True):
    """A lab-wide counter."""

    name: str
    used: int
    total: int


class ResourceList(Message, frozen=True, kw_only=True):
    """Answer to `ListResources`, sorted by name."""

    seq: int
    resources: tuple[ResourceRow, ...]


class Output(Message, frozen=True, kw_only=True):
    """A piece of a stream. ``data`` begins at ``offset``; ``note`` is a remark (a gap, the source is away)."""

    seq: int
    offset: int
    data: bytes = b""
    source: Literal["worker", "stored", "none"] = "worker"
    note: str = ""
    attempt: int = 0
    end: bool = False
    state: JobFilter | None = None


class Info(Message, frozen=True, kw_only=True):
    """Answer to `ServerInfo`."""

    seq: int
    version: str
    protocol: int
    queue_id: str
    pid: int
    started_wall: float
    read_only: str = ""
    """Why the server accepts nothing at the moment; empty: it does."""
    lock_trouble: str = ""
    """Why no job of a silent worker is given away: its lock is not in place and cannot be put back; empty: it is."""
    now_wall: float | None = None
    """UTC seconds on the server's clock when it answered: clocks are compared by it, nothing depends on it."""
    secrets: tuple[str, ...] = ()
    """Fingerprints of the secrets that it accepts, the present one first."""
    old_secret_workers: tuple[str, ...] = ()
    """Names of the workers that are connected by another than the present one."""


class BackedUp(Message, frozen=True, kw_only=True):
    """Answer to `Backup`: comes several times while the copy is made; the last, with ``end``, says that it is whole."""

    seq: int
    path: OsText = ""
    done_bytes: int = 0
    total_bytes: int = 0
    live: int = 0
    """Jobs in it that are not over."""
    finished: int = 0
    next_job: int = 0
    """The id that the next job would have got."""
    note: str = ""
    end: bool = True


# === worker → server =================================================================================================


class AttemptReport(Struct, frozen=True, kw_only=True):
    """An attempt that was ever started on this worker and whose end is not acknowledged.

    ``queued``: handed to the runner, not started yet. ``unknown``: its runner does not answer. ``gone``: proven that
    no process of it is left and no end was written (runner's lock free, no tagged process; or the machine booted).
    """

    offer: Number
    job: Number
    queue_id: Name
    state: Literal["queued", "running", "paused", "stopping", "ended", "unknown", "gone"]
    started_wall: Wall | None = None
    end: EndRecord | None = None


class WorkerHello(Message, frozen=True, kw_only=True):
    """First message of a worker. Answered by `WorkerWelcome` or `Sorry`.

    `attempts` is the whole truth of the worker: whatever was offered before and does not stand there was never handed
    to a runner and never will be.
    """

    protocol: int = PROTOCOL
    version: Version = ""
    identity: Name
    name: Name
    machine_id: Mark
    boot_id: Mark
    made_boottime: Seconds = 0.0
    """When it was made, on the worker's ``CLOCK_BOOTTIME``: one that was held up on the way and comes after a newer one
    of the same boot is refused, for what it says is not the truth any more. 0: not said."""
    info: MachineInfo = MachineInfo()
    totals: MachineTotals
    load: MachineLoad = MachineLoad()
    attempts: tuple[AttemptReport, ...] = ()
    lines: bool = False
    """It understands `Offer.line`."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Every ``min(10, lease/6)`` seconds. Answered by `HeartbeatAnswer` with the same ``number``."""

    number: Amount


class Report(Message, frozen=True, kw_only=True):
    """The machine's load, at the set interval and after every start and end. Not answered."""

    load: MachineLoad
    totals: MachineTotals | None = None
    """If they changed."""
    note: Remark = ""
    """For people: what hinders the worker itself."""


class AttemptStarted(Message, frozen=True, kw_only=True):
    """The runner has started the process of this offer. Not answered; repeated in `WorkerHello`."""

    offer: Number
    started_wall: Wall


class AttemptQueued(Message, frozen=True, kw_only=True):
    """The offer is with the runner and starts when no earlier attempt of its line is left. Not answered."""

    offer: Number


class OfferDeferred(Message, frozen=True, kw_only=True):
    """Not now; never started. The server asks again after a newer load."""

    offer: Number
    reason: Remark
    load: MachineLoad


class OfferRejected(Message, frozen=True, kw_only=True):
    """Not here; never started. Holds for the job's directory."""

    offer: Number
    reason: Remark


class OfferWithdrawn(Message, frozen=True, kw_only=True):
    """Answer to `WithdrawOffer`: never started and never will be."""

    offer: Number


class AttemptChanged(Message, frozen=True, kw_only=True):
    """For people: the attempt was paused, continues, or cannot be stopped and why."""

    offer: Number
    note: Remark = ""


class AttemptEnded(Message, frozen=True, kw_only=True):
    """The attempt is over and none of its processes is left. Answered by `Acknowledge` once it is stored."""

    offer: Number
    end: EndRecord


class AttemptGone(Message, frozen=True, kw_only=True):
    """Proven: no process of it is left and no end was written. Answered by `Acknowledge`."""

    offer: Number
    reason: Remark


class FetchedOutput(Message, frozen=True, kw_only=True):
    """Answer to `FetchOutput`."""

    token: Amount
    offset: Amount
    data: bytes = b""
    size: Amount = 0
    """Bytes in the stream now."""
    error: Remark = ""
    note: Remark = ""
    """For example how many bytes the size limit cut out here."""


class Goodbye(Message, frozen=True, kw_only=True):
    """An orderly stop: of a worker (its jobs go on under their runner) or of the server.

    That of a worker is answered by the same: it has then read, and given back, whatever was offered to it before.
    """

    reason: Remark = ""


# === server → worker =================================================================================================


class WorkerWelcome(Message, frozen=True, kw_only=True):
    """The worker is taken in. What it shall do about the attempts it named follows as orders."""

    protocol: int
    version: str
    queue_id: str
    worker: int
    worker_timeout_seconds: float
    lease_seconds: float
    cleanup_after_seconds: float
    """Kept output of acknowledged attempts may be dropped at this age."""


class HeartbeatAnswer(Message, frozen=True, kw_only=True):
    """The lease now runs until the moment the worker noted *before* it sent that heartbeat, plus ``lease_seconds``."""

    number: int
    lease_seconds: float


class Offer(Message, frozen=True, kw_only=True):
    """Run this. It permits the start.

    Answered by `AttemptStarted`, `AttemptEnded` (could not start), `AttemptQueued`, `OfferDeferred` or `OfferRejected`.
    """

    offer: int
    job: int
    attempt: int
    """The number this attempt gets if it starts."""
    payload: Payload
    place: Place
    request: Request
    terms: Terms
    allocation: Allocation
    line: int | None = None
    """The first offer of its line, if another one begins it: it starts when no earlier attempt of that line is left,
    in the room which that line holds. Only to workers that said `WorkerHello.lines`.
    """


class WithdrawOffer(Message, frozen=True, kw_only=True):
    """Do not start it.

    Answered by `OfferWithdrawn` if it never started, else by how it stands (`AttemptStarted`, `AttemptEnded`).
    """

    offer: int


class StopAttempt(Message, frozen=True, kw_only=True):
    """End it; ``kill``: at once and without a grace (it was paused or given away). Answered by `AttemptEnded`."""

    offer: int
    kill: bool = False


class Acknowledge(Message, frozen=True, kw_only=True):
    """The ends of these offers are stored; the runner's records of them may go."""

    offers: tuple[int, ...]


class ForgetOutput(Message, frozen=True, kw_only=True):
    """The jobs of these offers were cleaned away; their kept output may go."""

    offers: tuple[int, ...]


class FetchOutput(Message, frozen=True, kw_only=True):
    """Send a piece of a stream. Answered by `FetchedOutput`."""

    token: int
    offer: int
    stream: Stream
    offset: int
    limit: int = 256 * 1024


FromClient: TypeAlias = (
    ClientHello
    | Submit
    | ListJobs
    | ShowJobs
    | WatchJobs
    | RemoveJobs
    | CleanJobs
    | HoldJobs
    | ReleaseJobs
    | ExplainJob
    | ListWorkers
    | ListResources
    | SetNode
    | ReadOutput
    | StopReading
    | ServerInfo
    | Backup
)
ToClient: TypeAlias = (
    Welcome
    | Sorry
    | Failed
    | Done
    | Submitted
    | JobList
    | JobDetails
    | Watching
    | JobEnded
    | Results
    | Explanation
    | WorkerList
    | ResourceList
    | Output
    | Info
    | BackedUp
    | Goodbye
)
FromWorker: TypeAlias = (
    WorkerHello
    | Heartbeat
    | Report
    | AttemptStarted
    | AttemptQueued
    | OfferDeferred
    | OfferRejected
    | OfferWithdrawn
    | AttemptChanged
    | AttemptEnded
    | AttemptGone
    | FetchedOutput
    | Goodbye
)
ToWorker: TypeAlias = (
    WorkerWelcome
    | Sorry
    | HeartbeatAnswer
    | Offer
    | WithdrawOffer
    | StopAttempt
    | Acknowledge
    | ForgetOutput
    | FetchOutput
    | Goodbye
)
