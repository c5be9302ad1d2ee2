"""What the engine must know of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Limits and times; a reload replaces the whole."""

    worker_timeout_seconds: float = 300.0
    """T: silence after which a worker's jobs may be given away."""
    job_offer_timeout_seconds: float = 60.0
    job_cleanup_after_seconds: float = 2880 * 60.0
    global_max_parallel_jobs: int = 100
    """Slots that offered and running jobs may take over all workers."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Licence name → total."""

    @property
    def margin_seconds(self) -> float:
        """M: what the lease is shorter than T by; a tenth, but at least 2 s, for clock drift and a slow pause."""
        return max(2.0, self.worker_timeout_seconds / 10.0)

    @property
    def lease_seconds(self) -> float:
        """L = T - M."""
        return self.worker_timeout_seconds - self.margin_seconds
