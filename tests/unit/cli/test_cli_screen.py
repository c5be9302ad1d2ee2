"""Streams that take nothing any more."""

from __future__ import annotations

import contextlib
import io
import os
import pty

import pytest

from kueue.cli.screen import Screen
from kueue.errors import KueueError


@contextlib.contextmanager
def stderr_of(descriptor: int):
    """A screen whose stderr is this descriptor; what could not be written goes nowhere at the end."""
    stream = os.fdopen(descriptor, "w")
    try:
        yield Screen(stdout=io.StringIO(), stderr=stream)
    finally:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
        stream.close()


def test_the_stderr_of_a_job_that_cannot_be_written_is_a_failure_with_a_sentence():
    with (
        stderr_of(os.open("/dev/full", os.O_WRONLY)) as screen,
        pytest.raises(KueueError, match="stderr cannot be written: No space left"),
    ):
        screen.write_error_bytes(b"line\n")


def test_a_reader_of_the_stderr_of_a_job_that_has_left_is_no_fault():
    reader, writer = os.pipe()
    os.close(reader)
    with stderr_of(writer) as screen, pytest.raises(BrokenPipeError):
        screen.write_error_bytes(b"line\n")


def test_progress_on_a_terminal_that_was_closed_is_left_out():
    outer, inner = pty.openpty()
    with stderr_of(inner) as screen:
        screen.status("1 of 2")
        os.close(outer)
        screen.status("2 of 2")
        screen.remark("nobody is there")
