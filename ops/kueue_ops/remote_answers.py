"""What the answers of a host mean: its screen sessions, its unit, remarks, last words. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable

from kueue import log
from kueue_ops.remote_script import Answer
from kueue_ops.sight import SESSION, UNIT, ScreenSession, Service


def sessions_of(answer: Answer) -> list[ScreenSession]:
    """Those of our name on this host, somebody's own among them."""
    programs = dict(line.partition(" ")[::2] for line in answer.lines("foreign"))
    found = []
    for line in answer.lines("session"):
        pid, _, state = line.partition(" ")
        # One of another host, in a socket directory on a shared disk, is none of this host.
        if pid.isdecimal() and "(Remote" not in state:
            program = (programs[pid].strip() or "another program") if pid in programs else ""
            found.append(ScreenSession(int(pid), is_dead="(Dead" in state, program=program))
    return found


def noted(answer: Answer, sessions: tuple[ScreenSession, ...], *, kills: bool) -> list[str]:
    """Remarks that are worth a line."""
    foreign = " and ".join(f"{session.pid}.{SESSION} ({session.program})" for session in sessions if session.program)
    dead = sum(session.is_dead for session in sessions)
    elsewhere = sum("(Remote" in line for line in answer.lines("session"))
    has_screen = bool(answer.word("has_screen"))
    complaint = answer.word("screen_trouble").strip()
    notes: list[tuple[object, Callable[[], str]]] = [
        (dead, lambda: f"{dead} dead screen session{'s' * (dead != 1)} of {SESSION} wiped."),
        (foreign, lambda: f"the screen session {foreign} runs no worker and is left alone."),
        (elsewhere, lambda: "screen's socket directory is shared with other hosts; their sessions are left alone."),
        (complaint and has_screen, lambda: f"screen's own directory is of no use ({complaint}); another one is used."),
        (complaint and not has_screen, lambda: f"screen does not work there: {complaint}."),
        (not has_screen and not complaint, lambda: "no screen there; a worker is started without a session."),
        (
            kills and not answer.has("lingers"),
            lambda: "logind there ends everything at logout: loginctl enable-linger",
        ),
    ]
    return [sentence() for holds, sentence in notes if holds]


def service_of(answer: Answer) -> Service | None:
    """The worker's unit, if it is the one to start it there."""
    if not answer.has("service"):
        return None
    state, sub, enabled, pid, result, code = [*answer.word("service").split(" "), *[""] * 6][:6]
    why = ""
    if state == "failed" or sub == "auto-restart":
        said = log.bare(answer.word("service.said"))
        why = said or f"{UNIT} failed ({result}{f', exit code {code}' if code not in {'', '0'} else ''})."
    return Service(
        state="failed" if sub == "auto-restart" else state,
        is_enabled=enabled.startswith("enabled"),
        pid=int(pid) if pid.isdecimal() and pid != "0" else None,
        why=why,
    )


def ending(code: str) -> str:
    """A sentence for the exit code of a worker that said nothing; a shell adds 128 to the number of a signal."""
    if not code.isdecimal():
        return "it left no word in its log."
    number = int(code) - 128
    try:
        return f"it was ended by {signal.Signals(number).name} and said nothing."
    except ValueError:
        return f"it said nothing (exit code {code})."


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return log.safe(lines[-1].strip()) if lines else ""
