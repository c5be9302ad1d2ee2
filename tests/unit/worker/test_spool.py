"""Excerpts, pieces, the size limit and cleaning up, on real files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from kueue.model import DISCARD, EndRecord, Excerpt, Exited, to_os_text
from kueue.protocol.messages import FetchOutput
from kueue.worker.spool import BLOCK, EXCERPT_BYTES, MEGABYTE, Paths, Spool, punch, resolved

END = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=2.0)


@pytest.fixture
def spool(tmp_path):
    return Spool(str(tmp_path), limit_mb=1)


def wrote(spool, offer=1, stdout=None, stderr=None, **records):
    folder = Path(spool.root) / str(offer)
    folder.mkdir(exist_ok=True)
    for name, data in (("stdout", stdout), ("stderr", stderr)):
        if data is not None:
            (folder / name).write_bytes(data)
    for name, data in records.items():
        (folder / f"{name}.json").write_text(data)
    return folder


def asks(spool, offset=0, limit=1000, stream="stdout", offer=1, paths=None):
    return spool.fetch(FetchOutput(token=5, offer=offer, stream=stream, offset=offset, limit=limit), paths)


def can_punch(folder):
    probe = Path(folder) / "probe"
    probe.write_bytes(b"x" * 3 * BLOCK)
    with probe.open("r+b") as file:
        try:
            punch(file.fileno(), BLOCK, BLOCK)
        except OSError:
            return False
        finally:
            probe.unlink()
    return True


# --- excerpts --------------------------------------------------------------------------------------------------------


def test_a_short_stream_is_kept_whole_with_any_bytes(spool):
    wrote(spool, stdout=b"ok\377ok\n", stderr=b"")
    end = spool.with_excerpts(1, END, Paths())
    assert end.stdout == Excerpt(size=6, head=b"ok\377ok\n")
    assert end.stderr == Excerpt()
    assert end.outcome == Exited(0)


def test_of_a_long_stream_head_and_tail_are_kept(tmp_path):
    spool = Spool(str(tmp_path))
    data = os.urandom(5 * EXCERPT_BYTES)
    wrote(spool, stdout=data)
    kept = spool.with_excerpts(1, END, Paths()).stdout
    assert (kept.size, kept.head, kept.tail) == (len(data), data[:EXCERPT_BYTES], data[-EXCERPT_BYTES:])
    assert kept.omitted == 3 * EXCERPT_BYTES


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_nothing_is_kept_twice_around_the_border(tmp_path, more):
    spool = Spool(str(tmp_path))
    data = os.urandom(2 * EXCERPT_BYTES + more)
    wrote(spool, stdout=data)
    kept = spool.with_excerpts(1, END, Paths()).stdout
    assert len(kept.head) + len(kept.tail) + kept.omitted == len(data)
    assert (kept.head + kept.tail == data) == (more <= 0)


def test_a_users_file_and_a_discarded_stream_are_named_and_not_kept(spool):
    wrote(spool)
    end = spool.with_excerpts(1, END, Paths(stdout="/home/u/out", stderr=DISCARD))
    assert end.stdout == Excerpt(redirected="/home/u/out")
    assert end.stderr == Excerpt(discarded=True)


def test_an_attempt_that_wrote_nothing_has_empty_excerpts(spool):
    end = spool.with_excerpts(1, END, Paths())
    assert (end.stdout, end.stderr, end.notes) == (Excerpt(), Excerpt(), ())


def test_an_unreadable_stream_is_a_note_and_no_failure(spool):
    folder = wrote(spool)
    (folder / "stdout").mkdir()
    end = spool.with_excerpts(1, END, Paths())
    assert end.stdout == Excerpt()
    assert "cannot be read" in end.notes[0]


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_pieces_join_to_the_whole(spool):
    data = os.urandom(100_000)
    wrote(spool, stdout=data)
    read = b""
    while True:
        piece = asks(spool, offset=len(read), limit=7001)
        assert (piece.token, piece.offset, piece.size, piece.error) == (5, len(read), len(data), "")
        if not piece.data:
            break
        read += piece.data
    assert read == data


def test_a_piece_at_the_end_is_empty(spool):
    wrote(spool, stdout=b"abc")
    piece = asks(spool, offset=3)
    assert (piece.offset, piece.data, piece.size, piece.error, piece.note) == (3, b"", 3, "", "")


def test_a_reader_behind_the_end_of_a_file_that_was_cut_short_begins_anew_and_is_told(spool):
    wrote(spool, stdout=b"abc")
    piece = asks(spool, offset=99)
    assert (piece.offset, piece.data, piece.size, piece.error) == (0, b"abc", 3, "")
    assert "cut short" in piece.note


def test_a_users_file_is_read_while_the_job_runs_and_after_its_end(spool, tmp_path):
    wrote(spool)
    mine = tmp_path / "mine\udcff.txt"
    mine.write_bytes(b"hello")
    paths = Paths(stdout=to_os_text(str(mine)))
    assert asks(spool, offset=1, paths=paths).data == b"ello"
    spool.with_excerpts(1, END, paths)
    assert asks(spool, offset=1).data == b"ello"
    mine.unlink()
    assert "No such file" in asks(spool).error


def test_what_is_no_file_is_not_read(spool, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    paths = Paths(stdout=str(tmp_path / "fifo"), stderr=str(tmp_path))
    assert "not a regular file" in asks(spool, paths=paths).error
    assert asks(spool, stream="stderr", paths=paths).error


def test_output_that_is_gone_is_said_to_be(spool):
    assert "not kept" in asks(spool, offer=77).error
    assert asks(spool, offer=77, paths=Paths()).error == ""


def test_a_discarded_stream_is_said_to_be(spool):
    assert "discarded" in asks(spool, paths=Paths(stdout=DISCARD)).note


# --- the size limit --------------------------------------------------------------------------------------------------


def test_the_middle_of_a_growing_file_is_cut_out_and_the_writer_goes_on(spool):
    if not can_punch(spool.root):
        pytest.skip("this file system cannot punch holes")
    folder = wrote(spool)
    written = 0
    with (folder / "stdout").open("ab", buffering=0) as job:
        for number in range(64):
            job.write(f"{number:04}".encode() * (MEGABYTE // 32))
            written += 4 * (MEGABYTE // 32)
            spool.trim([1])
            assert (folder / "stdout").stat().st_blocks * 512 <= MEGABYTE
    assert (folder / "stdout").stat().st_size == written
    end = spool.with_excerpts(1, END, Paths())
    assert end.stdout.head.startswith(b"0000")
    assert end.stdout.tail.endswith(b"0063")
    assert b"\0" not in end.stdout.head + end.stdout.tail
    assert "cut out" in end.notes[0]


def test_a_reader_is_led_around_the_hole(spool):
    if not can_punch(spool.root):
        pytest.skip("this file system cannot punch holes")
    folder = wrote(spool, stdout=b"x" * (4 * MEGABYTE))
    spool.trim([1])
    assert (folder / "stdout").stat().st_blocks * 512 < MEGABYTE
    offset, read, notes = 0, 0, []
    while offset < 4 * MEGABYTE:
        piece = asks(spool, offset=offset, limit=100_000)
        assert set(piece.data) == {ord("x")}
        if piece.note:
            notes.append(f"{piece.offset - offset} bytes")
            assert notes[-1] in piece.note
        read += len(piece.data)
        offset = piece.offset + len(piece.data)
    assert len(notes) == 1
    assert read == MEGABYTE // 4 + MEGABYTE // 2


def test_a_short_file_and_no_limit_leave_everything(tmp_path):
    spool = Spool(str(tmp_path), limit_mb=0)
    folder = wrote(spool, stdout=b"x" * (2 * MEGABYTE))
    spool.trim([1, 2])
    assert (folder / "stdout").read_bytes() == b"x" * (2 * MEGABYTE)


def test_an_output_that_grew_large_before_it_was_looked_at_is_cut_at_its_end(spool):
    if not can_punch(spool.root):
        pytest.skip("this file system cannot punch holes")
    folder = wrote(spool, stdout=b"y" * (3 * MEGABYTE))
    spool.with_excerpts(1, END, Paths())
    assert (folder / "stdout").stat().st_blocks * 512 < MEGABYTE


# --- cleaning up -----------------------------------------------------------------------------------------------------


def old(folder, seconds=1000):
    os.utime(folder, (time.time() - seconds,) * 2)


def test_old_output_goes_when_its_end_is_acknowledged_and_not_before(spool):
    for offer, records in ((1, {}), (2, {"start": "{}"}), (3, {}), (4, {})):
        folder = wrote(spool, offer, stdout=b"x", **records)
        if offer != 3:
            old(folder)
    old(wrote(spool, "5.old1", stdout=b"x"))
    (Path(spool.root) / "other").mkdir()
    old(Path(spool.root) / "other")
    assert spool.clean(500, known={4}) == 2
    assert sorted(os.listdir(spool.root)) == ["2", "3", "4", "other"]


def test_forgotten_output_goes_and_records_of_the_runner_stay(spool):
    wrote(spool, 1, stdout=b"x", stderr=b"y", redirected=msgspec.json.encode(Paths(stdout="/x")).decode())
    wrote(spool, 2, stdout=b"x", start="{}")
    spool.forget([1, 2, 99])
    assert os.listdir(spool.root) == ["2"]
    assert os.listdir(f"{spool.root}/2") == ["start.json"]


def test_relative_paths_are_under_the_jobs_directory():
    assert resolved("a/b", "/data") == "/data/a/b"
    assert resolved("/a/b", "/work") == "/a/b"
    assert resolved(DISCARD, "/work") == DISCARD
    assert resolved(None, "/work") is None
