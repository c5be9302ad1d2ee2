"""``python -m pytest tests/sim --seed 1234`` (or ``SIM_SEED=1234``) replays one world and tells its story."""

from __future__ import annotations

import os


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="replay this one world of the simulation")


def pytest_generate_tests(metafunc):
    if "only_seed" in metafunc.fixturenames:
        text = os.environ.get("SIM_SEED")
        seed = metafunc.config.getoption("--seed", default=None)
        metafunc.parametrize("only_seed", [seed if seed is not None else int(text) if text else None])
