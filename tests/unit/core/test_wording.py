"""The sentences about the end of a job."""

from __future__ import annotations

import pytest

from kueue.core.wording import comment
from kueue.model import EndRecord, Exited

PAUSED = "paused for 3 s while the lease had lapsed"
FULL = "the disk was full when it ended"


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ((), "Job finished orderly."),
        (("It says so.",), "Job finished orderly. It says so."),
        (
            (PAUSED, FULL),
            "Job finished orderly. Paused for 3 s while the lease had lapsed. The disk was full when it ended.",
        ),
        (("",), "Job finished orderly."),
    ],
)
def test_each_note_of_the_end_is_a_sentence(notes, expected):
    end = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=5.0, notes=notes)
    assert comment(Exited(0), end) == expected
