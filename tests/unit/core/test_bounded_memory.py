"""What is over leaves nothing behind in the engine."""

from __future__ import annotations

import gc

import pytest

from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.core.workers import REMEMBERED_SECONDS
from kueue.model import EndRecord, Exited, JobRange, MachineLoad, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m

TOTALS = MachineTotals(slots=4, cores=4, ram_mb=1000)
END = EndRecord(outcome=Exited(0), started_wall=1.0, ended_wall=2.0, run_seconds=1.0)
BLIND, SEEING = 1, 2
"""Sessions of two workers: one lacks the file system with the directories of the jobs."""


class Lab:
    def __init__(self) -> None:
        self.engine = Engine(Settings(), queue_id="q")
        self.steady = 0.0
        self.engine.opened(self.now())
        for session in (BLIND, SEEING):
            name = f"w{session}"
            hello = m.WorkerHello(identity=name, name=name, machine_id=name, boot_id="b", totals=TOTALS)
            self.say(session, hello)

    def now(self) -> Now:
        return Now(1000.0 + self.steady, self.steady)

    def say(self, session: int, message: m.Message) -> None:
        self.engine.handle(session, message, self.now())

    def run(self, directory: str) -> None:
        """One job, to its end, for 2 s."""
        entry = JobRange(payload=Payload(argv=("true",)), place=Place(cwd=directory), request=Request())
        self.say(9, m.Submit(seq=1, request_id=directory, ranges=(entry,)))
        while self.engine.state.jobs:
            for session, message in self.engine.settle(self.now()).sends:
                if isinstance(message, m.Offer) and session == BLIND:
                    self.say(BLIND, m.OfferRejected(offer=message.offer, reason="no such directory"))
                elif isinstance(message, m.Offer):
                    self.say(SEEING, m.AttemptStarted(offer=message.offer, started_wall=1.0))
                    self.say(SEEING, m.AttemptEnded(offer=message.offer, end=END))
        self.steady += 2.0
        self.look()

    def look(self) -> None:
        for session in (BLIND, SEEING):
            self.say(session, m.Report(load=MachineLoad()))
        self.engine.tick(self.now())


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_directories_of_jobs_that_are_done_are_not_remembered(lab):
    for number in range(200):
        lab.run(f"/scratch/{number}")
    gc.collect()
    assert len(lab.engine.state._interned) < 10
    blind = lab.engine.queue.workers[0]
    assert len(blind.probing) > 100
    for seconds in (10.0, REMEMBERED_SECONDS + 1.0):
        lab.steady += seconds
        lab.look()
    assert not blind.declined
    assert not blind.probing
    assert not lab.engine.state.answers


def test_what_waiting_jobs_have_in_common_is_kept_once(lab):
    lab.engine.session_closed(BLIND, lab.now())
    lab.engine.session_closed(SEEING, lab.now())
    for number in range(3):
        entry = JobRange(
            payload=Payload(argv=("true",)), place=Place(cwd="/d", env=(("A", "1"),)), request=Request(ram_mb=5)
        )
        lab.say(9, m.Submit(seq=1, request_id=str(number), ranges=(entry,)))
    templates = [job.template for job in lab.engine.state.jobs.values()]
    assert len({id(template) for template in templates}) == 3
    for shared in ("place", "request", "terms"):
        assert len({id(getattr(template, shared)) for template in templates}) == 1
