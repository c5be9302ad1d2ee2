"""What is shown of each host: the file that the running tool keeps, and the table made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kueue import clock, whole_file
from kueue.cli.screen import Screen
from kueue.cli.table import Cell, Column, render
from kueue.cli.text import harmless
from kueue_ops.restart_decision import Decision, spoken
from kueue_ops.sight import HostSight, ServerWord, Trouble, WorkerSight


class HostStatus(msgspec.Struct, frozen=True):
    """One host as the tool last saw it."""

    host: str
    """As it stands in the settings."""
    is_reachable: bool | None = None
    """None: not looked at yet."""
    session: str = ""
    """``screen 1234``, ``dead``, ``systemd``, ``none``; empty: not known."""
    worker: str = ""
    worker_pid: int | None = None
    server: str = ""
    """What the server said then: ``alive``, ``offline``, ``not seen``, ``away``; empty: it was not asked."""
    action: str = ""
    """What was decided: ``leave``, ``start``, ``renew``, ``back_off``, ``give_up``, ``trouble``."""
    sentence: str = ""
    hint: str = ""
    more: str = ""
    has_worker: bool = False
    is_settled: bool = False
    looked_wall: float | None = None
    last_action: str = ""
    """``started``, ``renewed``, ``not started``, ``not renewed``; empty: nothing was done."""
    last_action_wall: float | None = None
    next_wall: float | None = None

    @classmethod
    def of(
        cls, host: str, look: HostSight | Trouble, word: ServerWord, decision: Decision, before: HostStatus | None
    ) -> HostStatus:
        """After a decision."""
        past = before or cls(host)
        found = look if isinstance(look, HostSight) else None
        return cls(
            host,
            is_reachable=found is not None,
            session=_session(found) if found else "",
            worker=found.worker_name if found else past.worker,
            worker_pid=found.worker_pid if found else None,
            server=_server(word) if found else "",
            action=decision.action,
            sentence=decision.sentence,
            hint=decision.hint,
            more=decision.more,
            has_worker=decision.has_worker,
            is_settled=decision.is_settled,
            looked_wall=clock.wall(),
            last_action=past.last_action,
            last_action_wall=past.last_action_wall,
        )


class RoundsStatus(msgspec.Struct, frozen=True):
    """The whole file."""

    hosts: tuple[HostStatus, ...]


def write(path: str, status: RoundsStatus) -> None:
    """Replace the file; whoever reads it sees the old or the new one whole. Raises `OSError`."""
    # A word of a host, or a path of ours, may hold bytes that are no text; msgspec does not write what they become.
    whole_file.write(path, json.dumps(msgspec.to_builtins(status)).encode())


def read(path: str) -> RoundsStatus | None:
    """The file, or None when there is none that can be used."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  as above
            return msgspec.convert(json.loads(file.read()), RoundsStatus)
    except (OSError, ValueError, msgspec.ValidationError):
        return None


def merged(
    hosts: Sequence[str], status: RoundsStatus | None, workers: Mapping[str, WorkerSight] | None
) -> list[HostStatus]:
    """A row for each host: what the file knows, and what the server says now.

    A host that was never looked at is taken to have the worker of its own short name.
    """
    known = {one.host: one for one in status.hosts} if status else {}
    rows = []
    for host in hosts:
        row = known.get(host, HostStatus(host))
        name = row.worker or host.rpartition("@")[2].partition(":")[0].partition(".")[0]
        word = ServerWord(is_reached=workers is not None, worker=(workers or {}).get(name))
        rows.append(
            msgspec.structs.replace(row, server=_server(word), worker=row.worker or (name if word.worker else ""))
        )
    return rows


def table(screen: Screen, rows: Sequence[HostStatus], *, is_running: bool) -> list[str]:
    """The lines of ``--status``."""
    columns = (
        Column("host", 4),
        Column("reachable"),
        Column("session", 8),
        Column("worker", 6),
        Column("server"),
        Column("last action", 11),
        Column("next check"),
        Column("remark", 12),
    )
    now = clock.wall()
    return render(screen, columns, [_row(one, now, is_running=is_running) for one in rows])[0]


def as_json(
    rows: Sequence[HostStatus], *, pid: int | None, server_reached: bool, recheck_seconds: float
) -> dict[str, Any]:
    """The form for programs; `pid` None: the tool does not run on this machine."""
    return {
        "running": pid is not None,
        "pid": pid,
        "server_reached": server_reached,
        "recheck_seconds": recheck_seconds,
        "hosts": [msgspec.to_builtins(one) for one in rows],
    }


def _row(one: HostStatus, now: float, *, is_running: bool) -> list[Cell]:
    reachable = {None: "?", True: "yes", False: "no"}[one.is_reachable]
    action = "-"
    if one.last_action and one.last_action_wall is not None:
        action = f"{one.last_action} {_ago(now - one.last_action_wall)}"
    due = "-"
    if is_running and one.next_wall is not None:
        due = f"in {spoken(one.next_wall - now)}" if one.next_wall > now else "now"
    remark = "" if one.action == "leave" and one.has_worker and one.is_settled else f"{one.sentence} {one.more}".strip()
    colour = {"alive": "green", "offline": "yellow", "not seen": "red"}.get(one.server, "")
    return [
        Cell(harmless(one.host)),
        Cell(reachable, "red" if one.is_reachable is False else ""),
        Cell(one.session or "?"),
        Cell(harmless(one.worker) or "?"),
        Cell(one.server, colour),
        Cell(action),
        Cell(due),
        Cell(harmless(remark)),
    ]


def _ago(seconds: float) -> str:
    return f"{spoken(seconds)} ago" if seconds >= 1 else "now"


def _session(look: HostSight) -> str:
    if look.service is not None and look.service.pid is not None and look.worker_pid in {None, look.service.pid}:
        return "systemd"
    sessions = [one for one in look.sessions if not one.program]
    living = [one for one in sessions if not one.is_dead]
    if living:
        return f"screen {living[0].pid}"
    return "dead" if sessions else "none"


def _server(word: ServerWord) -> str:
    if not word.is_reached:
        return "away"
    if word.worker is None or not word.worker.is_alive:
        return "not seen"
    return "offline" if word.worker.offline else "alive"
