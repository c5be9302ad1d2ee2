"""Looks at job directories, real ones and one that hangs."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from kueue.model import Place, to_os_text
from kueue.worker import directories
from kueue.worker.directories import Directories, look


def test_a_directory_is_good_and_all_else_has_a_reason(tmp_path):
    assert look(str(tmp_path), "x") is None
    assert "no such directory" in look(str(tmp_path / "none"), "/none")
    (tmp_path / "file").touch()
    assert "not a directory" in look(str(tmp_path / "file"), "/file")
    assert "Not a directory" in look(str(tmp_path / "file" / "below"), "/file/below")
    assert look("a\0b", "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert look(str(tmp_path / "loop"), "loop")


@pytest.mark.skipif(os.getuid() == 0, reason="root may enter everything")
def test_a_directory_that_may_not_be_entered_is_declined(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(0o600)
    assert "Permission denied" in look(str(closed), "closed")


@pytest.mark.trio
async def test_a_bad_answer_is_never_believed_for_the_next_job(tmp_path):
    checks = Directories(60.0)
    there = tmp_path / "th\udcffere"
    place = Place(cwd=to_os_text(str(there)))
    assert "no such directory" in await checks.problem(place)
    there.mkdir()
    assert await checks.problem(place) is None


@pytest.mark.trio
async def test_a_hanging_directory_holds_one_thread_and_stops_nobody_else(tmp_path, monkeypatch):
    let_go = trio.Event()
    portal = trio.lowlevel.current_trio_token()
    looks = []

    def slow_look(path, name):
        looks.append(path)
        if path == "/hung":
            trio.from_thread.run(let_go.wait, trio_token=portal)
        return look(path, name)

    monkeypatch.setattr(directories, "look", slow_look)
    checks = Directories(60.0)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(checks.problem, Place(cwd="/hung"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(10):
            assert await checks.problem(Place(cwd=str(tmp_path))) is None
        assert looks.count("/hung") == 1
        let_go.set()


@pytest.mark.trio
async def test_a_directory_that_never_answers_keeps_one_task_however_many_ask_for_it(monkeypatch):
    let_go = trio.Event()
    portal = trio.lowlevel.current_trio_token()
    monkeypatch.setattr(directories, "look", lambda path, name: trio.from_thread.run(let_go.wait, trio_token=portal))
    checks = Directories(0.1)
    answers = []

    async def ask():
        answers.append(await checks.problem(Place(cwd="/hung")))

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
        with trio.fail_after(30):
            while len(nursery.child_tasks) > 1:  # noqa: ASYNC110 - the end of a task sets no event
                await trio.sleep(0.01)
        assert answers == ["the directory /hung does not answer"] * 99
        let_go.set()
    assert answers[99] is None


@pytest.mark.trio
async def test_directories_beyond_the_threads_keep_no_task_either(tmp_path, monkeypatch):
    let_go = trio.Event()
    portal = trio.lowlevel.current_trio_token()
    monkeypatch.setattr(directories, "look", lambda path, name: trio.from_thread.run(let_go.wait, trio_token=portal))
    checks = Directories(0.1)
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(checks.problem, Place(cwd=f"/hung/{number}"))
        with trio.fail_after(30):
            while len(nursery.child_tasks) > directories.THREADS:  # noqa: ASYNC110 - as above
                await trio.sleep(0.01)
        assert await checks.problem(Place(cwd=str(tmp_path))) == f"the directory {tmp_path} does not answer"
        let_go.set()
    monkeypatch.undo()
    assert await checks.problem(Place(cwd=str(tmp_path))) is None


@pytest.mark.trio
async def test_many_jobs_of_one_directory_look_seldom(tmp_path, monkeypatch):
    looks = []

    def counted(path, name):
        looks.append(path)
        return look(path, name)

    monkeypatch.setattr(directories, "look", counted)
    checks = Directories(60.0)
    for _ in range(200):
        assert await checks.problem(Place(cwd=str(tmp_path))) is None
    assert len(looks) < 20
