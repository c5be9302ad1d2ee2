"""How damage of a state file shows, and the way out of it."""

from __future__ import annotations

import sqlite3

import msgspec

DAMAGE = (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError)
"""What reading a damaged file raises; the last one comes from Python, when SQLite's sentence quotes a damaged name."""

LEFT = "It was left as it is. `kueue_server --recover` saves what can be read into a new file."
"""The hint for those whose server does not start."""


def words(error: BaseException) -> str:
    """What it says; Python 3.10 says nothing where SQLite quotes a damaged name."""
    return str(error) or "a name in it cannot be read"
