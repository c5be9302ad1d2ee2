"""Fixtures of the runner: see `runner_bench`."""

import pytest
from runner_bench import Bench


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def desk(bench):
    """An attachment to a fresh runner, with a lease of an hour."""
    desk = bench.start_runner()
    desk.lease()
    return desk
