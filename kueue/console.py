"""How a program that people start ends: what could not be written is said in a sentence, and counts in the exit code.

Python itself would say it at exit, with a traceback's wording and the code 120, and only where output is buffered.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from kueue.errors import EXIT_CANCELED, EXIT_REFUSED, EXIT_SIGNAL_BASE

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable

_SIGPIPE = 13
_HIGHEST_STREAM = 2
_NOT_TAKEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def concluded(program: Callable[[], int]) -> int:
    """Run the program to its end, `--help` included. Returns its exit code.

    1 in place of 0 if stdout did not take what was written; 141 if its reader went away, as for any program in a pipe.
    A `KeyboardInterrupt` ends the process by SIGINT.
    """
    try:
        return _concluded(program)
    except KeyboardInterrupt:
        return _interrupted()


def _concluded(program: Callable[[], int]) -> int:
    _stand_in()
    try:
        code = program()
    except SystemExit as leaving:
        code = _code_of(leaving)
    except BrokenPipeError:
        forget_stdout()
        return EXIT_SIGNAL_BASE + _SIGPIPE
    except OSError as error:
        # What does not fit into the buffer fails when it is written, and not at the end.
        if error.filename is not None or error.errno not in _NOT_TAKEN:
            raise
        return unwritten(error, EXIT_REFUSED)
    return flushed(code)


def _interrupted() -> int:
    """End by the signal itself, with what was printed: a shell leaves its loop only when the command died of it.

    Shells show that as 130, which is returned where the signal is blocked.
    """
    import signal  # noqa: PLC0415 - 2 ms that only an interrupt pays for

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    flushed(0)
    os.kill(os.getpid(), signal.SIGINT)
    return EXIT_CANCELED


def expect_children() -> None:
    """For programs that start others: undo that SIGCHLD is ignored, which whoever started us may have handed down.

    The kernel would forget every exit code, and Python takes those for 0.
    """
    import signal  # noqa: PLC0415 - as above

    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Closed(io.TextIOBase):
    """In place of a stdout that whoever started us has closed: what is written fails at the end, not in the middle."""

    has_lost = False

    def write(self, text: str | bytes) -> int:
        self.has_lost |= bool(text)
        return len(text)

    @property
    def buffer(self) -> Closed:
        """For those who write bytes."""
        return self

    def flush(self) -> None:
        if self.has_lost:
            raise OSError(errno.EBADF, "it is closed")


def _stand_in() -> None:
    # A number that is free goes to the next file that is opened, which is then written to by whoever means the stream.
    while (null := os.open(os.devnull, os.O_RDWR)) <= _HIGHEST_STREAM:
        pass
    os.close(null)
    if sys.stdout is None:
        sys.stdout = Closed()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        # With PYTHONUNBUFFERED it would fail at once, inside of argparse, which hides it.
        sys.stdout.reconfigure(write_through=False)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  open until the end


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    complain(str(leaving.code))
    return EXIT_REFUSED


def flushed(code: int) -> int:
    """Write out what is left for stdout. Returns the code, or failure where that could not be done."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        return EXIT_SIGNAL_BASE + _SIGPIPE
    except (OSError, ValueError) as error:
        return unwritten(error, code)
    return code


def unwritten(error: Exception, code: int) -> int:
    """Say why stdout did not take the results. Returns the code, or failure in place of 0."""
    forget_stdout()
    complain(f"Error: The results cannot be written: {getattr(error, 'strerror', None) or error}.")
    return code or EXIT_REFUSED


def forget_stdout() -> None:
    """Leave nothing to be written at exit."""
    if isinstance(sys.stdout, Closed):
        sys.stdout.has_lost = False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def complain(sentence: str, hint: str = "") -> None:
    """To stderr, in whatever characters it can take; to nobody if nobody is there."""
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")
    try:
        print(sentence, file=sys.stderr)  # noqa: T201  what it is for
        if hint:
            print(hint, file=sys.stderr)  # noqa: T201  as above
    except OSError:
        return  # nobody is left to hear of it
