"""Widths, shortening, harmless text and tables."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kueue.cli import job_text
from kueue.cli.job_text import listing
from kueue.cli.screen import Screen
from kueue.cli.table import Cell, Column, fit, render
from kueue.cli.text import harmless, harmless_lines, keep_end, keep_start, pad, shown, width


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", 0),
        ("abc", 3),
        ("Grüße", 5),
        ("Gru\u0308ße", 5),
        ("日本語", 6),
        ("ﾊﾟ", 2),
        ("한글", 4),
        ("\u1112\u1161\u11ab", 2),
        ("☃", 1),
        ("☃\ufe0f", 2),
        ("😀", 2),
        ("👍🏽", 2),
        ("👩\u200d💻", 2),
        ("🇩🇪", 2),
        ("🇩🇪🇫🇷", 4),
        ("a\u200bb", 2),
        ("…", 1),
    ],
)
def test_widths_are_those_of_a_terminal(text, cells):
    assert width(text) == cells


def test_shortening_keeps_the_start_or_the_end_and_fits():
    assert keep_start("finished after 0h", 11) == "finished..."
    assert keep_end("/home/ann/project", 11) == ".../project"
    assert keep_start("short", 5) == "short"
    assert keep_start("long", 3) == "..."
    assert keep_start("long", 1) == "."
    assert keep_end("long", 0) == ""


def test_shortening_never_cuts_a_wide_character_or_a_cluster_in_two():
    assert keep_start("日本語日本語", 8) == "日本..."
    assert keep_end("日本語日本語", 8) == "...本語"
    assert keep_end("xxxxx👩\u200d💻", 4) == "..."
    assert keep_end("xxxxx👩\u200d💻", 5) == "...👩\u200d💻"
    assert keep_start("u\u0308" * 9, 5) == "u\u0308u\u0308..."


@given(st.text(), st.integers(0, 30))
def test_shortened_text_is_never_wider_than_asked(text, cells):
    safe = harmless(text)
    assert width(keep_start(safe, cells)) <= cells
    assert width(keep_end(safe, cells)) <= cells
    assert width(pad(safe, cells)) == max(cells, width(safe))


@given(st.text())
def test_harmless_text_holds_no_control_character_and_is_one_line(text):
    safe = harmless(text)
    assert all(character.isprintable() or character in "\u200c\u200d" for character in safe)
    assert len(safe.splitlines()) <= 1
    safe.encode()


def test_control_characters_are_made_visible():
    assert harmless("a\x1b[31mb\n\t\r\x00\x9b\u202e\udcff") == "a\\x1b[31mb\\n\\t\\r\\x00\\x9b\\u202e\ufffd"
    assert harmless_lines("a\tb\n\x1b[2J") == "a\tb\n\\x1b[2J"


def test_bytes_that_are_not_utf8_are_shown_as_a_replacement_sign():
    assert shown({"b64": "b2v/b2s="}) == "ok\ufffdok"
    assert shown(None) == ""


def test_columns_get_what_they_want_when_there_is_room():
    assert fit([(2, 2), (6, 20)], 40) == [2, 20]
    assert fit([(2, 2), (6, 3)], 40) == [2, 6]
    assert fit([(2, 2), (6, 20)], None) == [2, 20]


def test_columns_keep_their_least_width_when_even_that_does_not_fit():
    assert fit([(2, 2), (6, 20)], 5) == [2, 6]
    assert fit([(2, 2), (6, 20)], -9) == [2, 6]


def test_the_narrowest_column_that_wants_more_is_widened_first():
    assert fit([(2, 9), (4, 9), (3, 3)], 12) == [5, 4, 3]
    assert fit([(2, 9), (2, 9)], 7) == [4, 3]
    # Widths of the example: id, directory, command, cpus, memory, other, worker, status at 110 columns.
    limits = [(2, 2), (17, 14), (7, 14), (4, 4), (7, 7), (5, 21), (6, 7), (6, 28)]
    assert fit(limits, 85) == [2, 17, 14, 4, 7, 17, 7, 17]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(-20, 300),
)
def test_widths_stay_within_their_limits_and_use_all_the_room(limits, available):
    widths = fit(limits, available)
    most = [max(low, high) for low, high in limits]
    assert all(low <= cells <= high for (low, _), cells, high in zip(limits, widths, most, strict=True))
    assert sum(widths) == max(sum(low for low, _ in limits), min(sum(most), available))


@pytest.mark.parametrize("columns", [None, 1, 10, 30, 80])
def test_every_line_of_a_table_is_equally_wide(columns):
    screen = Screen(io.StringIO(), io.StringIO())
    screen.columns = columns
    table = (Column("id", right=True), Column("name", 4), Column("path", 5, shorten=keep_end))
    rows = [
        [Cell("1"), Cell("日本語の名前"), Cell("/home/ann/日本語")],
        [Cell("12"), Cell("u\u0308"), Cell("/x")],
    ]
    lines, cells = render(screen, table, rows)
    assert {width(line) for line in lines} == {cells}


def test_a_table_is_straight_also_where_characters_have_to_be_spelled_out():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = Screen(out, io.StringIO())
    lines, cells = render(screen, (Column("name", 4), Column("id")), [[Cell("Grüße ☃"), Cell("1")]])
    for line in lines:
        screen.print(line)
    screen.flush()
    assert {len(line) for line in out.buffer.getvalue().decode().splitlines()} == {cells}


@pytest.mark.parametrize(("columns", "count"), [(None, 2), (80, 3), (120, 2)])
def test_a_summary_that_is_wider_than_the_terminal_takes_another_line(columns, count):
    screen = Screen(io.StringIO(), io.StringIO())
    screen.columns = columns
    states = ("held", "running", "succeeded", "failed", "canceled")
    lines = listing(screen, {"jobs": [], "counts": [(state, 1) for state in states]}, 0.0)
    assert len(lines) == count
    assert all(len(line) <= columns for line in lines if columns is not None)
    assert lines[-1].endswith("remaining jobs ETA: 0h:00m:00s")


def test_without_a_terminal_there_are_no_escape_sequences(monkeypatch):
    screen = Screen(io.StringIO(), io.StringIO())
    assert screen.styled("x", "red") == "x"
    assert screen.columns is None


def test_on_a_terminal_there_is_colour_unless_it_is_not_wanted(pty_screen, monkeypatch):
    make, _ = pty_screen
    for name in ("NO_COLOR", "CLICOLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert make().styled("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("CLICOLOR", "0")
    assert make().styled("x", "red") == "x"
    monkeypatch.delenv("CLICOLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert make().styled("x", "red") == "x"


@pytest.mark.parametrize(("value", "columns"), [("110", 110), ("1", 1), ("0", None), ("", None), ("abc", None)])
def test_columns_of_the_environment_overrule_the_terminal_if_they_make_sense(pty_screen, monkeypatch, value, columns):
    make, _ = pty_screen  # a new pseudo terminal has no size
    monkeypatch.setenv("COLUMNS", value)
    assert make().columns == columns


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"1%\r2%\r3%\n", "3%"),
        (b"a\n1%\r2%\rdone\nb\n", "a\ndone\nb"),
        (b"one\r\ntwo\r\r\n", "one\ntwo"),
        (b"1%\r2%\r", "2%"),
        (b"1%\r\x1b[K2%\x1b[0K\n", "2%"),
        (b"1%\r\x1b[K\n", ""),
        (b"1%\r\x1b[0m\n", "1%"),
        (b"\x1b[1;31mred\x1b[m and \x1b[38:5:9mred\x1b[0m\n", "red and red"),
        (b"\x1b[2J\x1b]0;t\x07\n", "\\x1b[2J\\x1b]0;t\\x07"),
        (b"ok\xff\n\n", "ok\ufffd\n"),
        (b"\r", ""),
    ],
)
def test_output_is_shown_as_it_would_stand_on_a_terminal_in_the_end(written, shown):
    assert job_text.readable(written) == shown
