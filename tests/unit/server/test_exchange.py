"""A state that is exchanged is the old one or the new one, whenever somebody presses Ctrl-C."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kueue import places
from kueue.server import exchange
from kueue.server.exchange import COMPANIONS


def there(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


class Interrupted:
    """Every step of an exchange may be interrupted, before or behind it, until the first one was."""

    def __init__(self, monkeypatch, *, at: int, is_behind: bool, has_links: bool) -> None:
        self.steps = 0
        self.at = at
        self.is_behind = is_behind
        for owner, name in ((os, "link"), (Path, "rename"), (Path, "replace"), (places, "sync_directory")):
            monkeypatch.setattr(owner, name, self.step(getattr(owner, name), name, has_links=has_links))

    def step(self, real, name, *, has_links):
        def step(*paths):
            if name == "link" and not has_links:
                raise PermissionError
            self.steps += 1
            if self.steps == self.at and not self.is_behind:
                raise KeyboardInterrupt
            real(*paths)
            if self.steps == self.at:
                raise KeyboardInterrupt

        return step


@pytest.mark.parametrize("files", [("",), ("", "-wal", "-shm"), ("", "-journal"), (), ("-wal",)])
@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("is_behind", [True, False])
def test_an_exchange_that_is_interrupted_anywhere_is_taken_back(tmp_path, files, has_links, is_behind):
    for at in range(1, len(files) + 4):
        folder = tmp_path / str(at)
        folder.mkdir()
        before = {f"state{suffix}": f"old{suffix}" for suffix in files}
        for name, text in before.items():
            (folder / name).write_text(text)
        draft = folder / "draft"
        draft.write_text("new")
        with pytest.MonkeyPatch.context() as patched:
            interrupted = Interrupted(patched, at=at, is_behind=is_behind, has_links=has_links)
            try:
                exchange.exchange(draft, folder / "state", folder / "aside")
            except KeyboardInterrupt:
                if draft.exists():
                    draft.unlink()
                else:
                    assert "" in files, "it is the only one that can be loaded"
                assert there(folder) == before
                continue
        assert interrupted.steps < at
        moved = {name.replace("state", "aside"): text for name, text in before.items()}
        assert there(folder) == {"state": "new", **moved}
        return
    raise AssertionError("it never was left alone")


def test_without_a_state_there_is_nothing_to_move_aside(tmp_path):
    (tmp_path / "draft").write_text("new")
    assert exchange.exchange(tmp_path / "draft", tmp_path / "state", tmp_path / "aside") is None
    assert there(tmp_path) == {"state": "new"}


def test_all_that_sqlite_lays_beside_a_file_goes_with_it(tmp_path):
    for suffix in COMPANIONS:
        (tmp_path / f"state{suffix}").write_text(f"old{suffix}")
    (tmp_path / "draft").write_text("new")
    assert exchange.exchange(tmp_path / "draft", tmp_path / "state", tmp_path / "aside") == tmp_path / "aside"
    assert there(tmp_path) == {"state": "new", **{f"aside{suffix}": f"old{suffix}" for suffix in COMPANIONS}}


def test_an_exchange_whose_directory_cannot_be_flushed_has_happened(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(places, "sync_directory", fails)
    (tmp_path / "draft").write_text("new")
    (tmp_path / "state").write_text("old")
    assert exchange.exchange(tmp_path / "draft", tmp_path / "state", tmp_path / "aside") == tmp_path / "aside"
    assert (tmp_path / "state").read_text() == "new"
