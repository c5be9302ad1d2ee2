"""What this machine has, what it is, and how busy it is.

Rules
- Cores are those that this process may use (``sched_getaffinity``: ``taskset``, cpusets); the configuration wins.
- Load is measured as the settings say: ``ceil(ceil(load1 - ghost) * scale)``, the ghost being what kueue's own ended
  jobs still contribute (`kueue.worker.ghost`).
- What the configuration withholds from jobs counts as the place where others run: their load takes that first.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from kueue.model import MachineInfo, MachineLoad, MachineTotals

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class MachineSettings:
    """The part of the configuration that concerns the machine."""

    slots: int = 10
    cores: int = 0
    """0: as measured."""
    ram_mb: int = 0
    """0: as measured."""
    named: tuple[tuple[str, int], ...] = ()
    looks_at_load: bool = True
    load_scale: float = 1.0


@dataclass(frozen=True)
class Measured:
    """One look at the kernel's figures; memory in whole MB."""

    load: tuple[float, float, float]
    cores: int
    ram_mb: int
    available_ram_mb: int


@dataclass(frozen=True)
class Ours:
    """What kueue's jobs contribute to the figures."""

    ghost: float = 0.0
    running: float = 0.0
    ram_mb: int = 0


def measure() -> Measured:
    """The figures of this moment."""
    memory = psutil.virtual_memory()
    return Measured(
        load=_load_average(),
        cores=len(os.sched_getaffinity(0)),
        ram_mb=memory.total // MEGABYTE,
        available_ram_mb=memory.available // MEGABYTE,
    )


def _load_average() -> tuple[float, float, float]:
    # From where the memory comes too: a container that shows figures of its own under /proc (lxcfs) means them, while
    # getloadavg(3) of newer C libraries asks the kernel past it.
    try:
        one, five, fifteen = Path("/proc/loadavg").read_text(encoding="ascii").split()[:3]
        return float(one), float(five), float(fifteen)
    except (OSError, ValueError):
        return os.getloadavg()


def totals(settings: MachineSettings, measured: Measured) -> MachineTotals:
    """What jobs may have here in all."""
    return MachineTotals(
        slots=settings.slots,
        cores=settings.cores or measured.cores,
        ram_mb=settings.ram_mb or measured.ram_mb,
        named=settings.named,
    )


def load(settings: MachineSettings, measured: Measured, ours: Ours = Ours()) -> MachineLoad:
    """How busy the machine is, for the room formula of `kueue.core.room`."""
    if not settings.looks_at_load:
        return MachineLoad(load=measured.load)
    limits = totals(settings, measured)
    spare_cores = max(0, measured.cores - limits.cores)
    spare_ram_mb = max(0, measured.ram_mb - limits.ram_mb)
    others_ram_mb = max(0, measured.ram_mb - measured.available_ram_mb - ours.ram_mb)
    return MachineLoad(
        load=measured.load,
        busy_cores=max(0, _busy(measured.load[0], ours.ghost, settings.load_scale) - spare_cores),
        others_busy_cores=max(0, _busy(measured.load[0], ours.ghost + ours.running, settings.load_scale) - spare_cores),
        available_ram_mb=measured.available_ram_mb,
        others_ram_mb=max(0, others_ram_mb - spare_ram_mb),
    )


def _busy(load1: float, ours: float, scale: float) -> int:
    left = load1 - ours
    # Our average and the kernel's are sampled at other moments: what is left within that error is nobody's load.
    if ours > 0.0 and left <= 0.1 + 0.1 * ours:
        left = 0.0
    # Without the tiny bit taken off, 10 * 1.1 would round up to 12.
    return math.ceil(math.ceil(max(0.0, left)) * scale - 1e-9)


def info() -> MachineInfo:
    """What the machine is, for people."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return MachineInfo(
        kernel=platform.release() or "unknown",
        distribution=release.get("PRETTY_NAME") or release.get("NAME") or "unknown",
        cpu_mhz=_cpu_mhz(),
    )


def _cpu_mhz() -> int:
    """Mean over the cores; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        figures = [float(line.partition(":")[2]) for line in lines if line.lower().startswith("cpu mhz")]
    except (OSError, ValueError):
        return 0
    return round(sum(figures) / len(figures)) if figures else 0


def machine_id() -> str:
    """Names this installation of the system; two machines with the same one are copies of a disk. Empty: none known."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
        if text:
            return text
    return ""


def boot_id() -> str:
    """Changes with every boot (random(4)); empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
