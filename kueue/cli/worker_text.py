"""The listings and pages of workers and resources, as text: values from the wire in, lines out."""

from __future__ import annotations

from kueue.cli.job_text import NONE
from kueue.cli.screen import Screen
from kueue.cli.table import Cell, Column, render
from kueue.cli.text import harmless, pad, width
from kueue.units import format_date

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_LOADS_AS_COLUMNS = 6
# The three loads count as three columns when widths are shared out, although they stand in one.


def listing(screen: Screen, workers: Sequence[dict[str, Any]], now_wall: float) -> list[str]:
    """The lines of ``list-workers``."""
    loads = [[f"{load:.1f}" for load in _load(worker)] for worker in workers]
    load_widths = [max(len(row[index]) for row in loads) for index in range(3)] if loads else [3, 3, 3]
    columns = (
        Column("id", max(2, max((len(str(worker["id"])) for worker in workers), default=2)), right=True),
        Column("name", 4),
        Column("operating system", 16),
        Column("cpus", right=True),
        Column("avg freq", right=True),
        Column("memory", right=True),
        Column("jobs", 4),
        Column("busy", right=True),
        Column("load 1/5/15m", right=True),
        Column("uptime", right=True),
    )
    rows = [_row(worker, texts, load_widths, now_wall) for worker, texts in zip(workers, loads, strict=True)]
    return render(screen, columns, rows, reserved=_LOADS_AS_COLUMNS)[0]


def page(screen: Screen, worker: dict[str, Any], now_wall: float) -> list[str]:
    """The lines of ``show-worker``."""
    info, totals = worker.get("info", {}), worker["totals"]
    load = " / ".join(screen.styled(f"{one:.1f}", _load_colour(one, totals["cores"])) for one in _load(worker))
    occupation = worker.get("occupation", 0.0)
    occupied = screen.styled(f"{occupation * 100:.2f} %", _busy_colour(occupation))
    lines = [
        screen.styled("=== worker information ===", "bold"),
        f"worker id: {worker['id']}",
        f"name: {harmless(worker['name'])}",
    ]
    if state := _state(worker):
        lines.append(f"state: {screen.styled(state, 'yellow')}")
    lines += [
        f"connected since: {_date(worker.get('connected_wall'), now_wall)}",
        "",
        "system information",
        f"   kernel: {harmless(info.get('kernel', 'unknown'))}",
        f"   distribution: {harmless(info.get('distribution', 'unknown'))}",
        f"   cpu cores: {totals['cores']}",
        f"   cpu frequency: {info.get('cpu_mhz', 0)} megahertz",
        f"   total memory: {totals['ram_mb']} megabytes",
        f"last updated: {_date(worker.get('updated_wall'), now_wall)}",
        "",
        "system load and resources",
        f"   load: {load}",
        f"   jobs offered: {_ids(worker.get('offered', ()))}",
        f"   jobs running: {_ids(worker.get('running', ()))}",
        f"   free jobs slots: {worker.get('free_slots', 0)}",
        f"   free cpus: {worker.get('free_cores', 0)} / {totals['cores']}",
        f"   free ram: {worker.get('free_ram_mb', 0)} / {totals['ram_mb']} megabytes",
    ]
    lines += [f"   {harmless(name)}: {amount}" for name, amount in totals.get("named", ())]
    lines.append(f"total occupation: {occupied}")
    return lines


def resources(screen: Screen, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of ``list-resources``."""
    cells = max([8, *(width(harmless(row["name"])) for row in rows)])
    head = "resource" + " " * (cells - 8)
    lines = [" | ".join(("| " + screen.styled(head, "head"), screen.styled("used", "head"), "")).rstrip()]
    lines[0] += " " + screen.styled("total", "head") + " |"
    for row in rows:
        used, total = row["used"], row["total"]
        colour = "green" if used == 0 else "red" if used >= total else "yellow"
        lines.append(
            f"| {pad(harmless(row['name']), cells)} | {screen.styled(f'{used:>4}', colour)} | {total:>5} |",
        )
    return lines


def _row(worker: dict[str, Any], loads: Sequence[str], load_widths: Sequence[int], now_wall: float) -> list[Cell]:
    info, totals = worker.get("info", {}), worker["totals"]
    pieces: list[tuple[str, str]] = []
    for index, text in enumerate(loads):
        colour = _load_colour(_load(worker)[index], totals["cores"])
        pieces += [(" ", "")] if index else []
        pieces.append((text.rjust(load_widths[index]), colour))
    occupation = worker.get("occupation", 0.0)
    name, state = harmless(worker["name"]), _state(worker)
    return [
        Cell(str(worker["id"])),
        Cell(f"{name} ({state})" if state else name, "yellow" if state else ""),
        Cell(harmless(info.get("distribution", "unknown"))),
        Cell(f"{totals['cores']} x"),
        Cell(f"{info.get('cpu_mhz', 0)} MHz"),
        Cell(f"{totals['ram_mb']} MB"),
        Cell(_ids([*worker.get("running", ()), *worker.get("offered", ())])),
        Cell(f"{int(occupation * 100 + 1e-9)} %", _busy_colour(occupation)),
        Cell("".join(text for text, _ in pieces), parts=tuple(pieces)),
        Cell(_uptime(worker.get("connected_wall"), now_wall)),
    ]


def _state(worker: dict[str, Any]) -> str:
    """What is special about the worker; empty when it is online and nothing is to be said."""
    words = [] if worker.get("state", "online") == "online" else [worker["state"]]
    if worker.get("note"):
        words.append(harmless(worker["note"]))
    return ": ".join(words)


def _load(worker: dict[str, Any]) -> list[float]:
    return list(worker.get("load", {}).get("load", (0.0, 0.0, 0.0)))


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(str(number) for number in ids) or NONE


def _date(wall: float | None, now_wall: float) -> str:
    return NONE if wall is None else format_date(wall, now_wall)


def _uptime(connected_wall: float | None, now_wall: float) -> str:
    if connected_wall is None:
        return NONE
    hours = int(max(0.0, now_wall - connected_wall)) // 3600
    return f"{hours // 24}d {hours % 24:02}h"


def _busy_colour(occupation: float) -> str:
    return "green" if occupation < 0.25 else "yellow" if occupation < 0.75 else "red"


def _load_colour(load: float, cores: int) -> str:
    return "green" if load < 0.25 * cores else "yellow" if load < 0.75 * cores else "red"
