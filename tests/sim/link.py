"""The worker's side of its runner: attaches, notices silence and death, repeats what a broken connection may have lost.

Rules
- What was handed to a runner that does not name it after an attachment never got there: `Refused`.
- A runner that was silent gets no lease until it was attached to anew and the agent said so.
- A dead runner is followed by a new one, which takes in what the disk says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kueue.worker import orders as o
from tests.sim.runner import Desk, Runner, describe
from tests.sim.world import Program

if TYPE_CHECKING:
    from tests.sim.workstation import Workstation

ANSWER_SECONDS = 5.0
"""A runner that does not answer for so long counts as silent."""
LAUNCH_SECONDS = (0.02, 0.2)


@dataclass
class Known:
    """What is known of an attempt, and what may have to be said again."""

    state: o.AttemptState
    runner: str
    start: o.StartAttempt | None = None
    stop: o.StopOrder | None = None
    withdraw: o.WithdrawOrder | None = None
    is_orphan: bool = False


class RunnerLink:
    """One per life of a worker."""

    def __init__(self, station: Workstation, worker: Program) -> None:
        self.station = station
        self.world = station.world
        self.worker = worker
        self.known: dict[int, Known] = {}
        self.is_settled = False
        """Enough is known for a hello."""
        self._desk: Desk | None = None
        self._is_attached = False
        self._buries = ""
        """The dead runner whose attempts the next one is asked about."""
        self._asked_at: float | None = None
        self._is_told_mute = False
        self._last = 0.0
        self._lease: o.SetLease | None = None

    def open(self) -> None:
        self._attach()
        self._ping()

    # --- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        station = self.station
        runner = station.runner
        if runner is None or runner.is_dead:
            if runner is not None:
                self._learn_from_spool(runner.name)
                self._buries = runner.name
            runner = station.launch_runner()
        desk = self._desk = Desk(self.worker, runner)
        self._is_attached = False
        self._asked_at = None
        program = runner.program
        self.world.after(0.001, lambda: program.post(lambda: runner.attach(desk) if desk.is_open else None))
        self.worker.wake(ANSWER_SECONDS, lambda: self._late(desk))

    def _late(self, desk: Desk) -> None:
        if desk is not self._desk or self._is_attached:
            return
        desk.is_open = False
        self._learn_from_spool(desk.runner.name)
        self.world.tell(f"{self.worker.name}: its runner does not answer")
        self._settle()
        self._tell_mute()
        self.worker.wake(1.0, lambda: self._attach() if desk is self._desk else None)

    def _learn_from_spool(self, runner: str) -> None:
        for offer, record in self.station.spool.items():
            if record.runner == runner and offer not in self.known:
                self.known[offer] = Known(describe(record, None, "unknown"), runner)

    def _settle(self) -> None:
        if not self.is_settled:
            self.is_settled = True
            self.station.settled(self.attempts())
            self.station.connect()

    def hung_up(self, desk: Desk) -> None:
        """The other side of the socket is gone."""
        if desk is self._desk:
            self._is_attached = False
            self.worker.wake(
                self.world.between(*LAUNCH_SECONDS), lambda: self._attach() if desk is self._desk else None
            )

    def _ping(self) -> None:
        now = self.station.machine.boottime()
        if self._is_attached and self._asked_at is None:
            self._asked_at = now
            self._to(o.Ping(number=1))
        elif not self.is_well and self._asked_at is not None:
            self._tell_mute()
        self.worker.wake(ANSWER_SECONDS, self._ping)

    def _tell_mute(self) -> None:
        if not self._is_told_mute:
            self._is_told_mute = True
            self.station.runner_event(o.RunnerMute(offers=self._not_over()))

    def _tell_that_it_answers(self) -> None:
        if self._is_told_mute:
            self._is_told_mute = False
            self.station.runner_event(o.RunnerAnswers(offers=self._not_over()))

    def _not_over(self) -> tuple[int, ...]:
        return tuple(offer for offer, one in self.known.items() if one.state.state not in {"ended", "gone"})

    @property
    def is_well(self) -> bool:
        if not self._is_attached:
            return False
        return self._asked_at is None or self.station.machine.boottime() - self._asked_at < ANSWER_SECONDS

    def attempts(self) -> tuple[o.AttemptState, ...]:
        """For the hello."""
        return tuple(
            known.state
            if self.is_well or known.state.state in {"ended", "gone"}
            else msgspec.structs.replace(known.state, state="unknown")
            for known in self.known.values()
        )

    # --- orders ------------------------------------------------------------------------------------------------------

    def send(self, order: o.Order) -> None:
        match order:
            case o.StartAttempt(offer=offer):
                if offer not in self.known:
                    state = o.AttemptState(
                        offer=offer, job=order.job, queue_id=order.queue_id, state="queued", memo=order.memo
                    )
                    assert self._desk is not None
                    self.known[offer] = Known(state, self._desk.runner.name, start=order)
                self._to(order)
            case o.SetLease():
                self._lease = order
                if self.is_well:
                    self._to(order)
            case o.StopOrder(offer=offer) if offer in self.known:
                self.known[offer].stop = order
                self._to_its_own(order)
            case o.WithdrawOrder(offer=offer) if offer in self.known:
                self.known[offer].withdraw = order
                self._to_its_own(order)
            case o.ForgetAttempts(offers=offers):
                for offer in offers:
                    self.known.pop(offer, None)
                self._to(order)
            case _:
                self._to(order)

    def _to_its_own(self, order: o.StopOrder | o.WithdrawOrder) -> None:
        """A runner that has not taken it in yet would say that there is none."""
        if not self.known[order.offer].is_orphan:
            self._to(order)

    def _to(self, order: o.Order) -> None:
        desk = self._desk
        if desk is None or not desk.is_open or not self._is_attached:
            return
        at = self._last = max(self._last, self.world.now + self.world.between(0.0001, 0.001))
        self.world.at(at, lambda: desk.runner.arrives(desk, order))

    # --- events ------------------------------------------------------------------------------------------------------

    def carries(self, desk: Desk, event: o.Event) -> None:
        """An event on its way from the runner."""
        at = self._last = max(self._last, self.world.now + self.world.between(0.0001, 0.001))
        self.world.at(at, lambda: self.worker.post(lambda: self._hears(desk, event)))

    def _hears(self, desk: Desk, event: o.Event) -> None:
        if desk is not self._desk or not desk.is_open:
            return
        if isinstance(event, o.Attached):
            is_first = not self._is_attached
            self._is_attached = True
            self._asked_at = None
            self._tell_that_it_answers()
            self._attached(desk.runner, event, is_first=is_first)
            return
        if not self.is_well:
            # It was silent, and may have been called unknown since: what it has is asked anew, before any lease.
            desk.is_open = False
            self._attach()
            return
        self._asked_at = None
        match event:
            case o.Started(offer=offer, started_wall=wall):
                self._now(offer, "running", started_wall=wall)
            case o.Queued(offer=offer):
                self._now(offer, "queued")
            case o.Changed(offer=offer, state=state, note=note):
                self._now(offer, state, note=note)
            case o.Ended(offer=offer, end=end):
                self._now(offer, "ended", end=end)
            case o.Gone(offer=offer, reason=reason):
                self._now(offer, "gone", note=reason)
            case o.Refused(offer=offer) | o.Withdrawn(offer=offer) | o.Unknown(offer=offer):
                self.known.pop(offer, None)
            case o.PauseDone():
                waiting = tuple(
                    offer
                    for offer, known in self.known.items()
                    if known.runner == desk.runner.name and known.start is None and known.state.state == "queued"
                )
                deadline = event.deadline_boottime
                self.station.runner_event(o.ProvenStill(deadline_boottime=deadline, offers=waiting))
        self.station.runner_event(event)

    def _now(self, offer: int, state: o.RunnerState, **more: object) -> None:
        known = self.known.get(offer)
        if known is not None:
            known.start = None
            known.state = msgspec.structs.replace(known.state, state=state, **more)

    def _attached(self, runner: Runner, attached: o.Attached, *, is_first: bool) -> None:
        named = {state.offer for state in attached.attempts}
        for state in attached.attempts:
            known = self.known.get(state.offer)
            if known is None:
                self.known[state.offer] = Known(state, runner.name)
            else:
                known.state, known.runner, known.start, known.is_orphan = state, runner.name, None, False
        missing = [
            offer
            for offer, known in self.known.items()
            if known.runner == runner.name and offer not in named and (is_first or known.is_orphan)
        ]
        publish = self.station.runner_event
        for offer in missing:
            known = self.known.pop(offer)
            if known.start is not None or known.state.state in {"queued", "starting"}:
                publish(o.Refused(offer=offer, reason="its runner ended before it was started"))
            else:
                state = known.state
                publish(o.Gone(offer=offer, job=state.job, queue_id=state.queue_id, reason="there is no record of it"))
        for state in attached.attempts:
            if state.state == "ended" and state.end is not None:
                publish(o.Ended(offer=state.offer, job=state.job, end=state.end))
            elif state.state == "gone":
                publish(o.Gone(offer=state.offer, job=state.job, queue_id=state.queue_id, reason=state.note))
            elif state.started_wall is not None:
                publish(o.Started(offer=state.offer, job=state.job, started_wall=state.started_wall))
        for state in attached.attempts:
            known = self.known.get(state.offer)
            again = known and (known.stop or known.withdraw)
            if known and again and known.state.state not in {"ended", "gone"}:
                self._to(again)
        if self._lease is not None and self.station.quirks.leases_at_attachment:
            self._to(self._lease)
        publish(attached)
        self._settle()
        if self._buries:
            self._bury(runner)

    def _bury(self, runner: Runner) -> None:
        dead, self._buries = self._buries, ""
        for known in self.known.values():
            if known.runner == dead:
                known.runner, known.is_orphan = runner.name, True
        self._to(o.Inherit())
