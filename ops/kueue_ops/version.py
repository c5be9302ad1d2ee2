"""Versions as pip compares them, as far as kueue needs it. Pure."""

from __future__ import annotations

import re

_LENGTH_MAX = 200
"""Of what a host says; Python refuses to read numbers of thousands of digits."""


def is_older(running: str, installed: str) -> bool:
    """Is one version older than another? False when either cannot be read."""
    one, other = _release(running), _release(installed)
    return one is not None and other is not None and one < other


def is_other(running: str, installed: str) -> bool:
    """Are they different versions? False when either cannot be read."""
    return is_older(running, installed) or is_older(installed, running)


def _release(version: str) -> tuple[tuple[int, ...], int, tuple[int, ...]] | None:
    """Sortable: numbers without trailing zeros, then a preliminary version before the final one (PEP 440)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)(.*)$", version.strip()[:_LENGTH_MAX])
    if not found:
        return None
    numbers = [int(word) for word in found[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    rest = found[2].partition("+")[0].lower()
    stage = re.match(r"[.\-_]?(dev|a|b|c|rc|post)", rest)
    rank = {"dev": -4, "a": -3, "b": -2, "c": -1, "rc": -1, "post": 1}[stage[1]] if stage else 0
    return tuple(numbers), rank, tuple(int(word) for word in re.findall(r"\d+", rest))
