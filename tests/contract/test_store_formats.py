"""A state file of every released format opens, and no format changes without a new number."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from kueue.storage import schema
from kueue.storage.memory import MemoryStore
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_format import DATA, Told, definition, fill, told
from tests.support.storage_rows import WALL, ending

FORMATS = sorted(int(path.stem.removeprefix("format-")) for path in DATA.glob("format-*.sqlite"))


def test_the_format_is_the_one_that_is_written_down():
    written = (DATA / f"format-{schema.FORMAT}.txt").read_text()
    assert definition() == written, "the stored form changed: see tests/support/storage_format.py"


def test_there_is_a_file_of_this_format():
    assert schema.FORMAT in FORMATS


@pytest.mark.parametrize("number", FORMATS)
def test_a_file_of_this_format_tells_what_it_told_when_it_was_made(number, tmp_path):
    path = tmp_path / "state.sqlite"
    shutil.copy(DATA / f"format-{number}.sqlite", path)
    then = msgspec.json.decode((DATA / f"format-{number}.json").read_bytes(), type=Told)
    store = SqliteStore(path, take_over=True, wall=lambda: WALL, ballast_bytes=4096)
    assert told(store) == then
    store.commit(ending(2))
    assert store.finished_job(2) is not None
    store.close()


def test_the_file_holds_what_another_store_tells_of_the_same_history():
    store = MemoryStore(wall=lambda: WALL)
    fill(store)
    then = msgspec.json.decode((DATA / f"format-{schema.FORMAT}.json").read_bytes(), type=Told)
    assert told(store) == then
