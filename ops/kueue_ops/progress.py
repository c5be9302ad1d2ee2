"""A line that shows how far the work over many hosts is, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from kueue import log


@contextlib.contextmanager
def shown(what: str, total: int, log_level: str) -> Iterator[Callable[[str], None]]:
    """Yields a function to be called with each host that is done; the log goes on above the line."""
    if not (sys.stderr is not None and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415  100 ms that a run without a terminal need not pay
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415  as above

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[last]}"))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            # The line is redrawn below whatever is written to the stderr that exists from now on.
            log.start(log_level)
            task = bar.add_task(what, total=total, last="")
            yield lambda host: bar.update(task, advance=1, last=host)
    finally:
        log.start(log_level)
