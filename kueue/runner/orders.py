"""Which lines of a worker are orders that can be carried out; whoever wrote the others, they stop nothing.

The orders themselves are those of `kueue.worker.orders`, which the runner may not import.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from kueue.runner.wire import os_bytes

Order: TypeAlias = dict[str, Any]

MOST = 1e15  # beyond all seconds and numbers of processes; what is no number is neither below nor above


def read_order(line: bytes) -> Order | None:
    """None: this is no order that can be carried out. A type that only newer releases know is one."""
    try:
        order = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(order, dict) or not isinstance(order.get("type"), str):
        return None
    needed, others = _FIELDS.get(order["type"], {}), _MAY_BE_MISSING.get(order["type"], {})
    is_whole = all(name in order and is_fit(order[name]) for name, is_fit in needed.items())
    return order if is_whole and all(is_fit(order[name]) for name, is_fit in others.items() if name in order) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN is before and after no moment


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and -MOST < value < MOST


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    """One that has bytes: half of a pair of surrogates has none."""
    return isinstance(value, str) and _is_os_text(value)


def _is_os_text(value: object) -> bool:
    try:
        return isinstance(value, (str, dict)) and os_bytes(value) is not None
    except (ValueError, TypeError, KeyError):
        return False


def _or_none(is_fit: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_fit(value)


def _is_list_of(is_fit: Callable[[Any], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_fit, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_os_text, value))


def _is_attempt(value: object) -> bool:
    """As far as anything is looked into of what a dead runner had."""
    if not isinstance(value, dict):
        return False
    is_named = _is_int(value.get("offer")) and _is_int(value.get("job")) and _is_text(value.get("queue_id"))
    wall = value.get("started_wall")
    return is_named and _is_text(value.get("memo", "")) and (wall is None or _is_number(wall))


_Check: TypeAlias = Callable[[object], bool]

_FIELDS: dict[str, dict[str, _Check]] = {
    "StartAttempt": {"offer": _is_int, "job": _is_int, "queue_id": _is_text},
    "SetLease": {"deadline_boottime": _is_number},
    "StopOrder": {"offer": _is_int},
    "WithdrawOrder": {"offer": _is_int},
    "ForgetAttempts": {"offers": _is_list_of(_is_int)},
}
_MAY_BE_MISSING: dict[str, dict[str, _Check]] = {
    "Attach": {
        "worker_pid": _is_int,
        "restart_command": _is_list_of(_is_os_text),
        "restart_env": _is_list_of(_is_pair),
        "server_lock_path": _or_none(_is_os_text),
        "server_lock_seconds": _is_number,
    },
    "StartAttempt": {
        "timeout_seconds": _or_none(_is_number),
        "on_lost": ("rerun", "wait", "fail").__contains__,
        "keep_background": _is_bool,
        "grace_seconds": _is_number,
        "line": _or_none(_is_int),
        "memo": _is_text,
    },
    "StopOrder": {"kill": _is_bool, "grace_seconds": _is_number},
    "Inherit": {"attempts": _is_list_of(_is_attempt)},
}
"""What is looked into before a process is made. The rest of a start is the spawner's to read."""
