"""The nouns: immutable values that the core decides about and the protocol carries.

Rules
- Everything here is frozen and hashable, so that equal values can be interned.
- An operating-system string (argument, path, environment) may hold bytes that are not UTF-8. Inside a
  program it is a ``str`` with surrogate escapes; in a value that travels it is `OsText`.
- Sizes are whole megabytes (2**20 bytes) with the unit in the name; times are seconds.
- What a worker tells is bounded here, in the types, and checked where it is decoded: a worker that tells nonsense loses
  its connection, and no number reaches the state that cannot be stored, summed or shown. What a person may type (ids,
  sizes) is not bounded by its type, so that it can be refused with a sentence.
"""

from __future__ import annotations

import base64
from enum import Enum
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from kueue.errors import (
    EXIT_CANCELED,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_OWN_FAILURE,
    EXIT_SIGNAL_BASE,
    EXIT_TIMED_OUT,
)

DEFAULT_PRIORITY = 10
DISCARD = "null"
"""An output path of exactly this text means: throw the stream away. A file of that name is ``./null``."""

OnLost: TypeAlias = Literal["rerun", "wait", "fail"]

Number: TypeAlias = Annotated[int, Meta(ge=0, lt=2**50)]
"""Of a job or an offer. There is room for more above it, so that ids still grow after the worst that can be told."""
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
"""Cores, megabytes, bytes; whole in every JSON reader."""
Units: TypeAlias = Annotated[int, Meta(ge=0, le=4096)]
"""How many of a named resource one machine has: each is given by its number, so they are counted out one by one."""
Wall: TypeAlias = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
"""UTC seconds before the year 10000; what the kernel can be set to lies within."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=2**53)]
Load: TypeAlias = Annotated[float, Meta(ge=0, lt=2**53)]
Excerpted: TypeAlias = Annotated[bytes, Meta(max_length=2**20)]
"""Far above what a worker sends of one stream with an end."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]
Mark: TypeAlias = Annotated[str, Meta(max_length=255)]
"""Of a machine or a boot; empty where the system does not say."""
Remark: TypeAlias = Annotated[str, Meta(max_length=65536)]


class Now(NamedTuple):
    """The clocks. `wall` (UTC seconds) is for the record and may jump; `steady` is for deadlines, never stored."""

    wall: float
    steady: float


class Raw(Struct, frozen=True):
    """An operating-system string that is not UTF-8, as base64 of its bytes."""

    b64: str

    def __post_init__(self) -> None:
        # Here, so that nothing is taken in, stored or handed to a worker that later nobody can read.
        base64.b64decode(self.b64, validate=True)


OsText: TypeAlias = str | Raw


def to_os_text(text: str) -> OsText:
    """The travelling form of a string that may hold surrogate escapes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Raw(base64.b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii"))
    return text


def from_os_text(text: OsText) -> str:
    """The string with surrogate escapes, as ``os.fsdecode`` would give it under a UTF-8 locale."""
    if isinstance(text, Raw):
        return base64.b64decode(text.b64).decode("utf-8", "surrogateescape")
    return text


def shown(text: OsText) -> str:
    """The string for people: bytes that are not UTF-8 become the replacement sign."""
    return from_os_text(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class JobState(str, Enum):
    """Where a job stands; `core.lifecycle` has the moves. `collecting` joins when results are copied back."""

    HELD = "held"
    PENDING = "pending"
    OFFERED = "offered"
    RUNNING = "running"
    STOPPING = "stopping"
    UNREACHABLE = "unreachable"
    DONE = "done"


class Request(Struct, frozen=True, weakref=True):
    """What a job asks for, and how urgent it is: the *shape* by which waiting jobs are grouped.

    A *wish* is a size that the user did not type; see `core.placement`.
    """

    slots: int = 1
    cores: int = 1
    ram_mb: int = 0
    cores_are_wish: bool = False
    ram_is_wish: bool = False
    named: tuple[tuple[str, int], ...] = ()
    """Named resources of one worker, for example ``(("gpu", 2),)``; sorted by name."""
    counters: tuple[tuple[str, int], ...] = ()
    """Lab-wide counters (licences), sorted by name."""
    priority: int = DEFAULT_PRIORITY


class Place(Struct, frozen=True, weakref=True):
    """Where and in what surroundings a job runs, as the submitter had them."""

    cwd: OsText
    """Absolute, symbolic links resolved."""
    pwd: OsText = ""
    """The same directory as the user wrote it (may go through links); empty: as `cwd`."""
    env: tuple[tuple[OsText, OsText], ...] = ()
    """Variables that travel, sorted by name; set on top of the worker's own environment."""
    umask: int = 0o022


class Terms(Struct, frozen=True, weakref=True):
    """How a job may end other than by itself."""

    timeout_seconds: float | None = None
    """Running time (pauses not counted) after which the job is stopped; none: no limit."""
    max_attempts: int = 3
    """How many attempts may be *lost* before the job fails as lost."""
    on_lost: OnLost = "rerun"
    keep_background: bool = False
    """Leave processes alone that outlive the job's main process."""


class Payload(Struct, frozen=True):
    """What only runner and reader look into; stored as one bytes object (JSON)."""

    argv: tuple[OsText, ...]
    name: OsText | None = None
    stdout: OsText | None = None
    """None: captured in the worker's spool. `DISCARD`: thrown away. Else a path, relative ones under the cwd."""
    stderr: OsText | None = None


class JobRange(Struct, frozen=True):
    """Jobs with consecutive ids from one template: `count` times the same, or one per entry of `argvs`."""

    payload: Payload
    place: Place
    request: Request
    terms: Terms = Terms()
    held: bool = False
    count: int = 1
    argvs: tuple[tuple[OsText, ...], ...] = ()
    """If not empty: one job for each, `payload.argv` and `count` do not count."""

    @property
    def size(self) -> int:
        """How many jobs it makes."""
        return len(self.argvs) or self.count


class Share(Struct, frozen=True):
    """Room taken on one node."""

    node: int
    slots: int
    cores: int
    ram_mb: int
    named: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Which units of each named resource, for example ``(("gpu", (0, 3)),)``."""


class Allocation(Struct, frozen=True):
    """All that an attempt holds: shares of nodes and amounts of counters. The only record of use."""

    shares: tuple[Share, ...]
    counters: tuple[tuple[str, int], ...] = ()


# --- how a job ended -------------------------------------------------------------------------------------------------


class Exited(Struct, frozen=True, tag="exited"):
    """The main process ended by itself with this exit status (0…255)."""

    code: Annotated[int, Meta(ge=0, le=255)]


class Signaled(Struct, frozen=True, tag="signaled"):
    """A signal that was not ours ended the main process."""

    signal: Annotated[int, Meta(ge=0, le=127)]


class NotStarted(Struct, frozen=True, tag="not_started"):
    """The process could not be started; `cause` decides the exit code (127, 126, 125)."""

    reason: Remark
    cause: Literal["not_found", "not_executable", "output", "directory", "limit", "other"] = "other"


class TimedOut(Struct, frozen=True, tag="timed_out"):
    """The job ran longer than its `timeout_seconds` and was stopped."""

    after_seconds: Seconds


class Canceled(Struct, frozen=True, tag="canceled"):
    """A person ended it."""

    reason: Remark = ""


class Lost(Struct, frozen=True, tag="lost"):
    """The last allowed attempt was given away or proven gone; the reason names the workers."""

    reason: Remark


Outcome: TypeAlias = Exited | Signaled | NotStarted | TimedOut | Canceled | Lost

CODE_NOT_STARTED = -43
CODE_SIGNALED = -44
CODE_KILLED = -46
CODE_LOST = -47
CODE_TIMED_OUT = -48


def succeeded(outcome: Outcome) -> bool:
    return isinstance(outcome, Exited) and outcome.code == 0


def kind_of(outcome: Outcome) -> Literal["succeeded", "failed", "canceled"]:
    """The word under which listings count a finished job."""
    if isinstance(outcome, Canceled):
        return "canceled"
    return "succeeded" if succeeded(outcome) else "failed"


def return_code(outcome: Outcome) -> int:
    """The code that `show-job` and `cmd --wait` print: the job's own, or one of the special negative ones."""
    match outcome:
        case Exited(code):
            return code
        case Signaled():
            return CODE_SIGNALED
        case NotStarted():
            return CODE_NOT_STARTED
        case TimedOut():
            return CODE_TIMED_OUT
        case Canceled():
            return CODE_KILLED
        case Lost():
            return CODE_LOST


def exit_code(outcome: Outcome) -> int:
    """What `cmd --wait`, `wait-job` and `follow` exit with."""
    match outcome:
        case Exited(code):
            return code
        case Signaled(signal):
            return EXIT_SIGNAL_BASE + signal
        case NotStarted(_, cause):
            codes = {"not_found": EXIT_NOT_FOUND, "not_executable": EXIT_NOT_EXECUTABLE}
            return codes.get(cause, EXIT_OWN_FAILURE)
        case TimedOut():
            return EXIT_TIMED_OUT
        case Canceled():
            return EXIT_CANCELED
        case Lost():
            return EXIT_OWN_FAILURE


class Excerpt(Struct, frozen=True):
    """What the server keeps of one output stream: the first and the last bytes."""

    size: Amount = 0
    """Bytes the job wrote in all."""
    head: Excerpted = b""
    tail: Excerpted = b""
    """The end of the stream; empty when `head` is the whole."""
    redirected: OsText | None = None
    """Absolute path on the worker if the user gave one; then head and tail are empty."""
    discarded: bool = False

    @property
    def omitted(self) -> int:
        """Bytes between head and tail that are not here."""
        return max(0, self.size - len(self.head) - len(self.tail))


class EndRecord(Struct, frozen=True):
    """How one attempt ended, as its runner wrote it down."""

    outcome: Outcome
    started_wall: Wall | None
    ended_wall: Wall
    run_seconds: Seconds = 0.0
    """Spawn to exit on the worker's steady clock, pauses included."""
    cpu_seconds: Seconds = 0.0
    max_rss_mb: Amount = 0
    leftovers_stopped: Amount = 0
    """Processes of the job that outlived its main process and were stopped."""
    notes: Annotated[tuple[Remark, ...], Meta(max_length=100)] = ()
    stdout: Excerpt = Excerpt()
    stderr: Excerpt = Excerpt()


class MachineTotals(Struct, frozen=True):
    """What a worker's machine has, after the overrides of its configuration."""

    slots: Amount
    cores: Amount
    ram_mb: Amount
    named: Annotated[tuple[tuple[Name, Units], ...], Meta(max_length=100)] = ()


class MachineInfo(Struct, frozen=True):
    """What a machine is; for people only."""

    kernel: Remark = "unknown"
    distribution: Remark = "unknown"
    cpu_mhz: Amount = 0


class MachineLoad(Struct, frozen=True):
    """How busy a machine is, as measured by its worker; never what is free: the server sums allocations itself."""

    load: tuple[Load, Load, Load] = (0.0, 0.0, 0.0)
    busy_cores: Amount = 0
    """Cores in use: ``ceil(ceil(load1 - ghost) * scale)``; 0 when dynamic checking is off."""
    others_busy_cores: Amount = 0
    """The same without what kueue's running jobs contribute."""
    available_ram_mb: Amount | None = None
    """None: do not look at measured memory (dynamic checking is off)."""
    others_ram_mb: Amount = 0
    """Memory used by anything but kueue's jobs."""


class NodeRecord(Struct, frozen=True):
    """What the server remembers of a worker over restarts."""

    id: int
    identity: str
    name: str
    machine_id: str = ""
    boot_id: str = ""
    offline: bool = False
    """Taken out by hand (`kueue node offline`): gets no new jobs."""
    totals: MachineTotals = MachineTotals(0, 0, 0)
