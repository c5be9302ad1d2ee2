"""How long placement takes in a full laboratory. Run by hand: ``python -m tests.bench.bench_placement``.

Each figure is the best and the median of several runs, in processor time; a goal that is missed makes the program end with exit code 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.model import (
    EndRecord,
    Exited,
    JobRange,
    MachineLoad,
    MachineTotals,
    NodeRecord,
    Now,
    Payload,
    Place,
    Request,
)
from kueue.protocol import messages as m

JOBS = 100_000
REPEATS = 31
END = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=2.0, run_seconds=60.0)
SHORT = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=1.1, run_seconds=0.1)


class Lab:
    """An engine with workers that start whatever they are offered."""

    def __init__(self, workers: int, totals: MachineTotals, *, cap: int = 1_000_000) -> None:
        self.now = Now(wall=1000.0, steady=1000.0)
        self.engine = Engine(Settings(global_max_parallel_jobs=cap), queue_id="bench")
        self.engine.opened(self.now)
        self.running: list[tuple[int, int]] = []
        for number in range(workers):
            hello = m.WorkerHello(
                identity=f"i{number}",
                name=f"w{number}",
                machine_id=f"m{number}",
                boot_id="b",
                totals=totals,
                lines=True,
            )
            self.engine.handle(number, hello, self.now)

    def submit(self, ranges: list[JobRange]) -> None:
        facts = f.JobsSubmitted(first_id=0, ranges=tuple(ranges), principal="operator", wall=1.0)
        self.engine.queue.decide(facts)
        self.engine.tick(self.now)

    def settle(self) -> int:
        """Until nothing more fits; all that is offered is started. Returns how many offers were made."""
        count = 0
        while self.engine.queue.unsettled:
            for session, message in self.engine.settle(self.now).sends:
                if isinstance(message, m.Offer):
                    count += 1
                    self.running.append((session, message.offer))
                    started = m.AttemptStarted(offer=message.offer, started_wall=1.0)
                    self.engine.handle(session, started, self.now)
        return count

    def end_one(self, end: EndRecord = END) -> None:
        session, offer = self.running.pop(0)
        self.engine.handle(session, m.AttemptEnded(offer=offer, end=end), self.now)


def job(ram_mb: int, *, cores: int = 1, priority: int = 10, cwd: str = "/home/user", count: int = 1) -> JobRange:
    return JobRange(
        payload=Payload(argv=("true",)),
        place=Place(cwd=cwd),
        request=Request(slots=1, cores=cores, ram_mb=ram_mb, priority=priority),
        count=count,
    )


def timed(what: Callable[[], object], prepare: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each run of `what`, after an untimed `prepare`."""
    figures = []
    for _ in range(repeats):
        prepare()
        begin = time.process_time()
        what()
        figures.append(1000.0 * (time.process_time() - begin))
    return figures


def told(name: str, figures: list[float], goal_ms: float) -> bool:
    median = statistics.median(figures)
    verdict = "ok" if median <= goal_ms else "MISSED"
    print(f"{name:<74} best {min(figures):9.3f} ms   median {median:9.3f} ms   goal {goal_ms:7.0f} ms  {verdict}")
    return median <= goal_ms


def fifty_shapes() -> bool:
    """A job ends on one of four full workers; the next one takes its place."""
    lab = Lab(4, MachineTotals(slots=10, cores=16, ram_mb=64_000))
    lab.submit([job(1000 + 100 * (n % 10), cores=1 + n // 10 % 5, count=JOBS // 50) for n in range(50)])
    lab.settle()
    return told("one end, one offer: 100,000 jobs of 50 shapes", timed(lab.settle, lab.end_one), 1)


def many_sizes() -> bool:
    """As before, but no two jobs share a directory and there are 10,000 sizes."""
    lab = Lab(4, MachineTotals(slots=10, cores=16, ram_mb=64_000))
    lab.submit([job(100 + n % 10_000, cwd=f"/data/{n}") for n in range(JOBS)])
    lab.settle()
    good = told("one end, one offer: 100,000 directories, 10,000 sizes", timed(lab.settle, lab.end_one), 5)

    def touch() -> None:
        lab.engine.queue.unsettled = True

    return told("full lab, nothing fits: 100,000 directories, 10,000 sizes", timed(lab.settle, touch), 5) and good


def no_room_for_most() -> bool:
    """10,000 sizes of which only the largest thousandth would fit nowhere else: the first that fits stands far behind."""
    lab = Lab(1, MachineTotals(slots=10, cores=16, ram_mb=1_000))
    lab.submit([job(11_000 - n // 10, cwd=f"/data/{n}") for n in range(JOBS)])
    lab.engine.queue.decide(
        f.NodeChanged(
            node=NodeRecord(id=0, identity="i0", name="w0", totals=MachineTotals(slots=10, cores=16, ram_mb=10_050)),
            wall=1.0,
        )
    )
    lab.settle()
    return told("one end, one offer: the first that fits stands behind 9,500 jobs", timed(lab.settle, lab.end_one), 5)


def missing_directories() -> bool:
    """One of two workers has declined 10,000 of the directories; the other is full."""
    lab = Lab(2, MachineTotals(slots=10, cores=16, ram_mb=64_000))
    lab.submit([job(1000, cwd=f"/data/{n // 5}") for n in range(JOBS)])
    lab.settle()
    for n in range(10_000):
        lab.engine.queue.workers[0].decline_place(f"/data/{n}", "no such directory", 1e9)
    return told("one end, one offer: 10,000 directories declined by one worker", timed(lab.settle, lab.end_one), 50)


def filling_up() -> bool:
    """1,000 idle workers take 10 jobs each."""
    figures: list[float] = []
    for sizes in (1, 50, 50):
        lab = Lab(1000, MachineTotals(slots=10, cores=16, ram_mb=64_000))
        lab.submit([job(1000 + n, count=20_000 // sizes) for n in range(sizes)])
        begin = time.process_time()
        offers = lab.settle()
        figures.append(1000.0 * (time.process_time() - begin))
        assert offers == 10_000
    return told("1,000 workers take 10,000 jobs of 1 and of 50 shapes  ", figures, 3000)


def busy_lab() -> bool:
    """One end, one offer, with 1,000 full workers."""
    lab = Lab(1000, MachineTotals(slots=10, cores=16, ram_mb=64_000))
    lab.submit([job(1000 + n, count=1000) for n in range(50)])
    lab.settle()
    good = told("one end, one offer: 1,000 full workers, 50 shapes", timed(lab.settle, lab.end_one), 10)

    def report() -> None:
        lab.engine.handle(0, m.Report(load=MachineLoad()), lab.now)

    good = told("one report, nothing fits: 1,000 full workers", timed(lab.settle, report), 10) and good
    return (
        told("next_deadline: 1,000 workers", timed(lambda: lab.engine.next_deadline(lab.now), lab.settle), 5) and good
    )


def short_jobs() -> bool:
    """1,000 full workers whose jobs are short: one ends, the next of its line starts, another is offered ahead."""
    lab = Lab(1000, MachineTotals(slots=10, cores=16, ram_mb=64_000))
    lab.submit([job(1000, count=JOBS), *(job(2000 + n, count=100) for n in range(50))])
    lab.settle()
    for _ in range(10_000):
        lab.end_one(SHORT)
    figures: list[float] = []
    begin = time.process_time()
    queue = lab.engine.queue
    waiting: list[tuple[int, int]] = []

    def settle() -> None:
        # All that has room starts, and what is offered ahead waits.
        while queue.unsettled:
            for session, message in lab.engine.settle(lab.now).sends:
                if isinstance(message, m.Offer) and message.line is None:
                    lab.running.append((session, message.offer))
                    lab.engine.handle(session, m.AttemptStarted(offer=message.offer, started_wall=1.0), lab.now)
                elif isinstance(message, m.Offer):
                    waiting.append((session, message.offer))

    settle()
    assert len(waiting) > 10_000
    figures.append(1000.0 * (time.process_time() - begin))
    good = told(f"1,000 workers take 10,000 short jobs, and {len(waiting)} ahead", figures, 5000)

    def one_follows() -> None:
        session, offer = lab.running.pop(0)
        line = lab.engine.state.lines[offer]
        lab.engine.handle(session, m.AttemptEnded(offer=offer, end=SHORT), lab.now)
        following = next(iter(line))
        lab.engine.handle(session, m.AttemptStarted(offer=following, started_wall=1.1), lab.now)

    good = told("one end, one start, one offer ahead: 1,000 workers", timed(settle, one_follows), 10) and good
    return (
        told("next_deadline: 1,000 workers, work ahead", timed(lambda: lab.engine.next_deadline(lab.now), settle), 10)
        and good
    )


def main() -> int:
    benches = [fifty_shapes, many_sizes, no_room_for_most, missing_directories, filling_up, busy_lab, short_jobs]
    good = [bench() for bench in benches]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
