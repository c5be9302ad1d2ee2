"""Each transcript in this folder comes true, line by line. See `tests.support.scenario` for their language."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenario import blocks, written

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_transcript_comes_true(path: Path):
    text = path.read_text()
    assert text.startswith("# "), "a transcript opens with the sentence why"
    assert any(expected for _, _, expected in blocks(text))
    assert written(text).splitlines() == text.splitlines()


def test_there_are_transcripts():
    assert len(FILES) > 20
