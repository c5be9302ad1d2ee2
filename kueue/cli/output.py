"""``follow`` and ``log``: the output of jobs, while they run and afterwards."""

from __future__ import annotations

from kueue.cli.job_text import decoded, readable
from kueue.cli.session import Session
from kueue.cli.waiting import JOB_NOT_FOUND, bad_end, hint_at_not_started, is_one, tell_how_to_go_on
from kueue.errors import EXIT_OWN_FAILURE, EXIT_REFUSED, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LINE_BYTES = 1024 * 1024
"""A line of more is broken on a terminal."""
_STREAMS = ("stdout", "stderr")


def follow(session: Session) -> int:
    """Both streams of each job, each to ours, from the beginning, one job after the other. Returns the worst code."""
    worst = job = 0
    ids = session.arguments.ids
    try:
        for job in session.each_job(ids):
            if not is_one(ids):
                session.screen.remark(f"job {job}:")
            try:
                worst = max(worst, _follow(session, job))
            except UserError as error:
                if is_one(ids):
                    raise
                session.report(error)
                worst = max(worst, error.exit_code)
    except KeyboardInterrupt:
        tell_how_to_go_on(session, ids, [(0, job - 1)])
        raise
    return worst


def _follow(session: Session, job: int) -> int:
    """Returns the job's exit code."""
    seqs = {stream: session.client.next_seq() for stream in _STREAMS}
    watch_seq = session.client.next_seq()
    offsets, attempts = dict.fromkeys(_STREAMS, 0), dict.fromkeys(_STREAMS, 0)
    told: dict[str, str] = {}
    is_open = dict.fromkeys(_STREAMS, True)
    code: int | None = None
    outcome: dict[str, Any] = {}

    def questions() -> list[dict[str, Any]]:
        # Watching first: a job that does not exist is told before anything is read.
        asked: list[dict[str, Any]] = [{"type": "WatchJobs", "seq": watch_seq, "ids": [(job, job)]}]
        asked += [
            {
                "type": "ReadOutput",
                "seq": seqs[stream],
                "id": job,
                "stream": stream,
                "offset": offsets[stream],
                "attempt": attempts[stream],
                "follow": True,
            }
            for stream in _STREAMS
            if is_open[stream]
        ]
        return asked

    for message in session.client.converse(questions):
        if message["type"] == "Watching" and message.get("missing"):
            session.screen.remark(JOB_NOT_FOUND)
            return EXIT_REFUSED
        if message["type"] == "JobEnded" and message["id"] == job:
            outcome = message.get("outcome") or {}
            code = message.get("exit_code", 0) if outcome else EXIT_OWN_FAILURE
        elif message["type"] == "Output":
            stream = next((one for one, seq in seqs.items() if seq == message.get("seq")), None)
            if stream is None:
                continue
            _print_piece(session, message, stream, told)
            attempts[stream] = message.get("attempt") or attempts[stream]
            offsets[stream] = message["offset"] + len(decoded(message.get("data", "")))
            if message.get("end"):
                is_open[stream] = False
        if code is not None and not any(is_open.values()):
            _tell_end(session, job, outcome)
            return code
    raise AssertionError("a conversation ends by return or exception")


def log(session: Session) -> int:
    """All there is of one stream of each job."""
    worst = 0
    ids = session.arguments.ids
    is_alone = is_one(ids)
    for job in session.each_job(ids):
        try:
            if not is_alone:
                session.screen.remark(f"job {job}:")
            _print_log(session, job)
        except UserError as error:  # noqa: PERF203 - one job that cannot be read must not hide the others
            if is_alone:
                raise
            session.report(error)
            worst = max(worst, error.exit_code)
    return worst


def _print_log(session: Session, job: int) -> None:
    arguments, screen = session.arguments, session.screen
    stream = "stderr" if arguments.stderr else "stdout"
    offset, told = 0, set[str]()
    is_text = screen.is_terminal and not arguments.raw
    rest, is_whole = b"", True
    while True:
        answer = session.client.ask("ReadOutput", id=job, stream=stream, offset=offset)
        source, note = answer.get("source", "worker"), answer.get("note", "")
        data = decoded(answer.get("data", ""))
        if source == "stored" and not data and not told:
            # A worker keeps no file of a stream to which nothing was written.
            screen.remark(f"Job {job}: its {stream} is empty.")
            break
        sentence = {
            "worker": "",
            "stored": f"Job {job}: this is the excerpt that the server keeps; the worker with all of it is not there.",
            "none": "" if note else f"Job {job}: there is no {stream}.",
        }[source]
        for remark in (sentence, note):
            if remark and remark not in told:
                told.add(remark)
                screen.remark(remark)
        if not data:
            break
        if not told and source == "worker":
            told.add("from the worker")
            screen.remark(f"Job {job}: {stream} from its worker.")
        offset = answer["offset"] + len(data)
        if not is_text:
            screen.write_bytes(data)
            continue
        # Whole lines only, so that no character is cut in two.
        lines, feed, rest = (rest + data).rpartition(b"\n")
        # A line that is written over and over, or does not end, must not be kept as long as it gets.
        left_out = rest.rstrip(b"\r").rfind(b"\r") + 1
        rest = rest[left_out:]
        is_whole &= left_out == 0
        if len(rest) > _LINE_BYTES:
            lines, feed, rest, is_whole = lines + feed + rest, b"\n", b"", False
        if feed:
            is_whole &= _print_lines(session, lines + feed)
    if rest:
        is_whole &= _print_lines(session, rest)
    if not is_whole:
        screen.remark(f"Job {job}: shown as far as it can be read; --raw shows every byte.")


def _print_lines(session: Session, data: bytes) -> bool:
    """Is all of it shown as the job wrote it?"""
    text = readable(data)
    session.screen.print(text)
    return text.encode() == data.replace(b"\r\n", b"\n").removesuffix(b"\n")


def _tell_end(session: Session, job: int, outcome: dict[str, Any]) -> None:
    """Says on stderr how the job ended if it did not end by itself: its output would look whole."""
    if outcome.get("type", "exited") == "exited":
        return
    session.screen.remark(f"Job {job} {bad_end(outcome)}.")
    hint = hint_at_not_started(outcome)
    if hint:
        session.screen.remark(f"Hint: {hint}")


def _print_piece(session: Session, message: dict[str, Any], stream: str, told: dict[str, str]) -> None:
    """`told`: the last remark of each stream that was about the job, and not about that stream alone."""
    note = message.get("note", "")
    data = decoded(message.get("data", ""))
    if note and message.get("source") == "none" and not data:
        # Both streams say it, one after the other.
        if note not in told.values() or told.get(stream) == note:
            session.screen.remark(note)
        told[stream] = note
    elif note:
        session.screen.remark(f"{stream}: {note}")
    if data:
        told.pop(stream, None)
        write = session.screen.write_bytes if stream == "stdout" else session.screen.write_error_bytes
        write(data)
