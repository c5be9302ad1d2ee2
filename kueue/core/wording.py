"""Sentences about jobs and workers that every program shows alike."""

from __future__ import annotations

from kueue.model import Canceled, EndRecord, Exited, Lost, NotStarted, Outcome, Signaled, TimedOut

SIGNAL_NAMES = {
    1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 5: "TRAP", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1",
    11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 24: "XCPU", 25: "XFSZ", 31: "SYS",
}  # fmt: skip
"""Linux numbers, signal(7); the rest have no name worth showing."""


def outcome_text(outcome: Outcome) -> str:
    """How a job or attempt ended, in a few words without a full stop."""
    match outcome:
        case Exited(code):
            return f"exited with code {code}"
        case Signaled(signal):
            name = SIGNAL_NAMES.get(signal)
            return f"ended by signal {signal} (SIG{name})" if name else f"ended by signal {signal}"
        case NotStarted(reason):
            return f"could not be started: {reason}"
        case TimedOut(after_seconds):
            return f"timed out after {after_seconds:g} s"
        case Canceled(reason):
            return f"canceled: {reason}" if reason else "canceled"
        case Lost(reason):
            return f"lost: {reason}"


def comment(outcome: Outcome, end: EndRecord | None) -> str:
    """The line ``comment:`` of `show-job`."""
    match outcome:
        case Exited():
            text = "Job finished orderly."
        case Signaled():
            text = f"Job {outcome_text(outcome)}."
        case NotStarted(reason):
            text = f"Failed to start job: {reason}"
        case TimedOut(after_seconds):
            text = f"Job timed out after {after_seconds:g} s and was stopped."
        case Canceled(reason):
            text = f"Job canceled: {reason}" if reason else "Job killed!" if end is not None else "Job canceled."
        case Lost(reason):
            text = f"Job lost: {reason}"
    if end is not None:
        if end.leftovers_stopped:
            noun = "process" if end.leftovers_stopped == 1 else "processes"
            text += f" {end.leftovers_stopped} background {noun} left behind and stopped."
        for note in filter(None, end.notes):
            text += f" {note[:1].upper()}{note[1:]}"
            text += "" if note.endswith(".") else "."
    return text
