"""How damage of a state file shows, and the way out of it."""

from __future__ import annotations

import sqlite3

import msgspec

from kueue.errors import Bug

DAMAGE = (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError)
"""What reading a damaged file raises; the last one comes from Python, when SQLite's sentence quotes a damaged name."""

SENSELESS = (Bug, LookupError, TypeError, ValueError)
"""What replaying raises where each fact can be read and they contradict each other."""

LEFT = "It was left as it is. `kueue_server --recover` saves what can be read into a new file."
"""The hint for those whose server does not start."""


def words(error: BaseException) -> str:
    """What it says; Python 3.10 says nothing where SQLite quotes a damaged name."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) or "a name in it cannot be read"
