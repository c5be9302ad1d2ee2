"""What a machine has and how busy it is: the six vectors, the ghost, the wishes' room."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from kueue.core.room import free_room, wish_room
from kueue.model import MachineLoad, MachineTotals
from kueue.worker import machine
from kueue.worker.ghost import DECAY, LoadOfJobs
from kueue.worker.machine import MachineSettings, Measured, Ours


def measured(load1, available_ram_mb, cores=16, ram_mb=64000):
    return Measured((load1, load1, load1), cores, ram_mb, available_ram_mb)


@pytest.mark.parametrize(
    ("looks", "scale", "load1", "available", "taken", "free"),
    [
        (True, 1.0, 0.0, 60000, (0, 0, 0), (10, 16, 60000)),
        (True, 1.0, 3.2, 60000, (1, 2, 8192), (9, 12, 55808)),
        (True, 2.0, 3.2, 60000, (1, 2, 8192), (9, 8, 55808)),
        (True, 2.0, 8.0, 60000, (0, 0, 0), (10, 0, 60000)),
        (True, 1.0, 1.0, 30000, (1, 8, 8192), (9, 8, 30000)),
        (False, 1.0, 15.0, 100, (1, 8, 8192), (9, 8, 55808)),
    ],
)
def test_free_room_follows_load_and_allocations(looks, scale, load1, available, taken, free):
    settings = MachineSettings(slots=10, looks_at_load=looks, load_scale=scale)
    figures = measured(load1, available)
    assert free_room(machine.totals(settings, figures), machine.load(settings, figures), *taken) == free


def test_load_above_the_cores_leaves_nothing_and_never_less():
    settings = MachineSettings(slots=2)
    figures = measured(40.0, 100)
    assert free_room(machine.totals(settings, figures), machine.load(settings, figures), 3, 20, 70000) == (0, 0, 0)


def test_the_scale_does_not_round_up_by_itself():
    assert machine.load(MachineSettings(load_scale=1.1), measured(10.0, 1)).busy_cores == 11


def test_configured_totals_win_over_measured_ones():
    settings = MachineSettings(slots=1, cores=64, ram_mb=5, named=(("gpu", 4),))
    assert machine.totals(settings, measured(0.0, 1)) == MachineTotals(1, 64, 5, (("gpu", 4),))


def test_what_is_withheld_from_jobs_is_where_others_run():
    settings = MachineSettings(slots=4, cores=4, ram_mb=16000)
    load = machine.load(settings, measured(8.0, 34000))
    assert (load.busy_cores, load.others_ram_mb) == (0, 0)
    assert free_room(machine.totals(settings, measured(8.0, 34000)), load, 0, 0, 0) == (4, 4, 16000)
    assert machine.load(settings, measured(14.0, 10000)).busy_cores == 2


def test_a_wish_counts_what_others_use_and_not_what_kueue_uses():
    settings = MachineSettings(slots=4)
    figures = measured(6.0, 40000)
    load = machine.load(settings, figures, Ours(running=3.9, ram_mb=20000))
    assert (load.busy_cores, load.others_busy_cores, load.others_ram_mb) == (6, 3, 4000)
    assert wish_room(machine.totals(settings, figures), load) == (13, 60000)
    assert wish_room(MachineTotals(1, 2, 100), MachineLoad(others_busy_cores=5, others_ram_mb=900)) == (0, 0)


def test_ended_jobs_are_subtracted_from_the_load_and_running_ones_are_not():
    settings = MachineSettings(slots=4)
    assert machine.load(settings, measured(8.0, 1), Ours(ghost=8.2)).busy_cores == 0
    assert machine.load(settings, measured(8.0, 1), Ours(ghost=5.0)).busy_cores == 3
    assert machine.load(settings, measured(8.0, 1), Ours(running=8.0)).busy_cores == 8


def test_the_ghost_follows_the_kernels_average():
    jobs = LoadOfJobs()
    kernel = 0.0
    for _ in range(24):
        kernel = kernel * DECAY + 4.0 * (1 - DECAY)
        jobs.step({1: 4.0})
    assert jobs.running == pytest.approx(kernel)
    assert jobs.ghost == 0.0
    jobs.ended(1, run_seconds=120.0, cpu_seconds=480.0)
    assert jobs.running == 0.0
    assert jobs.ghost == pytest.approx(kernel)
    for _ in range(12):
        kernel *= DECAY
        jobs.step({})
    assert jobs.ghost == pytest.approx(kernel)
    for _ in range(200):
        jobs.step({})
    assert jobs.ghost == 0.0


def test_a_job_too_short_to_be_sampled_leaves_what_its_record_says():
    jobs = LoadOfJobs()
    jobs.ended(1, run_seconds=3.0, cpu_seconds=6.0)
    assert jobs.ghost == pytest.approx(2.0 * (1 - math.exp(-3.0 / 60.0)))
    jobs.ended(2, run_seconds=0.0, cpu_seconds=0.0)
    assert jobs.ghost == pytest.approx(2.0 * (1 - math.exp(-3.0 / 60.0)))


def test_a_worker_bound_to_one_cpu_sees_one():
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); from kueue.worker import machine; print(machine.measure().cores)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


def test_the_machine_is_measured_and_described():
    figures = machine.measure()
    assert figures.cores >= 1
    assert 0 < figures.available_ram_mb <= figures.ram_mb
    info = machine.info()
    assert info.kernel == os.uname().release
    assert info.distribution
    assert info.cpu_mhz >= 0
    assert machine.boot_id() == machine.boot_id() != ""
