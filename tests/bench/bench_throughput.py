"""What a job costs the whole chain: ``python -m tests.bench.bench_throughput [--jobs N] [--slots N] [SOURCE ...]``.

SOURCE is a folder that holds the package ``kueue``; with several, each round measures all of them, one after the other:
only such ratios mean anything on a machine that does other things as well. Without one, this source is measured.

A real server, a real worker and the real command over TLS on loopback: one ``kueue cmd --wait`` of N jobs of /bin/true.
Prints jobs per second; per job the milliseconds of CPU of command, server, worker, and of keeper and spawner (the job's
own process is not counted); and the milliseconds that one ``kueue cmd --wait true`` takes from start to end.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.lab import Lab

HERE = Path(__file__).parents[2]
SINGLES = 9
ONCE = ("-c", "0", "-r", "0", "--wait")
FIGURES = ("jobs/s", "command", "server", "worker", "keeper", "spawner", "all", "single")


class LabOf(Lab):
    """A laboratory whose programs come from another source."""

    def __init__(self, folder: Path, source: Path) -> None:
        super().__init__(folder)
        self.source = source

    def environment(self, **extra: str) -> dict[str, str]:
        return super().environment(PYTHONPATH=str(self.source), **extra)


def cpu_seconds(pid: int) -> float:
    """Of all threads that live, to the nanosecond (proc(5), schedstat)."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def children_seconds() -> float:
    """CPU of the processes that we have waited for: commands only, while the programs run."""
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def measure(source: Path, jobs: int, slots: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as name:
        lab = LabOf(Path(name), source.resolve())
        try:
            server = lab.start_server()
            worker = lab.start_worker("w1", worker_max_parallel_jobs=slots)
            lines = lab.folder / "lines"
            lines.write_text("x\n" * (2 * slots))
            run = ("cmd", *ONCE, "--each-line", str(lines), "/bin/true", "{}")
            assert lab.kueue(*run).returncode == 0  # the first ones load what is loaded once
            keeper, *spawners = sorted(lab.runners())
            programs = {"server": server.pid, "worker": worker.pid, "keeper": keeper, "spawner": spawners[0]}
            lines.write_text("x\n" * jobs)
            before = {name: cpu_seconds(pid) for name, pid in programs.items()}
            before["command"] = children_seconds()
            begin = time.perf_counter()
            done = lab.kueue(*run, timeout=600)
            seconds = time.perf_counter() - begin
            assert done.returncode == 0, done.stderr
            after = {name: cpu_seconds(pid) for name, pid in programs.items()}
            after["command"] = children_seconds()
            cost = {name: (after[name] - before[name]) * 1000 / jobs for name in before}
            singles = []
            for _ in range(SINGLES):
                begin = time.perf_counter()
                assert lab.kueue("cmd", *ONCE, "true").returncode == 0
                singles.append((time.perf_counter() - begin) * 1000)
        finally:
            lab.close()
    return {**cost, "all": sum(cost.values()), "jobs/s": jobs / seconds, "single": statistics.median(singles)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=[HERE], metavar="SOURCE")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    found: dict[Path, list[Mapping[str, float]]] = {source: [] for source in chosen.sources}
    for _ in range(chosen.rounds):
        for source in chosen.sources:
            found[source].append(measure(source, chosen.jobs, chosen.slots))
    print(
        f"{chosen.jobs} jobs, {chosen.slots} at once; medians of {chosen.rounds} rounds; CPU in ms per job; one in ms"
    )
    print(" ".join(f"{name:>8}" for name in FIGURES))
    for source, costs in found.items():
        medians = {name: statistics.median(cost[name] for cost in costs) for name in FIGURES}
        print(" ".join(f"{medians[name]:8.{0 if name in ('jobs/s', 'single') else 2}f}" for name in FIGURES), source)


if __name__ == "__main__":
    main()
