"""The log of what happened: one line for each fact, after it is stored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from kueue import log
from kueue.core.facts import AnyFact
from kueue.core.story import event_of

FACTS_LOGGED = 100
"""Facts of one commit that get a line each; of more, info has their numbers by kind and debug the lines: a busy
server stores thousands in a second."""

_log = log.logger("server.queue")


def write(facts: Sequence[AnyFact], remarks: Sequence[str]) -> None:
    """Log what one commit has stored, and what the engine remarks."""
    for remark in remarks:
        _log.info("%s", remark)
    if not _log.isEnabledFor(logging.INFO):
        return
    each = len(facts) <= FACTS_LOGGED
    if not each:
        kinds = Counter(type(fact).__name__ for fact in facts)
        _log.info("stored %s", ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())))
    level = logging.INFO if each else logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    for fact in facts:
        offer = getattr(fact, "offer", None)
        for event in event_of(fact):
            numbers = "".join(
                f"{name}={number} "
                for name, number in (("job", event.job), ("last", event.last), ("offer", offer))
                if number is not None
            )
            _log.log(level, "%s%s", numbers, _words(event.who, event.what))


@lru_cache(maxsize=200)
def _words(who: str, what: str) -> str:
    # The same few are said of every job.
    return log.keys(by=who, event=what)
