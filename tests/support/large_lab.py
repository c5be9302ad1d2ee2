"""An engine with many workers and jobs, made by messages alone: for what must stay quick when a laboratory is large."""

from __future__ import annotations

from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.model import JobRange, MachineInfo, MachineLoad, MachineTotals, Now, Payload, Place, Request
from kueue.protocol import messages as m
from kueue.server.batch import Pending
from kueue.server.measures import Measures


class LargeLab:
    """`now` stands still unless it is moved. Whatever the engine decides counts as stored at once."""

    def __init__(self, workers: int = 0, *, cap: int = 1_000_000, **settings: object) -> None:
        self.now = Now(wall=1_000_000.0, steady=1_000.0)
        self.engine = Engine(Settings(global_max_parallel_jobs=cap, **settings), queue_id="large")  # type: ignore[arg-type]
        self.engine.opened(self.now)
        self.measures = Measures()
        self.measures.began(self.engine)
        self.offers: list[tuple[int, m.Offer]] = []
        """(session, offer) of all offers so far."""
        for number in range(workers):
            self.join(f"worker{number:04}", session=number)

    def take(self, turn) -> list[m.Message]:
        batch = Pending()
        batch.add(turn)
        self.measures.stored(batch, self.engine)
        self.offers += [(to, message) for to, message in turn.sends if isinstance(message, m.Offer)]
        return [message for _, message in turn.sends]

    def later(self, seconds: float) -> None:
        self.now = Now(self.now.wall + seconds, self.now.steady + seconds)

    def join(self, name: str, *, session: int, identity: str = "", named=(("gpu", 4),), slots: int = 10) -> None:
        hello = m.WorkerHello(
            identity=identity or f"identity of {name}",
            name=name,
            machine_id=f"machine of {name}",
            boot_id="boot",
            info=MachineInfo(),
            totals=MachineTotals(slots=slots, cores=32, ram_mb=64_000, named=tuple(named)),
            load=MachineLoad(load=(1.5, 1.0, 0.5)),
        )
        assert any(isinstance(one, m.WorkerWelcome) for one in self.say(session, hello))

    def say(self, session: int, message: m.Message) -> list[m.Message]:
        return self.take(self.engine.handle(session, message, self.now))

    def submit(self, *requests: Request, count: int = 1, words: tuple[str, ...] = ("true",), cwd: str = "/") -> None:
        ranges = tuple(
            JobRange(payload=Payload(argv=words), place=Place(cwd=cwd), request=request, count=count)
            for request in requests
        )
        number = self.engine.state.sums.next_job
        self.say(1_000_000, m.Submit(seq=1, request_id=f"{number:032x}", ranges=ranges))

    def settle(self) -> None:
        """Until nothing more is offered."""
        while self.engine.queue.unsettled:
            self.take(self.engine.settle(self.now))

    def start_all(self) -> None:
        """Every offer that is out begins to run."""
        for session, offer in self.offers:
            self.say(session, m.AttemptStarted(offer=offer.offer, started_wall=self.now.wall))
