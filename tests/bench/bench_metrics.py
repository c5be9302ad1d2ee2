"""How long a look at the figures of a large laboratory takes. Run by hand: ``python -m tests.bench.bench_metrics``.

10,000 jobs of 100 kinds, a tenth of them running, on 200 workers: first inside of this program, in processor time (what
"holds the loop" is the longest that anything else in the server waits), then by HTTP from a real server that 200 workers
are connected to and that takes submissions meanwhile. A goal that is missed makes the program end with exit code 1.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import trio

from kueue import exposition
from kueue.model import Request
from kueue.protocol import messages as m
from kueue.server.metrics import Disk, Sight, families
from tests.support.large_lab import LargeLab
from tests.support.ports import free_port
from tests.support.server_program import ServerProgram, job_range

REPEATS = 31
GOAL_SECONDS = 0.1
GOAL_BYTES = 1_000_000


def main() -> int:
    lab = LargeLab(workers=200)
    for number in range(100):
        lab.submit(Request(cores=4 + number % 32, ram_mb=100 + number), count=100)
    lab.settle()
    lab.start_all()
    sight = Sight(lab.engine, lab.now, lab.measures, disk=Disk(1, 1))
    states = {state.value: number for state, number in lab.engine.state.by_state.items() if number}
    print(f"{len(lab.engine.state.jobs)} jobs {states}, {len(lab.engine.state.nodes)} workers")
    collected = measured("collected (holds the loop)", lambda: families(sight))
    found = families(sight)
    longest = 0.0
    for family in found:
        began = time.process_time()
        trio.run(exposition.rendered, [family])
        longest = max(longest, time.process_time() - began)
    print(f"{'longest family (holds the loop), trio.run included':<52} {1000 * longest:8.1f} ms")
    good = collected < GOAL_SECONDS
    for name, accept in (("text", ""), ("OpenMetrics", "application/openmetrics-text")):
        seconds = measured(f"rendered as {name}", lambda accept=accept: trio.run(exposition.rendered, found, accept))
        _, body = trio.run(exposition.rendered, found, accept)
        print(f"{f'size as {name}':<52} {len(body) / 1000:8.0f} kB, {body.count(b'kueue_worker_')} lines of workers")
        good = good and collected + seconds < GOAL_SECONDS and len(body) < GOAL_BYTES
    for what in ("prometheus_client", "kueue.server.metrics"):
        code = f"import time, kueue.server.main; t = time.process_time(); import {what}; print(time.process_time() - t)"
        took = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
        print(f"{f'import {what} behind the server':<52} {1000 * min(took):8.1f} ms")
    return 0 if scraped() and good else 1


def scraped() -> bool:
    """By HTTP, from a server that is at work."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProgram(Path(folder), global_max_parallel_jobs=1_000_000)
        server.figures = f"127.0.0.1:{free_port()}"
        server.write_config()
        server.start()
        try:
            workers = [server.worker(f"worker{number:04}", slots=5) for number in range(200)]
            client = server.client(local=True)
            for number in range(100):
                client.submit("true", count=100, cores=5 - number % 2)
            for worker in workers:
                worker.start(worker.hear_a(m.Offer))
            times, size = [], 0
            for number in range(REPEATS):
                client.say(m.Submit(seq=10_000 + number, request_id=f"{number:032x}", ranges=(job_range("more"),)))
                began = time.perf_counter()
                with urllib.request.urlopen(f"http://{server.figures}/metrics", timeout=20) as answer:
                    size = len(answer.read())
                times.append(time.perf_counter() - began)
        finally:
            server.close()
    median = statistics.median(times)
    print(
        f"{'scraped from a real server, elapsed':<52} {1000 * min(times):8.1f} ms best {1000 * median:8.1f} ms median "
        f"{1000 * max(times):8.1f} ms worst, {size / 1000:.0f} kB"
    )
    return median < GOAL_SECONDS


def measured(what: str, work: Callable[[], object]) -> float:
    """Prints best and median; returns the median."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    median = statistics.median(times)
    print(f"{what:<52} {1000 * min(times):8.1f} ms best {1000 * median:8.1f} ms median")
    return median


if __name__ == "__main__":
    sys.exit(main())
