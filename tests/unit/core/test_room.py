"""The one formula for what a machine may still promise."""

from __future__ import annotations

from math import ceil

import pytest

from kueue.core.room import free_room, wish_room
from kueue.model import MachineLoad, MachineTotals

TOTALS = MachineTotals(slots=10, cores=16, ram_mb=64000)


@pytest.mark.parametrize(
    ("dynamic", "scale", "load1", "available", "taken", "free"),
    [
        (True, 1.0, 0.0, 60000, (0, 0, 0), (10, 16, 60000)),
        (True, 1.0, 3.2, 60000, (1, 2, 8192), (9, 12, 55808)),
        (True, 2.0, 3.2, 60000, (1, 2, 8192), (9, 8, 55808)),
        (True, 2.0, 8.0, 60000, (0, 0, 0), (10, 0, 60000)),
        (True, 1.0, 1.0, 30000, (1, 8, 8192), (9, 8, 30000)),
        (False, 1.0, 15.0, 100, (1, 8, 8192), (9, 8, 55808)),
    ],
)
def test_free_room_follows_the_documented_figures(dynamic, scale, load1, available, taken, free):
    busy = ceil(ceil(load1) * scale)
    load = MachineLoad(busy_cores=busy, available_ram_mb=available) if dynamic else MachineLoad()
    assert free_room(TOTALS, load, *taken) == free


def test_nothing_is_free_where_totals_were_lowered_below_what_is_taken():
    assert free_room(MachineTotals(slots=1, cores=2, ram_mb=100), MachineLoad(), 4, 8, 500) == (0, 0, 0)


def test_a_wish_sees_what_others_leave():
    load = MachineLoad(busy_cores=15, others_busy_cores=3, available_ram_mb=10, others_ram_mb=4000)
    assert wish_room(TOTALS, load) == (13, 60000)
