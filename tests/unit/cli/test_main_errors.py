"""What goes wrong in a verb is a sentence, and never a traceback."""

import pytest

from kueue.cli import local, main


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (PermissionError(13, "Permission denied", "/state/server/lock"), 1, "/state/server/lock: Permission denied."),
        (IsADirectoryError(21, "Is a directory", b"/state/\xff"), 1, "/state/\\xff: Is a directory."),
        (OSError(24, "Too many open files"), 125, "a fault in kueue itself: OSError: [Errno 24] Too many open files"),
        (ZeroDivisionError("by zero"), 125, "a fault in kueue itself: ZeroDivisionError: by zero"),
    ],
)
def test_an_error_that_nobody_expected_is_a_sentence(monkeypatch, capsys, error, code, sentence):
    def fails(_session):
        raise error

    monkeypatch.setattr(local, "down", fails)
    assert main._run(["down"]) == code
    assert capsys.readouterr().err.splitlines()[0] == f"Error: {sentence}"
