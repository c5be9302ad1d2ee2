"""The spawner: makes the processes of the attempts, reaps them, and takes over when the keeper dies.

It is a child of the keeper, tied to it by a socket. It does not wait for a program or a file that may not answer: a
start happens in a child of its own (`program`), whose success it learns from a pipe that exec closes, unless the same
has just been seen to work without delay (`launch`).

    keeper → spawner   {"do": "start", offer, tag, cgroup, not_after}, followed by the order's own line
                       {"do": "mirror", rows, …}
    spawner → keeper   {"is": "made" | "late" | "executed" | "exited", offer, …}
                       {"is": "stood_in", since}, see `stand_in`
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import time
from typing import Any, NoReturn

from kueue.runner import cgroup, program
from kueue.runner.children import boottime, reap
from kueue.runner.kernel import Alarm, OomScore, be_subreaper, name_process
from kueue.runner.launch import Key, Launcher, key_of
from kueue.runner.log import Log
from kueue.runner.mains import Mains
from kueue.runner.revocable import Main, Revocable
from kueue.runner.rundir import SPAWNER
from kueue.runner.shared import Shared
from kueue.runner.spool import Spool
from kueue.runner.stand_in import StandIn
from kueue.runner.tree import INFINITY, RLIMIT_LOCKS, status
from kueue.runner.wire import Lines, line_of

PIPE_BYTES = 65536  # all that a pipe holds, see pipe(7)

Message = dict[str, Any]


class Spawner:
    """One spawner process. `run` returns when the keeper is gone and everything it had sent is done."""

    def __init__(self, keeper: Lines, spool: Spool, log: Log, folder: str, shared: Shared) -> None:
        """`folder`: the runner's own."""
        self.shared = shared
        self.keeper = keeper
        self.spool = spool
        self.made = Mains(folder)
        self.log = log
        self.mains: dict[int, int] = {}
        """Main process → offer."""
        self.pids: dict[int, int] = {}
        """Offer → main process, until it has ended."""
        self.ends: dict[int, Message] = {}
        """Offer → how its main process ended, with what it used, until the keeper shows that it knows."""
        self.mirror: dict[str, Any] = {}
        """What the keeper would have us know: `succession.take_over` reads it."""
        self._failures: dict[int, Message] = {}
        """Offer → why its program could not be executed, until its child is reaped."""
        self._pipes: dict[int, tuple[int, Key, float]] = {}
        """Pipe of a child that has not executed its program yet → offer, what it starts, and since when."""
        self._start: Message | None = None
        self._oom = OomScore()
        self._held_back: tuple[int, ...] = ()
        self._launcher = Launcher()
        self._stand_in = StandIn(shared)
        self._revocable = Revocable()
        self._alarm = Alarm()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve the keeper until it is gone."""
        be_subreaper()
        name_process(SPAWNER)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._held_back = program.held_back()
        self._launcher.signals = self._held_back
        # For good: it costs less than around each fork, and none of them is meant for a spawner.
        signal.pthread_sigmask(signal.SIG_BLOCK, set(self._held_back) - {signal.SIGCHLD})
        gc.freeze()
        gc.disable()  # a collection writes to every object: a child that meets one copies the whole memory
        self._selector.register(self.keeper, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        while self.keeper.open:
            self._turn()
        gc.enable()
        self._launcher.close()
        signal.set_wakeup_fd(-1)
        for pipe in list(self._pipes):
            self._read_pipe(pipe)
        self._alarm.close()
        for handle in (self._wake_read, self._wake_write, *self._pipes):
            os.close(handle)
        self._selector.close()

    @property
    def is_done(self) -> bool:
        """The keeper ended by its own will, with nothing left to do."""
        return bool(self.mirror.get("done"))

    def _turn(self) -> None:
        self._alarm.set(self._stand_in.due(is_needed=bool(self._revocable)))
        ready = {key.fd for key, _ in self._selector.select()}
        if self._alarm.fileno() in ready:
            self._alarm.rang()
        if self.keeper.fileno() in ready:
            for line in self.keeper.receive():
                self._hear(line)
        for pipe in ready & self._pipes.keys():
            self._read_pipe(pipe)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()
        self._look_after_lease()
        self.keeper.flush()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.keeper.waits_to_send else 0)
        if self.keeper.open and self._selector.get_key(self.keeper).events != wanted:
            self._selector.modify(self.keeper, wanted)

    def _hear(self, line: bytes) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            self._fork(start, line)
            return
        message = json.loads(line)
        if message["do"] == "start":
            self._start = message
        elif message["do"] == "mirror":
            self.reflect(message)

    def reflect(self, mirror: Message) -> None:
        """Take in what `mirror` tells anew."""
        rows = self.mirror.setdefault("rows", {})
        for offer, row in mirror.pop("rows").items():
            self._revocable.told(int(offer), row)
            if row is None:
                rows.pop(offer, None)
            else:
                rows[offer] = row
            if row is None or row["policy"] is None or row["policy"]["main_ended"]:
                self.ends.pop(int(offer), None)
        self.mirror.update(mirror)

    def _look_after_lease(self) -> None:
        match self._stand_in.look(boottime(), is_needed=bool(self._revocable)):
            case "stop":
                if self._stand_in.is_new:
                    self.log("the lease has ended and the keeper does not answer: its jobs are paused until it does")
                running = self._revocable.stop(self._mains())
                self._stand_in.stopped(boottime(), running)
            case "say":
                self._revocable.done()
                self.keeper.put(line_of({"is": "stood_in", "since": self._stand_in.ended}))
            case None:
                pass

    def _mains(self) -> dict[int, Main]:
        """The main processes that are known, by offer."""
        found: dict[int, Main] = {}
        for offer, row in (self.mirror.get("rows") or {}).items():
            care = row["care"]
            if care["pid"] and care["start"]:
                ended = care["exit"] or self.ends.get(int(offer)) or {}
                found[int(offer)] = (care["pid"], care["start"], ended["at"] if ended.get("held") else 0.0)
        for offer, pid in self.pids.items():
            birth = status(pid)  # not reaped yet, so there is one
            if birth is not None:
                found[offer] = (pid, birth.start, 0.0)
        return found

    def _say(self, what: str, offer: int, **more: Any) -> None:
        self.keeper.put(line_of({"is": what, "offer": offer, **more}))

    def _fork(self, start: Message, line: bytes) -> None:
        offer, tag = start["offer"], start["tag"]
        if boottime() >= start["not_after"]:
            self._say("late", offer, reason="the lease ended before the process was made")
            return
        hard = resource.getrlimit(RLIMIT_LOCKS)[1]
        if hard != INFINITY and hard < tag:
            self._say("late", offer, reason="the limit on file locks (ulimit -x) does not leave room for the tag")
            return
        try:
            order = program.prepared(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._say("late", offer, reason=f"the order is not understood: {type(error).__name__}: {error}")
            return
        at, wall = boottime(), time.time()
        resource.setrlimit(RLIMIT_LOCKS, (tag, hard))
        self._oom.raise_it()
        is_executed = False
        try:
            pid = None
            if not start["cgroup"] and self._launcher.can_launch(order, at):
                pid = self._launcher.launch(order, self.spool.folder(offer))
                is_executed = pid is not None
            if pid is None:
                pid = self._fork_child(order, start, at)
        except OSError as error:
            self._say("late", offer, reason=f"no process could be made: {error.strerror}")
            return
        finally:
            self._oom.put_back()
            resource.setrlimit(RLIMIT_LOCKS, (hard, hard))
        self.mains[pid] = offer
        self.pids[offer] = pid
        birth = status(pid)  # not reaped yet, so there is one
        start_time = birth.start if birth is not None else 0
        self.made.add(offer, pid, start_time)
        self._revocable.made(offer, tag, start["cgroup"], order)
        if is_executed:
            now = boottime()
            self._launcher.executed(key_of(order), now, now - at)
        self._say("made", offer, pid=pid, start=start_time, at=at, wall=wall, executed=is_executed)

    def _fork_child(self, order: Message, start: Message, at: float) -> int:
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(order, start, write_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._pipes[read_end] = (start["offer"], key_of(order), at)
        self._selector.register(read_end, selectors.EVENT_READ)
        return pid

    def _become(self, order: Message, start: Message, pipe: int) -> NoReturn:
        """In the child: never returns into the spawner's own work."""
        offer = start["offer"]
        try:
            signal.set_wakeup_fd(-1)
            os.closerange(3, pipe)
            os.closerange(pipe + 1, pipe + 1024)
            if start["cgroup"]:
                with contextlib.suppress(OSError):  # then its tag has to do
                    cgroup.enter(start["cgroup"])
            program.execute(order, self.spool.folder(offer), self._held_back)
        except program.CannotStart as failure:
            record = {"cause": failure.cause, "reason": failure.reason, "is_ours": failure.is_ours}
        except BaseException as error:  # noqa: BLE001 - told to the person as the reason; the child must end here
            record = {"cause": "other", "reason": f"{type(error).__name__}: {error}"}
        try:
            self.spool.write_not_started(offer, record)
            # The spawner may have died, and then the exit code says more than this signal.
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            os.write(pipe, line_of(record))
        finally:
            os._exit(program.NOT_EXECUTED)

    def _read_pipe(self, pipe: int) -> None:
        """The pipe of a child was closed: by exec, or after a line that says why there was none."""
        try:
            data = os.read(pipe, PIPE_BYTES)
        except BlockingIOError:
            return
        offer, key, since = self._pipes.pop(pipe)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pipe)
        os.close(pipe)
        if not data:
            now = boottime()
            self._launcher.executed(key, now, now - since)
            self._say("executed", offer)
            return
        with contextlib.suppress(ValueError):  # it did not fit into the pipe: the spool has it, too
            self._failures[offer] = json.loads(data)

    def _reap(self) -> None:
        for ended in reap(self.mains, self.spool):
            if ended.offer is None:
                continue
            self.pids.pop(ended.offer, None)
            self._revocable.main_ended(ended.offer)
            self.made.ended(ended.offer)
            for pipe in [pipe for pipe, (offer, *_) in self._pipes.items() if offer == ended.offer]:
                self._read_pipe(pipe)
            failure = self._failures.pop(ended.offer, None)
            record = ended.record if failure is None else {**ended.record, "not_started": failure}
            self.ends[ended.offer] = record
            self._say("exited", ended.offer, **record)
