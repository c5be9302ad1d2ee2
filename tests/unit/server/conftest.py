"""A store on the disk, for what drives a real one."""

from __future__ import annotations

import pytest

from kueue.storage.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path):
    (tmp_path / "state").mkdir()
    store = SqliteStore(tmp_path / "state" / "queue.sqlite", ballast_bytes=4096)
    yield store
    store.close()
