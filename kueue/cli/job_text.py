"""The listing and the page of jobs, as text: values from the wire in, lines out."""

from __future__ import annotations

import re

from kueue.cli.screen import Screen
from kueue.cli.table import Cell, Column, render
from kueue.cli.text import harmless, harmless_lines, keep_end, shown, width
from kueue.units import format_date, format_elapsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NONE = "---"
OTHER_WORK = "busy with other work"
"""Words of the reason that what is not kueue's takes the machine (`kueue.core.placement.Obstacle`)."""
_COLOUR, _ERASE = re.compile(r"\x1b\[[0-9;:]*m"), re.compile(r"\x1b\[[0-2]?K")
_COUNTED = ("held", "offered", "running", "succeeded", "failed", "canceled")
_STATE_COLOURS = {
    "held": "yellow",
    "offered": "dim",
    "running": "blue",
    "succeeded": "green",
    "failed": "red",
    "canceled": "yellow",
}


def listing(screen: Screen, answer: dict[str, Any], now_wall: float) -> list[str]:
    """The lines of ``list-jobs`` for a `JobList` whose parts were put together."""
    jobs = answer["jobs"]
    lines: list[str] = []
    table_width = screen.columns or 0
    if jobs:
        columns = (
            Column("id", max(2, len(str(jobs[-1]["id"]))), right=True),
            Column("working directory", 17, shorten=keep_end),
            Column("command", 7),
            Column("cpus", right=True),
            Column("memory", right=True),
            Column("other", 5),
            Column("worker", 6),
            Column("status", 6),
        )
        lines, table_width = render(screen, columns, [_row(job, now_wall) for job in jobs])
    counts = dict(answer.get("counts", ()))
    states = [f"pending: {counts.get('pending', 0)}"]
    states += [f"{state}: {counts[state]}" for state in _COUNTED if counts.get(state)]
    average = f"average job runtime: {format_elapsed(answer.get('average_seconds', 0))}"
    remaining = f"remaining jobs ETA: {format_elapsed(answer.get('eta_seconds', 0))}"
    for left, right in (("--- job status summary ---", average), (", ".join(states), remaining)):
        lines += _flush(left, right, table_width, screen.columns)
    return lines


def status(job: dict[str, Any], now_wall: float) -> Cell:
    """Where the job stands, in words, with what is to be said beside it in brackets."""
    state = job["state"]
    remarks = [word for word in ("stopping" if job.get("stopping") else "", harmless(job.get("note") or "")) if word]
    if remarks[1:] and remarks[1].startswith("stopping"):
        del remarks[0]
    beside = f" ({'; '.join(remarks)})" if remarks else ""
    issued = format_date(job["issued_wall"], now_wall)
    if state == "held":
        text = f"pending (held) since {issued}"
    elif state == "pending":
        text = f"pending since {issued}"
    elif state == "offered":
        text = f"offered on {format_date(job.get('offered_wall') or job['issued_wall'], now_wall)}"
    elif state == "running":
        text = f"running for {format_elapsed(running_seconds(job, now_wall))}"
    elif state == "succeeded":
        text = f"finished after {format_elapsed(job.get('run_seconds') or 0)}"
    elif state == "failed":
        text = f"failed with code {job.get('return_code')}"
    else:
        text = f"canceled on {format_date(job.get('ended_wall') or job['issued_wall'], now_wall)}"
    return Cell(text + beside, _STATE_COLOURS.get(state, ""))


def running_seconds(job: dict[str, Any], now_wall: float) -> float:
    return max(0.0, now_wall - (job.get("started_wall") or now_wall))


def command_line(job: dict[str, Any]) -> str:
    """The arguments joined by blanks, harmless."""
    return harmless(" ".join(shown(word) for word in job["payload"]["argv"]))


def quoted_command(job: dict[str, Any]) -> str:
    """The arguments as a shell would take them, so that where one ends can be seen; harmless."""
    from shlex import join  # noqa: PLC0415 - a listing need not load it

    return harmless(join(shown(word) for word in job["payload"]["argv"]))


def page(screen: Screen, detail: dict[str, Any], now_wall: float) -> list[str]:
    """The lines of ``show-job`` up to the output, which `streams` gives."""
    job = detail["row"]
    request = job["request"]
    lines = [screen.styled("=== job information ===", "bold"), f"job id: {job['id']}"]
    if job["payload"].get("name") is not None:
        lines.append(f"name: {harmless(shown(job['payload']['name']))}")
    lines += [
        f"command: {quoted_command(job)}",
        f"working directory: {harmless(shown(job['cwd']))}",
        f"required job slots: {request.get('slots', 1)}",
        "required CPU cores: "
        + _wish(request.get("cores", 1), request.get("cores_are_wish", False), job.get("taken_cores")),
        f"required RAM: {request.get('ram_mb', 0)} megabytes"
        + _taken(request.get("ram_mb", 0), request.get("ram_is_wish", False), job.get("taken_ram_mb")),
    ]
    lines += _terms(detail.get("terms", {}), request)
    lines.append("")
    named = sorted([*request.get("named", ()), *request.get("counters", ())])
    if named:
        lines += ["additional resources:", *(f"   {amount}x {harmless(name)}" for name, amount in named), ""]
    lines += _status_block(screen, detail, now_wall)
    lines += _history(detail.get("attempts", ()), now_wall)
    return lines


def streams(screen: Screen, end: dict[str, Any], job: int) -> list[str]:
    """The blocks of stored output in ``show-job``, from an `EndRecord`; each begins with an empty line."""
    lines = []
    for stream in ("stdout", "stderr"):
        text = excerpt(end.get(stream) or {}, f"kueue log {job}{' --stderr' if stream == 'stderr' else ''}")
        if text:
            lines += ["", screen.styled(f"=== {stream} ===", "bold"), text]
    return lines


def excerpt(kept: dict[str, Any], command: str) -> str:
    """The kept text of one stream without its last line feed; empty if there is none."""
    if kept.get("redirected") is not None:
        return f"Redirected to {harmless(shown(kept['redirected']))}"
    if kept.get("discarded"):
        return ""
    head, tail = decoded(kept.get("head", "")), decoded(kept.get("tail", ""))
    omitted = kept.get("size", 0) - len(head) - len(tail)
    if omitted <= 0:
        return readable(head + tail)
    middle = f"[... {omitted} bytes are left out here; `{command}` shows all that is kept ...]"
    return "\n".join(part for part in (readable(head), middle, readable(tail)) if part)


def readable(data: bytes) -> str:
    """Output for people, as a terminal would have it in the end: of each line what stands behind its last carriage
    return, without colours.

    Undecodable bytes are replaced, other control characters made visible; no line feed at the end.
    """
    text = data.decode("utf-8", "replace")
    text = _COLOUR.sub("", text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return harmless_lines(_ERASE.sub("", text)).removesuffix("\n")


def decoded(data: str) -> bytes:
    """Bytes as they stand in a message (base64)."""
    from binascii import a2b_base64  # noqa: PLC0415 - listings carry no bytes

    return a2b_base64(data) if data else b""


def explanation(answer: dict[str, Any]) -> list[str]:
    """The lines of ``explain``."""
    lines = [harmless(answer["verdict"])]
    for title, entries in (("workers:", answer.get("workers", ())), ("resources:", answer.get("counters", ()))):
        if entries:
            widest = max(width(harmless(name)) for name, _, _ in entries)
            lines.append(title)
            for name, fits, sentence in entries:
                shown_name = harmless(name)
                blanks = " " * (widest - width(shown_name))
                lines.append(f"   {'+' if fits else '-'} {shown_name}{blanks}  {harmless(sentence)}".rstrip())
    advice = against_other_work(answer["verdict"])
    return [*lines, "what to do:", *(f"   {line}" for line in advice)] if advice else lines


def against_other_work(reason: str) -> list[str]:
    """What a person can do if the reason that a job waits is the work of others; sentences, none if it is not."""
    if OTHER_WORK not in reason:
        return []
    is_memory = "MB of memory" in reason.rpartition(OTHER_WORK)[2]
    less = "-r N, in MB." if is_memory else "-c N; -c 0 for a job that needs no core of its own."
    return [
        "Wait: it starts when programs that are not kueue's leave enough of the machine.",
        f"Ask for less: {less}",
        (
            "Do not count them: dynamic_check_free_resources = false in [worker_settings] of that machine, then "
            "`kueue down && kueue up` there."
        ),
    ]


def _row(job: dict[str, Any], now_wall: float) -> list[Cell]:
    request = job["request"]
    name = job["payload"].get("name")
    command = command_line(job)
    cores, ram_mb = job.get("taken_cores"), job.get("taken_ram_mb")
    named = sorted([*request.get("named", ()), *request.get("counters", ())])
    has_worker = job.get("worker") is not None and job["state"] not in {"held", "pending", "canceled"}
    return [
        Cell(str(job["id"])),
        Cell(harmless(shown(job["cwd"]))),
        Cell(command if name is None else f"[{harmless(shown(name))}] {command}"),
        Cell(f"{request.get('cores', 1) if cores is None else cores} x"),
        Cell(f"{request.get('ram_mb', 0) if ram_mb is None else ram_mb} MB"),
        Cell(", ".join(f"{amount}x {harmless(resource)}" for resource, amount in named) or NONE),
        Cell(harmless(job["worker"]) if has_worker else NONE),
        status(job, now_wall),
    ]


def _status_block(screen: Screen, detail: dict[str, Any], now_wall: float) -> list[str]:
    job = detail["row"]
    state = job["state"]

    def date(key: str) -> str:
        wall = job.get(key)
        return NONE if wall is None else format_date(wall, now_wall)

    worker = harmless(job.get("worker") or NONE)
    word = {"held": "pending (held)", "succeeded": "finished"}.get(state, state)
    beside = status({**job, "state": "pending"}, now_wall).text.partition(" (")[2]
    lines = [
        "job status: " + screen.styled(word, _STATE_COLOURS.get(state, "")) + (f" ({beside}" if beside else ""),
        f"   issued on: {date('issued_wall')}",
    ]
    if state == "offered":
        lines += [f"   offered on: {date('offered_wall')}", f"   offered to: {worker}"]
    elif state == "running":
        lines += [f"   started on: {date('started_wall')}", f"   running on: {worker}"]
    elif state == "canceled" and job.get("started_wall") is not None:
        lines += [
            f"   started on: {date('started_wall')}",
            f"   canceled on: {date('ended_wall')}",
            f"   executed on: {worker}",
            f"   runtime: {format_elapsed(job.get('run_seconds') or 0)}",
        ]
    elif state == "canceled":
        lines.append(f"   canceled on: {date('ended_wall')}")
    elif state in {"succeeded", "failed"}:
        lines += [
            f"   started on: {date('started_wall')}",
            f"   finished on: {date('ended_wall')}",
            f"   return code: {job.get('return_code')}",
            f"   executed on: {worker}",
            f"   runtime: {format_elapsed(job.get('run_seconds') or 0)}",
        ]
    if detail.get("comment"):
        lines.append(f"   comment: {harmless(detail['comment'])}")
    lines += [f"   waits: {harmless(sentence)}" for sentence in detail.get("waits", ())]
    return lines


def _history(attempts: Sequence[dict[str, Any]], now_wall: float) -> list[str]:
    """The attempts, when there is more to tell than the status says: a second one, or an offer that came to nothing."""
    if len(attempts) < 2 and all(one.get("number") is not None for one in attempts):
        return []
    lines = ["", "attempts:"]
    for one in attempts:
        number = "-" if one.get("number") is None else str(one["number"])
        begun = one.get("started_wall")
        when = (
            f"started on {format_date(begun, now_wall)}"
            if begun is not None
            else f"offered on {format_date(one['offered_wall'], now_wall)}"
        )
        end = f", {harmless(one['end'])}" if one.get("end") else ""
        lines.append(f"   {number}: {harmless(one['worker'])}, {when}{end}")
    return lines


def _terms(terms: dict[str, Any], request: dict[str, Any]) -> list[str]:
    lines = []
    if request.get("priority", 10) != 10:
        lines.append(f"priority: {request['priority']}")
    if terms.get("timeout_seconds") is not None:
        lines.append(f"time limit: {format_elapsed(terms['timeout_seconds'])}")
    if terms.get("max_attempts", 3) != 3:
        lines.append(f"attempts allowed: {terms['max_attempts']}")
    if terms.get("on_lost", "rerun") != "rerun":
        lines.append(f"when its worker is lost: {terms['on_lost']}")
    if terms.get("keep_background"):
        lines.append("background processes: kept")
    return lines


def _wish(amount: int, is_wish: bool, taken: int | None) -> str:
    return f"{amount}{_taken(amount, is_wish, taken)}"


def _taken(amount: int, is_wish: bool, taken: int | None) -> str:
    return f" (default; took {taken})" if is_wish and taken is not None and taken != amount else ""


def _flush(left: str, right: str, cells: int, most: int | None) -> list[str]:
    """Left and right end of a line; two lines where one would be wider than the terminal and the table."""
    if most is not None and len(left) + 1 + len(right) > max(most, cells):
        return [left, right]
    return [left + " " * max(1, cells - len(left) - len(right)) + right]
