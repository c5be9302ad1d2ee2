"""Every error a person can meet: a sentence, a hint, an exit code.

    KueueError
    ├── UserError        the person asked for something that cannot be done
    ├── ConfigError      a setting is missing, malformed or unsafe
    ├── Unreachable      the server (or a worker) cannot be talked to
    ├── Refused          the peer does not accept us (secret, version, identity)
    ├── StorageError     the disk said no
    │   └── DiskFull     ... because it is full; nothing was accepted
    ├── ProtocolError    the *peer* broke the protocol
    └── Bug              *we* broke a rule of our own
        └── IllegalTransition

Programs print the sentence and the hint and exit with the code; a traceback is shown only with
``--debug`` or for a `Bug`.
"""

from __future__ import annotations

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_TIMED_OUT = 124
EXIT_OWN_FAILURE = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128
EXIT_CANCELED = 130


class KueueError(Exception):
    """A failure with a sentence for the person (`str(error)`) and, if there is one, a `hint` what to do."""

    exit_code = EXIT_REFUSED

    def __init__(self, sentence: str, *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(sentence)
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UserError(KueueError):
    """What was asked for cannot be done: unknown job, malformed resource, bad option value."""


class UsageError(UserError):
    """The command line itself is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(KueueError):
    """A setting is unreadable, of the wrong type, or unsafe; the sentence names key, file and line."""


class Unreachable(KueueError):
    """No answer from the other side; the sentence names host and port."""


class Refused(KueueError):
    """The peer does not accept us: wrong secret, other protocol version, copied identity."""


class StorageError(KueueError):
    """The state on disk cannot be read or written."""


class DiskFull(StorageError):
    """The disk is full: nothing of the batch was accepted and nothing acknowledged was lost."""


class ProtocolError(KueueError):
    """The peer sent what the protocol does not allow; only its own connection is closed."""


class Bug(KueueError):
    """A rule of our own was broken; the place to look is our code, not the input."""

    exit_code = EXIT_OWN_FAILURE


class IllegalTransition(Bug):
    """A fact met a job in a state for which `core.lifecycle` has no entry."""
