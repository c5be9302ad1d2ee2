"""Whose worker is being renewed, and which version is kept from the others. Pure.

Rules
- At most one worker that lives is renewed at a time over the whole laboratory; a turn that is not given back ends.
- A version that did not come up on one host is kept from the others for a day, or until it does.
"""

from __future__ import annotations

import msgspec

from kueue_ops.restart_decision import Cause, Decision, Limits


class Turns(msgspec.Struct, frozen=True):
    """Whose worker is being renewed, and the version that did not come up somewhere."""

    host: str = ""
    cause: Cause = ""
    until: float = 0.0
    braked_version: str = ""
    braked_by: str = ""
    braked_until: float = 0.0

    def is_free(self, host: str, cause: Cause, version: str, now: float) -> bool:
        """May the living worker of `host` be renewed now?"""
        if self.host not in {"", host} and now < self.until:
            return False
        return not (cause == "version" and self.is_braked(host, version, now))

    def is_braked(self, host: str, version: str, now: float) -> bool:
        """Did this version not come up on another host?"""
        return self.braked_by not in {"", host} and version == self.braked_version and now < self.braked_until

    def taken(self, host: str, cause: Cause, now: float, limits: Limits) -> Turns:
        return msgspec.structs.replace(self, host=host, cause=cause, until=now + limits.turn_seconds)

    def after(self, host: str, decision: Decision, version: str, failures: int, now: float, limits: Limits) -> Turns:
        """After a look at `host`. `version`: installed there; `failures`: counted after that look."""
        turns = self
        has_failed = failures > 0 or decision.action == "give_up"
        if host == turns.host and (has_failed or decision.action == "trouble" or decision.is_good):
            if has_failed and turns.cause == "version":
                turns = msgspec.structs.replace(
                    turns, braked_version=version, braked_by=host, braked_until=now + limits.given_up_seconds
                )
            turns = msgspec.structs.replace(turns, host="", cause="", until=0.0)
        if host == turns.braked_by and decision.is_good:
            turns = msgspec.structs.replace(turns, braked_version="", braked_by="", braked_until=0.0)
        return turns
