"""Fixtures of the worker: see `tests.support.runner_lab`."""

import pytest

from tests.support.runner_lab import Lab


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()
