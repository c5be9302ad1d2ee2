"""The server is killed, stopped and started again: nothing that was acknowledged is lost, nothing happens twice."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kueue import places
from tests.support.kill_lab import IS_FULL, MORTAL, SMALL, KillLab, lives, scaled

SUBMITTERS = 4


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        yield lab


class Load:
    """Threads that submit jobs in small portions and repeat each request until it is acknowledged.

    `allowed`: how many jobs may have been submitted by now, so that the load lasts as long as the killing does.
    """

    def __init__(self, lab: KillLab, total: int, seed: int) -> None:
        self.lab = lab
        self.total = total
        self.allowed = 0
        self.acknowledged: dict[int, str] = {}
        self.failures: list[BaseException] = []
        self._tokens = iter(range(total))
        self._seed = seed
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(SUBMITTERS)]
        self._stop = threading.Event()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _take(self, size: int) -> list[int]:
        with self._lock:
            return list(itertools.islice(self._tokens, size))

    def _submit(self, number: int) -> None:
        chance = random.Random(self._seed + number)
        try:
            with self.lab.repeating_client(local=number % 2 == 0) as client:
                while not self._stop.is_set() and (tokens := self._take(chance.randint(1, 10))):
                    while tokens[-1] >= self.allowed and not self._stop.is_set():
                        time.sleep(0.01)
                    ranges = [self.lab.range_of("sh", "-c", f"echo token{token} >> effects") for token in tokens]
                    answer = client.submit(ranges)
                    ids = [job for first, last in answer["ids"] for job in range(first, last + 1)]
                    assert len(ids) == len(tokens)
                    with self._lock:
                        assert not set(ids) & set(self.acknowledged), "an id was given twice"
                        self.acknowledged.update(zip(ids, (f"token{token}" for token in tokens), strict=True))
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.failures.append(error)


@pytest.mark.slow
@pytest.mark.timeout(1800 if IS_FULL else 300)
def test_kill_9_of_the_server_at_random_moments_loses_no_job_and_runs_none_twice(lab):
    kills, total = scaled(12, 200), scaled(400, 5000)
    seed = int(os.environ.get("KUEUE_TEST_SEED", "1"))
    chance = random.Random(seed)
    # The whole of the load may run at once: what is tested is not patience.
    lab.start_server(server_settings={"global_max_parallel_jobs": 16})
    worker = lab.start_worker("w1", worker_max_parallel_jobs=16)
    load = Load(lab, total, seed)
    begun = time.monotonic()
    load.start()
    early = 0
    try:
        for kill in range(1, kills + 1):
            load.allowed = min(total, total * kill // kills + SUBMITTERS * 10)
            assert not load.failures, load.failures
            # From the middle of its start to the middle of the work.
            if chance.random() < 0.15:
                time.sleep(chance.uniform(0.0, 0.4))
                early += not lab.answers()
            else:
                lab.until(lab.answers, "it listens", process=lab.server)
                worker.send_signal(signal.SIGHUP)
                time.sleep(chance.uniform(0.0, 1.2))
            lab.kill_server()
            lab.server = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), log="server")
        load.allowed = total
        lab.until(lab.answers, "the last server answers", process=lab.server)
        # Its pauses grow while servers die on it; a hangup ends them, as a person who hurries would.
        worker.send_signal(signal.SIGHUP)
        lab.until(lambda: load.is_over or load.failures, "all is submitted", seconds=120)
        assert not load.failures, load.failures
        assert len(load.acknowledged) == total
        lab.until(lambda: len(lab.rows("succeeded")) >= total, "all have run", seconds=scaled(90, 300))
    finally:
        load.stop()
    rows = lab.rows()
    assert sorted(row["id"] for row in rows) == sorted(load.acknowledged), "each acknowledged id is there once"
    assert {row["state"] for row in rows} == {"succeeded"}
    effects = collections.Counter(lab.lines("effects"))
    assert effects == collections.Counter(load.acknowledged.values()), "each effect is there exactly once"
    lab.no_traceback()
    print(
        f"\n{kills} kills of the server ({early} before it listened), {total} jobs, seed {seed}: "
        f"{len(load.acknowledged)} acknowledged, {sum(effects.values())} effects, {time.monotonic() - begun:.0f} s"
    )


def test_a_hundred_acknowledged_jobs_survive_kill_9_and_ids_go_on(lab):
    lab.start_server()
    done = lab.kueue("cmd", "--hold", *SMALL, "--each-line", "-", stdin="true\n" * 100)
    acknowledged = [int(line) for line in done.stdout.split()]
    lab.kill_server()
    lab.start_server()
    assert sorted(lab.jobs()) == acknowledged == list(range(100))
    assert {row["state"] for row in lab.rows()} == {"held"}
    assert lab.submit("--hold", *SMALL, "true") == 100


def test_pending_and_running_jobs_are_all_there_after_a_restart_and_none_runs_twice(lab):
    lab.start_server()
    lab.start_worker("w1", worker_max_parallel_jobs=2)
    gate = lab.gate()
    jobs = [job for _ in range(12) for job in lab.quick(lab.range_of(*gate.command))]
    lab.until(lambda: len(gate.begun) == 2, "two run")
    running = sorted(gate.begun)
    begin = time.monotonic()
    assert lab.stop_server() == 0
    assert time.monotonic() - begin < 10
    lab.start_server()
    lab.until_online()
    assert sorted(row["id"] for row in lab.rows("running")) == running
    assert len(lab.rows("pending")) == 10
    while lab.rows("pending", "offered", "running"):
        gate.open()
        time.sleep(0.02)
    assert sorted(gate.begun) == jobs
    assert {row["state"] for row in lab.rows()} == {"succeeded"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_orderly_stop_is_told_to_clients_and_workers_come_back(lab, number):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    waiter = lab.popen_kueue("wait-job", str(job))
    follower = lab.popen_kueue("follow", str(job))
    lab.until(lambda: b"wait-job" in cmdline(waiter.pid), "it waits")
    time.sleep(1)  # both are connected by then, or are told the same by the closed port
    begin = time.monotonic()
    lab.server.send_signal(number)
    lab.server.send_signal(signal.SIGHUP)  # a hangup in the middle does not revive it
    assert lab.server.wait(15) == 0
    assert time.monotonic() - begin < 10
    lab.until(lambda: "goodbye" in lab.log("w1"), "the worker was told")
    assert waiter.poll() is None
    lab.start_server()
    lab.until_online()
    gate.open()
    assert waiter.wait(30) == 0
    assert follower.wait(30) == 0
    assert b"Waiting for the server" in waiter.stderr.read()
    assert lab.numbers(job) == [1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_come_back_by_themselves_after_a_server_that_was_long_away(lab):
    lab.start_server(server_settings=MORTAL)
    for name in ("w1", "w2"):
        lab.start_worker(name)
    gate = lab.gate()
    jobs = [job for _ in range(4) for job in lab.quick(lab.range_of(*gate.command))]
    lab.until(lambda: len(gate.begun) == 4, "all run")
    pids = {pid for job in jobs for pid in lab.processes_of(job)}
    lab.stop_server()
    away = scaled(12, 60)
    lab.remains(lambda: all(lives(pid) for pid in pids), away)
    lab.start_server()
    began = time.monotonic()
    for name in ("w1", "w2"):
        lab.until_online(name, 30)
    back = time.monotonic() - began
    assert sorted(row["id"] for row in lab.rows("running")) == sorted(jobs)
    assert pids == {pid for job in jobs for pid in lab.processes_of(job)}
    gate.open()
    for job in jobs:
        lab.end_of(job)
        assert lab.numbers(job) == [1]
    print(f"\nserver away for {away} s: all workers back {back:.1f} s after its start")


def test_the_listing_is_the_same_after_each_of_three_restarts(lab):
    lab.start_server()
    worker = lab.start_worker("w1")
    gate = lab.gate()
    lab.run(*SMALL, "echo", "good")
    lab.run(*SMALL, "sh", "-c", "echo bad >&2; exit 7")
    canceled = lab.submit("--hold", *SMALL, "true")
    lab.kueue("remove-job", str(canceled))
    lab.submit("--hold", *SMALL, "--name", "kept", "true")
    lab.submit("-c", "999", "-r", "1", "true")
    running = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    worker.send_signal(signal.SIGTERM)
    worker.wait(20)

    def told() -> object:
        known = json.loads(lab.kueue("list-jobs", "--json").stdout)["jobs"]
        # What depends on the moment or on who is connected is not the queue's memory.
        return [{key: one[key] for key in one if key not in {"waits", "reason", "silent_since"}} for one in known]

    def details() -> object:
        keys = ("id", "state", "return_code", "comment", "stdout", "stderr", "attempts", "cmd", "name")
        found = lab.details([row["id"] for row in lab.rows()])
        return [{key: one.get(key) for key in keys} for one in found.values()]

    first, first_details = told(), details()
    assert len(first) == 6
    for kind in ("stop", "kill", "stop"):
        if kind == "kill":
            lab.kill_server()
        else:
            lab.stop_server()
        lab.start_server()
        assert told() == first
        assert details() == first_details
    lab.start_worker("w1")
    gate.open()
    lab.end_of(running)


def test_numbers_are_not_used_again_after_clean_up_and_restart(lab):
    lab.start_server()
    lab.start_worker("w1")
    for _ in range(3):
        lab.run(*SMALL, "true")
    assert lab.kueue("clean-jobs", "--all").returncode == 0
    assert lab.jobs() == {}
    lab.stop_server()
    lab.start_server()
    assert lab.submit(*SMALL, "true") == 3
    gone = lab.kueue("remove-job", "2")
    assert gone.returncode == 1
    assert "2" in gone.stderr


def test_a_strangers_pid_in_every_lock_and_pid_file_hinders_nobody(lab):
    lab.start_server()
    lab.start_worker("w1")
    lab.run(*SMALL, "true")
    lab.kill(*lab.runners(), lab.workers["w1"].pid)
    lab.kill_server()
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        start = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19]
        files = [path for path in (lab.folder / "state").rglob("*") if path.is_file()]
        locks = [path for path in files if path.name in {"lock", "pid"} or path.suffix in {".lock", ".pid"}]
        assert len(locks) >= 3
        for path in locks:
            path.write_text(f"{stranger.pid} {start}\n")
        lab.start_server()
        lab.start_worker("w1")
        lab.run(*SMALL, "true")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_second_server_says_so_and_the_first_goes_on(lab):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    before = contents(lab.folder / "state" / "server")
    second = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), log="second")
    assert second.wait(20) == 1
    assert f"running already (pid {lab.server.pid})" in lab.log("second")
    assert contents(lab.folder / "state" / "server") == before
    assert lab.submit(*SMALL, "--hold", "true") == 0


@pytest.mark.parametrize("option", ["", "--recover", "--restore"])
def test_a_second_server_is_refused_also_if_the_lock_of_the_first_was_removed(lab, option):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    server = "kueue.server.main", "-c", str(lab.folder / "lab.toml")
    copy = str(lab.folder / "copy")
    assert lab.start(*server, "--backup", copy, log="copying").wait(20) == 0
    lock = lab.folder / "state" / "server" / "lock"
    lock.unlink()
    words = [word for word in (option, copy if option == "--restore" else "") if word]
    second = lab.start(*server, *words, log="second")
    assert second.wait(20) == 1
    assert f"running already (pid {lab.server.pid})" in lab.log("second")
    assert places.holder(str(lock)) == lab.server.pid
    assert "it is put back" in lab.log("server")
    assert lab.submit(*SMALL, "--hold", "true") == 0


@pytest.mark.parametrize("option", ["", "--recover", "--restore", "--backup"])
def test_a_server_whose_lock_and_sockets_were_removed_keeps_its_state(lab, option):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    assert lab.submit(*SMALL, "--hold", "true") == 0
    server = "kueue.server.main", "-c", str(lab.folder / "lab.toml")
    copy = lab.folder / "copy"
    assert lab.start(*server, "--backup", str(copy), log="copying").wait(20) == 0
    folder = lab.folder / "state" / "server"
    state = (folder / "queue.sqlite").stat().st_ino
    (folder / "lock").unlink()
    for path in folder.glob("*.sock"):
        path.unlink()
    names = {"--restore": str(copy), "--backup": f"{copy}-2"}
    words = [word for word in (option, names.get(option, "")) if word]
    second = lab.start(*server, *words, log="second")
    assert second.wait(30) == 1
    assert "queue.sqlite" in lab.log("second")
    assert "uses" in lab.log("second")
    assert (folder / "queue.sqlite").stat().st_ino == state
    assert not [path.name for path in folder.iterdir() if "before" in path.name or "recovered" in path.name]
    assert lab.submit(*SMALL, "--hold", "true") == 1
    assert places.holder(str(folder / "lock")) == lab.server.pid


def test_what_keeps_the_lock_from_being_put_back_is_told_by_version_and_doctor(lab):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    lock = lab.folder / "state" / "server" / "lock"
    lock.unlink()
    lock.mkdir()
    told = "cannot be put back; no job is given away until it is"
    assert told in lab.kueue("version").stderr
    assert told in lab.kueue("doctor").stdout
    lock.rmdir()
    assert told not in lab.kueue("version").stderr
    assert places.holder(str(lock)) == lab.server.pid


@pytest.mark.parametrize("option", ["", "--recover"])
def test_a_server_that_is_stopped_and_whose_lock_was_removed_keeps_its_state(lab, option):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    assert lab.submit(*SMALL, "--hold", "true") == 0
    folder = lab.folder / "state" / "server"
    os.kill(lab.server.pid, signal.SIGSTOP)
    (folder / "lock").unlink()
    try:
        before = contents(folder)
        words = [option] if option else []
        second = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), *words, log="second")
        assert second.wait(30) == 1
        assert "A server runs that does not answer, and its lock" in lab.log("second")
        assert contents(folder) == before
    finally:
        os.kill(lab.server.pid, signal.SIGCONT)
    assert lab.submit(*SMALL, "--hold", "true") == 1


def test_a_backup_is_made_by_the_server_also_if_its_lock_was_removed(lab):
    lab.start_server()
    lab.until(lambda: "listening on" in lab.log("server"), "all its files are made")
    (lab.folder / "state" / "server" / "lock").unlink()
    assert lab.submit(*SMALL, "--hold", "true") == 0
    (lab.folder / "state" / "server" / "lock").unlink()
    server = "kueue.server.main", "-c", str(lab.folder / "lab.toml")
    copying = lab.start(*server, "--backup", str(lab.folder / "copy"), log="copying")
    assert copying.wait(20) == 0
    assert "1 jobs not over" in lab.log("copying")


@pytest.mark.slow
def test_questions_stay_quick_when_history_and_queue_are_long(lab):
    lab.start_server(client_settings={"on_lost": "rerun"})
    old = lab.quick(lab.range_of("true", held=True, count=scaled(1000, 5000)))
    for at in range(0, len(old), 500):
        lab.ask("RemoveJobs", request_id=f"{at:032x}", ids=[[old[at], min(old[at] + 499, old[-1])]])
    lab.quick(lab.range_of("true", held=False, cores=1, count=1000))
    limits = {("show-job", "17"): 0.5, ("list-jobs", "-n", "10"): 1.0, ("cmd", *SMALL, "true"): 0.5}
    figures = {}
    for words, limit in limits.items():
        # The best of a few: other things run on the machine that tests.
        took = []
        for _ in range(15):
            begin = time.monotonic()
            assert lab.kueue(*words).returncode == 0
            took.append(time.monotonic() - begin)
            if took[-1] < limit:
                break
        figures[words[0]] = min(took)
        assert min(took) < limit, (words, took)
    shares = []
    for _ in range(10):
        before = cpu_seconds(lab.server.pid)
        time.sleep(2)
        shares.append((cpu_seconds(lab.server.pid) - before) / 2)
        if shares[-1] < 0.02:
            break
    assert min(shares) < 0.02, shares
    print(f"\n{len(old)} finished, 1000 pending: {figures}, idle {min(shares):.1%} of a core")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_done_jobs_and_their_output_are_gone_after_the_retention(lab):
    lab.start_server(server_settings={"job_cleanup_after_minutes": 0, "maintenance_interval_seconds": 1})
    lab.start_worker("w1")
    good = lab.run(*SMALL, "sh", "-c", "echo out")["id"]
    bad = lab.run(*SMALL, "sh", "-c", "echo out; exit 3")["id"]
    canceled = lab.submit("--hold", *SMALL, "true")
    lab.kueue("remove-job", str(canceled))
    kept = lab.submit("--hold", *SMALL, "true")
    ended = time.monotonic()
    assert len(list(lab.spool().glob("*/stdout"))) == 2
    lab.until(lambda: {row["id"] for row in lab.rows()} == {kept}, "the three are gone", seconds=120)
    assert 55 < time.monotonic() - ended < 120
    assert lab.states([good, bad, canceled]) == ["unknown"] * 3
    lab.until(lambda: not list(lab.spool().glob("*/stdout")), "their output is gone as well", seconds=60)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def contents(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir() if "-wal" not in path.name}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
