"""Judges the world by its processes, its disk and what clients were told; it knows nothing of how the engine thinks.

Checks, by the name under which a violation is reported
- ``overlap``: two attempts of one job run unpaused at the same real time.
- ``revoked``: an attempt that the record has given away runs (again).
- ``unstored``: a process starts for an offer that no commit holds; or twice for one offer.
- ``lost``: an acknowledged submission's ids are not there, or were given twice.
- ``done twice``: a job's end is recorded more than once.
- ``outcome``: the recorded end is not what the processes of the deciding attempt did, or they live.
- ``room``: what lives on a machine is more than it has. ``counter``: what runs holds more than a lab-wide total.
- ``line``: two attempts of one line live at the same time, in the room of one.
- ``canceled``: a job starts after its user was told that it is canceled (or will not be started again).
- ``told``: what a watcher was told is not what is stored.
- ``liveness``: the faults have stopped, and still something does not end.
- and what the programs say of themselves: ``engine``, ``invariants``, ``replay``.

After a restored backup (docs/reliability.md) what came after the backup is undone here too; ids and offers stay used, what
was acknowledged before it must be there, and attempts from after it run beside others only where that is documented.

Exempt, as documented: an attempt while neither its worker nor its runner can do anything, and for the blink of an eye
after a machine woke; jobs ended by force; attempts of ``on_lost = "fail"`` jobs that were declared lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from kueue.core import facts as f
from kueue.model import Canceled, Exited, JobRange, Lost, NotStarted, Outcome, Request, Signaled, TimedOut
from kueue.storage.store import Batch
from tests.sim.processes import Tree
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.service import Backup
    from tests.sim.workstation import Workstation

BLINK_SECONDS = 0.2
"""After a machine woke or a guard came back: until processes are stopped. Far below every margin."""


class Violation(AssertionError):
    """A promise is broken. `check` names which."""

    def __init__(self, check: str, text: str, job: int | None) -> None:
        super().__init__(f"[{check}] {text}")
        self.check = check
        self.text = text
        self.job = job

    def __reduce__(self) -> tuple[object, ...]:
        return Violation, (self.check, self.text, self.job)


@dataclass(frozen=True)
class Seen:
    """What the oracle knew at one moment."""

    jobs: frozenset[int]
    offers: frozenset[int]
    revoked: dict[int, str]
    done: dict[int, f.JobDone]
    canceled_at: dict[int, float]
    given_up_at: dict[int, float]


class Oracle:
    """One per world. Every method is called at the real time of what it is about."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stations: dict[str, Workstation] = {}
        self.counters: dict[str, int] = {}
        self.global_slots = 0
        self.trees: dict[int, Tree] = {}
        self.by_job: dict[int, list[Tree]] = {}
        self.by_line: dict[int, list[Tree]] = {}
        self.chained_starts = 0
        """Processes of offers ahead."""
        self.chained_returns = 0
        """Offers ahead that were given back."""
        self.ranges: dict[int, JobRange] = {}
        """Job → the range it came from, of all that were ever stored."""
        self.offers: dict[int, f.JobOffered] = {}
        self.offered_at: dict[int, float] = {}
        self.revoked: dict[int, str] = {}
        self.done: dict[int, f.JobDone] = {}
        self.acknowledged: dict[str, tuple[tuple[int, int], ...]] = {}
        self.wanted_ended: set[int] = set()
        """Jobs that somebody asked to end."""
        self.forced: set[int] = set()
        self.canceled_at: dict[int, float] = {}
        self.given_up_at: dict[int, float] = {}
        """Jobs of which a user was told that they will not be started again."""
        self.heard_ends: dict[int, Outcome | None] = {}
        self.violation: Violation | None = None
        self._left_alone: frozenset[int] = frozenset()
        """Offers that may run on as documented: ended by force, or of a job that runs nowhere else."""
        self.is_restored = False
        self.gone: set[int] = set()
        """Jobs that came after the backup that was restored: the record does not know of them."""
        self._other_life: frozenset[int] = frozenset()
        """Offers made after that backup: they run to their end and decide nothing."""
        self._twice: set[int] = set()
        """Jobs that may run beside an attempt of the other life: they ran at the backup, or a person released them."""
        self._releases: set[int] = set()
        """Jobs of which somebody asks the release at the moment."""

    def fail(self, check: str, text: str, job: int | None = None, cause: BaseException | None = None) -> NoReturn:
        self.violation = Violation(check, f"at {self.world.now:.3f} s: {text}", job)
        raise self.violation from cause

    def require(self, holds: bool, check: str, text: str, job: int | None = None) -> None:
        if not holds:
            self.fail(check, text, job)

    # --- processes ---------------------------------------------------------------------------------------------------

    def tree_began(self, tree: Tree) -> None:
        job, offer = tree.job, tree.offer
        self.world.tell(f"process of offer {offer} begins on {tree.machine.name}", job)
        made = self.offers.get(offer)
        self.require(made is not None, "unstored", f"offer {offer} starts and no commit holds it", job)
        self.require(offer not in self.trees, "unstored", f"offer {offer} starts a second time", job)
        assert made is not None
        self.require(made.job == job, "unstored", f"offer {offer} is of job {made.job}, not {job}", job)
        if job not in self.forced:
            at = self.canceled_at.get(job)
            self.require(at is None, "canceled", f"job {job} starts, canceled since {at}", job)
            at = self.given_up_at.get(job)
            late = at is not None and self.offered_at[offer] > at
            self.require(not late, "canceled", f"job {job} was offered anew after its stop was confirmed at {at}", job)
        self.trees[offer] = tree
        self.by_job.setdefault(job, []).append(tree)
        self._line_of(tree, made)
        self._room_of(tree)

    def tree_runs(self, tree: Tree) -> None:
        """It was stopped, or not there, and runs now."""
        self._look_at(tree)

    def _look_at(self, tree: Tree) -> None:
        if not tree.works:
            return
        if self._is_excused(tree):
            self.world.after(BLINK_SECONDS, lambda: self._look_at(tree))
            return
        reason = self.revoked.get(tree.offer)
        if reason is not None:
            self.fail("revoked", f"offer {tree.offer} runs on {tree.machine.name} although: {reason}", tree.job)
        for other in self.by_job[tree.job]:
            if other is tree or not other.works or self._may_be_beside(tree, other):
                continue
            if self._is_excused(other):
                self.world.after(BLINK_SECONDS, lambda: self._look_at(tree))
                return
            text = f"offers {other.offer} on {other.machine.name} and {tree.offer} on {tree.machine.name} both run"
            self.fail("overlap", text, tree.job)
        self._counters(tree)

    def _may_be_beside(self, tree: Tree, other: Tree) -> bool:
        offers = {tree.offer, other.offer}
        if offers & self._left_alone or offers <= self._other_life:
            return True
        return bool(offers & self._other_life) and tree.job in self._twice | self._releases

    def _is_excused(self, tree: Tree) -> bool:
        machine = tree.machine
        if self.world.now < machine.woken_at + BLINK_SECONDS:
            return True
        return self.world.now < self.stations[machine.name].unguarded_until + 2 * BLINK_SECONDS

    # --- room --------------------------------------------------------------------------------------------------------

    def _line_of(self, tree: Tree, made: f.JobOffered) -> None:
        line = tree.offer if made.line is None else made.line
        if made.line is not None:
            self.chained_starts += 1
        members = self.by_line.setdefault(line, [])
        for other in members:
            lives = other.living and (other.main_lives or not other.may_leave_background)
            is_judged = other.offer not in self._other_life and tree.offer not in self._other_life
            text = f"offers {other.offer} and {tree.offer} of line {line} live on {tree.machine.name}"
            self.require(not (lives and is_judged), "line", text, tree.job)
        members.append(tree)

    def _room_of(self, tree: Tree) -> None:
        station = self.stations[tree.machine.name]
        living = [
            one
            for one in station.trees.values()
            if one.living and (one.main_lives or not one.may_leave_background) and one.offer not in self._other_life
        ]
        slots = sum(one.share.slots for one in living)
        cores = sum(one.share.cores for one in living)
        ram_mb = sum(one.share.ram_mb for one in living)
        has = station.totals
        offers = [one.offer for one in living]
        self.require(
            slots <= has.slots and cores <= has.cores and ram_mb <= has.ram_mb,
            "room",
            f"{tree.machine.name} runs {offers}: {slots} slots, {cores} cores, {ram_mb} MB of {has}",
            tree.job,
        )
        units = [(name, unit) for one in living for name, indices in one.share.named for unit in indices]
        self.require(len(units) == len(set(units)), "room", f"{tree.machine.name} gave a unit twice: {units}", tree.job)

    def _counters(self, tree: Tree) -> None:
        running = [
            one
            for one in self.trees.values()
            if one.works
            and one.job not in self.forced
            and one.offer not in self._left_alone
            and one.offer not in self._other_life
            and not self._is_excused(one)
        ]
        requests = [(one, self._request(one.job)) for one in running]
        for name, total in self.counters.items():
            used = sum(dict(request.counters).get(name, 0) for _, request in requests)
            offers = [one.offer for one, request in requests if dict(request.counters).get(name)]
            self.require(used <= total, "counter", f"{used} of {total} {name} in use by offers {offers}", tree.job)
        slots = sum(request.slots for _, request in requests)
        self.require(
            slots <= self.global_slots, "counter", f"{slots} slots of {self.global_slots} run in the lab", tree.job
        )

    def _request(self, job: int) -> Request:
        return self.ranges[job].request

    # --- the record --------------------------------------------------------------------------------------------------

    def committed(self, batch: Batch) -> None:
        """These facts are on the disk now."""
        for fact in batch.facts:
            match fact:
                case f.JobsSubmitted(first_id=first, ranges=ranges):
                    for entry in ranges:
                        for job in range(first, first + entry.count):
                            self.require(job not in self.ranges, "lost", f"id {job} is given a second time", job)
                            self.ranges[job] = entry
                        first += entry.count
                case f.JobOffered():
                    self.require(
                        fact.offer not in self.offers, "unstored", f"offer {fact.offer} is made twice", fact.job
                    )
                    self.offers[fact.offer] = fact
                    self.offered_at[fact.offer] = self.world.now
                case f.OfferReturned(job=job, offer=offer):
                    self.chained_returns += self.offers[offer].line is not None
                    self._revoke(offer, job, "it was returned as never started")
                case f.AttemptLost(job=job, offer=offer, reason=reason):
                    self._revoke(offer, job, f"it was given away: {reason}")
                case f.JobDone():
                    self._job_done(fact)
        for row in batch.finished:
            self._row(row)

    def _revoke(self, offer: int, job: int, reason: str) -> None:
        self.revoked[offer] = reason
        tree = self.trees.get(offer)
        if tree is not None:
            self._look_at(tree)

    def _job_done(self, fact: f.JobDone) -> None:
        job = fact.job
        self.require(job not in self.done, "done twice", f"job {job} ends again: {fact}", job)
        self.done[job] = fact
        if fact.offer is None:
            for tree in self.by_job.get(job, []):
                if tree.living and (job in self.forced or self.ranges[job].terms.on_lost == "fail"):
                    self._left_alone = self._left_alone | {tree.offer}
            for offer, made in self.offers.items():
                is_judged = offer not in self._left_alone and offer not in self._other_life
                if made.job == job and is_judged and job not in self.forced:
                    self._revoke(offer, job, f"its job ended without it: {fact.outcome}")

    def _row(self, row: f.FinishedJob) -> None:
        job, outcome = row.id, row.outcome
        terms = self.ranges[job].terms
        if isinstance(outcome, Lost):
            lost = [past for past in row.attempts if past.end.startswith("lost:")]
            allowed = terms.on_lost == "fail" or len(lost) >= terms.max_attempts
            self.require(allowed, "outcome", f"job {job} is lost after {len(lost)} lost attempts", job)
        if isinstance(outcome, Canceled):
            self.require(job in self.wanted_ended, "outcome", f"job {job} is canceled and nobody asked for it", job)
        if row.end is None:
            self.require(
                isinstance(outcome, Lost | Canceled), "outcome", f"job {job} is {outcome} without an end record", job
            )
            return
        offer = row.attempts[-1].offer
        self.require(offer not in self.revoked, "outcome", f"job {job} is decided by revoked offer {offer}", job)
        self._decided(job, outcome, self.trees.get(offer), offer)

    def _decided(self, job: int, outcome: Outcome, tree: Tree | None, offer: int) -> None:
        did = f"offer {offer} ended as {tree.main_end}" if tree is not None else f"offer {offer} never had a process"
        if tree is not None:
            left = tree.living and (tree.main_lives or not tree.may_leave_background)
            self.require(not left, "outcome", f"job {job} is recorded as over and lives: {did}", job)
        match outcome:
            case Exited(code):
                is_true = tree is not None and tree.main_end == (code, None)
            case Signaled(signal):
                is_true = tree is not None and tree.main_end == (None, signal)
            case TimedOut(after_seconds=limit):
                is_true = tree is not None and tree.ran_seconds + tree.slept_seconds >= 0.97 * limit - 0.2
            case NotStarted():
                is_true = tree is None
            case Canceled():
                is_true = tree is None or tree.main_end is not None
            case Lost():
                is_true = True
        self.require(is_true, "outcome", f"job {job} is recorded as {outcome}: {did}", job)

    # --- a restored backup -------------------------------------------------------------------------------------------

    def seen(self) -> Seen:
        """All that is undone if the record goes back to this moment."""
        return Seen(
            jobs=frozenset(self.ranges),
            offers=frozenset(self.offers),
            revoked=dict(self.revoked),
            done=dict(self.done),
            canceled_at=dict(self.canceled_at),
            given_up_at=dict(self.given_up_at),
        )

    def restored(self, backup: Backup, with_attempt: set[int]) -> None:
        """The record is that of the backup again; `with_attempt`: jobs that have one there."""
        seen = backup.seen
        self.is_restored = True
        self.gone |= set(self.ranges) - seen.jobs
        self._other_life |= set(self.offers) - seen.offers
        self._twice |= with_attempt
        self.revoked = dict(seen.revoked)
        self.done = dict(seen.done)
        self.canceled_at = dict(seen.canceled_at)
        self.given_up_at = dict(seen.given_up_at)
        self.acknowledged = {
            request_id: ids for request_id, ids in self.acknowledged.items() if ids[0][0] not in self.gone
        }

    @property
    def expected(self) -> list[int]:
        """Jobs that must end in the record."""
        return [job for job in self.ranges if job not in self.gone]

    def release_asked(self, job: int) -> None:
        self._releases.add(job)

    def release_answered(self, job: int) -> None:
        self._releases.discard(job)
        if self.is_restored:
            self._twice.add(job)

    # --- what people are told ----------------------------------------------------------------------------------------

    def submitted(self, request_id: str, ids: tuple[tuple[int, int], ...]) -> None:
        known = self.acknowledged.setdefault(request_id, ids)
        self.require(known == ids, "lost", f"submission {request_id} was acknowledged as {known} and as {ids}")
        for first, last in ids:
            for job in range(first, last + 1):
                self.require(job in self.ranges, "lost", f"job {job} was acknowledged and is not stored", job)

    def ended(self, job: int, outcome: Outcome | None) -> None:
        stored = self.done.get(job)
        self.require(
            stored is not None and stored.outcome == outcome,
            "told",
            f"job {job} was told as {outcome}, is {stored}",
            job,
        )

    # --- when all is over --------------------------------------------------------------------------------------------

    def over(self, stored: dict[int, f.FinishedJob]) -> None:
        """`stored`: the finished rows in the store at the end."""
        given: set[int] = set()
        for request_id, ids in self.acknowledged.items():
            for first, last in ids:
                for job in range(first, last + 1):
                    self.require(job not in given, "lost", f"id {job} was given to two submissions ({request_id})", job)
                    given.add(job)
                    self.require(job in stored, "lost", f"job {job} was acknowledged and is nowhere", job)
        unasked = sorted(set(self.expected) - given)
        self.require(not unasked, "lost", f"jobs {unasked} are there beside those that were acknowledged: made twice?")
        for job, fact in self.done.items():
            self.require(stored[job].outcome == fact.outcome, "done twice", f"the outcome of job {job} changed", job)
