"""What the restart tool reads from the settings: hosts, limits, and where its lock and its status lie."""

from __future__ import annotations

import os
from binascii import crc32
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property

from kueue import config, places
from kueue.config import Config, RestartWorkers
from kueue.errors import ConfigError, UserError
from kueue_ops import patience
from kueue_ops.address import WHERE, HostAddress, check_login, duplicates, parse_hosts
from kueue_ops.remote import RENEW_LIMIT_SECONDS
from kueue_ops.restart_decision import Limits
from kueue_ops.server_view import ANSWER_SECONDS

EXAMPLE = '[restart_workers]\nssh_user = "ada"\nhostnames = "ralab01 ralab02"'
WAY_LIMITS = 11
"""Connection limits that a host behind another one may use up: six for a login with its name, four more, and some."""
_SERVER_LEASE_SLACK_SECONDS = 60.0
_STAMP_SECONDS = 1.0
"""The stamp is asked for while hosts wait; without an answer the last one counts."""


class Laboratory:
    """The settings at one moment, checked."""

    def __init__(self, loaded: Config, chosen: Sequence[str] = ()) -> None:
        if loaded.restart_workers is None:
            raise ConfigError(
                f"{loaded.path} has no section [restart_workers]."
                if loaded.exists
                else f"There is no settings file {loaded.path}.",
                hint="Add for example:\n" + EXAMPLE,
            )
        self.config = loaded
        self._stamp = ""
        self.settings: RestartWorkers = loaded.restart_workers
        check_login(self.settings.ssh_user)
        addresses = parse_hosts(self.settings.hostnames)
        if not addresses:
            raise ConfigError(f"{loaded.path}: {WHERE} names no host.", hint="For example:\n" + EXAMPLE)
        known = {address.text: address for address in addresses}
        self.hosts: dict[str, HostAddress] = _chosen(known, chosen) if chosen else known
        twice = duplicates(self.settings.hostnames)
        self.remarks = (
            *loaded.warnings,
            *(
                [f"{WHERE} names hosts more than once; each counts once: {', '.join(dict.fromkeys(twice))}."]
                if twice
                else []
            ),
        )
        """Sentences for the log."""

    @property
    def interval_seconds(self) -> float:
        return self.settings.sleep_minutes_before_recheck * 60.0

    @property
    def limits(self) -> Limits:
        """The patience of the policy."""
        return Limits(
            recheck_seconds=self.interval_seconds,
            stale_seconds=self.config.server.worker_timeout_seconds + _SERVER_LEASE_SLACK_SECONDS,
        )

    @property
    def look_seconds(self) -> float:
        """How long one look with what follows may take before it counts as hung.

        Every step has its own limit; this one is for what escapes them.
        """
        connect, command = self.settings.connect_timeout_seconds, self.settings.command_timeout_seconds
        # A host behind another one, a look, a renewal with its stop and start, the server's word.
        return WAY_LIMITS * connect + command + max(RENEW_LIMIT_SECONDS, command) + 2 * ANSWER_SECONDS

    @property
    def stamp(self) -> str:
        """Changes when the settings file does; as it was, while it cannot be said, as of a silent file server."""
        try:
            found = patience.within(_STAMP_SECONDS, f"stamp of {self.config.path}", lambda: os.stat(self.config.path))  # noqa: PTH116  the state places are strings
        except (FileNotFoundError, NotADirectoryError):
            self._stamp = ""
        except OSError:
            return self._stamp
        else:
            self._stamp = f"{found.st_mtime_ns} {found.st_size}"
        return self._stamp

    @cached_property
    def lock(self) -> str:
        """Held by the tool that runs with these settings on this machine."""
        return f"{self._root}.lock"

    @cached_property
    def status(self) -> str:
        """What the running tool knows of its hosts."""
        return f"{self._root}.json"

    @property
    def log(self) -> str:
        """Where it is said what the running tool does when its terminal is gone."""
        return f"{self._root}.log"

    @cached_property
    def _root(self) -> str:
        """Found once: to look for it asks file systems that may be dead later."""
        folder = places.own_directory(f"{places.find(self.config.common.state_dir).root}/restart_workers")
        mark = crc32(os.path.realpath(self.config.path).encode("utf-8", "surrogateescape"))
        return f"{folder}/{mark:08x}"


def load(path: str | None, chosen: Sequence[str] = ()) -> Laboratory:
    """The laboratory that the file describes; of its hosts only those that were `chosen`, if any were.

    Raises `ConfigError`, and `UserError` for a chosen host that is none.
    """
    return Laboratory(config.load(path, (RestartWorkers.name,)), chosen)


def _chosen(known: dict[str, HostAddress], words: Sequence[str]) -> dict[str, HostAddress]:
    """Hosts in the order of the settings; a word fits as it is written there, or as the bare host name."""
    wanted = set()
    for word in words:
        fits = {text for text, address in known.items() if word in {text, address.host}} or {
            text for text, address in known.items() if word.lower() == address.host.lower()
        }
        if not fits:
            close = get_close_matches(word, list(known), n=1)
            raise UserError(
                f"{word} is none of the hosts in {WHERE}.",
                hint=f"Did you mean {close[0]}?" if close else f"They are: {' '.join(known)}",
            )
        wanted |= fits
    return {text: address for text, address in known.items() if text in wanted}
