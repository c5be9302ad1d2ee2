"""What a verb works with: its arguments, the screen, the settings and the connection, each made when first needed."""

from __future__ import annotations

import argparse
import time
from functools import cached_property

from kueue.cli.screen import Screen
from kueue.cli.verbs import LOOK_PATIENCE_SECONDS, LOOKING, PATIENCE_SECONDS
from kueue.client import Client, connect
from kueue.config import Config, load, write_template
from kueue.errors import EXIT_REFUSED, KueueError, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

_DETAILED = ("trace", "debug")
"""Levels of log_level at which a command tells its steps."""
ASKED_ONE_BY_ONE = 1000
"""Ids: to ask about so many that do not exist takes a moment; a range may be typed of any length."""


class Session:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self.arguments = arguments
        self.screen = screen

    @cached_property
    def config(self) -> Config:
        """The settings; a file of defaults is written when there is none."""
        config = self._load()
        if not config.exists and write_template(config.path):
            self.screen.remark(
                f"Wrote a new configuration to {config.path}. To join a lab put its server_name and shared_secret "
                "there; to try kueue on this machine: kueue up"
            )
            # Nobody can know the new secret yet, so there is nobody to wait for.
            self.arguments.patience = 0.0
            config = self._load()
        for warning in config.warnings:
            self.screen.remark(f"Warning: {warning}")
        if config.common.log_level in _DETAILED:
            self._remark_step(f"settings of {config.path}")
        return config

    @property
    def patience_seconds(self) -> float:
        """How long a server that is away is waited for: as typed, else as the verb needs it."""
        typed: float | None = self.arguments.patience
        if typed is not None:
            return typed
        return LOOK_PATIENCE_SECONDS if self.arguments.verb in LOOKING else PATIENCE_SECONDS

    @cached_property
    def client(self) -> Client:
        """The connection to the server, made at the first question."""
        client = connect(self.config, patience_seconds=self.patience_seconds)
        client.tell = self.screen.remark
        if self.config.common.log_level in _DETAILED:
            client.debug = self._remark_step
        return client

    @cached_property
    def now_wall(self) -> float:
        """UTC seconds when the answer was there; one moment for a whole listing."""
        return time.time()

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    def print_json(self, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """One JSON document, indented when a person looks at it."""
        import json  # noqa: PLC0415 - loaded by the client already

        # ASCII alone: the same bytes in every locale.
        self.screen.print(json.dumps(value, indent=2 if self.screen.is_terminal else None))

    def each_job(self, ids: Sequence[tuple[int, int]]) -> Iterator[int]:
        """The single ids, to ask about one after the other; of very many only those that exist.

        Raises `UserError` when none of very many exists.
        """
        if sum(last - first + 1 for first, last in ids) <= ASKED_ONE_BY_ONE:
            for first, last in ids:
                yield from range(first, last + 1)
            return
        there = [job["id"] for part in self.client.ask_parts("ListJobs", ids=ids) for job in part["jobs"]]
        if not there:
            raise UserError("Job not found!", hint="`kueue list-jobs` shows those that there are.")
        yield from there

    def tell_results(self, answer: Mapping[str, Any]) -> int:
        """What was done goes to stdout, what was refused to stderr; 1 if anything was refused."""
        worst = 0
        for result in answer["results"]:
            if result["ok"]:
                self.screen.print(result["text"])
                continue
            worst = EXIT_REFUSED
            self.screen.remark(result["text"])
            if result.get("hint"):
                self.screen.remark(f"Hint: {result['hint']}")
        return worst

    def report(self, error: KueueError) -> None:
        """Tells the person of an error: sentence and hint."""
        self.screen.remark(f"Error: {error}")
        if error.hint:
            self.screen.remark(f"Hint: {error.hint}")

    def _remark_step(self, text: str) -> None:
        self.screen.remark(f"debug: {text}")

    def _load(self) -> Config:
        return load(self.arguments.config, ("client_settings",), cache_dir=_cache_directory())


def _cache_directory() -> str | None:
    """Where parsed settings are kept; none if there is no place, which costs only time."""
    from kueue import places  # noqa: PLC0415 - a verb without settings need not load it

    try:
        return places.find().cache
    except (KueueError, OSError):
        return None
