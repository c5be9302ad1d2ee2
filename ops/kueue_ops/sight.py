"""What can be seen of a host: over ssh on the host itself, and by the server of its worker."""

from __future__ import annotations

from typing import Literal

import msgspec

SESSION = "kueue_worker"
"""Exact name of the screen session that a worker runs in."""
UNIT = "kueue-worker.service"
"""The worker's unit of ``systemd --user``, where one is installed."""


Kind = Literal[
    "unknown_host",
    "refused",
    "no_route",
    "timeout",
    "no_greeting",
    "unknown_key",
    "changed_key",
    "authentication",
    "ssh",
    "hung",
    "command",
    "not_found",
    "disk",
    "screen",
    "died",
]
"""Of `Trouble`."""


class Trouble(msgspec.Struct, frozen=True):
    """Why a host could not be looked at or helped: one sentence for its line, and what to type."""

    kind: Kind
    sentence: str
    hint: str = ""

    def __str__(self) -> str:
        return self.sentence


class ScreenSession(msgspec.Struct, frozen=True):
    """One line of `screen -ls` whose session has exactly the name `SESSION`."""

    pid: int
    is_dead: bool
    program: str = ""
    """What runs in it when that is no worker: then it is somebody's, and left alone; empty: ours."""


class Service(msgspec.Struct, frozen=True):
    """`UNIT` on a host whose worker it is for: it runs, has failed, or starts with the machine."""

    state: str
    """``active``, ``activating``, ``failed``, ``inactive`` and so on, as systemd calls it."""
    is_enabled: bool
    pid: int | None
    """Its main process; None: it has none."""
    why: str = ""
    """Why it has none, as far as systemd says; empty: nothing went wrong."""


class HostSight(msgspec.Struct, frozen=True):
    """A host as one look over ssh found it."""

    host_name: str
    """Short host name, as the worker's default name is made of it."""
    boot_id: str
    sessions: tuple[ScreenSession, ...]
    has_screen: bool
    command: str
    """How the worker is started there, a word for `sh`; empty: it was not found."""
    tried: tuple[str, ...] = ()
    """Where it was looked for, when it was not found."""
    version: str = ""
    """Of kueue as installed there now; empty: not known."""
    worker_name: str = ""
    """Name the worker has or would have there."""
    worker_pid: int | None = None
    """Of the worker that holds its lock there now; None: none runs."""
    worker_version: str = ""
    """Of the worker that runs; empty: none runs, or not known."""
    last_words: str = ""
    """Last line of the worker's log when none runs."""
    noted: tuple[str, ...] = ()
    """Remarks worth a line: no screen, linger off where logind ends processes, dead sessions wiped."""
    state_dir: str = ""
    """Of the worker, on the host; empty: not known."""
    log_file: str = ""
    """That a worker started by us writes; empty: not known."""
    service: Service | None = None
    """None: the worker there is not for systemd to start."""
    ends_at_logout: bool = False
    """logind there ends what a login leaves behind (``KillUserProcesses``)."""


class WorkerSight(msgspec.Struct, frozen=True):
    """A worker as the server lists it."""

    name: str
    is_alive: bool
    """Connected and not silent."""
    version: str = ""
    boot_id: str = ""
    """Of the boot in which it said hello; empty: the server does not tell."""
    offline: bool = False
    """A person took it offline; it is not our business to start it less for that."""


class ServerWord(msgspec.Struct, frozen=True):
    """What the server says about one worker: nothing at all when it is not reached."""

    is_reached: bool
    worker: WorkerSight | None = None

    @property
    def sees_it(self) -> bool:
        return self.worker is not None and self.worker.is_alive
