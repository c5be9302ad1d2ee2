"""Durations, sizes, dates, id ranges, resources: what people type and read."""

import itertools
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kueue import units
from kueue.errors import UserError
from kueue.model import from_os_text, to_os_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("90m", 5400),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1.5h", 5400),
        ("1w", 604800),
        ("0", 0),
        ("0.5", 0.5),
        ("1H 30M", 5400),
        ("10s", 10),
    ],
)
def test_a_duration_is_read(text, seconds):
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "-5", "1h30", "1x", "1h1h", "h1", "1e5", "inf", "nan", "٣", "99999999999999d"]
)
def test_what_is_no_duration_is_refused_and_quoted(text):
    with pytest.raises(UserError, match="duration") as caught:
        units.parse_duration(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "0h:00m:05s"),
        (3661, "1h:01m:01s"),
        (108000, "30h:00m:00s"),
        (59.99, "0h:00m:59s"),
        (-3, "0h:00m:00s"),
        (360000, "100h:00m:00s"),
    ],
)
def test_elapsed_time_is_shown_with_unpadded_hours(seconds, text):
    assert units.format_elapsed(seconds) == text


@pytest.fixture
def in_zone():
    before = os.environ.get("TZ")

    def switch(zone):
        os.environ["TZ"] = zone
        time.tzset()

    yield switch
    if before is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = before
    time.tzset()


def local(text):
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


@pytest.mark.parametrize(
    ("moment", "now", "shown"),
    [
        ("2024-03-03 12:00:00", "2024-03-03 12:00:01", "today 12:00:00"),
        ("2024-03-03 00:00:00", "2024-03-03 23:59:59", "today 00:00:00"),
        ("2024-03-02 23:59:59", "2024-03-03 00:00:00", "yesterday 23:59:59"),
        ("2024-02-29 08:00:00", "2024-03-01 09:00:00", "yesterday 08:00:00"),
        ("2023-12-31 08:00:00", "2024-01-01 09:00:00", "yesterday 08:00:00"),
        ("2024-03-01 12:00:00", "2024-03-03 00:00:00", "2024-03-01 12:00:00"),
        ("2024-03-04 12:00:00", "2024-03-03 00:00:00", "2024-03-04 12:00:00"),
        # The night in which summer time begins has 23 hours: the day before is still yesterday.
        ("2024-03-30 23:30:00", "2024-03-31 23:30:00", "yesterday 23:30:00"),
    ],
)
def test_a_date_is_shown_by_calendar_day_of_the_local_zone(in_zone, moment, now, shown):
    in_zone("Europe/Berlin")
    assert units.format_date(local(moment), local(now)) == shown


@pytest.mark.parametrize("wall", [1e18, -1e18, float("inf"), float("nan")])
def test_a_date_outside_the_calendar_breaks_no_listing(wall):
    assert units.format_date(wall, 0.0).startswith("@")


@pytest.mark.parametrize(
    ("text", "ranges"),
    [("3", [(3, 3)]), ("3-7", [(3, 7)]), ("1,4-6", [(1, 1), (4, 6)]), ("0", [(0, 0)]), (" 2 - 3 ", [(2, 3)])],
)
def test_id_ranges_are_read(text, ranges):
    assert units.parse_id_ranges(text) == ranges


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "a", "1-2-3", "1.5", "7-3", "9" * 19, "²", "0x1"])
def test_what_is_no_id_is_refused_and_quoted(text):
    with pytest.raises(UserError) as caught:
        units.parse_id_ranges(text)
    assert f"'{text}'" in str(caught.value)


ids = st.integers(0, units.ID_MAX)
ranges = st.lists(st.tuples(ids, ids).map(sorted).map(tuple), min_size=1)


@given(ranges)
def test_formatted_id_ranges_are_read_as_the_same(given_ranges):
    assert units.parse_id_ranges(units.format_id_ranges(given_ranges)) == given_ranges


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple)))
def test_merged_id_ranges_hold_the_same_ids_and_neither_touch_nor_overlap(given_ranges):
    merged = units.merge_id_ranges(given_ranges)
    assert {i for a, b in merged for i in range(a, b + 1)} == {i for a, b in given_ranges for i in range(a, b + 1)}
    assert all(earlier[1] + 1 < later[0] for earlier, later in itertools.pairwise(merged))


@pytest.mark.parametrize(
    ("text", "pair"), [("genus", ("genus", 1)), ("primelib=4", ("primelib", 4)), ("a.b-c_d=07", ("a.b-c_d", 7))]
)
def test_a_resource_is_read(text, pair):
    assert units.parse_resource(text) == pair


@pytest.mark.parametrize(
    "text", ["a=x", "x=-1", "x=1.5", "x=", "a b=1", "=1", "", "a\nb", "x=0", "x=²", "-x", "x" * 65, "x=" + "9" * 19]
)
def test_a_malformed_resource_is_refused_with_its_text_and_a_reason(text):
    with pytest.raises(UserError) as caught:
        units.parse_resource(text)
    assert str(caught.value).startswith(f"Failed to parse resource: '{text}', ")


def test_a_resource_with_two_equal_signs_has_its_own_sentence():
    with pytest.raises(UserError) as caught:
        units.parse_resource("a=b=c")
    assert str(caught.value) == "Failed to parse resource: a=b=c"


def test_of_a_resource_named_twice_the_last_counts():
    assert units.parse_resources(["b", "a=2", "b=3"]) == (("a", 2), ("b", 3))


@given(st.binary())
def test_any_bytes_of_the_operating_system_travel_and_come_back(raw):
    text = raw.decode("utf-8", "surrogateescape")
    wire = units.os_to_wire(text)
    assert units.os_from_wire(wire) == text
    twin = to_os_text(text)
    assert wire == (twin if isinstance(twin, str) else {"b64": twin.b64})
    assert from_os_text(twin) == text


@pytest.mark.parametrize(
    ("ranges", "others", "left"),
    [
        ([(0, 9)], [], [(0, 9)]),
        ([(0, 9)], [(3, 4), (6, 6)], [(0, 2), (5, 5), (7, 9)]),
        ([(0, 9)], [(0, 0), (9, 20)], [(1, 8)]),
        ([(5, 9), (0, 3)], [(2, 6)], [(0, 1), (7, 9)]),
        ([(4, 7)], [(0, 100)], []),
        ([(0, 2**63)], [(5, 2**63)], [(0, 4)]),
    ],
)
def test_ids_are_taken_out_of_ranges_of_any_length(ranges, others, left):
    assert units.subtract_id_ranges(ranges, others) == left
