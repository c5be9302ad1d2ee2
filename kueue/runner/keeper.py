"""The keeper: carries out what the policy decides, and answers the worker.

It touches ``/proc``, its cgroup, the local spool and its sockets, never a path of a user: nothing can hang it. The
spawner, its child, makes and reaps the processes; when the spawner dies they become the keeper's own children, when the
keeper dies the spawner goes on as keeper, from the mirror that it was sent before each action.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kueue.runner import cgroup
from kueue.runner.care import Care, terms_of
from kueue.runner.children import boottime, ended_child, ended_elsewhere, has_ended, take
from kueue.runner.desk import Desk, close, read_order, want
from kueue.runner.kernel import be_subreaper, name_process
from kueue.runner.log import Log
from kueue.runner.policy import (
    Action,
    Continue,
    Finish,
    Kill,
    Look,
    Pause,
    PauseDone,
    Policy,
    Start,
    Tell,
    Terminate,
)
from kueue.runner.reviver import Reviver
from kueue.runner.rundir import Rundir
from kueue.runner.server_watch import ServerWatch
from kueue.runner.spawner import Spawner
from kueue.runner.spool import MAIN, NOT_STARTED, NumberInUse, Record, Spool
from kueue.runner.succession import inherit, take_over
from kueue.runner.tree import Scanner, Seen, status, tag_of
from kueue.runner.wire import PROTOCOL, Lines, line_of, os_bytes

MUTE_SPAWNER_SECONDS = 10.0  # so long may a spawner take to make a process before another one serves
RETRY_SECONDS = 1.0  # a record that did not fit on a full disk, a process somebody else has to reap


@dataclass
class Settings:
    """What a runner is told on its command line."""

    rundir: Rundir
    identity: str
    version: str
    linger_seconds: float = 10.0
    """How long a runner without attempts and worker waits for either."""
    cgroup: str = ""
    """Directory of the cgroup that is ours to divide; empty: none is."""


@dataclass
class Child:
    """A spawner of ours."""

    pid: int
    lines: Lines


class Keeper:
    """One runner's keeper. `run` returns when there is nothing left to keep."""

    def __init__(self, settings: Settings, lock: int) -> None:
        self.settings = settings
        self.lock = lock
        self.rundir = settings.rundir
        self.log = Log(self.rundir.log)
        self.spool = Spool(self.rundir.spool)
        self.policy = Policy()
        self.scanner = Scanner()
        self.reviver = Reviver(self.log)
        self.cares: dict[int, Care] = {}
        self.mains: dict[int, int] = {}
        """Main processes that are our own children (their spawner died) → offer."""
        self.watched: dict[int, int] = {}
        """Descriptor of a main process that somebody else reaps → offer."""
        self.unexplained: dict[int, int] = {}
        """Offer → descriptor of a main process that has ended under somebody else; its status may come yet."""
        self.spawner: Child | None = None
        self.retired: dict[int, Child] = {}
        self.sent: dict[int, float] = {}
        """Starts that the spawner has not answered yet: offer → when they were sent; the oldest first."""
        self.changed: set[int] = set()
        """Offers whose mirror is old; 0 stands for what is not about one attempt."""
        self.looks: set[int] = set()
        self.again: set[int] = set()
        """Attempts to look after when `again_at` comes: a record to write, a process to be reaped by somebody else."""
        self.again_at: float | None = None
        self.unwritten: dict[int, Record] = {}
        self.dropped: set[int] = set()
        """Tags of trees that are over and whose cgroups are still there."""
        self.idle_since: float | None = None
        self.leaving = False
        self.server_watch = ServerWatch()
        self.selector = selectors.DefaultSelector()
        self.desk = Desk(self.selector, self._attach, self._obey, self._lost_worker)
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- life

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Keep until there is nothing left. `ready` is called when workers can attach."""
        be_subreaper()
        name_process("kueue-keeper")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._asked_to_leave)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(self.wake_read, selectors.EVENT_READ)
        self.desk.open(self.rundir)
        if self.spawner is None:
            self._new_spawner()
        inherit(self)
        os.write(self.wake_write, b"!")  # children that ended before we took over have sent their signal already
        ready()
        self.log(f"keeper of runner {self.rundir.runner}, version {self.settings.version}")
        while not self._is_done():
            self._turn()
        self._leave()

    def _turn(self) -> None:
        now = boottime()
        ready = {key.fd for key, _ in self.selector.select(self._patience(now))}
        if self.wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        for descriptor in ready & self.watched.keys():
            self._watched_ended(descriptor)
        for child in self._spawners():
            if child.lines.open and child.lines.fileno() in ready:
                self._hear_spawner(child)
        self.desk.serve(ready)
        if self.wake_read in ready:
            self._reap()
        self._tick()
        self._look()
        self._flush()

    def _patience(self, now: float) -> float | None:
        times = [self.policy.next_wake(now), self.again_at, self.reviver.due, self.server_watch.due]
        if self.idle_since is not None:
            times.append(self.idle_since + self.settings.linger_seconds)
        if self.sent:
            times.append(next(iter(self.sent.values())) + MUTE_SPAWNER_SECONDS)
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - now) if known else None

    def _asked_to_leave(self, *_: object) -> None:
        """A machine that shuts down ends the jobs too; a guard never leaves one that lives."""
        self.leaving = True

    def _is_done(self) -> bool:
        if self.leaving and not any(attempt.lives for attempt in self.policy.open.values()):
            return True
        now = boottime()
        if self.cares or not self.desk.is_empty or self.reviver.command:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        return self.idle_since is not None and now - self.idle_since >= self.settings.linger_seconds

    def _leave(self) -> None:
        self.log("nothing left to keep")
        for child in self._spawners():
            if child.lines.open:
                child.lines.put(line_of({"do": "mirror", "rows": {}, "done": True}))
                child.lines.flush()
                child.lines.close()
        self.desk.close()
        if not self.cares:
            self.rundir.remove()

    # -- the worker

    def _lost_worker(self) -> None:
        self.reviver.lost(boottime())

    def _attach(self, order: dict[str, Any]) -> None:
        now = boottime()
        self.reviver.attached(order, now)
        self.changed.add(0)
        path = os_bytes(order.get("server_lock_path") or "").decode("utf-8", "surrogateescape")
        self.server_watch = ServerWatch(path, float(order.get("server_lock_seconds") or 0.0))
        self.server_watch.plan(self.policy, now)
        self._describe()

    def _describe(self) -> None:
        deadline = self.policy.deadline
        attempts = [
            care.describe("stopping" if offer in self.unwritten else self.policy.attempts[offer].state)
            for offer, care in self.cares.items()
        ]
        self.desk.tell(
            "Attached",
            protocol=PROTOCOL,
            version=self.settings.version,
            runner=self.rundir.runner,
            pid=os.getpid(),
            lease_deadline_boottime=deadline if deadline > 0 else None,
            attempts=attempts,
        )

    def _obey(self, line: bytes) -> None:
        order = read_order(line)
        if order is None:
            self.log(f"a line that is no order was skipped: {line[:80]!r}")
            return
        now = boottime()
        match order["type"]:
            case "StartAttempt":
                self._start_attempt(order, line, now)
            case "SetLease":
                self.do(self.policy.set_lease(float(order["deadline_boottime"]), now))
                self.changed.add(0)
                self.server_watch.plan(self.policy, now)
            case "StopOrder":
                grace = float(order.get("grace_seconds", 10.0))
                self.do(self.policy.stop(order["offer"], bool(order.get("kill")), grace, now), answers=True)
            case "WithdrawOrder":
                self.do(self.policy.withdraw(order["offer"], now), answers=True)
            case "ForgetAttempts":
                for offer in order["offers"]:
                    self._forget(offer)
            case "Inherit":
                inherit(self)
                self._describe()
            case "Ping":
                self.desk.tell("Pong", number=order.get("number", 0))
            case "Detach":
                self.reviver.detached()
                self.changed.add(0)
                self.desk.drop()
            case kind:
                self.log(f"an order of a newer release was skipped: {kind}")

    def _start_attempt(self, order: dict[str, Any], line: bytes, now: float) -> None:
        offer = order["offer"]
        is_new = offer not in self.policy.attempts
        known = self.cares.get(offer)
        if known is not None and known.queue_id != order["queue_id"]:
            self.desk.tell(
                "Refused", offer=offer, reason="an attempt of another queue has the same number and is not over"
            )
            return
        terms = terms_of(order)
        actions = self.policy.start(offer, terms, now)
        if is_new and offer in self.policy.attempts:
            tag = tag_of(order["queue_id"], self.settings.identity, offer)
            care = Care(offer, order["job"], order["queue_id"], tag, order.get("memo", ""), line=line)
            care.cgroup = cgroup.fresh_directory(self.settings.cgroup, offer)
            record = {
                "offer": offer,
                "job": care.job,
                "queue_id": care.queue_id,
                "tag": tag,
                "cgroup": care.cgroup,
                "runner": self.rundir.runner,
                "memo": care.memo,
                "ordered_wall": time.time(),
                **vars(terms),
            }
            try:
                self.spool.begin(offer, record)
            except NumberInUse:
                actions = self.policy.start_refused(offer, "an attempt of this number is in the spool already", now)
            except OSError as error:
                actions = self.policy.start_refused(offer, f"{self.spool.root}: {error.strerror}", now)
            else:
                self.take_in(care)
                if self.desk.has_hung_up:
                    # An order left unread by a worker that died meanwhile. The next worker did not find it in the
                    # spool, so the server may have given the job to somebody else. Looked at after the record was
                    # written: a worker that dies from now on is followed by one that finds it.
                    actions = self.policy.start_refused(offer, "its worker is gone", now)
        self.do(actions, answers=True)

    def take_in(self, care: Care) -> None:
        """From now on this attempt is ours to look after."""
        self.cares[care.offer] = care
        if care.cgroup:
            self.dropped.discard(care.tag)
            self.scanner.cgroups[care.tag] = care.cgroup

    def _forget(self, offer: int) -> None:
        if offer not in self.unwritten and self.policy.forget(offer):
            self.cares.pop(offer, None)
            self.changed.add(offer)
            self.spool.forget(offer)

    # -- what the policy decides

    def do(self, actions: Iterable[Action], *, answers: bool = False) -> None:
        """Carry out, in order. `answers`: somebody asked, so what was said before is said again."""
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            now = boottime()
            match action:
                case Start(offer, not_after):
                    self._send_start(offer, not_after)
                case Look(offer):
                    self.looks.add(offer)
                case Terminate(offer):
                    todo += self._signal(offer, signal.SIGTERM, now)
                case Kill(offer):
                    todo += self._signal(offer, signal.SIGKILL, now)
                case Pause(offer):
                    seen = self.scanner.pause_tree(self.cares[offer].tag)
                    todo += self.policy.seen(offer, seen.living, seen.running, now, seen.note)
                case Continue(offer):
                    self.scanner.continue_tree(self.cares[offer].tag)
                case Finish():
                    self._finish(action, now)
                case Tell():
                    self._say(action, answers)
                case PauseDone(deadline):
                    self.desk.tell("PauseDone", deadline_boottime=deadline)
            if not isinstance(action, PauseDone):
                self.changed.add(action.offer)

    def _signal(self, offer: int, number: int, now: float) -> list[Action]:
        self._send_mirror()  # whoever takes over must know that it was us
        care = self.cares[offer]
        seen = self.scanner.signal_tree(care.tag, number, care.pid)
        # Before its process is made nothing can be reached, but nothing has ended by itself either.
        reached = seen.main_reached or care.pid is None
        actions = self.policy.signalled(offer, reached, now)
        return actions + self.policy.seen(offer, seen.living, seen.running, now, seen.note)

    def _say(self, tell: Tell, answers: bool) -> None:
        offer = tell.offer
        care = self.cares.get(offer)
        match tell.word:
            case "refused":
                self._vanish(offer)
                self.desk.tell("Refused", offer=offer, reason=tell.note)
            case "withdrawn":
                self._vanish(offer)
                self.desk.tell("Withdrawn", offer=offer)
            case "unknown":
                self.desk.tell("Unknown", offer=offer)
            case "queued":
                self.desk.tell("Queued", offer=offer)
            case _ if care is None:
                pass
            case "ended" | "gone":
                self._tell_end(care)
            case state:
                care.note = tell.note if tell.note != "continues" else ""
                if care.executed and (answers or (state == "running" and not tell.note)):
                    self.desk.tell(
                        "Started", offer=offer, job=care.job, started_wall=care.started_wall, pid=care.pid or 0
                    )
                if state != "running" or tell.note:
                    self.desk.tell("Changed", offer=offer, state=state, note=tell.note)

    def _vanish(self, offer: int) -> None:
        care = self.cares.pop(offer, None)
        if care is not None:
            self.drop_tree(care)
            self.spool.forget(offer)

    def _finish(self, finish: Finish, now: float) -> None:
        care = self.cares[finish.offer]
        self.unwritten[care.offer] = care.conclude(finish, now, time.time())
        self._write_end(care)

    def _write_end(self, care: Care) -> None:
        record = self.unwritten[care.offer]
        try:
            self.spool.write_exit(care.offer, record)
        except OSError as error:  # a full disk, most likely: nothing is told that is not written
            self.log(f"the record of attempt {care.offer} cannot be written: {error}")
            self._once_more(care.offer)
            return
        del self.unwritten[care.offer]
        care.end = record
        self.drop_tree(care)
        self._tell_end(care)

    def drop_tree(self, care: Care) -> None:
        """What was allowed to stay behind keeps its cgroup for as long as it lives."""
        if care.cgroup:
            self.dropped.add(care.tag)

    def _tell_end(self, care: Care) -> None:
        if care.end is None:
            return
        if care.end["outcome"]["type"] == "lost":
            self.desk.tell("Gone", offer=care.offer, job=care.job, queue_id=care.queue_id, reason=care.gone_reason())
        else:
            self.desk.tell("Ended", offer=care.offer, job=care.job, end=care.end)

    def _once_more(self, offer: int) -> None:
        self.again.add(offer)
        if self.again_at is None:
            self.again_at = boottime() + RETRY_SECONDS

    def _tick(self) -> None:
        now = boottime()
        prolonged = self.server_watch.look(self.policy, now)
        if prolonged is not None:
            self.do(self.policy.set_lease(prolonged, now))
            self.changed.add(0)
            self.server_watch.plan(self.policy, now)
        self.do(self.policy.tick(now))
        self.reviver.tick(now)
        if self.again_at is not None and now >= self.again_at:
            again, self.again, self.again_at = self.again, set(), None
            for offer in again:
                if offer in self.unwritten:
                    self._write_end(self.cares[offer])
                elif offer in self.cares:
                    self._find_end(self.cares[offer])
        if self.spawner and self.sent and now - next(iter(self.sent.values())) >= MUTE_SPAWNER_SECONDS:
            self._retire_spawner(self.spawner)

    def _look(self) -> None:
        """One pass over the processes for all attempts that ask for it."""
        while self.looks:
            offers = [offer for offer in self.looks if offer in self.cares]
            self.looks.clear()
            seen = self.scanner.look(self.cares[offer].tag for offer in offers)
            now = boottime()
            for offer in offers:
                found = seen.get(self.cares[offer].tag, Seen()) if offer in self.cares else None
                if found is not None:
                    self.do(self.policy.seen(offer, found.living, found.running, now))
                    self.changed.add(offer)

    def _flush(self) -> None:
        self.dropped = {tag for tag in self.dropped if not self.scanner.drop(tag)}
        self._send_mirror()
        self.desk.flush()
        for child in self._spawners():
            if child.lines.open:
                child.lines.flush()
                want(self.selector, child.lines)

    # -- spawners

    def _new_spawner(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self.log(f"no spawner could be made: {error.strerror}")
            return
        if pid == 0:
            self._be_spawner(theirs)
        theirs.close()
        self.spawner = Child(pid, Lines(ours))
        self.selector.register(self.spawner.lines, selectors.EVENT_READ)
        self.scanner.spared = {pid, *self.retired}
        self.rundir.write_info(self.settings.version, PROTOCOL, os.getpid(), [pid, *self.retired])
        self.changed.update(self.cares, {0})

    def _be_spawner(self, sock: socket.socket) -> None:
        """The whole life of a spawner, in the child; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the keeper decides when the runner leaves
            keep = {self.lock, sock.fileno()}
            for descriptor in range(3, max(keep) + 1):
                if descriptor not in keep:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.closerange(max(keep) + 1, 65536)
            spawner = Spawner(Lines(sock), self.spool, self.log)
            spawner.run()
            if spawner.is_retired:
                os.close(self.lock)
                spawner.finish_alone()
            elif not spawner.is_done:
                self.log("the keeper is gone: taking over")
                successor = Keeper(self.settings, self.lock)
                take_over(successor, spawner)
                successor.run()
        except BaseException as error:  # noqa: BLE001 - the log is the only place that is left
            self.log(f"spawner {os.getpid()} failed: {type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def _retire_spawner(self, child: Child) -> None:
        self.log(f"spawner {child.pid} does not answer: another one takes the new jobs")
        child.lines.put(line_of({"do": "mirror", "rows": {}, "retired": True}))
        child.lines.flush()
        self.retired[child.pid] = child
        self.sent.clear()
        self.spawner = None
        self._new_spawner()

    def _send_start(self, offer: int, not_after: float) -> None:
        if self.spawner is None:
            self._new_spawner()
        care = self.cares[offer]
        if self.spawner is None:
            self.do(self.policy.start_refused(offer, "no spawner could be made", boottime()))
            return
        care.spawner = self.spawner.pid
        self.sent[offer] = boottime()
        head = {"do": "start", "offer": offer, "tag": care.tag, "cgroup": care.cgroup, "not_after": not_after}
        self.spawner.lines.put(line_of(head) + care.line + b"\n")

    def _send_mirror(self) -> None:
        if not self.changed or self.spawner is None or not self.spawner.lines.open:
            return
        rows: dict[str, Any] = {}
        for offer in self.changed - {0}:
            care = self.cares.get(offer)
            rows[str(offer)] = care and {"policy": self.policy.row(offer), "care": care.mirror()}
        deadline = self.policy.deadline
        self.spawner.lines.put(
            line_of(
                {
                    "do": "mirror",
                    "rows": rows,
                    "deadline": deadline if deadline > 0 else 0.0,
                    "lapsed": self.policy.lapsed,
                    "pause_told": self.policy.pause_told,
                    "server_lock": [
                        self.server_watch.path.encode("utf-8", "surrogateescape").hex(),
                        self.server_watch.seconds,
                    ],
                    **({"reviver": self.reviver.mirror()} if 0 in self.changed else {}),
                }
            )
        )
        self.changed.clear()
        self.spawner.lines.flush()

    def _hear_spawner(self, child: Child) -> None:
        for line in child.lines.receive():
            message = json.loads(line)
            care = self.cares.get(message["offer"])
            if care is not None:
                self._hear_of(care, message)
        if not child.lines.open:
            close(self.selector, child.lines)

    def _hear_of(self, care: Care, message: dict[str, Any]) -> None:
        now = boottime()
        self.changed.add(care.offer)
        match message["is"]:
            case "forked":
                self.forked(care, message["pid"], message["at"], message["wall"])
            case "late":
                self.sent.pop(care.offer, None)
                self.do(self.policy.start_refused(care.offer, message["reason"], now))
            case "executed":
                care.executed = True
                self.do(self.policy.started(care.offer, care.started_at or now))
            case "exited":
                self._exited(care, message)
            case other:
                self.log(f"a spawner said {other!r}, which is not understood")

    def forked(self, care: Care, pid: int, at: float, wall: float) -> None:
        care.pid = pid
        care.started_at = at
        care.started_wall = wall
        care.line = b""
        self.sent.pop(care.offer, None)

    def _exited(self, care: Care, record: Record) -> None:
        care.exit = record
        now = boottime()
        failure = self.spool.read(care.offer, NOT_STARTED) if record["code"] is not None and not care.executed else None
        if failure is not None:
            self.do(self.policy.not_started(care.offer, failure["cause"], failure["reason"], now))
            return
        if not care.executed:
            care.executed = True
            self.do(self.policy.started(care.offer, care.started_at or now))
        self.do(self.policy.exited(care.offer, record["code"], record["signal"], now))

    def _reap(self) -> None:
        while (pid := ended_child()) is not None:
            if pid not in self.mains:
                # It may be a main process whose spawner has died. Then the kernel shows that one as dead too, and it
                # must be heard first: reaped as nobody's, the process would seem never to have been made.
                dead = [child for child in self._spawners() if has_ended(child.pid)]
                if dead:
                    for child in dead:
                        take(child.pid, None, self.spool)
                        self._lost_spawner(child)
                    continue
            ended = take(pid, self.mains.pop(pid, None), self.spool)
            care = self.cares.get(ended.offer) if ended.offer is not None else None
            if care is not None:
                self._exited(care, ended.record)

    def _spawners(self) -> list[Child]:
        return [*([self.spawner] if self.spawner else []), *self.retired.values()]

    def _lost_spawner(self, child: Child) -> None:
        """Its children are ours now; what it still had to say is read first."""
        self.log(f"spawner {child.pid} is gone: its jobs are ours now")
        self.retired.pop(child.pid, None)
        if child is self.spawner:
            self.spawner = None
            self.sent.clear()
        if child.lines.open:
            self._hear_spawner(child)
        close(self.selector, child.lines)
        for offer, attempt in list(self.policy.attempts.items()):
            care = self.cares.get(offer)
            if care is not None and care.spawner == child.pid and attempt.lives and not attempt.main_ended:
                self.find_main(care)
        if self.spawner is None:
            self._new_spawner()

    def find_main(self, care: Care) -> None:
        """Find the main process of an attempt whose spawner died, or how it ended."""
        attempt = self.policy.attempts[care.offer]
        main = self.spool.read(care.offer, MAIN)
        if main is not None:
            care.pid = main["pid"]
            care.started_at = care.started_at or main["at"]
            self._exited(care, main)
            return
        if care.pid is None:
            care.pid = self._oldest(care.tag)
            if care.pid is not None:
                self.forked(care, care.pid, boottime(), time.time())
            elif care.line and attempt.stop is None:
                self._send_start(care.offer, self.policy.deadline)  # certain: its process was never made
                return
            else:
                self.do(
                    self.policy.start_refused(care.offer, "its spawner died before the process was made", boottime())
                )
                return
        if not care.executed:
            care.executed = True
            self.do(self.policy.started(care.offer, care.started_at or boottime()))
        now = status(care.pid)
        if now is not None and now.parent == os.getpid():
            self.mains[care.pid] = care.offer
        else:
            self._watch(care)

    def _oldest(self, tag: int) -> int | None:
        """The main process is the first that carried the tag; also if it has ended and is not reaped."""
        found = []
        for pid in self.scanner.pass_over(tag.__eq__).get(tag, ()):
            now = status(pid)
            if now is not None:
                found.append((now.start, pid))
        return min(found)[1] if found else None

    def _watch(self, care: Care) -> None:
        """Learn of the end of a process that is not our child."""
        try:
            descriptor = os.pidfd_open(care.pid or 0)
        except (OSError, ValueError):
            self._find_end(care)
            return
        self.watched[descriptor] = care.offer
        self.selector.register(descriptor, selectors.EVENT_READ)

    def _watched_ended(self, descriptor: int) -> None:
        offer = self.watched.pop(descriptor)
        self.selector.unregister(descriptor)
        self.unexplained[offer] = descriptor
        if offer in self.cares:
            self._find_end(self.cares[offer])
        else:
            self._explained(offer)

    def _find_end(self, care: Care) -> None:
        """The main process has ended under somebody else: read what that one wrote down, or ask the kernel."""
        attempt = self.policy.attempts.get(care.offer)
        if attempt is None or not attempt.lives or attempt.main_ended:
            self._explained(care.offer)
            return
        main = self.spool.read(care.offer, MAIN)
        if main is None and care.pid in self.scanner.pass_over(care.tag.__eq__).get(care.tag, ()):
            self._once_more(care.offer)  # not reaped yet
            return
        if main is None and care.offer in self.unexplained:
            main = ended_elsewhere(care.pid or 0, self.unexplained[care.offer])
            if main is not None:
                self.spool.write_main(care.offer, main)
        self._explained(care.offer)
        if main is not None:
            self._exited(care, main)
        else:
            self.do(self.policy.exited(care.offer, None, None, boottime()))

    def _explained(self, offer: int) -> None:
        descriptor = self.unexplained.pop(offer, None)
        if descriptor is not None:
            os.close(descriptor)
