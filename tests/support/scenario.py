"""Transcripts of the engine: what happens to it, then the facts it decides and what it says.

A file holds comments (``#``: the sentence why), commands, and under ``----`` what came of the command, up to an empty
line. After each command the engine settles, as the server does after each batch; a crash replays what was stored.

    # A job is offered where there is room.
    w1 joins cores=8

    client submits cores=4
    ----
    fact JobsSubmitted ids=0-0
    ...

Who speaks: ``w1`` (its newest session; ``w1.1`` is its first one) or ``client``, ``client2`` …
``python -m tests.support.scenario --bless FILE…`` writes the outcome into the files; read the difference before you
check it in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kueue.core import facts as f
from kueue.core import invariants, queries
from kueue.core.engine import Engine
from kueue.core.queue import Turn
from kueue.core.reasons import Sight, reasons
from kueue.core.settings import Settings
from kueue.core.wording import outcome_text
from kueue.model import (
    Allocation,
    Canceled,
    EndRecord,
    Exited,
    JobRange,
    MachineLoad,
    MachineTotals,
    NotStarted,
    Now,
    Outcome,
    Payload,
    Place,
    Request,
    Signaled,
    Terms,
)
from kueue.protocol import messages as m
from kueue.storage.memory import MemoryStore
from kueue.storage.store import Batch

WALL = 1_000_000.0


def blocks(text: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """(comment lines, command, expected lines) of each command of a file."""
    comments: list[str] = []
    command = ""
    expected: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            comments.append(line)
        elif line == "----":
            pass
        elif line and not command:
            command = line
        elif line:
            expected.append(line)
        elif command:
            yield comments, command, expected
            comments, command, expected = [], "", []
        elif comments:
            comments.append("")


def written(text: str) -> str:
    """The file with what really comes of its commands."""
    scenario = Scenario()
    out: list[str] = []
    for comments, command, _ in blocks(text):
        result = scenario.run(command)
        out += [*comments, command]
        if result:
            out += ["----", *result]
        out.append("")
    return "\n".join(out[:-1]) + "\n"


class Scenario:
    """An engine, its store, and the people around it."""

    def __init__(self) -> None:
        self.steady = 0.0
        self.settings = Settings(worker_timeout_seconds=10.0, job_offer_timeout_seconds=3.0)
        self.store = MemoryStore(queue_id="q", wall=lambda: WALL + self.steady)
        self.sessions: dict[str, list[int]] = {}
        self.names: dict[int, str] = {}
        self.beats = 0
        self.requests = 0
        self.lines: list[str] = []
        self.engine = self._start()

    @property
    def now(self) -> Now:
        return Now(wall=WALL + self.steady, steady=self.steady)

    def _start(self) -> Engine:
        engine = Engine(self.settings, queue_id="q", version="1")
        engine.replay(self.store.aggregates(), self.store.replay())
        engine.opened(self.now)
        return engine

    def run(self, command: str) -> list[str]:
        """What came of one command."""
        self.lines = []
        who, *words = command.split()
        if hasattr(self, f"do_{who}"):
            getattr(self, f"do_{who}")(words)
        else:
            verb, *rest = words
            kind = "client" if who.startswith("client") else "worker"
            getattr(self, f"{kind}_{verb}")(who, rest)
        self._settle()
        invariants.check(self.engine.state)
        return self.lines

    # --- turns -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self.engine.queue.unsettled:
            self._take(self.engine.settle(self.now))

    def _take(self, turn: Turn) -> None:
        if turn.facts:
            batch = Batch(
                facts=tuple(turn.facts),
                finished=tuple(turn.finished),
                aggregates=self.engine.aggregates(),
                wall=self.now.wall,
            )
            self.store.commit(batch)
        self.lines += [f"fact {told(fact)}" for fact in turn.facts if not isinstance(fact, f.RequestAnswered)]
        self.lines += [f"{self.names[session]} hears {told(message)}" for session, message in turn.sends]
        self.lines += [f"{self.names[session]} is closed" for session in turn.closes]
        self.lines += [f"log {line}" for line in turn.remarks]

    def _session(self, who: str) -> int:
        name, _, number = who.partition(".")
        return self.sessions[name][int(number) - 1 if number else -1]

    def _open(self, who: str) -> int:
        session = len(self.names) + 1
        mine = self.sessions.setdefault(who, [])
        mine.append(session)
        self.names[session] = who if len(mine) == 1 else f"{who}.{len(mine)}"
        return session

    def _say(self, session: int, message: m.Message) -> None:
        past = {row.id: row for row in self.store.finished()}
        self._take(self.engine.handle(session, message, self.now, past))

    # --- the server and time -----------------------------------------------------------------------------------------

    def _settings(self, words: list[str]) -> Settings:
        values = dict(word.split("=") for word in words)
        return Settings(
            worker_timeout_seconds=float(values.get("timeout", 10)),
            job_offer_timeout_seconds=float(values.get("offer_timeout", 3)),
            global_max_parallel_jobs=int(values.get("cap", 100)),
            counters={"lic": int(values["lic"])} if "lic" in values else {},
        )

    def do_settings(self, words: list[str]) -> None:
        """Start the server anew, on what is stored, with these settings."""
        self.settings = self._settings(words)
        self.do_restart([])

    def do_reload(self, words: list[str]) -> None:
        self.settings = self._settings(words)
        self._take(self.engine.reload(self.settings, self.now))

    def do_restart(self, _: list[str]) -> None:
        self.engine = self._start()

    def do_stall(self, words: list[str]) -> None:
        self.steady += float(words[0])
        self.engine.stalled(self.now)
        self._take(self.engine.tick(self.now))

    def do_time(self, words: list[str]) -> None:
        """Seconds pass. Deadlines are looked at twice, as the server does after it has read all mail."""
        self.steady += float(words[0])
        self._take(self.engine.tick(self.now))
        self.steady += 0.0625
        self._take(self.engine.tick(self.now))

    def do_why(self, words: list[str]) -> None:
        """Why a live job waits."""
        job = self.engine.state.jobs[int(words[0])]
        (detail,) = queries.live_details(self.engine, [job], self.now)
        self.lines += detail.waits or reasons(Sight(self.engine.queue, self.now), job)

    def do_jobs(self, _: list[str]) -> None:
        """Live and finished jobs, and the attempts of their past."""
        rows = {job.id: (job.state.value, job.past) for job in self.engine.state.jobs.values()}
        rows |= {row.id: (outcome_text(row.outcome), row.attempts) for row in self.store.finished()}
        for job, (state, past) in sorted(rows.items()):
            history = "".join(f"; attempt {one.number} on {one.worker} {one.end}" for one in past)
            self.lines.append(f"job {job} {state}{history}")

    # --- workers -----------------------------------------------------------------------------------------------------

    def worker_joins(self, who: str, words: list[str]) -> None:
        """``w1 joins cores=8 slots=4 ram=8000 gpu=2 boot=b machine=m 0=running 1=exit:0 2=unknown``.

        ``old``: of a release that takes no offers ahead.
        """
        values = dict(word.split("=") for word in words if "=" in word)
        reports = tuple(self._report(int(key), value) for key, value in values.items() if key.isdecimal())
        named = (("gpu", int(values["gpu"])),) if "gpu" in values else ()
        hello = m.WorkerHello(
            identity=values.get("identity", who),
            name=who,
            machine_id=values.get("machine", f"machine of {who}"),
            boot_id=values.get("boot", "b"),
            totals=MachineTotals(
                slots=int(values.get("slots", 10)),
                cores=int(values.get("cores", 16)),
                ram_mb=int(values.get("ram", 64000)),
                named=named,
            ),
            attempts=reports,
            lines="old" not in words,
        )
        self._say(self._open(who), hello)

    def _report(self, offer: int, word: str) -> m.AttemptReport:
        job, _, word = word.rpartition("/")
        state, _, _ = word.partition(":")
        is_end = state in {"exit", "signal", "canceled", "not_started"}
        return m.AttemptReport(
            offer=offer,
            job=int(job or 0),
            queue_id="q",
            state="ended" if is_end else state,  # type: ignore[arg-type]
            started_wall=None if state in {"queued", "unknown", "gone"} else self.now.wall,
            end=self._end(word) if is_end else None,
        )

    def _end(self, word: str, run_seconds: float = 5.0) -> EndRecord:
        kind, _, value = word.partition(":")
        makers: dict[str, Callable[[], Outcome]] = {
            "exit": lambda: Exited(int(value)),
            "signal": lambda: Signaled(int(value)),
            "canceled": Canceled,
            "not_started": lambda: NotStarted(value or "no such file", "not_found"),
        }
        started = None if kind == "not_started" else self.now.wall - run_seconds
        return EndRecord(
            outcome=makers[kind](), started_wall=started, ended_wall=self.now.wall, run_seconds=run_seconds
        )

    def worker_starts(self, who: str, words: list[str]) -> None:
        self._say(self._session(who), m.AttemptStarted(offer=int(words[0]), started_wall=self.now.wall))

    def worker_queues(self, who: str, words: list[str]) -> None:
        self._say(self._session(who), m.AttemptQueued(offer=int(words[0])))

    def worker_ends(self, who: str, words: list[str]) -> None:
        """``w1 ends 0 exit:0 [0.1]``; the last word: seconds it ran."""
        seconds = float(words[2]) if len(words) > 2 else 5.0
        self._say(self._session(who), m.AttemptEnded(offer=int(words[0]), end=self._end(words[1], seconds)))

    def worker_loses(self, who: str, words: list[str]) -> None:
        self._say(self._session(who), m.AttemptGone(offer=int(words[0]), reason="its processes vanished"))

    def worker_defers(self, who: str, words: list[str]) -> None:
        load = MachineLoad(busy_cores=int(words[1]) if len(words) > 1 else 0)
        self._say(self._session(who), m.OfferDeferred(offer=int(words[0]), reason="busy", load=load))

    def worker_rejects(self, who: str, words: list[str]) -> None:
        self._say(self._session(who), m.OfferRejected(offer=int(words[0]), reason="no such directory"))

    def worker_withdraws(self, who: str, words: list[str]) -> None:
        self._say(self._session(who), m.OfferWithdrawn(offer=int(words[0])))

    def worker_beats(self, who: str, _: list[str]) -> None:
        self.beats += 1
        self._say(self._session(who), m.Heartbeat(number=self.beats))

    def worker_reports(self, who: str, words: list[str]) -> None:
        values = dict(word.split("=") for word in words)
        busy = int(values.get("busy", 0))
        self._say(self._session(who), m.Report(load=MachineLoad(busy_cores=busy, others_busy_cores=busy)))

    def worker_stops(self, who: str, _: list[str]) -> None:
        self._say(self._session(who), m.Goodbye())

    def worker_hangs(self, who: str, _: list[str]) -> None:
        """``w1 hangs up``."""
        self._take(self.engine.session_closed(self._session(who), self.now))

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client(self, who: str) -> int:
        return self._session(who) if who in self.sessions else self._open(who)

    def _request_id(self, values: dict[str, str]) -> str:
        self.requests += 1
        return values.get("request", f"r{self.requests}")

    def client_submits(self, who: str, words: list[str]) -> None:
        """``client submits count=2 cores=4 ram=100 slots=1 lic=1 gpu=1 cwd=/d priority=20 on_lost=wait wish held``."""
        values = dict(word.split("=") for word in words if "=" in word)
        request = Request(
            slots=int(values.get("slots", 1)),
            cores=int(values.get("cores", 1)),
            ram_mb=int(values.get("ram", 0)),
            cores_are_wish="wish" in words,
            named=(("gpu", int(values["gpu"])),) if "gpu" in values else (),
            counters=(("lic", int(values["lic"])),) if "lic" in values else (),
            priority=int(values.get("priority", 10)),
        )
        entry = JobRange(
            payload=Payload(argv=("true",)),
            place=Place(cwd=values.get("cwd", "/d")),
            request=request,
            terms=Terms(on_lost=values.get("on_lost", "rerun"), max_attempts=int(values.get("attempts", 3))),  # type: ignore[arg-type]
            held="held" in words,
            count=int(values.get("count", 1)),
        )
        part, last = int(values.get("part", 0)), "more" not in words
        request_id = self._request_id(values)
        submit = m.Submit(seq=1, request_id=request_id, ranges=(entry,), part=part, last=last)
        self._say(self._client(who), submit)

    @staticmethod
    def _ids(word: str) -> tuple[tuple[int, int], ...]:
        pairs = (one.partition("-") for one in word.split(","))
        return tuple((int(first), int(last or first)) for first, _, last in pairs)

    def client_removes(self, who: str, words: list[str]) -> None:
        values = dict(word.split("=") for word in words if "=" in word)
        remove = m.RemoveJobs(
            seq=2,
            request_id=self._request_id(values),
            ids=self._ids(words[0]),
            kill="kill" in words,
            force="force" in words,
        )
        self._say(self._client(who), remove)

    def client_holds(self, who: str, words: list[str]) -> None:
        hold = m.HoldJobs(seq=3, request_id=self._request_id({}), ids=self._ids(words[0]))
        self._say(self._client(who), hold)

    def client_releases(self, who: str, words: list[str]) -> None:
        release = m.ReleaseJobs(seq=4, request_id=self._request_id({}), ids=self._ids(words[0]))
        self._say(self._client(who), release)

    def client_watches(self, who: str, words: list[str]) -> None:
        self._say(self._client(who), m.WatchJobs(seq=5, ids=self._ids(words[0])))

    def client_sets(self, who: str, words: list[str]) -> None:
        """``client sets w1 offline``."""
        state = m.SetNode(seq=6, request_id=self._request_id({}), name=words[0], state=words[1], force="force" in words)  # type: ignore[arg-type]
        self._say(self._client(who), state)

    def client_cleans(self, who: str, _: list[str]) -> None:
        """All finished jobs, as the server does it in portions."""
        self._client(who)
        self._take(self.engine.clean(self.store.finished(), "operator", self.now))

    def client_hangs(self, who: str, _: list[str]) -> None:
        """``client hangs up``."""
        self._take(self.engine.session_closed(self._session(who), self.now))
        del self.sessions[who]


# --- in words --------------------------------------------------------------------------------------------------------

LEFT_OUT = {"wall", "seq", "principal", "payload", "place", "request", "terms", "started_wall", "version", "protocol"}
LEFT_OUT |= {"queue_id", "cleanup_after_seconds", "ranges", "first_id", "end", "by", "request_id", "return_code"}
LEFT_OUT |= {"exit_code"}


def told(thing: f.Fact | m.Message) -> str:
    """A fact or message in one line: its type and what matters of it."""
    words = [type(thing).__name__]
    for name in thing.__struct_fields__:
        value = getattr(thing, name)
        if name not in LEFT_OUT and value not in ((), "", None):
            words.append(_field(name, value))
    if isinstance(thing, f.JobsSubmitted):
        count = sum(len(entry.argvs) or entry.count for entry in thing.ranges)
        words.append(f"ids={thing.first_id}-{thing.first_id + count - 1}")
    return " ".join(words)


def _field(name: str, value: object) -> str:
    if isinstance(value, Allocation):
        (share,) = value.shares
        text = f"takes slots={share.slots} cores={share.cores} ram={share.ram_mb}"
        text += "".join(f" {one}={','.join(map(str, units))}" for one, units in share.named)
        return text + "".join(f" {one}={amount}" for one, amount in value.counters if not one.startswith("@"))
    if isinstance(value, Outcome):
        return f"({outcome_text(value)})"
    if isinstance(value, f.NodeRecord):
        state = " offline" if value.offline else ""
        return f"{value.id} {value.name}{state} boot={value.boot_id or '-'} cores={value.totals.cores}"
    if name in {"results", "remarks"}:
        assert isinstance(value, tuple)
        return "".join(f"\n      {_result(one)}" for one in value)
    if name in {"ids", "missing"}:
        assert isinstance(value, tuple)
        return f"{name}=" + ",".join(f"{first}-{last}" for first, last in value)
    if name == "offers":
        assert isinstance(value, tuple)
        return "offers=" + ",".join(map(str, value))
    if isinstance(value, float):
        return f"{name}={value:g}"
    return f"{name}={value}" if not isinstance(value, str) or " " not in value else f"{name}=({value})"


def _result(one: object) -> str:
    return f"{'ok' if one.ok else 'no'}: {one.text}" if isinstance(one, m.Result) else str(one)


def main(arguments: list[str]) -> int:
    """Bless the named files."""
    if arguments[:1] != ["--bless"]:
        print(__doc__)
        return 2
    for name in arguments[1:]:
        path = Path(name)
        path.write_text(written(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
