"""What the keeper does with the attempts in its care: every decision, and nothing else.

The caller hands in what happened, with ``now`` (``CLOCK_BOOTTIME`` seconds), carries out the actions that come back *in
their order*, and calls `Policy.tick` at `Policy.next_wake`. After each `Pause`, `Terminate`, `Kill` or `Look` it calls
`Policy.seen` with what is left of the tree.

Rules
- Nothing starts without a lease. At its end nothing starts, what was being stopped is killed, and attempts that may be
  given away (``on_lost = "rerun"``) are paused; they continue when a newer lease comes. Others are never paused.
- Of a line one attempt lives at a time, the oldest that waits next; it starts when nothing of those before is left.
- Stop: SIGTERM, grace, SIGKILL, proof. What is paused is killed at once and never continued for it.
- An attempt is over when its main process has ended *and* nothing of its tree is left (or may be left).
- Whether we ended it or it ended by itself is decided by what came first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kueue.runner.actions import Action, Continue, Finish, Kill, Look, Pause, PauseDone, Start, Tell, Terminate
from kueue.runner.attempt import FIRST_LOOK_SECONDS, Attempt, Terms, Why

SHUTDOWN_SECONDS = 120.0  # how long a service manager waits for those it told to end, at most (user@.service)
SHUTDOWN_NOTICE_SECONDS = 0.2  # it tells jobs and keeper at the same moment, and a job's end may be seen first
LAST_LOOK_SECONDS = 0.5  # and what takes longer is asked twice a second
PAUSED_LOOK_SECONDS = 1.0  # the kernel itself continues a process group that becomes orphaned
LEFTOVER_SECONDS = 0.5  # the `tee` at the end of a pipe may drain it after the main process has ended
SLOW_START_SECONDS = 10.0  # after this a start that hangs on a dead file server is said to people
WITHDRAWN_KEPT = 4096  # numbers of offers withdrawn before they came; far more than can be under way


@dataclass
class Policy:
    """All attempts of one keeper. See the module for how it is driven."""

    deadline: float = float("-inf")
    lapsed: bool = True
    pause_told: bool = True
    attempts: dict[int, Attempt] = field(default_factory=dict)
    open: dict[int, Attempt] = field(default_factory=dict)
    """Those that are not over: what is over may stay for long, and costs nothing."""
    lines: dict[int, set[int]] = field(default_factory=dict)
    """Line → its open attempts, never none."""
    withdrawn: dict[int, None] = field(default_factory=dict)
    shut_down_from: float = float("inf")
    shut_down_until: float = float("-inf")
    """Between these machine or session are being shut down; see `shut_down`."""
    is_leaving: bool = False
    """We were told to end, and do when nothing lives any more."""

    # -- orders

    def set_lease(self, deadline: float, now: float) -> list[Action]:
        self.deadline = deadline
        actions: list[Action] = []
        if now < deadline:
            if self.lapsed:
                self.lapsed = False
                for attempt in self.open.values():
                    actions += self._resume(attempt, now)
            # Also when no `tick` has come between the end of the old lease and the new one: what ended then let nobody
            # start.
            actions += self._start_queued(list(self.lines), now)
            return actions
        return self.tick(now)

    def start(self, offer: int, terms: Terms, now: float) -> list[Action]:
        known = self.attempts.get(offer)
        if known is not None:
            return [Tell(offer, known.state)]
        if offer in self.withdrawn:
            return [Tell(offer, "withdrawn")]
        if now >= self.deadline:
            return [Tell(offer, "refused", "the worker has no lease")]
        if self.is_leaving:
            return [Tell(offer, "refused", "the runner is ending")]
        attempt = Attempt(offer, terms, ordered_at=now)
        self._enter(attempt)
        return self._begin(attempt, now) if self._is_its_turn(attempt) else [Tell(offer, "queued")]

    def stop(self, offer: int, kill: bool, grace: float, now: float) -> list[Action]:
        attempt = self.attempts.get(offer)
        if attempt is None:
            return [Tell(offer, "unknown")]
        if attempt.phase == "over":
            return [Tell(offer, attempt.state)]
        if attempt.phase == "queued":
            return self._drop(attempt, "withdrawn", now)
        return self._stop(attempt, "canceled", now, grace=grace, kill=kill)

    def withdraw(self, offer: int, now: float) -> list[Action]:
        attempt = self.attempts.get(offer)
        if attempt is None:
            self._remember_withdrawn(offer)
            return [Tell(offer, "withdrawn")]
        if attempt.phase == "queued":
            self._remember_withdrawn(offer)
            return self._drop(attempt, "withdrawn", now)
        return [Tell(offer, attempt.state)]

    def forget(self, offer: int) -> bool:
        """True if the attempt was over (or is not known): its records may go."""
        attempt = self.attempts.get(offer)
        if attempt is not None and attempt.phase != "over":
            return False
        self.attempts.pop(offer, None)
        self.withdrawn.pop(offer, None)
        return True

    # -- what became of them

    def started(self, offer: int, now: float) -> list[Action]:
        """The program was executed."""
        attempt = self.attempts.get(offer)
        if attempt is None or attempt.phase != "starting":
            return []
        attempt.phase = "running"
        attempt.started_at = now
        if attempt.paused:  # its clock has not begun to run yet
            attempt.paused_since = now
        return [Tell(offer, "running")]

    def start_refused(self, offer: int, reason: str, now: float) -> list[Action]:
        """No process was made, and none will be."""
        attempt = self.attempts.get(offer)
        if attempt is None or attempt.phase not in ("queued", "starting"):
            return []
        if attempt.stop == "canceled":
            attempt.stopped_main = True
            attempt.main_ended = True
            return self._finish(attempt, now)
        return self._drop(attempt, "refused", now, reason)

    def not_started(self, offer: int, cause: str, reason: str, now: float) -> list[Action]:
        """The program could not be executed; nothing of it exists."""
        attempt = self.attempts.get(offer)
        if attempt is None or not attempt.lives:
            return []
        attempt.main_ended = True
        attempt.why_not = (cause, reason)
        return self._finish(attempt, now)

    def exited(self, offer: int, code: int | None, signal: int | None, now: float) -> list[Action]:
        """The main process ended; both None: it is gone and nobody knows how it ended."""
        attempt = self.attempts.get(offer)
        if attempt is None or not attempt.lives or attempt.main_ended:
            return []
        attempt.main_ended = True
        attempt.ended_at = now
        attempt.exit_code = code
        attempt.exit_signal = signal
        if attempt.stop == "canceled" and not attempt.stopped_main:
            attempt.stop = "leftovers"
        if attempt.is_shot and attempt.stop is None and now >= self.shut_down_until:
            attempt.look_at = now + SHUTDOWN_NOTICE_SECONDS
            return []
        if attempt.may_leave:
            return self._finish(attempt, now)
        attempt.look_at = None
        return [Look(offer)]

    def shut_down(self, now: float) -> None:
        """We were told to end, and with us all processes: a job that a signal ends now has not failed, it is gone."""
        if now >= self.shut_down_until:
            self.shut_down_from = now - SHUTDOWN_NOTICE_SECONDS
        self.shut_down_until = now + SHUTDOWN_SECONDS
        self.is_leaving = True

    def signalled(self, offer: int, reached_main: bool, now: float) -> list[Action]:
        """The signals of a `Terminate` or `Kill` are sent; `reached_main`: the main process lived until then."""
        attempt = self.attempts.get(offer)
        if attempt is not None and attempt.stopped_main is None:
            attempt.stopped_main = reached_main and not attempt.main_ended
            attempt.only_killed = attempt.killing
        return self._wait_to_look(attempt, now) if attempt else []

    def seen(self, offer: int, living: int, running: int, now: float, note: str = "") -> list[Action]:
        """What is left of the tree: `living` processes (the dead but not yet reaped do not count), of which `running`
        are not stopped. `note`: why some cannot be signalled.
        """
        attempt = self.attempts.get(offer)
        if attempt is None or not attempt.lives:
            return []
        actions: list[Action] = [Tell(offer, attempt.state, note)] if note else []
        if attempt.main_ended and (living == 0 or attempt.may_leave):
            return actions + self._finish(attempt, now)
        if attempt.main_ended and attempt.stop is None:
            if attempt.leftovers_since is None:
                attempt.leftovers_since = now
            if attempt.paused or self._lapsed_for(now) or now >= attempt.leftovers_since + LEFTOVER_SECONDS:
                attempt.leftovers = living
                return actions + self._stop(attempt, "leftovers", now, grace=attempt.terms.grace_seconds)
        if attempt.paused and attempt.stop is None:
            proven = running == 0 and (living > 0 or attempt.phase == "running")
            if proven and not attempt.pause_proven:
                actions.append(Tell(offer, "paused"))
            attempt.pause_proven = proven
            if proven:
                attempt.look_at = now + PAUSED_LOOK_SECONDS
                attempt.look_gap = FIRST_LOOK_SECONDS
            else:
                self._wait_to_look(attempt, now)
        elif attempt.stop or attempt.main_ended:
            self._wait_to_look(attempt, now)
            if attempt.killing and attempt.look_gap >= LAST_LOOK_SECONDS and not attempt.stuck_told:
                attempt.stuck_told = True
                note = f"{living} of its processes were killed and do not end (a disk or file server does not answer?)"
                actions.append(Tell(offer, attempt.state, note))
        return actions + self._pause_done()

    def tick(self, now: float) -> list[Action]:
        """All that is due by the clock."""
        actions: list[Action] = []
        if now >= self.deadline and not self.lapsed:
            self.lapsed = True
            self.pause_told = False
            for attempt in self.open.values():
                actions += self._lapse(attempt, now)
        for attempt in list(self.open.values()):
            if attempt.lives:
                actions += self._due(attempt, now)
        return actions + self._pause_done()

    def stood_in(self, since: float, now: float) -> list[Action]:
        """While we did nothing the lease ended; since then somebody else has stopped what must not run without it."""
        had_lapsed = self.lapsed
        actions = self.tick(now)
        for attempt in self.open.values():
            if attempt.paused and not had_lapsed:
                attempt.paused_since = max(since, attempt.started_at or since)
            elif attempt.lives and not (attempt.paused or attempt.killing):
                actions.append(Continue(attempt.offer))
        return actions

    def next_wake(self, now: float) -> float | None:
        """When `tick` has something to do next, not before `now`; None: never."""
        times: list[float] = []
        for attempt in self.open.values():
            if not attempt.lives:
                continue
            times += [at for at in (attempt.look_at, attempt.kill_at, self._time_is_up(attempt)) if at is not None]
            if attempt.phase == "starting" and not attempt.slow_told:
                times.append(attempt.ordered_at + SLOW_START_SECONDS)
        if not self.lapsed and self.open:
            times.append(self.deadline)
        return max(now, min(times)) if times else None

    # -- handing over

    def row(self, offer: int) -> dict[str, Any] | None:
        """The attempt as plain values, for whoever may have to take over; None: there is none."""
        attempt = self.attempts.get(offer)
        return {**vars(attempt), "terms": dict(vars(attempt.terms))} if attempt else None

    def adopt(self, row: dict[str, Any]) -> None:
        """Take over an attempt from its `row`. What was not seen in between is seen at the next `tick`."""
        values = dict(row)
        terms = Terms(**values.pop("terms"))
        why_not = values.pop("why_not")
        attempt = Attempt(terms=terms, why_not=tuple(why_not) if why_not else None, **values)
        if attempt.lives and (attempt.stop or attempt.paused or attempt.main_ended):
            attempt.look_at = 0.0
        if attempt.phase == "over":
            self.attempts[attempt.offer] = attempt
        else:
            self._enter(attempt)

    def take_up(self, offer: int, terms: Terms, now: float) -> None:
        """Take over an attempt whose row never came: its process may have been asked for."""
        self._enter(Attempt(offer, terms, phase="starting", ordered_at=now))

    def inherit(
        self, offer: int, terms: Terms, exit_status: tuple[int | None, int | None] | None, now: float
    ) -> list[Action]:
        """An attempt whose runner died: nobody is left to see its main process end. Kill what is left, prove it gone.

        `exit_status`: (code, signal) if the dead runner still wrote down how the main process ended.
        """
        attempt = Attempt(offer, terms, phase="running", ordered_at=now, main_ended=True)
        self._enter(attempt)
        if exit_status is None:
            attempt.stop = "gone"
        else:
            attempt.exit_code, attempt.exit_signal = exit_status
            if terms.keep_background:
                return [Continue(offer), *self._finish(attempt, now)]  # its runner may have paused them
            attempt.stop = "leftovers"
        attempt.killing = True
        return [Kill(offer)]

    def reopen(self, offer: int) -> None:
        """Its end was decided, but its keeper died before it was written: decide again after a look."""
        attempt = self.attempts[offer]
        attempt.phase = "running"
        attempt.look_at = 0.0
        self._enter(attempt)

    def over(self, offer: int, gone: bool) -> None:
        """An attempt whose record was found written: known, and over."""
        self.attempts[offer] = Attempt(offer, Terms(), phase="over", main_ended=True, gone=gone)

    # -- inside

    def _lapsed_for(self, now: float) -> bool:
        return self.lapsed or now >= self.deadline

    def _begin(self, attempt: Attempt, now: float) -> list[Action]:
        attempt.phase = "starting"
        attempt.ordered_at = now
        return [Start(attempt.offer, self.deadline)]

    def _enter(self, attempt: Attempt) -> None:
        self.attempts[attempt.offer] = self.open[attempt.offer] = attempt
        self.lines.setdefault(attempt.line, set()).add(attempt.offer)

    def _leave(self, attempt: Attempt) -> None:
        del self.open[attempt.offer]
        members = self.lines[attempt.line]
        members.remove(attempt.offer)
        if not members:
            del self.lines[attempt.line]

    def _is_its_turn(self, attempt: Attempt) -> bool:
        """Nothing else of its line lives, nor waits for longer. Offers may come in another order than they were made:
        a younger one may be running already.
        """
        members = self.lines[attempt.line]
        if len(members) == 1:
            return True
        return min(members) == attempt.offer and not any(self.open[offer].lives for offer in members)

    def _start_queued(self, lines: Iterable[int], now: float) -> list[Action]:
        """Those whose turn it is; without a lease, and of a runner that is to end, they stay queued."""
        if self._lapsed_for(now) or self.is_leaving:
            return []
        actions: list[Action] = []
        for line in lines:
            members = self.lines.get(line)
            if members:
                attempt = self.open[min(members)]
                if attempt.phase == "queued" and self._is_its_turn(attempt):
                    actions += self._begin(attempt, now)
        return actions

    def _drop(self, attempt: Attempt, word: str, now: float, note: str = "") -> list[Action]:
        del self.attempts[attempt.offer]
        self._leave(attempt)
        return [Tell(attempt.offer, word, note), *self._start_queued((attempt.line,), now), *self._pause_done()]

    def _remember_withdrawn(self, offer: int) -> None:
        self.withdrawn[offer] = None
        if len(self.withdrawn) > WITHDRAWN_KEPT:
            del self.withdrawn[next(iter(self.withdrawn))]

    def _stop(self, attempt: Attempt, why: Why, now: float, *, grace: float, kill: bool = False) -> list[Action]:
        kill = kill or attempt.paused or self._lapsed_for(now)
        actions: list[Action] = []
        if attempt.stop is None:
            attempt.stop = "leftovers" if attempt.main_ended else why
            attempt.look_gap = FIRST_LOOK_SECONDS
            actions.append(Tell(attempt.offer, "stopping"))
            if not kill:
                attempt.look_at = None
                attempt.kill_at = now + grace
                return [*actions, Terminate(attempt.offer)]
        elif not kill or attempt.killing:
            return [Tell(attempt.offer, "stopping")]
        attempt.killing = True
        attempt.kill_at = attempt.look_at = None
        attempt.look_gap = FIRST_LOOK_SECONDS
        return [*actions, Kill(attempt.offer)]

    def _lapse(self, attempt: Attempt, now: float) -> list[Action]:
        if not attempt.lives:
            return []
        if attempt.main_ended and attempt.may_leave:
            return []  # over but for the notice of a shutdown
        if attempt.stop or attempt.main_ended:
            if attempt.killing:
                return []
            return self._stop(attempt, attempt.stop or "leftovers", now, grace=0.0, kill=True)
        if attempt.terms.on_lost != "rerun" or attempt.paused:
            return []
        attempt.paused = True
        attempt.pause_proven = False
        attempt.paused_since = now
        return [Pause(attempt.offer)]

    def _resume(self, attempt: Attempt, now: float) -> list[Action]:
        if not attempt.paused or attempt.stop or not attempt.lives:
            return []
        attempt.paused = False
        attempt.pause_proven = False
        attempt.paused_seconds += now - attempt.paused_since
        if not attempt.main_ended:
            attempt.look_at = None
        return [Continue(attempt.offer), Tell(attempt.offer, attempt.state, "continues")]

    def _time_is_up(self, attempt: Attempt) -> float | None:
        """When its time-out strikes; None while it does not run."""
        limit = attempt.terms.timeout_seconds
        if limit is None or attempt.started_at is None or attempt.paused or attempt.stop or attempt.main_ended:
            return None
        return attempt.started_at + limit + attempt.paused_seconds

    def _due(self, attempt: Attempt, now: float) -> list[Action]:
        actions: list[Action] = []
        limit = self._time_is_up(attempt)
        if limit is not None and now >= limit:
            actions += self._stop(attempt, "timed_out", now, grace=attempt.terms.grace_seconds)
        if attempt.kill_at is not None and now >= attempt.kill_at:
            actions += self._stop(attempt, attempt.stop or "leftovers", now, grace=0.0, kill=True)
        if attempt.look_at is not None and now >= attempt.look_at:
            attempt.look_at = None
            if attempt.killing:
                actions.append(Kill(attempt.offer))
            elif attempt.paused:
                actions.append(Pause(attempt.offer))
            else:
                actions.append(Look(attempt.offer))
        if attempt.phase == "starting" and not attempt.slow_told and now >= attempt.ordered_at + SLOW_START_SECONDS:
            attempt.slow_told = True
            actions.append(
                Tell(
                    attempt.offer, attempt.state, "its directory, output file or program does not answer (file server?)"
                )
            )
        return actions

    def _wait_to_look(self, attempt: Attempt, now: float) -> list[Action]:
        attempt.look_at = now + attempt.look_gap
        attempt.look_gap = min(attempt.look_gap * 2, LAST_LOOK_SECONDS)
        return []

    def _pause_done(self) -> list[Action]:
        if self.pause_told or not self.lapsed:
            return []
        for attempt in self.open.values():
            if attempt.lives and (attempt.stop or (attempt.paused and not attempt.pause_proven)):
                return []
        self.pause_told = True
        return [PauseDone(self.deadline)]

    def _finish(self, attempt: Attempt, now: float) -> list[Action]:
        actions: list[Action] = []
        if attempt.paused:
            attempt.paused = False
            attempt.paused_seconds += now - attempt.paused_since
            if attempt.may_leave:  # nobody looks after them from now on
                actions.append(Continue(attempt.offer))
        end = self._end(attempt)
        attempt.phase = "over"
        self._leave(attempt)
        attempt.gone = end.kind == "gone"
        attempt.look_at = attempt.kill_at = None
        return [*actions, end, *self._start_queued((attempt.line,), now), *self._pause_done()]

    def _end(self, attempt: Attempt) -> Finish:
        offer, leftovers, paused = attempt.offer, attempt.leftovers, attempt.paused_seconds
        by_itself = attempt.exit_code is not None and attempt.only_killed
        ours = attempt.stop in ("canceled", "timed_out") and attempt.stopped_main and not by_itself
        if ours and attempt.stop == "canceled":
            return Finish(offer, "canceled", leftovers=leftovers, paused_seconds=paused)
        if attempt.why_not is not None:
            cause, reason = attempt.why_not
            return Finish(offer, "not_started", cause=cause, reason=reason)
        if ours:
            after = attempt.terms.timeout_seconds or 0.0
            return Finish(offer, "timed_out", after_seconds=after, leftovers=leftovers, paused_seconds=paused)
        if attempt.is_shot and self.shut_down_from <= attempt.ended_at < self.shut_down_until:
            return Finish(offer, "gone", reason="it was ended with its machine or session", paused_seconds=paused)
        if attempt.exit_code is not None:
            return Finish(offer, "exited", attempt.exit_code, leftovers=leftovers, paused_seconds=paused)
        if attempt.exit_signal is not None:
            return Finish(offer, "signaled", attempt.exit_signal, leftovers=leftovers, paused_seconds=paused)
        return Finish(offer, "gone", reason="its runner died with it", paused_seconds=paused)
