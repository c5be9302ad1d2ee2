"""New jobs: what is refused at the door, and what is said about jobs that can hardly run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from kueue.core import facts as f
from kueue.core.placement import too_small
from kueue.core.queue import OPERATOR, Queue
from kueue.model import JobRange, Now, OsText, Request, from_os_text
from kueue.protocol import messages as m

MAX_JOBS_AT_ONCE = 5_000_000
"""Far above what a laboratory asks for, far below what fills the server's memory by one slip of a finger."""


def submit(queue: Queue, session: int, message: m.Submit, ranges: Sequence[JobRange], now: Now) -> None:
    """Make the jobs of a whole submission, all or none, and answer."""
    refusal = refuse(queue, ranges)
    requests = list(dict.fromkeys(entry.request for entry in ranges))
    remarks = tuple(remark for request in requests for remark in remarks_on(queue, request))
    if refusal is None and remarks and message.refuse_impossible:
        refusal = m.Failed(seq=message.seq, error=f"Job rejected by server: {remarks[0]}")
    if refusal is not None:
        queue.say(
            session, m.Failed(seq=message.seq, error=refusal.error, hint=refusal.hint, exit_code=refusal.exit_code)
        )
        return
    first = queue.state.sums.next_job
    queue.decide(f.JobsSubmitted(first_id=first, ranges=tuple(ranges), principal=OPERATOR, wall=now.wall))
    last = queue.state.sums.next_job - 1
    ids = ((first, last),)
    queue.answer(session, message.request_id, m.Submitted(seq=message.seq, ids=ids, remarks=remarks), now)


def refuse(queue: Queue, ranges: Sequence[JobRange]) -> m.Failed | None:
    """The first reason, in the documented order, why the submission as a whole is not taken."""
    jobs = sum(max(0, entry.size) for entry in ranges)
    if jobs < 1 or any(entry.size < 1 for entry in ranges):
        return _failed("an empty submission makes no job")
    if jobs > MAX_JOBS_AT_ONCE:
        return _failed(f"{jobs} jobs in one submission; at most {MAX_JOBS_AT_ONCE} are taken at once")
    for entry in ranges:
        sentence = _malformed(entry) or _impossible(queue, entry.request)
        if sentence:
            return _failed(sentence)
    return None


def _failed(sentence: str) -> m.Failed:
    return m.Failed(seq=0, error=f"Job rejected by server: {sentence}")


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


def remarks_on(queue: Queue, request: Request) -> tuple[str, ...]:
    """What to tell the submitter now: that no worker known could ever run it. Empty if one could."""
    nodes = [node for node in queue.state.nodes.values() if queue.worker(node.record.id).session is not None]
    if not nodes:
        return ("no worker is connected; the job waits for one",)
    obstacles = [too_small(request, node.record.totals) for node in nodes]
    if any(obstacle is None for obstacle in obstacles):
        return ()
    best = max((o for o in obstacles if o is not None), key=lambda o: o.there)
    asked = f"it asks for {best.asked} {best.what}, the largest worker has {best.there}"
    return (f"no connected worker can ever run this: {asked}; the job waits for a larger one",)
