"""New jobs: what is refused at the door, and what is said about jobs that can hardly run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

from msgspec.structs import replace

from kueue.core import facts as f
from kueue.core.jobs import Newcomers
from kueue.core.placement import too_small
from kueue.core.queue import OPERATOR, Queue
from kueue.model import JobRange, Now, OsText, Request, from_os_text
from kueue.protocol import messages as m

MAX_JOBS_AT_ONCE = 2_000_000
"""Far above what a laboratory asks for; what the last step of so many takes (0.3 s) disturbs no lease."""
PORTION = 20_000
"""Jobs that are checked or made in one turn: some hundredths of a second."""


class Arrival:
    """A submission that has come whole and is being worked on, a portion a turn: checked first, then made.

    Nothing is decided before its last portion, so it is stored and answered as one.
    """

    def __init__(self, session: int, message: m.Submit, ranges: Sequence[JobRange], now: Now) -> None:
        self.session = session
        self.message = message
        self.ranges = tuple(ranges)
        self.wall = now.wall
        self._unchecked = iter(self.ranges)
        self._newcomers: Newcomers | None = None
        self._hint = ""

    def step(self, queue: Queue, now: Now) -> bool:
        """Do the next portion. Returns whether it was the last: the question is answered then."""
        if self._newcomers is None:
            refusal, is_checked = self._check(queue)
            if refusal:
                self._refuse(queue, refusal)
                return True
            if is_checked:
                self._newcomers = queue.state.making(self.ranges, OPERATOR, self.wall)
            if not is_checked or jobs_of(self.ranges) > PORTION:
                return False
        assert self._newcomers is not None
        if not self._newcomers.grow(PORTION):
            return False
        self._decide(queue, self._newcomers, now)
        return True

    def _check(self, queue: Queue) -> tuple[str, bool]:
        """(why it is not taken, whether all was looked at)."""
        seen = 0
        for entry in self._unchecked:
            malformed = _malformed(entry)
            sentence = malformed or _impossible(queue, entry.request)
            if sentence:
                self._hint = "" if malformed else _remedy(queue, entry.request)
                return sentence, False
            seen += max(1, len(entry.argvs))
            if seen > PORTION:
                return "", False
        return "", True

    def _decide(self, queue: Queue, newcomers: Newcomers, now: Now) -> None:
        message = self.message
        requests = list(dict.fromkeys(entry.request for entry in self.ranges))
        remarks = tuple(remark for request in requests for remark in remarks_on(queue, request))
        if remarks and message.refuse_impossible:
            self._refuse(queue, next(found[0] for found in map(partial(_hopeless, queue), requests) if found))
            return
        first = queue.state.sums.next_job
        queue.state.newcomers = newcomers
        queue.decide(f.JobsSubmitted(first_id=first, ranges=self.ranges, principal=OPERATOR, wall=self.wall))
        ids = ((first, queue.state.sums.next_job - 1),)
        queue.answer(self.session, message.request_id, m.Submitted(seq=message.seq, ids=ids, remarks=remarks), now)

    def _refuse(self, queue: Queue, sentence: str) -> None:
        queue.say(
            self.session, m.Failed(seq=self.message.seq, error=f"Job rejected by server: {sentence}", hint=self._hint)
        )


def submit(queue: Queue, session: int, message: m.Submit, ranges: Sequence[JobRange], jobs: int, now: Now) -> None:
    """Make the jobs of a whole submission, all or none, and answer; a long one in the turns that follow.

    `jobs`: how many `ranges` shall make; if that is more than is taken they may be left out.
    """
    if jobs > MAX_JOBS_AT_ONCE:
        sentence = f"{jobs} jobs in one submission; at most {MAX_JOBS_AT_ONCE} are taken at once"
        queue.say(session, m.Failed(seq=message.seq, error=f"Job rejected by server: {sentence}"))
        return
    if jobs < 1 or any(entry.size < 1 for entry in ranges):
        error = "Job rejected by server: an empty submission makes no job"
        queue.say(session, m.Failed(seq=message.seq, error=error))
        return
    # A repetition takes the place of the question that it repeats.
    queue.arrivals[:] = [one for one in queue.arrivals if one.message.request_id != message.request_id]
    arrival = Arrival(session, message, ranges, now)
    if not arrival.step(queue, now):
        queue.arrivals.append(arrival)


def go_on(queue: Queue, now: Now) -> None:
    """A portion of the submission that has waited longest."""
    if queue.arrivals and queue.arrivals[0].step(queue, now):
        del queue.arrivals[0]


def portions(ranges: Iterable[JobRange]) -> Iterator[JobRange]:
    """The same jobs in ranges that a turn can check."""
    for entry in ranges:
        if len(entry.argvs) <= PORTION:
            yield entry
            continue
        for at in range(0, len(entry.argvs), PORTION):
            yield replace(entry, argvs=entry.argvs[at : at + PORTION])


def jobs_of(ranges: Iterable[JobRange]) -> int:
    return sum(max(0, entry.size) for entry in ranges)


def _malformed(entry: JobRange) -> str:
    request = entry.request
    argvs: Sequence[Sequence[OsText]] = entry.argvs or (entry.payload.argv,)
    if any(not argv for argv in argvs):
        return "the command is empty"
    amounts = (
        request.slots,
        request.cores,
        request.ram_mb,
        *(n for _, n in request.named),
        *(n for _, n in request.counters),
    )
    if min(amounts) < 0 or max(amounts) >= 1 << 53:
        return "amounts must be whole numbers of at least 0"
    for names in ([name for name, _ in request.named], [name for name, _ in request.counters]):
        if any(one >= other for one, other in pairwise(names)):
            # A name twice would be counted once and held twice.
            return "resources must be sorted by name, each named once"
    if any(name.startswith("@") for name, _ in request.counters):
        return "resource names cannot begin with @"
    if abs(request.priority) >= 1 << 53:
        return "the priority is out of bounds"
    if not 1 <= entry.terms.max_attempts < 1 << 53:
        return "max attempts must be at least 1"
    if entry.terms.timeout_seconds is not None and not 0 < entry.terms.timeout_seconds < 1 << 53:
        return "a time limit must be above 0 seconds"
    return _unusable(entry, argvs)


def _unusable(entry: JobRange, argvs: Iterable[Sequence[OsText]]) -> str:
    """What no operating system takes: a job that has it could be started nowhere."""
    place, payload = entry.place, entry.payload
    if not from_os_text(place.cwd).startswith("/"):
        return "the directory must be an absolute path"
    if not 0 <= place.umask <= 0o777:
        return "the umask must be between 0 and 0777"
    names = [from_os_text(name) for name, _ in place.env]
    if any(not name or "=" in name for name in names):
        return "the name of a variable must not be empty or contain '='"
    if len(set(names)) != len(names):
        return "a variable is set twice"
    texts = chain(
        (place.cwd, place.pwd, payload.name or "", payload.stdout or "", payload.stderr or ""),
        chain.from_iterable(place.env),
        chain.from_iterable(argvs),
    )
    if any("\0" in (text if isinstance(text, str) else from_os_text(text)) for text in texts):
        return "a NUL character cannot be handed to a program"
    return ""


def _impossible(queue: Queue, request: Request) -> str:
    settings = queue.settings
    if request.slots > settings.global_max_parallel_jobs:
        return (
            "Job requires more slots than the server will allow at once!"
            " See global_max_parallel_jobs setting in config."
        )
    if request.counters and not settings.counters:
        asked = ", ".join(f"{name}={amount}" for name, amount in request.counters)
        return f"No global resources configured on the server! Requested resources: {{{asked}}}"
    for name, amount in sorted(request.counters):
        if name not in settings.counters:
            return f"Required resource not configured on server: {name}"
        if amount > settings.counters[name]:
            return f"Required resource exceeds limits configured on the server: max. {name}={settings.counters[name]}"
    return ""


def _remedy(queue: Queue, request: Request) -> str:
    """What to do about a counter that the server does not have; empty if that is not the matter."""
    missing = [name for name, _ in request.counters if name not in queue.settings.counters]
    if not missing:
        return ""
    there = ", ".join(sorted(queue.settings.counters))
    return (
        f"Licences stand in [global_resources] of the server's settings, for example {missing[0]} = 3"
        f" (read again by `kill -HUP`). {f'Configured: {there}.' if there else 'None is configured.'}"
    )


def remarks_on(queue: Queue, request: Request) -> tuple[str, ...]:
    """What to tell the submitter now: that no worker known could ever run it. Empty if one could."""
    found = _hopeless(queue, request)
    return () if found is None else (f"{found[0]}; the job waits for {found[1]}",)


def _hopeless(queue: Queue, request: Request) -> tuple[str, str] | None:
    """(why no worker known could ever run it, what it would wait for); None if one could."""
    nodes = [node for node in queue.state.nodes.values() if queue.worker(node.record.id).session is not None]
    if not nodes:
        return "no worker is connected", "one"
    obstacles = [too_small(request, node.record.totals) for node in nodes]
    if any(obstacle is None for obstacle in obstacles):
        return None
    best = max((o for o in obstacles if o is not None), key=lambda o: o.there)
    asked = f"it asks for {best.asked} {best.what}, the largest worker has {best.there}{best.remedy()}"
    return f"no connected worker can ever run this: {asked}", "a larger one" if best.there else "one that has it"
