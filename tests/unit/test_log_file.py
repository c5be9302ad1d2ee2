"""The bounded log file."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kueue import log


@pytest.fixture
def path(tmp_path):
    before = logging.raiseExceptions
    yield str(tmp_path / "worker.log")
    log.close_file()
    logging.getLogger("kueue").handlers.clear()
    logging.raiseExceptions = before


def test_a_log_never_grows_beyond_twice_its_limit(path, tmp_path):
    log.to_file(path, limit=10_000)
    log.start("debug")
    for number in range(10_000):
        log.logger("x").debug("event %d", number)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["worker.log", "worker.log.1"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    assert log.last_words(path) == "event 9999"
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())


def test_the_file_stays_when_the_level_changes_and_stderr_has_it_too(path, capsys):
    log.to_file(path)
    log.start("info")
    log.start("error")
    log.logger("x").error("loud")
    log.logger("x").info("quiet")
    assert log.last_words(path) == "loud"
    assert capsys.readouterr().err.count("loud") == 1


def test_a_program_whose_stderr_is_the_file_writes_each_line_once(path, monkeypatch):
    with open(path, "a") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log.to_file(path)
        log.start("info")
        log.logger("x").info("once")
    assert Path(path).read_text().count("once") == 1


def test_last_words_of_no_file_and_of_an_empty_one_are_none(path):
    assert log.last_words(path) == ""
    Path(path).touch()
    assert log.last_words(path) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-03-03T12:00:00.000Z INFO  server  up\nError: a disk\nHint: look\n[at] it\n", "a disk"),
        ("Error: a disk\nHint: look\n2026-03-03T12:00:00.000Z INFO  server  up\n", "up"),
        ("Error: a disk\nHint: look\n\nError: a port\n", "a port"),
        ("Traceback\nOSError: bad\n \n", "OSError: bad"),
        ("  | ExceptionGroup: 1\n  +-+---- 1 ----\n    | OSError: bad\n    +-------\n", "OSError: bad"),
    ],
)
def test_last_words_are_the_error_that_ended_the_program_and_not_its_hint(path, text, words):
    Path(path).write_text(text)
    assert log.last_words(path) == words


def test_a_line_without_time_is_told_whole_and_harmless():
    assert log.bare("Error: no such thing \x1b[31m") == "Error: no such thing \\x1b[31m"


def test_a_worker_without_a_log_file_opens_none():
    from kueue.worker.main import _parser

    assert _parser().parse_args([]).log_file == ""
    assert _parser().parse_args(["--log-file", "here"]).log_file == str(Path.cwd() / "here")


def _logging(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_a_reader_who_does_not_read_holds_nobody_up_and_is_told_what_was_dropped():
    program = (
        "from kueue import log\n"
        "log.start('info'); log.unhurried(); log.WAITING_LINES = 100\n"
        "for number in range(1000): log.logger('test').info('%d %s', number, 'x' * 1000)\n"
        "print('done', flush=True); input()\n"
        "log.logger('test').info('last')\n"
    )
    with _logging(program) as process:
        assert process.stdout.readline() == "done\n"  # it did not wait for us
        said: list[str] = []
        reader = threading.Thread(target=said.extend, args=(process.stderr,))
        reader.start()
        process.stdin.write("\n")
        process.stdin.close()
        process.wait(60)
        reader.join(60)
    assert said[-1].endswith("last\n") or "lines were dropped" in said[-1]
    assert any("lines were dropped: nobody took them" in line for line in said)
    numbers = [int(line.split()[3]) for line in said if line.endswith("x\n")]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0


def test_a_terminal_that_another_program_has_made_impatient_loses_nothing():
    program = (
        "import os\n"
        "from kueue import log\n"
        "os.set_blocking(2, False)\n"
        "log.start('info'); log.unhurried()\n"
        "for number in range(3000): log.logger('test').info('%d %s', number, 'x' * 200)\n"
        "print('done', flush=True)\n"
        "assert log.written(60)\n"
    )
    with _logging(program) as process:
        assert process.stdout.readline() == "done\n"  # far more was said by now than a pipe takes
        assert len(process.stderr.readlines()) == 3000
