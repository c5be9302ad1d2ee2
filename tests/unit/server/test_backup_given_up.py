"""Backups to a file server that does not answer: bounded, told of, and nobody else's trouble."""

from __future__ import annotations

import os

import pytest

from kueue.protocol import messages as m
from kueue.server import backup
from tests.support.file_server import dead_file_server
from tests.support.served import eventually, serving

pytestmark = [pytest.mark.trio, pytest.mark.slow]


@pytest.fixture
def away(tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    return away


async def told(client, target):
    """The last answer to the request for a backup."""
    client.put(m.Backup, path=str(target))
    while True:
        answer = await client.hear()
        if isinstance(answer, m.Failed) or (isinstance(answer, m.BackedUp) and answer.end):
            return answer


async def test_a_backup_to_a_dead_file_server_is_given_up_and_all_else_goes_on(store, away, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "ANSWER_SECONDS", 0.3)
    async with serving(store) as house:
        asker, other = await house.client(uid=os.getuid()), await house.client()
        threads = house.driver.backup_threads
        with dead_file_server(away):
            asker.put(m.Backup, path=str(away / "copy"))
            await eventually(lambda: threads.borrowed_tokens, "it waits for the file server")
            await other.submit("x", held=True)
            answer = await asker.hear_a(m.Failed)
            assert f"what holds {away} has not taken it in 0 s" in answer.error
            assert (await told(asker, tmp_path / "copy")).live == 1
            while threads.available_tokens:
                assert "has not taken it" in (await told(asker, away / "copy")).error
            assert "still wait for the file server" in (await told(asker, tmp_path / "other")).error
        await eventually(lambda: not threads.borrowed_tokens, "all threads are back")
        assert (await told(asker, tmp_path / "other")).live == 1
    assert list(away.iterdir()) == []


async def test_a_file_server_that_dies_while_the_copy_is_brought_there_holds_nobody_up(
    store, away, tmp_path, monkeypatch
):
    monkeypatch.setattr(backup, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("kueue.places.is_network", lambda _: True)
    async with serving(store) as house:
        asker = await house.client(uid=os.getuid())
        dead = dead_file_server(away)
        planned = backup.backup.plan

        def plan(*about, **how):
            made = planned(*about, **how)
            dead.__enter__()
            return made

        monkeypatch.setattr(backup.backup, "plan", plan)
        try:
            answer = await told(asker, away / "copy")
            assert "has not taken it" in answer.error
            assert not [path.name for path in store.path.parent.iterdir() if "copy" in path.name]
        finally:
            dead.__exit__(None, None, None)
        monkeypatch.setattr(backup.backup, "plan", planned)
        assert (await told(asker, away / "copy")).end
        assert [path.name for path in away.iterdir()] == ["copy"]
