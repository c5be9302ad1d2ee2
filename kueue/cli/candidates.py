"""What the server and the settings offer as values for completion, within a time that nobody notices.

Rules
- All that touches the world runs in a thread of its own: the resolver and a dead file server know no time limit. When
  the time is over the process leaves without it.
- Nothing is written, derived or sent where there is no configuration; every failure means "no candidates".
- A value that could do harm in a line (control characters, lone bytes) is left out.
"""
# ruff: noqa: PTH111, PTH113, PTH123 - pathlib takes 5 ms to import

from __future__ import annotations

import _thread
import os
import time

from kueue.cli.text import harmless, keep_start, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TypeVar

    _Row = TypeVar("_Row")

    from kueue.config import Config

LIMIT = 100
"""Values that are offered at most."""
BUDGET_SECONDS = 0.24
"""Counted from the start of the process: a press of TAB is over within 0.3 s."""
BUDGET_VARIABLE = "KUEUE_COMPLETION_SECONDS"
"""Another budget, for those whose Python starts slowly."""
LEAST_SECONDS = 0.06
"""What the question gets even where Python took long to start."""

_DESCRIPTION_CELLS = 60
_ID_DIGITS = 12
"""Ids that begin with what was typed are asked for up to so many digits."""


def jobs(config: str | None, prefix: str, states: Sequence[str], *, typed: Sequence[str] = ()) -> dict[str, str]:
    """Ids, latest first, each with state and command. `prefix` may be a list of ids of which the last is being typed.

    `states`: empty for all. `typed`: words of the line; ids among them are not offered again.
    """
    head, start = _split_ids(prefix)
    if start and not (start.isascii() and start.isdigit()):
        return {}
    question: dict[str, Any] = {"states": tuple(states), "limit": LIMIT + len(typed)}
    if start:
        question["ids"] = _ids_that_begin_with(start)
    answers = _asked(config, "ListJobs", **question)
    found: dict[str, str] = {}
    for job in sorted((job for part in answers for job in part["jobs"]), key=lambda job: -job["id"])[:LIMIT]:
        if str(job["id"]) not in typed and str(job["id"]).startswith(start):
            command = " ".join(shown(word) for word in job["payload"]["argv"])
            name = shown(job["payload"].get("name"))
            found[f"{head}{job['id']}"] = _description(f"{job['state']} {f'{name}: ' if name else ''}{command}")
    return found


def worker_ids(config: str | None, prefix: str, *, typed: Sequence[str] = ()) -> dict[str, str]:
    """Ids of workers, each with name and state."""
    head, start = _split_ids(prefix)
    rows = _beginning(_workers(config), lambda one: str(one["id"]), start, typed)
    return {f"{head}{one['id']}": _description(f"{one['name']}, {_worker_state(one)}") for one in rows}


def worker_names(
    config: str | None, prefix: str, states: Sequence[str], *, typed: Sequence[str] = ()
) -> dict[str, str]:
    """Names of workers in one of the states (empty: all); ids instead where a digit was typed that begins no name."""
    rows = [one for one in _workers(config) if not states or one["state"] in states]
    named = _beginning([one for one in rows if is_safe(one["name"])], lambda one: str(one["name"]), prefix, typed)
    if prefix.isdigit() and not named:
        rows = _beginning(rows, lambda one: str(one["id"]), prefix, typed)
        return {str(one["id"]): _description(f"{one['name']}, {_worker_state(one)}") for one in rows}
    return {one["name"]: _description(_worker_state(one)) for one in named}


def resources(config: str | None, prefix: str) -> dict[str, str]:
    """Names of lab-wide resources, alone and with ``=``; behind the ``=`` how many there are to take."""
    rows = [row for part in _asked(config, "ListResources") for row in part["resources"]]
    name, equals, _ = prefix.partition("=")
    if equals:
        totals = [row["total"] for row in rows if row["name"] == name]
        return {f"{name}={number}": "" for number in range(1, min([*totals, 16]) + 1)} if totals else {}
    found = {}
    for row in _beginning(rows, lambda row: str(row["name"]), name, ()):
        if is_safe(row["name"]):
            found[row["name"]] = _description(f"{row['used']} of {row['total']} in use")
            found[f"{row['name']}="] = _description(f"how many of {row['total']}")
    return found


def hosts(config: str | None, prefix: str, *, typed: Sequence[str] = ()) -> dict[str, str]:
    """The hosts that the restart manager looks after."""

    def read() -> list[str]:
        section = _settings(config, "restart_workers").restart_workers
        return [] if section is None else section.hostnames.replace(",", " ").split()

    return dict.fromkeys(_beginning(filter(is_safe, in_time(read, [])), str, prefix, typed), "")


def is_safe(value: str) -> bool:
    """Can it stand in a line? Control characters, line ends and bytes that are no text cannot."""
    return value.isprintable() and not value.startswith("-") and bool(value.strip())


def _workers(config: str | None) -> list[Mapping[str, Any]]:
    return [row for part in _asked(config, "ListWorkers") for row in part["workers"]]


def _beginning(rows: Iterable[_Row], key: Callable[[_Row], str], start: str, typed: Sequence[str]) -> list[_Row]:
    """The first `LIMIT` that may be meant: to cut before would hide all but the first hundred for good."""
    return [row for row in rows if key(row).startswith(start) and key(row) not in typed][:LIMIT]


def _worker_state(one: Mapping[str, Any]) -> str:
    running = len(one.get("running", ()))
    return f"{one['state']}, {running} running" if running else str(one["state"])


def _description(text: str) -> str:
    return keep_start(harmless(text), _DESCRIPTION_CELLS)


def _split_ids(prefix: str) -> tuple[str, str]:
    """What is typed already of a list like ``3,7-9``, and the number that is being typed."""
    cut = max(prefix.rfind(","), prefix.rfind("-")) + 1
    return prefix[:cut], prefix[cut:]


def _ids_that_begin_with(digits: str) -> list[tuple[int, int]]:
    number = int(digits)
    if digits.startswith("0"):
        return [(number, number)]
    return [(number * 10**more, (number + 1) * 10**more - 1) for more in range(max(1, _ID_DIGITS + 1 - len(digits)))]


def _asked(config: str | None, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """The parts of the server's answer; none if there is no configuration, no server or no time."""

    def ask() -> list[dict[str, Any]]:
        from kueue import client, identity, places  # noqa: PLC0415 - most presses of TAB ask for no value

        settings = _settings(config)
        common = settings.common
        if not settings.exists or identity.kept(common.shared_secret, places.find(common.state_dir).cache) is None:
            return []  # to derive the key takes longer than there is time; the first command that is run does it
        with client.connect(settings, patience_seconds=0.0) as server:
            server.tell = lambda _: None
            return server.ask_parts(kind, **fields)

    return in_time(ask, [])


def _settings(path: str | None, *sections: str) -> Config:
    from kueue import places  # noqa: PLC0415 - see `_asked`
    from kueue.config import Config, default_path, load  # noqa: PLC0415 - as above

    path = os.path.expanduser(path or default_path())
    if not os.path.isfile(path):
        return Config(path)  # before a directory for the state would be made
    return load(path, ("client_settings", *sections), cache_dir=places.find().cache)


def in_time(work: Callable[[], list[Any]], otherwise: list[Any]) -> list[Any]:
    """What `work` returns, if it returns in time; `otherwise`, too, if it fails."""
    outcome: list[list[Any]] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            outcome.append(work())
        except Exception:  # noqa: BLE001, S110 - whatever it is, there are no candidates, and nobody wants to hear why
            pass
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    done.acquire(timeout=max(LEAST_SECONDS, _budget_seconds() - _age_seconds()))
    return outcome[0] if outcome else otherwise


def _budget_seconds() -> float:
    try:
        return min(60.0, float(os.environ[BUDGET_VARIABLE]))
    except (KeyError, ValueError):
        return BUDGET_SECONDS


def _age_seconds() -> float:
    """How long this process has been running: field 22 of proc_pid_stat(5), in ticks since boot."""
    try:
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0
