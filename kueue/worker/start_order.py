"""What a runner is told to start, made of an offer: command, directory, environment, and the memo it keeps for us.

Pure. What is the same for every job is turned into its travelling form once.
"""

from __future__ import annotations

from collections.abc import Mapping

from kueue.model import OsText, Share, to_os_text
from kueue.protocol.messages import Offer
from kueue.worker.environment import additions
from kueue.worker.known import Memo, write_memo
from kueue.worker.orders import StartAttempt


class StartOrders:
    """Makes them. `base`: what every job gets of the worker's environment, see `kueue.worker.environment`."""

    def __init__(self, base: Mapping[str, str], worker: str) -> None:
        self.base = base
        self._worker = worker
        self._pairs = {name: (to_os_text(name), to_os_text(value)) for name, value in base.items()}

    def make(
        self, offer: Offer, queue_id: str, share: Share, memo: Memo, *, grace_seconds: float, nice: int
    ) -> StartAttempt:
        """`share`: what the attempt holds of this machine."""
        return StartAttempt(
            offer=offer.offer,
            job=offer.job,
            queue_id=queue_id,
            argv=offer.payload.argv,
            env=self._environment(offer, share),
            cwd=offer.place.cwd,
            pwd=offer.place.pwd,
            umask=offer.place.umask,
            stdout=offer.payload.stdout,
            stderr=offer.payload.stderr,
            timeout_seconds=offer.terms.timeout_seconds,
            on_lost=offer.terms.on_lost,
            keep_background=offer.terms.keep_background,
            grace_seconds=grace_seconds,
            nice=nice,
            line=memo.line,
            memo=write_memo(memo),
        )

    def _environment(self, offer: Offer, share: Share) -> tuple[tuple[OsText, OsText], ...]:
        own = additions(offer, share, self._worker)
        pairs = self._pairs | {name: (to_os_text(name), to_os_text(value)) for name, value in own.items()}
        return tuple(pairs.values())
