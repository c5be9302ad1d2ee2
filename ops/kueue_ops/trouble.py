"""The error that everything about one host raises: a `Trouble` with the sentence for the line of that host."""

from __future__ import annotations

from kueue.errors import KueueError
from kueue_ops.sight import Kind, Trouble


class HostTrouble(KueueError):
    """One host cannot be looked at or helped; the others are not concerned."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.sentence, hint=trouble.hint)
        self.trouble = trouble


def trouble(kind: Kind, sentence: str, hint: str = "") -> HostTrouble:
    """The error to raise."""
    return HostTrouble(Trouble(kind, sentence, hint))
