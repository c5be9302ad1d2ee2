"""What a worker measures for its figures: the spool on the disk, and the output that its limit took out."""

from __future__ import annotations

import os

import pytest

from kueue.worker.metrics import look_at_disk
from kueue.worker.spool import MEGABYTE, Spool


def test_the_spool_is_measured_by_the_room_it_takes(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stdout").write_bytes(os.urandom(MEGABYTE))
    with (tmp_path / "7" / "stderr").open("wb") as file:
        file.truncate(100 * MEGABYTE)  # a hole takes none
    found = look_at_disk(str(tmp_path))
    assert found is not None
    assert MEGABYTE <= found.spool_bytes < 2 * MEGABYTE
    assert found.free_bytes > 0


def test_a_spool_that_is_not_there_has_no_figures(tmp_path):
    assert look_at_disk(str(tmp_path / "none")) is None


def test_output_that_the_limit_took_out_is_counted(tmp_path):
    spool = Spool(str(tmp_path), limit_mb=1)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stdout").write_bytes(os.urandom(3 * MEGABYTE))
    spool.trim([7])
    if spool.remark:
        pytest.skip(spool.remark)
    assert 2 * MEGABYTE <= spool.punched_bytes <= 3 * MEGABYTE
