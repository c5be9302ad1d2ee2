"""Looks at a host, lets the policy decide, carries the decision out, says what was done; for all hosts at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from kueue import clock, log
from kueue_ops.address import HostAddress
from kueue_ops.lanes import Ticket
from kueue_ops.restart_decision import Decision, Limits
from kueue_ops.restart_policy import HostHistory, Scene, acted, decide
from kueue_ops.restart_status import HostStatus
from kueue_ops.restart_turns import Turns
from kueue_ops.sight import HostSight, ServerWord, Trouble
from kueue_ops.trouble import HostTrouble

_log = log.logger("restart")


class Started(Protocol):
    """What came of a start."""

    @property
    def noted(self) -> tuple[str, ...]: ...


class Hand(Protocol):
    """What can be done on a host over one connection; everything raises `HostTrouble`."""

    def look(self) -> HostSight: ...

    def start(self, sight: HostSight) -> Started: ...

    def renew(self, sight: HostSight) -> Started: ...

    def close(self) -> None:
        """From another thread: whatever waits on this connection ends soon."""


class Speaker(Protocol):
    """Whoever knows what the server says of a worker."""

    def word(self, worker_name: str) -> ServerWord: ...


Reach = Callable[[HostAddress, Ticket], AbstractContextManager[Hand]]
"""Connects to a host, entering a lane as soon as it answers; the connection ends with the ``with`` block."""


class HostCare:
    """What is known of all hosts, and the care for each. `check` may run for many hosts at once.

    `settings_stamp` is asked for `Scene.settings_stamp`. `changed` is called after each look with what is to be shown
    of the host. `hurry` gets a host that waited for its turn to be renewed, when the turn is free.
    """

    def __init__(
        self,
        addresses: Mapping[str, HostAddress],
        server: Speaker,
        reach: Reach,
        *,
        limits: Limits,
        settings_stamp: Callable[[], str] = lambda: "",
        changed: Callable[[HostStatus], None] = lambda _: None,
        hurry: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.addresses = dict(addresses)
        self.server = server
        self.reach = reach
        self.limits = limits
        self.settings_stamp = settings_stamp
        self._changed = changed
        self._hurry = hurry
        self._lock = threading.Lock()
        self._histories: dict[str, HostHistory] = {}
        self._turns = Turns()
        self._waiting: list[str] = []
        self._statuses: dict[str, HostStatus] = {}
        self._noted: dict[str, tuple[str, ...]] = {}
        self._open: dict[str, Hand] = {}

    def status(self, host: str) -> HostStatus:
        """What is known of a host now; empty before the first look."""
        with self._lock:
            return self._statuses.get(host, HostStatus(host))

    def check(self, host: str, ticket: Ticket) -> float | None:
        """One look, and what follows of it. Returns the seconds after which to look again if that is sooner than usual.

        Raises what is no trouble of the host but a fault of ours, and `Abandoned` when nobody waits any more.
        """
        try:
            address = self.addresses.get(host)
            if address is None:
                return None  # taken out of the settings at this moment
            with self.reach(address, ticket) as hand, self._kept(host, hand):
                sight = hand.look()
                ticket.check()
                word = self.server.word(sight.worker_name)
                ticket.check()
                decision = self._decided(host, sight, word)
                if decision.action in {"start", "renew"}:
                    return self._act(host, hand, sight, decision, ticket)
                return decision.look_again_seconds
        except HostTrouble as error:
            if not ticket.is_awaited:
                return None
            return self._decided(host, _bare(host, error.trouble), ServerWord(is_reached=False)).look_again_seconds

    @contextlib.contextmanager
    def _kept(self, host: str, hand: Hand) -> Iterator[None]:
        """`hung` finds the hand for as long as it is at work."""
        with self._lock:
            self._open[host] = hand
        try:
            yield
        finally:
            with self._lock:
                if self._open.get(host) is hand:
                    del self._open[host]

    def hung(self, host: str) -> None:
        """The look at `host` did not come back within its limit."""
        with self._lock:
            hand = self._open.pop(host, None)
        if hand is not None:
            # The thread that hangs there may come free; closing may take a while itself.
            with contextlib.suppress(RuntimeError):  # there is no thread to be had
                threading.Thread(target=hand.close, name=f"close {host}", daemon=True).start()
        self._decided(
            host,
            Trouble("hung", "The look at it does not come back; it was given up, the next one comes as usual."),
            ServerWord(is_reached=False),
        )

    def failed(self, host: str, error: BaseException) -> None:
        """Our own code went wrong over `host`."""
        _log.error("%s a fault in kueue itself", log.keys(host=host), exc_info=error)
        self._decided(
            host,
            Trouble("ssh", f"A fault in kueue itself: {type(error).__name__}: {error}"),
            ServerWord(is_reached=False),
        )

    def _scene(self, host: str, stamp: str) -> Scene:
        return Scene(clock.steady(), host, stamp, self._turns, self.limits)

    def _decided(self, host: str, look: HostSight | Trouble, word: ServerWord) -> Decision:
        """Decides, takes the turn if one is needed, says and remembers it; all at once for all threads."""
        freed: str | None = None
        stamp = self.settings_stamp()
        with self._lock:
            scene = self._scene(host, stamp)
            decision, history = decide(self._histories.get(host, HostHistory()), look, word, scene)
            self._histories[host] = history
            version = look.version if isinstance(look, HostSight) else ""
            turns = self._turns.after(host, decision, version, history.failures, scene.now, self.limits)
            if decision.action == "renew" and decision.cause in {"version", "unseen"}:
                turns = turns.taken(host, decision.cause, scene.now, self.limits)
            was_taken, self._turns = self._turns.host, turns
            if host in self._waiting:
                self._waiting.remove(host)
            if was_taken and not turns.host and self._waiting:
                freed = self._waiting.pop(0)
            if decision.waits_for_turn and not decision.is_settled:
                self._waiting.append(host)
            before = self._statuses.get(host)
            status = HostStatus.of(host, look, word, decision, before)
            self._statuses[host] = status
        self._say(decision, before, status)
        if isinstance(look, HostSight):
            self._say_notes(host, look)
        self._changed(status)
        if freed is not None:
            self._hurry(freed)
        return decision

    def _act(self, host: str, hand: Hand, sight: HostSight, decision: Decision, ticket: Ticket) -> float | None:
        trouble: Trouble | None = None
        notes: tuple[str, ...] = ()
        try:
            notes = (hand.start(sight) if decision.action == "start" else hand.renew(sight)).noted
        except HostTrouble as error:
            trouble = _bare(host, error.trouble)
        word = {"start": "started", "renew": "renewed"}[decision.action]
        stamp = self.settings_stamp()
        with self._lock:
            scene = self._scene(host, stamp)
            history = acted(self._histories.get(host, HostHistory()), sight, trouble, scene)
            self._histories[host] = history
            status = msgspec.structs.replace(
                self._statuses[host],
                last_action=word if trouble is None else f"not {word}",
                last_action_wall=clock.wall(),
                sentence=f"Its worker was {word}." if trouble is None else trouble.sentence,
                hint="" if trouble is None else trouble.hint,
                is_settled=trouble is not None,
                has_worker=trouble is None and decision.has_worker,
            )
            self._statuses[host] = status
        if ticket.is_awaited:
            if trouble is None:
                _log.info("%s its worker was %s", log.keys(host=host, worker=sight.worker_name or None), word)
            else:
                _log.error("%s its worker could not be %s: %s", log.keys(host=host), word, _full(trouble))
            for note in notes:
                _log.warning("%s %s", log.keys(host=host), note.removeprefix(f"{host}: "))
            self._changed(status)
        if trouble is None:
            return self.limits.confirm_seconds
        return max(1.0, history.not_before - clock.steady())

    def _say(self, decision: Decision, before: HostStatus | None, status: HostStatus) -> None:
        """One line: in full when it is news, else short."""
        keys = log.keys(host=status.host, worker=status.worker or None)
        is_news = before is None or (before.action, before.sentence) != (decision.action, decision.sentence)
        sentence = decision.sentence
        if is_news and decision.hint:
            sentence = f"{sentence} {decision.hint}"
        if decision.more:
            sentence = f"{sentence} {decision.more}"
        match decision.action:
            case "leave":
                _log.info("%s %s", keys, sentence)
            case "start" | "renew":
                verb = "One is started." if decision.action == "start" else "It is renewed."
                _log.warning("%s %s %s", keys, sentence, verb)
            case "back_off":
                _log.warning("%s %s", keys, sentence if is_news else f"Still down. {decision.more}")
            case "give_up":
                _log.log(40 if is_news else 30, "%s %s", keys, sentence if is_news else "Still given up.")
            case "trouble":
                _log.log(40 if is_news else 30, "%s %s", keys, sentence)

    def _say_notes(self, host: str, look: HostSight) -> None:
        with self._lock:
            known, self._noted[host] = self._noted.get(host, ()), look.noted
        for note in look.noted:
            if note not in known:
                _log.warning("%s %s", log.keys(host=host), note)


def _bare(host: str, trouble: Trouble) -> Trouble:
    """Without the name of the host, which stands at the begin of the line anyway."""
    return msgspec.structs.replace(trouble, sentence=trouble.sentence.removeprefix(f"{host}: "))


def _full(trouble: Trouble) -> str:
    return f"{trouble.sentence} {trouble.hint}".strip()
