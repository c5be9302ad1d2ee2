"""The pages that are made from the code are true."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import pages


@pytest.mark.parametrize("file", pages.PAGES)
def test_a_page_made_from_the_code_is_up_to_date(file):
    text = (pages.ROOT / file).read_text(encoding="utf-8")
    assert text == pages.PAGES[file](), f"run: python {Path(pages.__file__).relative_to(pages.ROOT)}"
