"""How much is kept, and for how long."""

from __future__ import annotations

REQUESTS_KEPT_SECONDS = 3600.0
"""A client that lost its connection repeats a question well within this time."""

EVENTS_KEPT = 200_000
"""Rows; about 20 MB."""

EVENTS_KEPT_SECONDS = 30 * 86400.0

BALLAST_BYTES = 16 * 2**20
"""Room for the deletion of some ten thousand finished jobs while the disk is full."""

PROBE_BYTES = 2**20
"""A disk counts as usable again when it has this much, so that the server does not go back and forth."""

LOG_BYTES = 64 * 2**20
"""Down to so many is a log cut that one large batch has made longer."""
