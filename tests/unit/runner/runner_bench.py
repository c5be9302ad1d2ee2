"""A real runner in a directory of its own, spoken to over its socket, and ended with all it started."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

from kueue.runner.kernel import is_locked
from kueue.runner.rundir import Rundir
from kueue.runner.tree import Scanner, status, tag_of
from kueue.worker.runner_program import runner_archive

PATIENCE_SECONDS = 30  # for a loaded machine; a failure, never a measure
QUEUE = "queue"


def boottime():
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wait_until(condition, what=""):
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"did not happen: {what or condition}")


def is_alive(pid):
    now = status(pid)
    return now is not None and now.lives


class Bench:
    """A state directory with runners in it."""

    def __init__(self, path):
        self.identity = str(path)  # tests run side by side, and equal tags are one tree
        self.state = path / "state"
        self.state.mkdir()
        self.work = path / "work"
        self.work.mkdir()
        self.archive = self.state / "runner.pyz"
        self.archive.write_bytes(runner_archive())
        self.desks = []
        self.tags = set()

    def start_runner(self, name="one", linger=30.0, version="1", ours=None):
        """`ours`: directory of a cgroup that it may divide."""
        command = [sys.executable, "-I", "-S", "-B", str(self.archive), "run", "--state", str(self.state)]
        command += ["--runner", name, "--identity", self.identity, "--version", version, "--linger", str(linger)]
        if ours is not None:
            command = ["sh", "-c", f'echo 0 > {ours}/cgroup.procs; exec "$@"', "sh", *command, "--delegated", "yes"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, done
        return self.attach(name)

    def attach(self, name="one", **more):
        return wait_until(lambda: self._attach(name, more), f"attach to {name}")

    def _attach(self, name, more):
        """None: whoever listened was a spawner that still had the socket of its dead keeper."""
        desk = Desk(self, name)
        self.desks.append(desk)
        try:
            desk.send("Attach", **more)
            desk.attached = desk.expect("Attached")
        except (ConnectionError, EOFError):
            return None
        return desk

    def folder(self, offer):
        return self.state / "spool" / str(offer)

    def text(self, offer, stream="stdout"):
        return (self.folder(offer) / stream).read_text()

    def info(self, name="one"):
        return json.loads((self.state / "runners" / name / "info.json").read_text())

    def keeper(self, name="one"):
        return self.info(name)["keeper"][0]

    def spawner(self, name="one"):
        return self.info(name)["spawners"][0][0]

    def is_locked(self, name="one"):
        return is_locked(str(self.state / "runners" / name / "lock"))

    def tree(self, offer):
        """Living processes of an attempt."""
        tag = tag_of(QUEUE, self.identity, offer)
        return Scanner().look([tag])[tag].pids

    def close(self):
        for desk in self.desks:
            desk.close()
        logs = [path.read_text() for path in (self.state / "runners").glob("*/log")]
        self._end_all()
        failures = "".join(log for log in logs if "failed" in log or "Traceback" in log)
        if failures:
            raise AssertionError(failures)

    def _end_all(self):
        scanner = Scanner()
        for place in (self.state / "runners").glob("*"):  # there is none if the test was skipped
            with contextlib.suppress(OSError, ValueError):
                _end(place)
            with contextlib.suppress(AssertionError):
                # A spawner may have taken over in the moment between, and have no lock yet.
                while not Rundir(str(self.state), place.name).is_dead():
                    _end(place)
                    time.sleep(0.01)
        for tag in self.tags:
            while scanner.signal_tree(tag, signal.SIGKILL).living:
                time.sleep(0.01)


def _end(place):
    """Kill keeper and spawners of this runner. All are stopped first: who sees another die takes over, and where the lock
    was replaced nothing tells of it for a moment.
    """
    info = json.loads((place / "info.json").read_text())
    alive = [pid for pid, start in [info["keeper"], *info["spawners"]] if (now := status(pid)) and now.start == start]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in alive:
            os.kill(pid, number)


class Desk:
    """One attachment."""

    def __init__(self, bench, name):
        self.bench = bench
        self.name = name
        self.rest = b""
        self.kept = []
        self.sock = wait_until(self._connect, f"attach to {name}")

    def _connect(self):
        try:
            folder = os.open(self.bench.state / "runners" / self.name, os.O_PATH)
        except FileNotFoundError:
            return None
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"/proc/self/fd/{folder}/socket")
        except OSError:
            sock.close()
            return None
        finally:
            os.close(folder)
        sock.settimeout(PATIENCE_SECONDS)
        return sock

    def send(self, kind, **fields):
        self.sock.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def lease(self, seconds=3600.0):
        deadline = boottime() + seconds
        self.send("SetLease", deadline_boottime=deadline)
        return deadline

    def start(self, offer, *argv, env=None, **more):
        self.bench.tags.add(tag_of(QUEUE, self.bench.identity, offer))
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin"} if env is None else env
        order = {
            "offer": offer,
            "job": offer,
            "queue_id": QUEUE,
            "argv": list(argv),
            "env": [[k, v] for k, v in env.items()],
            "cwd": str(self.bench.work),
        }
        self.send("StartAttempt", **{**order, **more})

    def expect(self, kind, offer=None, **fields):
        """The next event of this kind; others are kept for later calls."""

        def fits(event):
            return (
                event["type"] == kind
                and (offer is None or event["offer"] == offer)
                and all(event[name] == value for name, value in fields.items())
            )

        for event in self.kept:
            if fits(event):
                self.kept.remove(event)
                return event
        while True:
            event = self._next()
            if fits(event):
                return event
            self.kept.append(event)

    def end(self, offer):
        return self.expect("Ended", offer)["end"]

    def run(self, offer, *argv, **more):
        self.start(offer, *argv, **more)
        return self.end(offer)

    def drain(self):
        """All that the runner says until it has answered a ping."""
        self.send("Ping", number=77)
        self.expect("Pong")
        return self.kept

    def _next(self):
        while b"\n" not in self.rest:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError("the runner closed the connection")
            self.rest += data
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def close(self):
        self.sock.close()
