"""How much room a machine has: the one formula, for the server's placement and for the worker's own answer to an offer.

Rules
- *Free* is never reported; both sides compute it here from totals, measured load and the sums over allocations.
- Cores that are busy by measurement and cores that are promised overlap (a running job makes load), so the larger of
  the two counts, not their sum.
"""

from __future__ import annotations

from kueue.model import MachineLoad, MachineTotals


def free_room(totals: MachineTotals, load: MachineLoad, slots: int, cores: int, ram_mb: int) -> tuple[int, int, int]:
    """Returns (slots, cores, ram_mb) that may still be promised; never below 0.

    `slots`, `cores`, `ram_mb`: sums over the allocations on this machine. Totals may have been lowered below them by a
    changed configuration; then nothing is free until enough has ended.
    """
    free_ram_mb = totals.ram_mb - ram_mb
    if load.available_ram_mb is not None:
        free_ram_mb = min(free_ram_mb, load.available_ram_mb)
    return (
        max(0, totals.slots - slots),
        max(0, totals.cores - max(cores, load.busy_cores)),
        max(0, free_ram_mb),
    )


def wish_room(totals: MachineTotals, load: MachineLoad) -> tuple[int, int]:
    """Returns (cores, ram_mb) that would be free if kueue ran nothing here: what a *wish* is cut down to."""
    return (
        max(0, totals.cores - load.others_busy_cores),
        max(0, totals.ram_mb - load.others_ram_mb),
    )
