"""The shared secret is changed while everything runs: nobody is refused, nothing pauses, and the old one ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

import pytest

from kueue import client, config, identity, places, transport
from tests.support.kill_lab import MORTAL, KillLab
from tests.support.lab import SECRET

pytestmark = pytest.mark.slow

COMMON = "common_settings"


class Machines(KillLab):
    """Each worker has a settings file of its own, as on machines without a shared home."""

    def secret(self, *words, code=0):
        done = self.kueue("secret", *words)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def secrets_of(self, name):
        common = config.load(str(self.folder / f"{name}.toml")).common
        return {"shared_secret": common.shared_secret, "shared_secret_previous": common.shared_secret_previous}

    def copy_secrets(self, name):
        """What a person does by copying the file: worker `name` gets the secrets of the server's file."""
        common = {**self.settings[COMMON], **self.secrets_of("lab")}
        self.config(name, **{COMMON: common}, worker_settings={**self.settings["worker_settings"], "worker_name": name})

    def identities(self):
        secrets = self.secrets_of("lab")
        cache = places.find(str(self.folder / "state")).cache
        return identity.identities(secrets["shared_secret"], secrets["shared_secret_previous"], cache)

    def ask_parts(self, kind, **fields):
        """With the secrets that stand in the server's file now."""
        if self._client is None:
            self._client = client.Client(
                transport.Server("127.0.0.1", self.port, (), self.identities()), tell=lambda _: None
            )
        return super().ask_parts(kind, **fields)

    def info(self):
        """Over a new connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
        return self.ask("ServerInfo")

    def old_ones(self):
        return self.info().get("old_secret_workers", [])

    def are_online(self):
        return {name: row["state"] for name, row in self.machines().items()} == {"w1": "online", "w2": "online"}


@pytest.fixture
def lab(tmp_path):
    with Machines(tmp_path) as lab:
        yield lab


JOB = "trap 'echo $KUEUE_JOB_ID >> continued' CONT; until [ -e go ]; do sleep 0.5; done; exit $((KUEUE_JOB_ID % 7))"
"""SIGSTOP leaves no trace in the stopped process, the SIGCONT after it does."""


@pytest.mark.parametrize("first", ["server", "workers"])
def test_twenty_jobs_do_not_notice_that_the_secret_is_changed(lab, first):
    lab.start_server(server_settings=MORTAL)
    for name in ("w1", "w2"):
        lab.start_worker(name)
    jobs = lab.quick(lab.range_of("sh", "-c", JOB, count=20))
    lab.until(lambda: {lab.state(job) for job in jobs} == {"running"}, "all run")
    lab.until(lambda: len(lab.machines()["w1"]["running"]) == len(lab.machines()["w2"]["running"]), "on both workers")

    told = lab.secret("rotate")
    assert "kueue secret finish" in told
    assert lab.secrets_of("lab")["shared_secret_previous"] == SECRET
    assert "A rotation is under way" in lab.secret("rotate", code=1)
    # The command has the new secret first, and is let in by a server that has never heard of it.
    assert lab.kueue("list-jobs").returncode == 0
    assert "does not have the new secret" in lab.secret("finish", code=1)

    if first == "server":
        lab.server.send_signal(signal.SIGHUP)
        lab.until(lambda: lab.old_ones() == ["w1", "w2"], "the server has the new secret")
        # A worker that is started again now knows the old one alone.
        lab.workers["w1"].terminate()
        lab.workers["w1"].wait(20)
        lab.workers["w1"] = lab.start("kueue.worker.main", "-c", str(lab.folder / "w1.toml"), log="w1")
        lab.until(lambda: lab.old_ones() == ["w1", "w2"] and lab.are_online(), "workers with the old secret are let in")
        assert "Connected with the old secret: w1, w2" in lab.secret("finish", code=1)
    for name in ("w1", "w2"):
        lab.copy_secrets(name)
        lab.workers[name].send_signal(signal.SIGHUP)
    if first == "workers":
        lab.until(lambda: lab.log("w1").count("taken in by") == 2, "the worker came again, by the old secret")
        lab.until(lab.are_online, "workers with both secrets are let in by a server with the old one")
        lab.server.send_signal(signal.SIGHUP)
        lab.until(lambda: lab.old_ones() == ["w1", "w2"], "the server has the new secret")
        lab.secret("reload")
    lab.until(lambda: lab.info()["secrets"][0] == lab.identities()[0].fingerprint, "the server has the new secret")
    lab.until(lambda: lab.old_ones() == [] and lab.are_online(), "all workers have the new secret")
    assert "Everybody has the new secret" in lab.secret("status")

    shutil.copy(lab.folder / "lab.toml", lab.folder / "both.toml")
    lab.secret("finish")
    assert lab.secrets_of("lab")["shared_secret_previous"] == ""
    for name in ("w1", "w2"):
        lab.copy_secrets(name)
    assert "worker w1" in lab.secret("reload")
    lab.until(lambda: len(lab.info()["secrets"]) == 1, "the server has dropped the old secret")
    lab.until(lab.are_online, "the workers are there")
    old = lab.config("old", **{COMMON: {**lab.settings[COMMON], "shared_secret": SECRET}})
    refused = lab.kueue("-c", str(old), "list-jobs", timeout=30)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Authentication failed!" in refused.stderr

    (lab.folder / "go").touch()
    lab.until_all(jobs, "succeeded", "failed")
    ends = {row["id"]: row["return_code"] for row in lab.rows() if row["id"] in jobs}
    assert ends == {job: job % 7 for job in jobs}
    assert {tuple(lab.numbers_of(job)) for job in jobs} == {(1,)}
    assert lab.lines("continued") == []
    lab.no_traceback()


def test_a_reload_does_not_pass_over_a_server_whose_lock_names_nobody(lab):
    """It was started on a disk that was full to the last byte."""
    lab.start_server()
    (lock,) = lab.folder.glob("**/server/lock")
    os.truncate(lock, 0)
    assert f"its pid is not known: somebody holds {lock}." in lab.secret("reload", code=1)
    lab.start_worker("w1")
    done = lab.kueue("secret", "reload")
    assert done.returncode == 1
    assert "worker w1" in done.stdout
    assert "its pid is not known" in done.stderr


def test_whoever_is_connected_by_a_secret_that_ends_is_sent_away(lab):
    lab.start_server()
    with contextlib.closing(lab.peer("stranger")):
        lab.secret("rotate")
        lab.server.send_signal(signal.SIGHUP)
        lab.until(lambda: len(lab.info()["secrets"]) == 2, "both count")
        lab.secret("finish", "--force")
        lab.server.send_signal(signal.SIGHUP)
        lab.until(lambda: len(lab.info()["secrets"]) == 1, "the old one is gone")
        lab.until(lambda: "stranger" not in lab.machines(), "the stranger is sent away")
