"""Real runner processes below one worker's directory, spoken to through its `RunnerSet`."""

import contextlib
import json
import os
import signal
import time
from contextlib import asynccontextmanager

import trio

from kueue.runner.kernel import is_locked
from kueue.runner.tree import Scanner, lives, tag_of
from kueue.worker.orders import SetLease, StartAttempt
from kueue.worker.runner_link import RunnerSet

PATIENCE_SECONDS = 60  # for a loaded machine; a failure, never a measure
QUEUE = "queue"
WAIT = ("sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 7")


def boottime():
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def runner_pids(state):
    """Runner → living pids, the keeper first."""
    found = {}
    for path in (state / "runners").iterdir():
        with contextlib.suppress(OSError, ValueError):
            info = json.loads((path / "info.json").read_text())
            pairs = [info["keeper"], *info["spawners"]]
            found[path.name] = [pid for pid, start in pairs if lives(pid, start)]
    return found


def kill_runner(state, name):
    pids = runner_pids(state).get(name, [])
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Lab:
    """A worker's directory with its runners, and what they are told to run."""

    def __init__(self, path):
        self.state = path / "state"
        self.state.mkdir()
        self.work = path / "work"
        self.work.mkdir()
        self.identity = str(path)
        self.tags = set()

    @asynccontextmanager
    async def worker(self, *, lease=3600.0, orderly=True, linger_seconds=30.0, **more):
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                link = RunnerSet(self.state, self.identity, linger_seconds=linger_seconds, **more)
                await link.open(nursery)
                if lease:
                    await link.send(SetLease(deadline_boottime=boottime() + lease))
                yield link
                await link.close(orderly=orderly)
                nursery.cancel_scope.cancel()

    def order(self, offer, *argv, **more):
        self.tags.add(tag_of(QUEUE, self.identity, offer))
        fields = {"env": (("PATH", "/usr/local/bin:/usr/bin:/bin"),), "cwd": str(self.work), **more}
        return StartAttempt(offer=offer, job=offer, queue_id=QUEUE, argv=argv, **fields)

    def tree(self, offer):
        tag = tag_of(QUEUE, self.identity, offer)
        return Scanner().look([tag])[tag].pids

    def close(self):
        for name in list(runner_pids(self.state)):
            while is_locked(str(self.state / "runners" / name / "lock")):
                kill_runner(self.state, name)
                time.sleep(0.01)
        for tag in self.tags:
            while Scanner().signal_tree(tag, signal.SIGKILL).living:
                time.sleep(0.01)


async def hear(link, kind, offer=None):
    """The next event of this kind; those before it are dropped."""
    async for event in link.events:
        if isinstance(event, kind) and (offer is None or event.offer == offer):
            return event
    raise AssertionError("the events ended")


async def wait_until(condition):
    while not condition():  # noqa: ASYNC110 - it is another process that we wait for
        await trio.sleep(0.01)
