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
from kueue.runner.children import boottime
from kueue.runner.desk import Desk, read_order
from kueue.runner.kernel import be_subreaper, name_process
from kueue.runner.log import Log
from kueue.runner.orphans import Orphans
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
from kueue.runner.program import NOT_EXECUTED
from kueue.runner.reviver import Reviver
from kueue.runner.rundir import Rundir
from kueue.runner.server_watch import ServerWatch
from kueue.runner.spawner import Spawner
from kueue.runner.spawners import Child, Spawners
from kueue.runner.spool import NOT_STARTED, NumberInUse, Record, Spool
from kueue.runner.succession import inherit, take_over
from kueue.runner.tree import Scanner, Seen, tag_of
from kueue.runner.wire import PROTOCOL, Lines, line_of, os_bytes

QUIET_SECONDS = 0.05  # without anything to do; then there is time to tidy up
MANY_VACANT = 2000
OURSELVES = -1
"""Where the number of an offer may stand: the keeper's own affairs. Offers count from 0."""
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
        self.changed: set[int] = set()
        """Offers whose mirror is old; `OURSELVES` for what is not about one attempt."""
        self.looks: set[int] = set()
        self.again: set[int] = set()
        """Attempts to look after when `again_at` comes: a record to write, a process to be reaped by somebody else.
        `OURSELVES`: what the directory says of us.
        """
        self.again_at: float | None = None
        self.unwritten: dict[int, Record] = {}
        self.dropped: set[int] = set()
        """Tags of trees that are over and whose cgroups are still there."""
        self.idle_since: float | None = None
        self.is_quiet = False
        """The last turn had nothing to do."""
        self.leaving = False
        self.server_watch = ServerWatch()
        self.selector = selectors.DefaultSelector()
        self.orphans = Orphans(self)
        self.spawners = Spawners(self.selector, self.log, self._be_spawner, self._met_spawner)
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
        self.spawners.make()
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
        if self.spool.vacant and (not ready or len(self.spool.vacant) > MANY_VACANT):
            self.spool.tidy()
        self.is_quiet = not ready
        if self.wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        self.orphans.serve(ready)
        for child in self.spawners.all:
            if child.lines.open and child.lines.fileno() in ready:
                self._hear_spawner(self.spawners.hear(child))
        self.desk.serve(ready)
        if self.wake_read in ready:
            self.orphans.reap()
        self._tick()
        self._look()
        self._flush()

    def _patience(self, now: float) -> float | None:
        times = [
            self.policy.next_wake(now),
            self.again_at,
            self.reviver.due,
            self.server_watch.due,
            self.spawners.due,
        ]
        if self.idle_since is not None:
            times.append(self.idle_since + self.settings.linger_seconds)
        if self.spool.vacant:
            times.append(now + (QUIET_SECONDS if not self.is_quiet else 0.0))
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - now) if known else None

    def _asked_to_leave(self, *_: object) -> None:
        """A machine that shuts down ends the jobs too; a guard never leaves one that lives."""
        self.leaving = True
        self.policy.shut_down(boottime())

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
        while self.spool.vacant:
            self.spool.tidy()
        for child in self.spawners.all:
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
        self.changed.add(OURSELVES)
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
                self.changed.add(OURSELVES)
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
                self.changed.add(OURSELVES)
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
            care.ordered_wall = time.time()
            care.cgroup = cgroup.fresh_directory(self.settings.cgroup, offer)
            record = {
                "offer": offer,
                "job": care.job,
                "queue_id": care.queue_id,
                "tag": tag,
                "cgroup": care.cgroup,
                "runner": self.rundir.runner,
                "memo": care.memo,
                "ordered_wall": care.ordered_wall,
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
                    self.send_start(offer, not_after)
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
            self.once_more(care.offer)
            return
        del self.unwritten[care.offer]
        care.end = record
        self.drop_tree(care)
        self._tell_end(care)

    def drop_tree(self, care: Care) -> None:
        """What was allowed to stay behind keeps its cgroup for as long as it lives."""
        self.scanner.forget(care.tag)
        if care.cgroup:
            self.dropped.add(care.tag)

    def _tell_end(self, care: Care) -> None:
        if care.end is None:
            return
        if care.end["outcome"]["type"] == "lost":
            self.desk.tell("Gone", offer=care.offer, job=care.job, queue_id=care.queue_id, reason=care.gone_reason())
        else:
            self.desk.tell("Ended", offer=care.offer, job=care.job, end=care.end)

    def once_more(self, offer: int) -> None:
        self.again.add(offer)
        if self.again_at is None:
            self.again_at = boottime() + RETRY_SECONDS

    def _tick(self) -> None:
        now = boottime()
        prolonged = self.server_watch.look(self.policy, now)
        if prolonged is not None:
            self.do(self.policy.set_lease(prolonged, now))
            self.changed.add(OURSELVES)
            self.server_watch.plan(self.policy, now)
        self.do(self.policy.tick(now))
        self.reviver.tick(now)
        if self.again_at is not None and now >= self.again_at:
            again, self.again, self.again_at = self.again, set(), None
            for offer in again:
                if offer == OURSELVES:
                    self._write_info()
                elif offer in self.unwritten:
                    self._write_end(self.cares[offer])
                elif offer in self.cares:
                    self.orphans.find_end(self.cares[offer])
        self.spawners.replace_mute(now)

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
        self.spawners.flush()

    # -- spawners

    def _met_spawner(self) -> None:
        self.scanner.spared = {child.pid for child in self.spawners.all}
        self._write_info()
        self.changed.update(self.cares, {OURSELVES})

    def _write_info(self) -> None:
        spawners = [child.pid for child in self.spawners.all]
        if not self.rundir.write_info(self.settings.version, PROTOCOL, os.getpid(), spawners):
            self.once_more(OURSELVES)

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
            spawner = Spawner(Lines(sock), self.spool, self.log, self.rundir.path)
            spawner.mirror = self._mirror({*self.cares, 0})  # the keeper may be killed before it sends one
            spawner.run()
            if not spawner.is_done:
                self.log("the keeper is gone: taking over")
                successor = Keeper(self.settings, self.lock)
                take_over(successor, spawner)
                successor.run()
        except BaseException as error:  # noqa: BLE001 - the log is the only place that is left
            self.log(f"spawner {os.getpid()} failed: {type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def send_start(self, offer: int, not_after: float) -> None:
        care = self.cares[offer]
        head = {"do": "start", "offer": offer, "tag": care.tag, "cgroup": care.cgroup, "not_after": not_after}
        pid = self.spawners.start(offer, line_of(head) + care.line + b"\n")
        if pid is None:
            self.do(self.policy.start_refused(offer, "no spawner could be made", boottime()))
        else:
            care.spawner = pid

    def _send_mirror(self) -> None:
        spawner = self.spawners.current
        if not self.changed or spawner is None or not spawner.lines.open:
            return
        spawner.lines.put(line_of({"do": "mirror", **self._mirror(self.changed)}))
        self.changed.clear()
        spawner.lines.flush()

    def _mirror(self, offers: set[int]) -> dict[str, Any]:
        """What a successor has to know of these, as in `changed`."""
        rows: dict[str, Any] = {}
        for offer in offers - {OURSELVES}:
            care = self.cares.get(offer)
            rows[str(offer)] = care and {"policy": self.policy.row(offer), "care": care.mirror()}
        deadline = self.policy.deadline
        return {
            "rows": rows,
            "deadline": deadline if deadline > 0 else 0.0,
            "lapsed": self.policy.lapsed,
            "pause_told": self.policy.pause_told,
            "server_lock": [
                self.server_watch.path.encode("utf-8", "surrogateescape").hex(),
                self.server_watch.seconds,
            ],
            **({"reviver": self.reviver.mirror()} if OURSELVES in offers else {}),
        }

    def _hear_spawner(self, lines: list[bytes]) -> None:
        for line in lines:
            message = json.loads(line)
            care = self.cares.get(message["offer"])
            if care is not None:
                self._hear_of(care, message)

    def _hear_of(self, care: Care, message: dict[str, Any]) -> None:
        now = boottime()
        self.changed.add(care.offer)
        match message["is"]:
            case "made":
                care.started_at, care.started_wall = message["at"], message["wall"]
                self.forked(care, message["pid"], message["start"])
                if message["executed"]:
                    care.executed = True
                    self.do(self.policy.started(care.offer, message["at"]))
            case "late":
                self.spawners.answered(care.offer)
                self.do(self.policy.start_refused(care.offer, message["reason"], now))
            case "executed":
                care.executed = True
                self.do(self.policy.started(care.offer, care.started_at or now))
            case "exited":
                self.exited(care, message)
            case other:
                self.log(f"a spawner said {other!r}, which is not understood")

    def forked(self, care: Care, pid: int, start: int) -> None:
        """Its main process is this one. `start` in clock ticks after boot."""
        care.pid = pid
        care.start = start
        self.scanner.know_main(care.tag, pid, start)
        care.began(boottime(), time.time())
        care.line = b""
        self.spawners.answered(care.offer)

    def exited(self, care: Care, record: Record) -> None:
        care.exit = record
        if care.start and record.get("held"):
            self.scanner.know_main(care.tag, record["pid"], care.start, record["at"])
        now = boottime()
        # Whoever took over believes that it was executed, without having seen it.
        failure = self.spool.read(care.offer, NOT_STARTED) if record["code"] == NOT_EXECUTED else None
        if failure is not None:
            self.do(self.policy.not_started(care.offer, failure["cause"], failure["reason"], now))
            return
        if not care.executed:
            care.executed = True
            self.do(self.policy.started(care.offer, care.started_at or now))
        self.do(self.policy.exited(care.offer, record["code"], record["signal"], now))

    def lost_spawner(self, child: Child) -> None:
        """Its children are ours now; what it still had to say is read first."""
        self.log(f"spawner {child.pid} is gone: its jobs are ours now")
        self._hear_spawner(self.spawners.lost(child))
        for offer, attempt in list(self.policy.attempts.items()):
            care = self.cares.get(offer)
            if care is not None and care.spawner == child.pid and attempt.lives and not attempt.main_ended:
                self.orphans.find(care)
        if self.spawners.current is None:
            self.spawners.make()
