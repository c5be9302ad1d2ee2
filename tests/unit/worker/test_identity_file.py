"""The file by which a worker is known again."""

from __future__ import annotations

import json
import stat

import pytest

from kueue.errors import KueueError
from kueue.worker.identity_file import own_identity


def test_an_identity_is_made_once_and_private(tmp_path):
    path = tmp_path / "identity"
    first = own_identity(str(path), "machine")
    assert len(first) == 32
    assert own_identity(str(path), "machine") == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["machine_id"] == "machine"


def test_two_workers_are_two(tmp_path):
    assert own_identity(str(tmp_path / "a"), "m") != own_identity(str(tmp_path / "b"), "m")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"identity": "xyz"}', '{"identity": "ab"}', '{"identity": 5}'])
def test_what_is_no_identity_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "identity"
    path.write_text(content)
    with pytest.raises(KueueError, match="does not hold an identity"):
        own_identity(str(path), "m")
    assert path.read_text() == content
