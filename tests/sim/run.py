"""Runs many seeds from the command line: ``python -m tests.sim.run --seeds 0:5000``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback

from tests.sim.lab import Result, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="first:last (exclusive), or one seed, which is told at length")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="also after a violation")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    if not last:
        return _tell(run_seed(int(first)))
    began = time.perf_counter()
    done = steps = starts = returns = 0
    failed: list[int] = []
    with multiprocessing.Pool(arguments.jobs) as pool:
        for result in pool.imap_unordered(run_seed, range(int(first), int(last)), chunksize=5):
            done += 1
            steps += result.steps
            starts += result.chained_starts
            returns += result.chained_returns
            if result.violation is not None:
                failed.append(result.seed)
                print(f"seed {result.seed}: {str(result.violation)[:300]}", flush=True)
                if not arguments.keep_going:
                    pool.terminate()
                    break
    seconds = time.perf_counter() - began
    print(f"{done} seeds, {steps} steps, {seconds:.1f} s, {len(failed)} failed {sorted(failed)[:50]}")
    print(f"{starts} starts of offers ahead, {returns} of them given back")
    return int(bool(failed))


def _tell(result: Result) -> int:
    print(
        f"seed {result.seed}: {result.jobs} jobs, {result.attempts} attempts, {result.seconds:.0f} simulated seconds, "
        f"{result.steps} steps, digest {result.digest}"
    )
    if result.violation is None:
        return 0
    print(result.story)
    print(result.violation)
    if result.violation.__cause__ is not None:
        traceback.print_exception(result.violation.__cause__)
    return 1


if __name__ == "__main__":
    sys.exit(main())
