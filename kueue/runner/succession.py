"""How a keeper comes by attempts that it did not start itself: from a keeper or from a whole runner that died."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kueue.runner import cgroup
from kueue.runner.attempt import Terms
from kueue.runner.care import Care, terms_of
from kueue.runner.children import boottime
from kueue.runner.mains import read_mains
from kueue.runner.rundir import Rundir, others
from kueue.runner.server_watch import ServerWatch
from kueue.runner.spawner import Spawner
from kueue.runner.spool import EXIT, MAIN, Record
from kueue.runner.tree import is_same, read_tag, status, tag_of

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper

UNKNOWN_SECONDS = 1.0
"""How long a keeper may wait for what it has killed; nothing else is done meanwhile."""


def take_over(keeper: Keeper, spawner: Spawner) -> None:
    """Go on for a keeper that died. We were its spawner: its mirror and our children are all there is."""
    now = boottime()
    mirror = spawner.mirror
    keeper.policy.deadline = spawner.shared.deadline
    # With the rows, as of one moment: what the keeper did about it since then is not known to be done.
    keeper.policy.lapsed = bool(mirror.get("lapsed", True))
    keeper.policy.pause_told = bool(mirror.get("pause_told", True))
    if mirror.get("shut_down"):
        keeper.policy.is_leaving = True
        keeper.policy.shut_down_from, keeper.policy.shut_down_until = mirror["shut_down"]
    path, seconds = mirror.get("server_lock") or ["", 0.0]
    keeper.server_watch = ServerWatch(bytes.fromhex(path).decode("utf-8", "surrogateescape"), seconds)
    keeper.server_watch.plan(keeper.policy, now)
    keeper.reviver.adopt(mirror.get("reviver") or {}, now)
    rows = {int(offer): row for offer, row in (mirror.get("rows") or {}).items()}
    written, mirrored = _starts(keeper), _mirrored(keeper, rows, spawner)
    for offer in mirrored.keys() - written.keys():
        keeper.log(f"the record of attempt {offer} is lost: it goes on from memory")
        keeper.spool.claim(offer, mirrored[offer], keeper.rundir.runner)
    # Oldest first: what waits in a line is given back when it comes up, before any that waits behind it is known.
    for offer, record in sorted({**mirrored, **written}.items(), key=_offer):
        _adopt(keeper, offer, record, rows.get(offer), spawner)
    since = spawner.shared.stood_in_since
    if since is not None:
        keeper.do(keeper.policy.stood_in(since, boottime()))


def _starts(keeper: Keeper) -> dict[int, Record]:
    """Our attempts by offer, as far as the spool can be read."""
    own = keeper.rundir.runner
    try:
        return {offer: record for offer, record in keeper.spool.starts() if record.get("runner") == own}
    except OSError as error:
        keeper.log(f"the spool cannot be read: {error}")
        return {}


def _mirrored(keeper: Keeper, rows: dict[int, dict[str, Any]], spawner: Spawner) -> dict[int, Record]:
    """The same from the mirror, of what has begun or ended: a disk may have lost a record, or the job removed it, and
    the job goes on. Of what was only ordered there is nothing to look after.
    """
    begun = {}
    for offer, row in rows.items():
        care = Care.from_start(offer, row["care"])
        care.adopt(row["care"])
        has_begun = care.pid is not None or offer in spawner.pids or offer in spawner.ends
        if row["policy"] is not None and (has_begun or care.end is not None):
            begun[offer] = care.start_record(terms_of(row["policy"]["terms"]), keeper.rundir.runner)
    return begun


def _offer(entry: tuple[int, Record]) -> int:
    return entry[0]


def _is_over(keeper: Keeper, care: Care) -> bool:
    """Its end was written down already; then it is only kept until that was acknowledged."""
    end = care.end = keeper.spool.read(care.offer, EXIT) or care.end
    if end is None:
        return False
    care.executed = end["started_wall"] is not None
    care.started_wall = end["started_wall"]
    keeper.policy.over(care.offer, end["outcome"]["type"] == "lost")
    keeper.ends.drop_tree(care)
    return True


def _adopt(keeper: Keeper, offer: int, record: Record, row: dict[str, Any] | None, spawner: Spawner) -> None:
    care = Care.from_start(offer, record)
    if row is not None and row["policy"] is not None:
        care.adopt(row["care"])
    keeper.take_in(care)
    if _is_over(keeper, care):
        return
    if row is not None and row["policy"] is not None:
        keeper.policy.adopt(row["policy"])
        if care.pid is not None and care.start:
            keeper.scanner.know_main(care.tag, care.pid, care.start)
    else:
        # Whether it had to wait for others of its line shows in what there is of it.
        keeper.policy.take_up(offer, terms_of(record), boottime())
        keeper.policy.lapsed = False  # if there is no lease, it has still to be paused
    attempt = keeper.policy.attempts[offer]
    if care.cgroup and not attempt.paused and boottime() < keeper.policy.deadline:
        cgroup.thaw(care.cgroup)  # the keeper may have died between freezing it and telling us
    if attempt.phase == "over":  # decided, and the record did not make it: decide again
        keeper.policy.reopen(offer)
    if attempt.phase == "queued" and (offer in spawner.pids or offer in spawner.ends):
        attempt.phase = "starting"  # its order came to us, the news of it did not
    if attempt.phase == "queued":
        keeper.do(keeper.policy.start_refused(offer, "its keeper died before it was started", boottime()))
        return
    if attempt.main_ended:
        care.exit = care.exit or spawner.ends.get(offer) or keeper.spool.read(offer, MAIN)
        _know_main(keeper, care, (care.pid or 0, care.start))
        return
    if offer in spawner.pids:
        pid = spawner.pids[offer]
        birth = status(pid)  # our child, and not reaped: it is there
        keeper.course.forked(care, pid, birth.start if birth else 0)
        keeper.orphans.children[pid] = offer
        if not care.executed:
            care.executed = True
            keeper.do(keeper.policy.started(offer, care.started_at or boottime()))
        return
    keeper.orphans.find(care, spawner.ends.get(offer))


def _know_main(keeper: Keeper, care: Care, main: Sequence[int]) -> None:
    """`main`: number and start time; 0: not known."""
    pid, start = main
    if start:
        ended = care.exit or {}
        keeper.scanner.know_main(care.tag, pid, start, ended["at"] if ended.get("held") else 0.0)


def inherit(keeper: Keeper, known: Sequence[dict[str, Any]] = ()) -> None:
    """Take in what runners have left that are dead: kill it, prove it gone, tell it. `known`: see `Keeper.inherit`."""
    own = keeper.rundir.runner
    places = {place.runner: place for place in others(keeper.rundir.state, own)}
    dead = {name: place for name, place in places.items() if place.is_dead()}
    alive = {name: name not in dead for name in places} | {own: False}
    made = {name: read_mains(place.path) for name, place in dead.items()}
    recorded = set()
    for offer, record in keeper.spool.starts():
        recorded.add(offer)
        runner = str(record.get("runner"))
        if runner not in alive:  # somebody has removed its directory
            alive[runner] = runner.isprintable() and not Rundir(keeper.rundir.state, runner).is_dead()
        if alive[runner] or offer in keeper.cares or offer in keeper.ends.undropped:
            continue
        keeper.log(f"attempt {offer} was left behind by runner {runner}")
        noted = made.get(runner, {}).get(offer)
        main = noted or record.get("main") or (0, 0)
        care = Care.from_start(offer, record)
        care.exit = keeper.spool.read(offer, MAIN)
        care.started_wall = record.get("started_wall")
        care.start = noted[1] if noted else 0  # that of an older record may count from another boot
        if care.exit is not None:
            care.began(care.exit["at"], care.exit["wall"])
        else:
            care.began(boottime(), time.time())
        # That directory goes when all are taken in, and we may die before this one is proven gone.
        keeper.spool.claim(offer, {**record, "main": main, "started_wall": care.started_wall}, own)
        keeper.take_in(care)
        if _is_over(keeper, care):
            continue
        care.executed = True
        _know_main(keeper, care, main)
        ended = (care.exit["code"], care.exit["signal"]) if care.exit else None
        keeper.do(keeper.policy.inherit(offer, terms_of(record), ended, boottime()))
    recorded.update(_inherit_unrecorded(keeper, known, recorded, made))
    for name, place in dead.items():
        for offer, (pid, start) in made[name].items():
            if offer not in recorded and is_same(pid, start):
                _end_unknown(keeper, offer, pid)
        place.remove()


def _inherit_unrecorded(
    keeper: Keeper, known: Sequence[dict[str, Any]], recorded: set[int], made: dict[str, dict[int, tuple[int, int]]]
) -> list[int]:
    """Take in those whose records somebody has removed, and of which something is left. Returns their offers.

    `made`: of each dead runner, the main processes that it noted.
    """
    missing = {}
    for fields in known:
        offer, job, queue_id = fields["offer"], fields["job"], fields["queue_id"]
        if offer not in recorded and offer not in keeper.cares and offer not in keeper.ends.undropped:
            tag = tag_of(queue_id, keeper.settings.identity, offer)
            care = Care(offer, job, queue_id, tag, fields.get("memo", ""), executed=True)
            care.started_wall = fields.get("started_wall")
            missing[tag] = care
            for mains in made.values():
                if offer in mains:
                    keeper.scanner.know_main(tag, *mains[offer])
    taken = []
    for tag, seen in keeper.scanner.look(missing).items() if missing else ():
        care = missing[tag]
        if not seen.living or care.offer in keeper.cares:
            keeper.scanner.forget(tag)
            continue
        keeper.log(f"attempt {care.offer} was left behind without a record: it is ended")
        keeper.spool.claim(care.offer, care.start_record(Terms(), keeper.rundir.runner), keeper.rundir.runner)
        keeper.take_in(care)
        keeper.do(keeper.policy.inherit(care.offer, Terms(), None, boottime()))
        taken.append(care.offer)
    return taken


def _end_unknown(keeper: Keeper, offer: int, pid: int) -> None:
    """End what a dead runner has made and has no record any more: the worker calls it gone when we have answered."""
    tag = read_tag(pid)
    if tag is None:
        return
    keeper.log(f"attempt {offer} was left behind without a record: it is killed")
    end = boottime() + UNKNOWN_SECONDS
    while keeper.scanner.signal_tree(tag, signal.SIGKILL, pid).living and boottime() < end:
        time.sleep(0.01)
    keeper.scanner.forget(tag)
