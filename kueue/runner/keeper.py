"""The keeper: turns until nothing is left to keep, and carries out what the policy decides.

It touches ``/proc``, its cgroup, the local spool and its sockets, never a path of a user: nothing can hang it. The
spawner, its child, makes and reaps the processes; when the spawner dies they become the keeper's own children, when the
keeper dies the spawner goes on as keeper, from the mirror that it is sent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kueue.runner.actions import Action, Continue, Finish, Kill, Look, Pause, PauseDone, Start, Tell, Terminate
from kueue.runner.care import Care
from kueue.runner.children import boottime
from kueue.runner.clerk import Clerk
from kueue.runner.course import Course
from kueue.runner.desk import Desk
from kueue.runner.ends import Ends
from kueue.runner.kernel import Alarm, be_subreaper, name_process
from kueue.runner.log import Log
from kueue.runner.mirror import OURSELVES, Mirror
from kueue.runner.orphans import Orphans
from kueue.runner.policy import Policy
from kueue.runner.premises import Premises
from kueue.runner.reviver import Reviver
from kueue.runner.rundir import KEEPER, Rundir
from kueue.runner.server_watch import ServerWatch
from kueue.runner.shared import Shared
from kueue.runner.spawner import Spawner
from kueue.runner.spawners import Spawners
from kueue.runner.spool import Spool
from kueue.runner.succession import inherit, take_over
from kueue.runner.tree import Scanner, Seen
from kueue.runner.wire import Lines, line_of

QUIET_SECONDS = 0.05  # without anything to do; then there is time to tidy up
MANY_VACANT = 2000
RETRY_SECONDS = 1.0  # what a full or broken disk did not take, a process somebody else has to reap


@dataclass
class Settings:
    """What a runner is told on its command line."""

    rundir: Rundir
    identity: str
    version: str
    linger_seconds: float = 10.0
    """How long a runner without attempts and worker waits for either."""
    is_local: bool = True
    """The state is on a disk of this machine: looking at it does not hang."""
    cgroup: str = ""
    """Directory of the cgroup that is ours to divide; empty: none is."""


class Keeper:
    """One runner's keeper. `run` returns when there is nothing left to keep."""

    def __init__(self, settings: Settings, lock: int) -> None:
        self.settings = settings
        self.rundir = settings.rundir
        self.log = Log(self.rundir.log)
        self.spool = Spool(self.rundir.spool)
        self.policy = Policy()
        self.scanner = Scanner()
        self.reviver = Reviver(self.log, self.rundir.worker_lock if settings.is_local else "")
        self.cares: dict[int, Care] = {}
        self.looks: set[int] = set()
        self.again: set[int] = set()
        """Attempts to look after when `again_at` comes: records to write or to drop, a process to be reaped by somebody
        else. `OURSELVES`: what the directory says of us, and its socket.
        """
        self.again_at: float | None = None
        self.idle_since: float | None = None
        self.is_quiet = False
        """The last turn had nothing to do."""
        self.server_watch = ServerWatch()
        self.selector = selectors.DefaultSelector()
        self.clerk = Clerk(self)
        self.course = Course(self)
        self.ends = Ends(self)
        self.mirror = Mirror(self)
        self.premises = Premises(self, lock)
        self.orphans = Orphans(self)
        self.spawners = Spawners(self.selector, self.log, self._be_spawner, self._met_spawner)
        self.desk = Desk(self.selector, self.clerk.attach, self.clerk.obey, self.clerk.lost)
        self.alarm = Alarm()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- life

    def run(self, ready: Callable[[], None] = lambda: None, *, begins: bool = False) -> None:
        """Keep until there is nothing left. `ready` is called when workers can attach.

        `begins`: a runner is being started, and whoever starts it is told of what goes wrong: raises `OSError`. Who has
        taken over goes on with what it has.
        """
        be_subreaper()
        name_process(KEEPER)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._asked_to_leave)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(self.wake_read, selectors.EVENT_READ)
        self.selector.register(self.alarm, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # a disk that does not take it is no reason to leave the jobs alone
            self.premises.hold()  # of a dead keeper that had put it back we did not inherit it
        self.premises.open_desk(is_needed=begins)
        if begins:
            self.inherit(is_needed=True)  # as long as there is no spawner that would take over when it fails
        self.spawners.make()
        if not begins:
            self.inherit()
        self.premises.look(boottime())
        os.write(self.wake_write, b"!")  # children that ended before we took over have sent their signal already
        ready()
        self.log(f"keeper of runner {self.rundir.runner}, version {self.settings.version}")
        while not self._is_done():
            self._turn()
        self._leave()

    def inherit(self, known: Sequence[dict[str, Any]] = (), *, is_needed: bool = False) -> bool:
        """Take in what dead runners have left; False: it cannot be read. `is_needed`: raises `OSError` instead.

        `known`: what they are said to have had, each an `AttemptState` of the wire.
        """
        try:
            inherit(self, known)
        except OSError as error:
            if is_needed:
                raise
            self.log(f"what another runner has left cannot be read: {error}")
            return False
        return True

    def _turn(self) -> None:
        self.alarm.set(self._due(boottime()))
        ready = {key.fd for key, _ in self.selector.select()}
        if self.alarm.fileno() in ready:
            ready.remove(self.alarm.fileno())
            self.alarm.rang()
        if self.spool.vacant and (not ready or len(self.spool.vacant) > MANY_VACANT):
            self.spool.tidy()
        self.is_quiet = not ready
        for child in self.spawners.all:
            self.course.look_at_stand_in(child)
        if self.wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        self.orphans.serve(ready)
        for child in self.spawners.all:
            if child.lines.open and child.lines.fileno() in ready:
                self.course.hear(child, self.spawners.hear(child))
        self.desk.serve(ready)
        if self.wake_read in ready:
            self.orphans.reap()
        self._tick()
        self._look()
        self._flush()

    def _due(self, now: float) -> float | None:
        """When the next turn has something to do, if nothing happens before."""
        times = [
            self.policy.next_wake(now),
            self.again_at,
            self.reviver.due,
            self.server_watch.due,
            self.spawners.due,
            self.premises.wake_at,
        ]
        if self.idle_since is not None:
            times.append(self.idle_since + self.settings.linger_seconds)
        if self.spool.vacant:
            times.append(now + (QUIET_SECONDS if not self.is_quiet else 0.0))
        return min((at for at in times if at is not None), default=None)

    def _asked_to_leave(self, *_: object) -> None:
        """A machine that shuts down ends the jobs too; a guard never leaves one that lives."""
        self.policy.shut_down(boottime())
        self.mirror.changed.add(OURSELVES)

    def _is_done(self) -> bool:
        if self.policy.is_leaving and not any(attempt.lives for attempt in self.policy.open.values()):
            return True
        now = boottime()
        if self.cares or not self.desk.is_empty or self.reviver.command:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        return self.idle_since is not None and now - self.idle_since >= self.settings.linger_seconds

    def _leave(self) -> None:
        self.log("nothing left to keep")
        for offer in sorted(offer for offer, attempt in self.policy.open.items() if attempt.phase == "queued"):
            self.do(self.policy.start_refused(offer, "its runner was told to end before it was started", boottime()))
        self.desk.flush()
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

    # -- what the policy decides

    def take_in(self, care: Care) -> None:
        """From now on this attempt is ours to look after."""
        self.cares[care.offer] = care
        self.ends.taken_back(care)
        if care.cgroup:
            self.scanner.cgroups[care.tag] = care.cgroup

    def do(self, actions: Iterable[Action], *, answers: bool = False) -> None:
        """Carry out, in order. `answers`: somebody asked, so what was said before is said again."""
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            now = boottime()
            match action:
                case Start(offer, not_after):
                    self.course.order(offer, not_after)
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
                    self.ends.finish(action, now)
                case Tell():
                    self.clerk.say(action, answers)
                case PauseDone(deadline):
                    self.desk.tell("PauseDone", deadline_boottime=deadline)
            if not isinstance(action, PauseDone):
                self.mirror.changed.add(action.offer)

    def _signal(self, offer: int, number: int, now: float) -> list[Action]:
        self.mirror.send()  # whoever takes over must know that it was us
        care = self.cares[offer]
        seen = self.scanner.signal_tree(care.tag, number, care.pid)
        # Before its process is made nothing can be reached, but nothing has ended by itself either.
        reached = seen.main_reached or care.pid is None
        actions = self.policy.signalled(offer, reached, now)
        return actions + self.policy.seen(offer, seen.living, seen.running, now, seen.note)

    def once_more(self, offer: int) -> None:
        self.again.add(offer)
        if self.again_at is None:
            self.again_at = boottime() + RETRY_SECONDS

    def _tick(self) -> None:
        now = boottime()
        prolonged = self.server_watch.look(self.policy, now)
        if prolonged is not None:
            self.do(self.policy.set_lease(prolonged, now))
            self.server_watch.plan(self.policy, now)
        self.do(self.policy.tick(now))
        if self.premises.due is not None and (now >= self.premises.due or self.reviver.is_due(now)):
            self.premises.look(now)  # a worker that is brought back is to find us
            self.spawners.look(now)
        self.reviver.tick(now)
        if self.again_at is not None and now >= self.again_at:
            again, self.again, self.again_at = self.again, set(), None
            for offer in again:
                if offer == OURSELVES:
                    self.premises.open_desk()
                    self.premises.write_info()
                elif offer in self.ends.undropped:
                    self.ends.drop_records(offer)
                elif offer in self.ends.unwritten:
                    self.ends.write(self.cares[offer])
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
                    self.mirror.changed.add(offer)

    def _flush(self) -> None:
        self.ends.drop_cgroups()
        self._share_lease()
        self.mirror.send()
        self.desk.flush()
        self.spawners.flush()

    # -- spawners

    def _share_lease(self) -> None:
        policy, now = self.policy, boottime()
        for child in self.spawners.all:
            child.shared.write(now, policy.deadline, lapsed=policy.lapsed)

    def _met_spawner(self) -> None:
        self.scanner.spared = {child.pid for child in self.spawners.all}
        self.premises.write_info()
        self._share_lease()
        self.mirror.changed.update(self.cares, {OURSELVES})

    def _be_spawner(self, sock: socket.socket, shared: Shared) -> None:
        """The whole life of a spawner, in the child; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the keeper decides when the runner leaves
            keep = {self.premises.lock, sock.fileno()}
            for descriptor in range(3, max(keep) + 1):
                if descriptor not in keep:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.closerange(max(keep) + 1, 65536)
            spawner = Spawner(Lines(sock), self.spool, self.log, self.rundir.path, shared)
            spawner.reflect(self.mirror.of({*self.cares, OURSELVES}))  # the keeper may be killed before it sends one
            spawner.run()
            if not spawner.is_done:
                self.log("the keeper is gone: taking over")
                successor = Keeper(self.settings, self.premises.lock)
                take_over(successor, spawner)
                successor.run()
        except BaseException as error:  # noqa: BLE001 - the log is the only place that is left
            self.log(f"spawner {os.getpid()} failed: {type(error).__name__}: {error}")
        finally:
            os._exit(0)
