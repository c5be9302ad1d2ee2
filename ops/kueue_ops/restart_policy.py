"""Decides what to do about the worker of one host: leave, start, renew, wait, or give up and say so. Pure.

Rules
- A worker that the server sees alive is left alone, whatever the host shows. Exceptions: one of another version than
  the one installed there is renewed, whichever is newer, and one that was seen or started before the host's last boot
  is known to be gone.
- A server that is away decides nothing: then a worker process that lives is left alone, and a missing one is started.
- A worker that lives but that a server which answers does not see is renewed after `Limits.unseen_seconds`, which
  is longer than any pause of a worker between two tries to connect (25 s).
- A worker that lives is renewed when it is its turn (`restart_turns`). A host where a renewal brings back a version
  that is newer than the installed one has two installations; it keeps that until something changes there.
- A start that fails is tried again after 1, 2, 4, … minutes; after `Limits.tries` in a row the host is given up until
  something changes there (version, boot, command, settings), or for a day.
- Moments are seconds of a steady clock: neither a changed clock nor a suspended machine makes anything overdue.
"""

from __future__ import annotations

import msgspec

from kueue_ops.restart_decision import Decision, Limits, spoken
from kueue_ops.restart_turns import Turns
from kueue_ops.sight import UNIT, HostSight, ServerWord, Trouble
from kueue_ops.version import is_older, is_other


class HostHistory(msgspec.Struct, frozen=True):
    """What is remembered of a host between two looks."""

    started_at: float | None = None
    """Our last start, as long as it is neither proven good nor counted as failed."""
    started_boot: str = ""
    failures: int = 0
    """Starts in a row that failed."""
    not_before: float = 0.0
    reason: str = ""
    """Why the last one failed."""
    tried_on: str = ""
    """The circumstances of the last try; when they change the failures do not count any more."""
    kept_version: str = ""
    """That came back by a renewal although an older one is installed: that is not what starts the worker there."""
    given_up_at: float | None = None
    unseen_since: float | None = None
    """Since when a worker lives there that a server which answers does not see."""
    missing_since: float | None = None
    """Since when the server sees a worker of which the host shows nothing."""
    worker_boot: str = ""
    """Boot of the host at the last look that found a worker there, or at our last start."""


class Scene(msgspec.Struct, frozen=True):
    """Where and when a host is judged."""

    now: float
    host: str = ""
    settings_stamp: str = ""
    """Changes whenever the settings that the worker reads may have changed."""
    turns: Turns = Turns()
    limits: Limits = Limits()


def decide(
    history: HostHistory, look: HostSight | Trouble, word: ServerWord, scene: Scene
) -> tuple[Decision, HostHistory]:
    """The decision, and the history with what this look has told."""
    if isinstance(look, Trouble):
        kept = msgspec.structs.replace(history, unseen_since=None, missing_since=None)
        return Decision("trouble", look.sentence, hint=look.hint), kept
    # A boot ends every worker; what the server sees of an earlier one is a connection whose end it has not noticed yet.
    latest = (word.worker.boot_id if word.worker is not None else "") or history.worker_boot
    is_over = look.worker_pid is None and latest not in {"", look.boot_id}
    boot = history.worker_boot if look.worker_pid is None else look.boot_id
    if word.sees_it and not is_over:
        decision, history = _seen(history, look, word, scene)
    else:
        history = msgspec.structs.replace(history, missing_since=None)
        if look.worker_pid is None:
            decision, history = _down(history, look, scene)
        elif not word.is_reached:
            decision, history = _alone(history, scene)
        else:
            decision, history = _unseen(history, look, scene)
    return decision, msgspec.structs.replace(history, worker_boot=boot)


def acted(history: HostHistory, look: HostSight, trouble: Trouble | None, scene: Scene) -> HostHistory:
    """The history after a start or renewal, which succeeded unless there was `trouble`."""
    history = msgspec.structs.replace(history, tried_on=circumstances(look, scene.settings_stamp), unseen_since=None)
    if trouble is None:
        return msgspec.structs.replace(
            history, started_at=scene.now, started_boot=look.boot_id, worker_boot=look.boot_id
        )
    return _failed(history, trouble.sentence, scene)


def circumstances(look: HostSight, settings_stamp: str) -> str:
    """What must change before a host that was given up is tried again."""
    return f"{look.version}\n{look.boot_id}\n{look.command}\n{settings_stamp}"


def _seen(history: HostHistory, look: HostSight, word: ServerWord, scene: Scene) -> tuple[Decision, HostHistory]:
    now, limits, turns, host = scene.now, scene.limits, scene.turns, scene.host
    worker = word.worker
    assert worker is not None
    if look.worker_pid is None:
        since = now if history.missing_since is None else history.missing_since
        history = msgspec.structs.replace(history, missing_since=since, unseen_since=None)
        # Right after a power loss the server does not know yet; it is asked often until it must have noticed.
        is_settled = now - since >= limits.stale_seconds
        return (
            Decision(
                "leave",
                "The server sees its worker alive, so it is left alone, although no process of it is found.",
                has_worker=True,
                is_settled=is_settled,
                look_again_seconds=None if is_settled else min(30.0, limits.recheck_seconds),
            ),
            history,
        )
    running = look.worker_version or worker.version
    if not look.command or not is_other(running, look.version):
        offline = " (taken offline by hand)" if worker.offline else ""
        return Decision("leave", f"Its worker is up{offline}.", has_worker=True), HostHistory()
    sentence = f"Its worker is up with version {running}, {look.version} is installed."
    history = msgspec.structs.replace(history, unseen_since=None, missing_since=None)
    if history.started_at is not None:
        history = _failed(history, f"It still has version {running} after its renewal.", scene)
        if is_older(look.version, running):
            # Another installation starts it; to renew it again would bring that back again.
            history = msgspec.structs.replace(history, kept_version=running)
    if history.kept_version == running and history.tried_on == circumstances(look, scene.settings_stamp):
        more = f"A renewal brought {running} back: two installations are on that host."
        hint = "worker_command in [restart_workers] names the one to be used, the worker's unit its own."
        return Decision("leave", sentence, hint, more, cause="version", has_worker=True), history
    waiting, history = _waits(history, look, scene)
    if waiting is not None:
        more = f"{waiting.sentence} {waiting.more}".strip()
        return Decision("leave", sentence, more=more, cause="version", has_worker=True), history
    if not turns.is_free(host, "version", look.version, now):
        is_braked = turns.is_braked(host, look.version, now)
        more = f"It did not come up on {turns.braked_by}." if is_braked else "Renewed when another one is done."
        return (
            Decision(
                "leave",
                sentence,
                more=more,
                cause="version",
                has_worker=True,
                is_settled=is_braked,
                look_again_seconds=None if is_braked else min(60.0, limits.recheck_seconds),
                waits_for_turn=True,
            ),
            history,
        )
    return Decision("renew", sentence, cause="version", has_worker=True, is_settled=False), history


def _alone(history: HostHistory, scene: Scene) -> tuple[Decision, HostHistory]:
    """A worker lives, and no server can say whether it is of use."""
    if history.started_at is None or scene.now - history.started_at >= scene.limits.settle_seconds:
        history = HostHistory()
    sentence = "Its worker process lives; the server is not reached, so it is left alone."
    return Decision("leave", sentence, has_worker=True), msgspec.structs.replace(history, unseen_since=None)


def _unseen(history: HostHistory, look: HostSight, scene: Scene) -> tuple[Decision, HostHistory]:
    """A worker lives, and the server answers but does not see it."""
    now, limits = scene.now, scene.limits
    since = now if history.unseen_since is None else history.unseen_since
    if history.started_at is not None:
        since = max(since, history.started_at)
    history = msgspec.structs.replace(history, unseen_since=since)
    left = limits.unseen_seconds - (now - since)
    if left > 0:
        is_fresh = history.started_at is not None and now - history.started_at < limits.settle_seconds
        again = min(left, limits.confirm_seconds) if is_fresh else left
        sentence = f"Its worker process lives (pid {look.worker_pid}), but the server does not see it yet."
        return (
            Decision("leave", sentence, is_settled=False, look_again_seconds=max(1.0, again)),
            history,
        )
    why = f"Its worker process lives (pid {look.worker_pid}), but the server does not see it."
    if history.started_at is not None:
        history = _failed(history, f"{why}{_words(look)}", scene)
    waiting, history = _waits(history, look, scene)
    if waiting is not None:
        return waiting, history
    if not look.command:
        return _not_found(look, why), history
    if not scene.turns.is_free(scene.host, "unseen", look.version, now):
        again = min(60.0, limits.recheck_seconds)
        more = "Renewed when another one is done."
        waiting = Decision(
            "leave", why, more=more, cause="unseen", is_settled=False, look_again_seconds=again, waits_for_turn=True
        )
        return waiting, history
    return Decision("renew", why, cause="unseen", is_settled=False), history


def _down(history: HostHistory, look: HostSight, scene: Scene) -> tuple[Decision, HostHistory]:
    """No worker process, and no server that sees one."""
    limits = scene.limits
    history = msgspec.structs.replace(history, unseen_since=None)
    # A session of our name in which somebody does something else is none.
    sessions = [session for session in look.sessions if not session.program]
    living: list[object] = [session for session in sessions if not session.is_dead]
    if look.service is not None and look.service.pid is not None:
        living.append(look.service)
    if history.started_at is not None:
        age = scene.now - history.started_at
        if living and age < limits.settle_seconds:
            sentence = "Its worker is starting."
            again = max(1.0, min(limits.confirm_seconds, limits.settle_seconds - age))
            return Decision("leave", sentence, is_settled=False, look_again_seconds=again), history
        # A machine that was started anew, or that nobody could look at for long, has proven nothing against the worker.
        if look.boot_id == history.started_boot and age < max(600.0, 10 * limits.settle_seconds):
            reason = f"The worker ended right after its start.{_words(look)}"
            history = _failed(history, reason, scene)
        else:
            history = msgspec.structs.replace(history, started_at=None)
    waiting, history = _waits(history, look, scene)
    if waiting is not None:
        return waiting, history
    if not look.command:
        return _not_found(look, "No worker runs."), history
    if look.service is not None:
        if look.service.pid is not None:
            why = f"{UNIT} is {look.service.state} and has no worker that works."
            return Decision("renew", why, cause="session", is_settled=False), history
        what = f"No worker runs; {UNIT} is {look.service.state}."
        return Decision("start", what, cause="missing", is_settled=False), history
    if sessions:
        what = "without a worker" if living else "that is dead"
        return Decision("renew", f"There is a screen session {what}.", cause="session", is_settled=False), history
    return Decision("start", "No worker runs.", cause="missing", is_settled=False), history


def _waits(history: HostHistory, look: HostSight, scene: Scene) -> tuple[Decision | None, HostHistory]:
    """The decision to do nothing for now after failures; None when a try is due."""
    now, limits = scene.now, scene.limits
    if history.failures and history.tried_on != circumstances(look, scene.settings_stamp):
        return None, HostHistory(unseen_since=history.unseen_since)
    if history.given_up_at is not None:
        if now - history.given_up_at >= limits.given_up_seconds:
            # One try; if it fails as well, the host is given up for another day.
            return None, msgspec.structs.replace(history, given_up_at=None, failures=limits.tries - 1, not_before=now)
        return _given_up(history), history
    if history.failures >= limits.tries:
        history = msgspec.structs.replace(history, given_up_at=now)
        return _given_up(history), history
    left = history.not_before - now
    if history.failures and left > 0:
        more = f"Failed {history.failures} of {limits.tries} times; next try in {spoken(left)}."
        hint = "" if look.last_words else "; ".join(look.noted)
        return Decision("back_off", history.reason, hint, more, look_again_seconds=max(1.0, left)), history
    return None, history


def _given_up(history: HostHistory) -> Decision:
    return Decision(
        "give_up",
        f"Given up: {history.reason}",
        hint="It is tried again when the version, the settings or the boot of the host change, after a day, or now by "
        "a restart of this program.",
    )


def _failed(history: HostHistory, reason: str, scene: Scene) -> HostHistory:
    failures = history.failures + 1
    return msgspec.structs.replace(
        history, started_at=None, failures=failures, reason=reason, not_before=scene.now + scene.limits.pause(failures)
    )


def _not_found(look: HostSight, why: str) -> Decision:
    tried = f" Looked for in {', '.join(look.tried)}." if look.tried else ""
    return Decision(
        "trouble",
        f"{why} kueue_worker is not found there.{tried}",
        hint="Install kueue there, or name the program: worker_command in [restart_workers].",
    )


def _words(look: HostSight) -> str:
    if look.service and look.service.why:
        return f" {UNIT}: {look.service.why[:300]}"
    return f' Its log ends with: "{look.last_words[:300]}"' if look.last_words else ""
