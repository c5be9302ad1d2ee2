"""How fast the SQLite store commits and replays: ``python -m tests.bench.bench_store [DIRECTORY]``.

Give a directory on the disk that matters: a flush costs 0.1 ms on one and 10 ms on another, and a commit is one flush.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import answered, batch, ending, job_range, offered, started, submitted

JOBS = 100_000
GROUP = 100
"""Jobs in one commit."""


def measure(what: str, work: Callable[[], object], *, jobs: int = JOBS) -> None:
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    print(f"{what:<58} {seconds:8.3f} s {jobs / seconds:12,.0f} jobs/s")


def submit_singly(store: SqliteStore) -> None:
    for first in range(1, JOBS + 1, GROUP):
        store.commit(batch(*(fact for job in range(first, first + GROUP) for fact in (submitted(job), answered(job)))))


def run_all(store: SqliteStore) -> None:
    for first in range(1, JOBS + 1, GROUP):
        jobs = range(first, first + GROUP)
        store.commit(batch(*(offered(job, job) for job in jobs)))
        store.commit(batch(*(started(job, job) for job in jobs)))
        store.commit(ending(*jobs))


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        bulk = SqliteStore(Path(directory) / "bulk.sqlite")
        argvs = tuple((f"./run.sh {number}",) for number in range(JOBS))
        measure(
            "one submission of all, in one commit", lambda: bulk.commit(batch(submitted(1, job_range(argvs=argvs))))
        )
        measure("... replayed", lambda: list(bulk.replay()))
        bulk.close()
        single = SqliteStore(Path(directory) / "single.sqlite")
        measure(f"single submissions, {GROUP} in a commit", lambda: submit_singly(single))
        measure("... replayed", lambda: list(single.replay()))
        measure(f"offered, started, ended, {GROUP} in a commit", lambda: run_all(single))
        measure("a page of finished jobs", single.finished, jobs=500)
        measure("tidied", single.tidy)
        single.close()
        size = single.path.stat().st_size / 2**20
        measure(f"opened and checked, {size:.0f} MiB", lambda: SqliteStore(single.path).close())


if __name__ == "__main__":
    main()
