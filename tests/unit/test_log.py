"""Logging: levels, the shape of a line, the journal, and what hostile text cannot do."""

import io
import logging
import os
import re
import socket
import subprocess
import sys

import pytest

from kueue import log
from kueue.errors import ConfigError


@pytest.fixture
def out():
    before = logging.raiseExceptions
    stream = io.StringIO()
    yield stream
    logging.getLogger("kueue").handlers.clear()
    logging.raiseExceptions = before


@pytest.mark.parametrize(("name", "number"), [("trace", 5), ("DEBUG", 10), ("Info", 20), ("warn", 30), (" error ", 40)])
def test_the_five_levels_are_known_in_any_letter_case(name, number):
    assert log.level(name) == number


@pytest.mark.parametrize("name", ["foo", "", "warning", "critical"])
def test_another_level_is_refused_naming_the_five(name):
    with pytest.raises(ConfigError, match="trace, debug, info, warn, error"):
        log.level(name)


def test_a_line_has_utc_time_level_part_and_text(out):
    log.start("info", stream=out, environ={})
    log.logger("server.sessions").warning("worker %s is silent", "w1")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARN  server\.sessions  worker w1 is silent\n", out.getvalue()
    )


def test_a_lower_level_shows_more_lines(out):
    shown = {}
    for name in log.LEVELS:
        out.truncate(0)
        log.start(name, stream=out, environ={})
        for number in log.LEVELS.values():
            log.logger("x").log(number, "line")
        shown[name] = out.getvalue().count("line")
    assert shown == {"trace": 5, "debug": 4, "info": 3, "warn": 2, "error": 1}


def test_the_logger_of_trio_and_others_is_left_alone(out):
    log.start("trace", stream=out, environ={})
    logging.getLogger("other").error("not ours")
    assert out.getvalue() == ""


def test_what_a_peer_sent_cannot_fake_a_line(out):
    log.start("info", stream=out, environ={})
    log.logger("net").info("said %s", "x\n2026-01-01 ERROR \x1b[2J\udce9\u202e")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().rstrip("\n").isprintable()


def test_an_exception_keeps_its_lines(out):
    log.start("info", stream=out, environ={})
    try:
        int("inner")
    except ValueError:
        log.logger("x").exception("failed")
    assert "Traceback" in out.getvalue()
    assert out.getvalue().endswith("with base 10: 'inner'\n")


def test_keys_are_quoted_where_needed_cut_and_left_out_when_none():
    assert log.keys(job=17, worker="w1", reason='no "x" here', none=None, empty="") == (
        'job=17 worker=w1 reason="no \\"x\\" here" empty=""'
    )
    assert log.safe("a\nb\\c") == "a\\nb\\\\c"
    assert log.safe("x" * 1000).endswith("x...(700 more)")


def test_under_the_journal_lines_have_a_priority_and_no_time(tmp_path):
    code = (
        "import os, logging; from kueue import log; log.start('trace'); "
        "[log.logger('server').log(n, 'line\\nfake') for n in (40, 30, 20, 10, 5)]"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = os.fstat(theirs.fileno())
        environ = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environ, check=True)
        theirs.close()
        text = ours.makefile().read()
    assert text.splitlines() == [f"<{n}>server  line\\nfake" for n in (3, 4, 6, 7, 7)]
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environ, check=True)
    assert "Z ERROR server  line" in run.stderr, "stderr was redirected: it is not the journal"


def test_a_closed_stderr_stops_nobody():
    code = "import os; from kueue import log; log.start(); os.close(2); log.logger('x').error('y'); print('alive')"
    # Up to Python 3.10 the interpreter itself exits with 120 when it cannot flush stderr.
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "alive\n"
