"""What a job costs the runner: ``python -m tests.bench.bench_runner [--jobs N] [--slots N] [SOURCE ...]``.

SOURCE is a folder that holds the package ``kueue``; with several, each round measures all of them, one after the other:
only such ratios mean anything on a machine that does other things as well. Without one, this source is measured.

Prints jobs per second and, per job, the milliseconds of CPU of keeper and spawner and of the child processes (from their
birth to the end of the program, /bin/true).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parents[2]
FORGET_AT_ONCE = 20


@dataclass(frozen=True)
class Cost:
    """Of one round; CPU in milliseconds per job."""

    rate: float
    keeper: float
    spawner: float
    child: float


def archive(source: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as packed:
        packed.writestr("kueue/__init__.py", "")
        packed.writestr("__main__.py", "import sys\nfrom kueue.runner.main import main\nsys.exit(main())\n")
        for path in sorted((source / "kueue" / "runner").glob("*.py")):
            packed.writestr(f"kueue/runner/{path.name}", path.read_text(encoding="utf-8"))
    return buffer.getvalue()


class Runner:
    """A real one, in a directory of its own; ends with everything it has started."""

    def __init__(self, source: Path, state: Path) -> None:
        program = state / "runner.pyz"
        program.write_bytes(archive(source))
        self.place = state / "runners" / "one"
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(program), "run", "--state", str(state)]
        command += ["--runner", "one", "--identity", str(state), "--version", "bench", "--linger", "1"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        self.sock = socket.socket(socket.AF_UNIX)
        folder = os.open(self.place, os.O_PATH)
        self.sock.settimeout(60)
        self.sock.connect(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
        self._rest = b""
        self.send({"type": "Attach"})
        self.send({"type": "SetLease", "deadline_boottime": time.clock_gettime(time.CLOCK_BOOTTIME) + 3600})

    def send(self, *orders: dict[str, Any]) -> None:
        self.sock.sendall(b"".join(json.dumps(order).encode() + b"\n" for order in orders))

    def events(self) -> Iterator[dict[str, Any]]:
        *lines, self._rest = (self._rest + self.sock.recv(1 << 20)).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def cpu(self) -> tuple[float, float, float]:
        """Seconds so far: keeper, spawner, children that were reaped."""
        info = json.loads((self.place / "info.json").read_bytes())
        keeper, spawner = (_times(pid) for pid, _ in (info["keeper"], info["spawners"][0]))
        return sum(keeper[:2]), sum(spawner[:2]), sum(spawner[2:])

    def close(self) -> None:
        info = json.loads((self.place / "info.json").read_bytes())
        self.send({"type": "Detach"})
        self.sock.close()
        handle = os.pidfd_open(info["keeper"][0])
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        os.close(handle)
        while self.place.exists() and Path(f"/proc/{info['keeper'][0]}").exists():
            time.sleep(0.01)


def _times(pid: int) -> list[float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(word) / TICKS for word in fields[11:15]]


def run_jobs(runner: Runner, first: int, jobs: int, slots: int, work: str) -> None:
    order = {
        "type": "StartAttempt",
        "queue_id": "bench",
        "argv": ["true"],
        "env": [[name, value] for name, value in os.environ.items()],
        "cwd": work,
        "pwd": work,
    }
    numbers = iter(range(first, first + jobs))
    runner.send(*({**order, "offer": number, "job": number} for _, number in zip(range(slots), numbers, strict=False)))
    left = jobs
    ended: list[int] = []
    while left:
        orders: list[dict[str, Any]] = []
        for event in runner.events():
            if event["type"] == "Ended":
                assert event["end"]["outcome"] == {"type": "exited", "code": 0}, event
                left -= 1
                ended.append(event["offer"])
                number = next(numbers, None)
                if number is not None:
                    orders.append({**order, "offer": number, "job": number})
            else:
                assert event["type"] in ("Attached", "Started", "Changed"), event
        if len(ended) >= FORGET_AT_ONCE or not left:
            orders.append({"type": "ForgetAttempts", "offers": ended})
            ended = []
        if orders:
            runner.send(*orders)


def measure(source: Path, jobs: int, slots: int) -> Cost:
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        runner = Runner(source, state)
        try:
            run_jobs(runner, 1, 2 * slots, slots, name)  # the first ones load what is loaded once
            before = runner.cpu()
            begin = time.perf_counter()
            run_jobs(runner, 1000, jobs, slots, name)
            seconds = time.perf_counter() - begin
            after = runner.cpu()
        finally:
            runner.close()
    keeper, spawner, child = ((new - old) * 1000 / jobs for old, new in zip(before, after, strict=True))
    return Cost(jobs / seconds, keeper, spawner, child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=[HERE], metavar="SOURCE")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    costs: dict[Path, list[Cost]] = {source: [] for source in chosen.sources}
    for _ in range(chosen.rounds):
        for source in chosen.sources:
            costs[source].append(measure(source, chosen.jobs, chosen.slots))
    print(f"{chosen.jobs} jobs, {chosen.slots} at once; medians of {chosen.rounds} rounds; CPU in ms per job")
    print(f"{'jobs/s':>8} {'keeper':>8} {'spawner':>8} {'child':>8} {'all':>8}")
    for source, found in costs.items():
        rate, keeper, spawner, child = (
            statistics.median(getattr(cost, name) for cost in found) for name in ("rate", "keeper", "spawner", "child")
        )
        total = keeper + spawner + child
        print(f"{rate:8.0f} {keeper:8.2f} {spawner:8.2f} {child:8.2f} {total:8.2f}  {source}")


if __name__ == "__main__":
    main()
