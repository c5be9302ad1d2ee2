"""The running server's part of a backup: it copies its own state, since nobody else can open it.

Rules
- Only for a command on this host, at the local socket: the file is written with the rights of this account.
- One portion for each round of the driver, so that commits, answers and leases go on; one backup at a time.
- A caller that leaves, or a stop of the server, ends the copy and leaves nothing behind.
- The target may lie on a file server that hangs. Whatever touches it runs in a thread that is not waited for without
  end, and of these there are few: then there are no more backups, and everything else goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

from kueue import log
from kueue.errors import KueueError, UserError
from kueue.model import from_os_text, to_os_text
from kueue.protocol import messages as m
from kueue.server.threads import in_thread
from kueue.storage import backup
from kueue.storage.backup import Copy
from kueue.storage.store import Store

if TYPE_CHECKING:
    from kueue.server.session import Session

TELL_SECONDS = 0.5
"""Between two words on how far the copy is."""
ANSWER_SECONDS = 60.0
"""A file server that is restarted answers again by then."""
SLOWEST_BYTES_PER_SECOND = 2 * 2**20
"""A copy may take that much longer; a home over a bad wireless link."""
LEAVE_SECONDS = 2.0
"""For removing a draft where the copy was to go. One that stays is swept up by the next backup there."""

_log = log.logger("server")
T = TypeVar("T")


async def answer(session: Session, question: m.Backup) -> None:
    """Make the copy and tell of it. Raises `KueueError`."""
    if not session.is_local:
        raise UserError("A backup can be asked for only on the server's own machine.")
    target = Path(from_os_text(question.path))
    if not target.is_absolute() or "\0" in str(target):
        raise UserError(f"The backup needs an absolute path, not {str(target)!r}.")
    if session.driver.backing_up.locked():
        session.say(m.BackedUp(seq=question.seq, end=False, note="Another backup is being made; waiting for it."))
    async with session.driver.backing_up:
        if not session.driver.backup_threads.available_tokens:
            raise UserError(
                "Earlier backups still wait for the file server they were to go to: no more until it answers.",
                hint="A restart of the server forgets them; the jobs go on.",
            )
        await _make(session, question, target)


async def _make(session: Session, question: m.Backup, target: Path) -> None:
    driver = session.driver
    lock, begun, is_gone = threading.Lock(), list[Copy](), False

    def begin(store: Store) -> Copy:
        with lock:
            if is_gone:
                raise UserError("Nobody waits for this backup any more.")
            begun.append(store.begin_copy(plan))
            return begun[0]

    def give_up() -> None:
        nonlocal is_gone
        # A read that was asked for is carried out also when its asker has left meanwhile.
        with lock:
            is_gone = True
        for one in begun:
            one.abort()

    def leave() -> None:
        for one in begun:
            one.leave()

    try:
        state = await driver.read(lambda store: store.path)
        plan = await _touching(
            session, target, ANSWER_SECONDS, partial(backup.plan, target, state, force=question.force)
        )
        copy = await driver.read(begin)
        told = trio.current_time()
        while not await driver.read(lambda _: copy.step()):
            if trio.current_time() - told >= TELL_SECONDS:
                told = trio.current_time()
                _tell(session, question, copy)
        _tell(session, question, copy)
        # No turn of the store is needed for the copy itself, and it is looked at page by page.
        summary = await _touching(
            session, target, ANSWER_SECONDS + copy.progress.total / SLOWEST_BYTES_PER_SECOND, copy.finish
        )
    except KueueError as error:
        _log.warning("the backup %s failed: %s", target, error)
        raise
    finally:
        with trio.CancelScope(shield=True):
            try:
                await in_thread(give_up, purpose="backup")
            except UserError:
                give_up()  # here, then: it waits for no file server
            with trio.move_on_after(LEAVE_SECONDS), suppress(UserError):
                await in_thread(leave, purpose="backup", limiter=driver.backup_threads)
    _log.info("%s", log.keys(backup=target, bytes=summary.size, live=summary.live, next_job=summary.next_job))
    session.say(
        m.BackedUp(
            seq=question.seq,
            path=to_os_text(str(target)),
            done_bytes=summary.size,
            total_bytes=summary.size,
            live=summary.live,
            finished=summary.finished,
            next_job=summary.next_job,
        )
    )


async def _touching(session: Session, target: Path, seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, which touches the target. Raises `UserError` when it takes longer; then it may go on."""
    with trio.move_on_after(seconds):
        return await in_thread(call, purpose="backup", limiter=session.driver.backup_threads)
    raise UserError(
        f"The backup {target} was given up: what holds {target.parent} has not taken it in {seconds:.0f} s.",
        hint="Is its file server away, or very slow? The kueue server is unharmed. Name a directory elsewhere.",
    )


def _tell(session: Session, question: m.Backup, copy: Copy) -> None:
    done, total = copy.progress
    session.say(m.BackedUp(seq=question.seq, done_bytes=done, total_bytes=total, end=False))
