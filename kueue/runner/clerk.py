"""The clerk: carries out what the worker orders at the desk, and tells it what becomes of its attempts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kueue.runner import cgroup
from kueue.runner.actions import Tell
from kueue.runner.attempt import Terms
from kueue.runner.care import Care, terms_of
from kueue.runner.children import boottime
from kueue.runner.mirror import OURSELVES
from kueue.runner.orders import Order, read_order
from kueue.runner.server_watch import ServerWatch
from kueue.runner.spool import NumberInUse
from kueue.runner.tree import tag_of
from kueue.runner.wire import PROTOCOL, os_bytes

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper


class Clerk:
    """That of one keeper, whose policy decides what an order does."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._is_strangers = False
        """The worker that is attached has another identity: its lease is about other attempts."""

    def lost(self) -> None:
        self._keeper.reviver.lost(boottime())
        self._keeper.premises.look_soon()  # the next worker is to find us

    def attach(self, order: Order) -> None:
        now = boottime()
        self._keeper.reviver.attached(order, now)
        self._keeper.mirror.changed.add(OURSELVES)
        self._is_strangers = self._keeper.premises.are_strangers()
        if self._is_strangers and not self._keeper.policy.is_leaving:
            self._keeper.log("the worker here has another identity: nothing more is begun for it")
            self._keeper.policy.is_leaving = True
        path = os_bytes(order.get("server_lock_path") or "").decode("utf-8", "surrogateescape")
        self._keeper.server_watch = ServerWatch(path, float(order.get("server_lock_seconds") or 0.0))
        self._keeper.server_watch.plan(self._keeper.policy, now)
        self._describe()

    def _describe(self) -> None:
        deadline = self._keeper.policy.deadline
        attempts = [
            care.describe(
                "stopping" if offer in self._keeper.ends.unwritten else self._keeper.policy.attempts[offer].state
            )
            for offer, care in self._keeper.cares.items()
        ]
        self._keeper.desk.tell(
            "Attached",
            protocol=PROTOCOL,
            version=self._keeper.settings.version,
            runner=self._keeper.rundir.runner,
            pid=os.getpid(),
            lease_deadline_boottime=deadline if deadline > 0 else None,
            attempts=attempts,
            leaving=self._keeper.policy.is_leaving,
        )

    def obey(self, line: bytes) -> None:
        order = read_order(line)
        if order is None:
            self._keeper.log(f"a line that is no order was skipped: {line[:80]!r}")
            return
        now = boottime()
        match order["type"]:
            case "StartAttempt":
                self._start(order, line, now)
            case "SetLease" if self._is_strangers:
                pass  # the server gives away by the lease of the worker that was told to run them
            case "SetLease":
                deadline = float(order["deadline_boottime"])
                if deadline < self._keeper.policy.deadline:
                    self._keeper.mirror.changed.add(OURSELVES)  # the spawner sleeps until the end that it knows
                self._keeper.do(self._keeper.policy.set_lease(deadline, now))
                self._keeper.server_watch.plan(self._keeper.policy, now)
            case "StopOrder":
                grace = float(order.get("grace_seconds", 10.0))
                self._keeper.do(
                    self._keeper.policy.stop(order["offer"], bool(order.get("kill")), grace, now), answers=True
                )
            case "WithdrawOrder":
                self._keeper.do(self._keeper.policy.withdraw(order["offer"], now), answers=True)
            case "ForgetAttempts":
                self._forget(order["offers"])
            case "Inherit":
                if self._keeper.inherit(order.get("attempts", ())):  # else the worker asks again
                    self._describe()
            case "Ping":
                self._keeper.desk.tell("Pong", number=order.get("number", 0))
            case "Detach":
                self._keeper.reviver.detached()
                self._keeper.mirror.changed.add(OURSELVES)
                self._keeper.desk.drop()
            case kind:
                self._keeper.log(f"an order of a newer release was skipped: {kind}")

    def _start(self, order: Order, line: bytes, now: float) -> None:
        offer = order["offer"]
        terms = terms_of(order)
        is_new = offer not in self._keeper.policy.attempts
        # Lines of two queues may have one number as well; what has begun is never refused for that.
        line_up = self._keeper.policy.lines.get(offer if terms.line is None else terms.line, ()) if is_new else ()
        known = [self._keeper.cares[one] for one in (offer, *line_up) if one in self._keeper.cares]
        if any(care.queue_id != order["queue_id"] for care in known):
            self._refuse(offer, "an attempt of another queue has the same number, or that of its line, and is not over")
            return
        actions = self._keeper.policy.start(offer, terms, now)
        if is_new and offer in self._keeper.policy.attempts:
            tag = tag_of(order["queue_id"], self._keeper.settings.identity, offer)
            care = Care(offer, order["job"], order["queue_id"], tag, order.get("memo", ""), line=line)
            care.ordered_wall = time.time()
            care.cgroup = cgroup.fresh_directory(self._keeper.settings.cgroup, offer)
            hindrance = self._write_down(care, terms)
            if not hindrance:
                self._keeper.take_in(care)
                if self._keeper.desk.has_hung_up:
                    # An order left unread by a worker that died meanwhile. The next worker did not find it in the
                    # spool, so the server may have given the job to somebody else. Looked at after the record was
                    # written: a worker that dies from now on is followed by one that finds it.
                    hindrance = "its worker is gone"
            if hindrance:
                actions = self._keeper.policy.start_refused(offer, hindrance, now)
        self._keeper.do(actions, answers=True)

    def _write_down(self, care: Care, terms: Terms) -> str:
        """Before its process is made. Returns what is in the way."""
        try:
            self._keeper.premises.hold()  # another runner would take what we begin for left behind, and kill it
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        try:
            self._keeper.spool.begin(care.offer, care.start_record(terms, self._keeper.rundir.runner))
        except NumberInUse:
            return "an attempt of this number is in the spool already"
        except OSError as error:
            return f"{self._keeper.spool.root}: {error.strerror}"
        return ""

    def _refuse(self, offer: int, reason: str) -> None:
        """`leaving`: another runner may take it, this one takes nothing any more."""
        is_leaving = {"leaving": True} if self._keeper.policy.is_leaving else {}
        self._keeper.desk.tell("Refused", offer=offer, reason=reason, **is_leaving)

    def _forget(self, offers: list[int]) -> None:
        unwritten, policy = self._keeper.ends.unwritten, self._keeper.policy
        forgotten = [offer for offer in offers if offer not in unwritten and policy.forget(offer)]
        for offer in forgotten:
            self._keeper.cares.pop(offer, None)
        self._keeper.mirror.changed.update(forgotten)
        self._keeper.mirror.send()  # whoever takes over must not take their records for lost
        for offer in forgotten:
            self._keeper.ends.drop_records(offer)

    def say(self, tell: Tell, answers: bool) -> None:
        """Say what the policy would have the worker know. `answers`: it asked, so also what it was told before."""
        offer = tell.offer
        care = self._keeper.cares.get(offer)
        match tell.word:
            case "refused":
                self._keeper.ends.vanish(offer)
                self._refuse(offer, tell.note)
            case "withdrawn":
                self._keeper.ends.vanish(offer)
                self._keeper.desk.tell("Withdrawn", offer=offer)
            case "unknown":
                self._keeper.desk.tell("Unknown", offer=offer)
            case "queued":
                self._keeper.desk.tell("Queued", offer=offer)
            case _ if care is None:
                pass
            case "ended" | "gone":
                self.tell_end(care)
            case state:
                care.note = tell.note if tell.note != "continues" else ""
                if care.executed and (answers or (state == "running" and not tell.note)):
                    self._keeper.desk.tell(
                        "Started", offer=offer, job=care.job, started_wall=care.started_wall, pid=care.pid or 0
                    )
                if state != "running" or tell.note:
                    self._keeper.desk.tell("Changed", offer=offer, state=state, note=tell.note)

    def tell_end(self, care: Care) -> None:
        """Say how an attempt ended; nothing while that is not written down."""
        if care.end is None:
            return
        if care.end["outcome"]["type"] == "lost":
            self._keeper.desk.tell(
                "Gone", offer=care.offer, job=care.job, queue_id=care.queue_id, reason=care.gone_reason()
            )
        else:
            self._keeper.desk.tell("Ended", offer=care.offer, job=care.job, end=care.end)
