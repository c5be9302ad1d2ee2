"""What a worker and its runner say to each other: orders to the runner, events from it.

On the wire each is one line of JSON whose ``type`` names the class. The runner is a program of its own that may be
older than the worker: `PROTOCOL` only grows, unknown fields are skipped on both sides, new ones have defaults.

Rules
- ``offer`` names an attempt everywhere. Every order may be repeated: a second `StartAttempt` of an offer starts nothing
  and is answered by how the attempt stands.
- An event is sent to the newest attachment only; whoever attaches later learns the same from `Attached`.
- ``..._boottime`` is ``CLOCK_BOOTTIME`` in seconds (it counts suspend), ``..._wall`` UTC seconds for people.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from kueue.model import EndRecord, OnLost, OsText

PROTOCOL = 1

RunnerState: TypeAlias = Literal[
    "queued", "starting", "running", "paused", "stopping", "ended", "gone", "unknown"
]  # as in `AttemptReport`, and ``starting``: a process exists, its program is not executed yet


class Line(Struct, frozen=True, tag=True, tag_field="type", kw_only=True):
    """Base of orders and events."""


# --- worker → runner -------------------------------------------------------------------------------------------------


class Attach(Line, frozen=True, kw_only=True):
    """First line of an attachment; it ends the older one. Answered by `Attached`."""

    protocol: int = PROTOCOL
    worker_pid: int = 0
    restart_command: tuple[OsText, ...] = ()
    """How to start a worker that died without `Detach`; empty: do not."""
    restart_env: tuple[tuple[OsText, OsText], ...] = ()
    """The whole environment of that command."""
    server_lock_path: OsText | None = None
    """The server's state lock, if this is the server's own host: while nobody holds it the lease does not lapse."""
    server_lock_seconds: float = 0.0
    """How long each look that finds that lock free prolongs the lease."""


class StartAttempt(Line, frozen=True, kw_only=True):
    """Run this. Answered by `Started`, `Queued`, `Refused` or `Ended` (could not start)."""

    offer: int
    job: int
    queue_id: str
    argv: tuple[OsText, ...]
    env: tuple[tuple[OsText, OsText], ...]
    """The whole environment (``PWD`` is set by the runner)."""
    cwd: OsText
    pwd: OsText = ""
    umask: int = 0o022
    stdout: OsText | None = None
    """None: into the spool. `kueue.model.DISCARD`: thrown away. Else a path, relative ones under the cwd."""
    stderr: OsText | None = None
    timeout_seconds: float | None = None
    on_lost: OnLost = "rerun"
    keep_background: bool = False
    grace_seconds: float = 10.0
    """Between SIGTERM and SIGKILL when it is stopped by time-out or leaves processes behind."""
    nice: int = 0
    """Added to the runner's own nice value."""
    line: int | None = None
    """The first offer of its line, if another one begins it: start when no earlier attempt of that line is left, nor
    any that runs. At once if there is none.
    """
    memo: str = ""
    """Given back in `AttemptState`; the runner does not look into it."""


class SetLease(Line, frozen=True, kw_only=True):
    """The lease now ends at this moment; an earlier one than before is taken as well."""

    deadline_boottime: float


class StopOrder(Line, frozen=True, kw_only=True):
    """End the attempt. ``kill``: SIGKILL at once. Answered by `Ended`, in the end, or `Unknown`."""

    offer: int
    kill: bool = False
    grace_seconds: float = 10.0


class WithdrawOrder(Line, frozen=True, kw_only=True):
    """Do not start it. Answered by `Withdrawn` (also for an offer never seen: it will not start later either), else by
    how it stands (`Started`, `Ended`).
    """

    offer: int


class ForgetAttempts(Line, frozen=True, kw_only=True):
    """The ends of these are stored by the server: drop their records. Output files stay. Not answered."""

    offers: tuple[int, ...]


class Inherit(Line, frozen=True, kw_only=True):
    """Another runner died: take in what it left, kill it, prove it gone. Answered by `Attached`, then by `Gone` or
    `Ended` for each.

    `attempts`: what it is known to have had. Those without a record are taken in if a process of theirs is left.
    """

    attempts: tuple[AttemptState, ...] = ()


class Detach(Line, frozen=True, kw_only=True):
    """An orderly stop of the worker: it is not restarted. Answered by closing the connection."""


class Ping(Line, frozen=True, kw_only=True):
    """Answered by `Pong`."""

    number: int = 0


# --- runner → worker -------------------------------------------------------------------------------------------------


class AttemptState(Struct, frozen=True, kw_only=True):
    """Where one attempt stands."""

    offer: int
    job: int
    queue_id: str
    state: RunnerState
    started_wall: float | None = None
    pid: int | None = None
    end: EndRecord | None = None
    """With ``ended``; without excerpts of the output."""
    note: str = ""
    """For people; with ``gone`` the reason."""
    memo: str = ""


class Attached(Line, frozen=True, kw_only=True):
    """Answer to `Attach`: every attempt that this runner has and nobody has told it to forget."""

    protocol: int
    version: str
    runner: str
    pid: int
    lease_deadline_boottime: float | None = None
    attempts: tuple[AttemptState, ...] = ()
    leaving: bool = False
    """It was told to end and takes nothing more. One that took over from an older release does not know."""


class Started(Line, frozen=True, kw_only=True):
    """The program of this attempt was executed."""

    offer: int
    job: int
    started_wall: float
    pid: int = 0


class Queued(Line, frozen=True, kw_only=True):
    """The attempt starts when those before it in its line are over."""

    offer: int


class Refused(Line, frozen=True, kw_only=True):
    """Never started and never will be, because of the moment: no lease, the number is in use by another queue."""

    offer: int
    reason: str
    leaving: bool = False
    """The runner was told to end: it takes nothing more."""


class Withdrawn(Line, frozen=True, kw_only=True):
    """Never started and never will be."""

    offer: int


class Changed(Line, frozen=True, kw_only=True):
    """The attempt was paused (*proven*: nothing of it runs), continues, is being stopped, or cannot be and why."""

    offer: int
    state: RunnerState
    note: str = ""


class PauseDone(Line, frozen=True, kw_only=True):
    """The lease has lapsed and all that had to be paused or killed is proven to be."""

    deadline_boottime: float


class Ended(Line, frozen=True, kw_only=True):
    """The attempt is over, none of its processes is left (but those it was allowed to leave), its record is written."""

    offer: int
    job: int
    end: EndRecord


class Gone(Line, frozen=True, kw_only=True):
    """Proven: no process of it is left, and how it ended is not known (its runner died with it)."""

    offer: int
    job: int
    queue_id: str
    reason: str


class Unknown(Line, frozen=True, kw_only=True):
    """The runner has no such attempt."""

    offer: int


class Pong(Line, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    number: int = 0


Order: TypeAlias = (
    Attach | StartAttempt | SetLease | StopOrder | WithdrawOrder | ForgetAttempts | Inherit | Detach | Ping
)
Event: TypeAlias = (
    Attached | Started | Queued | Refused | Withdrawn | Changed | PauseDone | Ended | Gone | Unknown | Pong
)


# --- what the worker's side of its runners concludes -----------------------------------------------------------------


class ProvenStill(Struct, frozen=True, kw_only=True):
    """A runner has told `PauseDone`: nothing runs of those of its attempts either that wait in lines."""

    deadline_boottime: float
    offers: tuple[int, ...]


class RunnerMute(Struct, frozen=True, kw_only=True):
    """A runner does not answer that has these attempts in its care: nothing is heard of them for now."""

    offers: tuple[int, ...]
    note: str = ""
    """For people: which runners do not answer; empty: all do."""


class RunnerAnswers(Struct, frozen=True, kw_only=True):
    """It does again, see `RunnerMute`; or it is dead, and these are none."""

    offers: tuple[int, ...]
    note: str = ""


News: TypeAlias = Event | ProvenStill | RunnerMute | RunnerAnswers
"""What the agent is told of its attempts."""
