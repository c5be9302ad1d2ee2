"""The running server's own small decisions."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kueue.config import Config
from kueue.server.service import engine_settings, name_remark
from kueue.settings import ServerSettings


@pytest.mark.parametrize(
    ("name", "addresses", "ours", "word"),
    [
        ("localhost", ["127.0.0.1", "::1"], True, ""),
        ("127.0.0.1", ["127.0.0.1"], True, ""),
        ("ralab04", ["127.0.1.1"], True, "/etc/hosts"),
        ("ralab04", ["127.0.1.1", "192.0.2.7"], True, ""),
        ("ralab04", ["192.0.2.7"], True, ""),
        ("ralab04", ["192.0.2.7"], False, "not this host"),
    ],
)
def test_a_name_that_leads_elsewhere_is_remarked_on(name, addresses, ours, word):
    remark = name_remark(name, addresses, lambda _: ours)
    assert (word in remark) if word else remark == ""


def test_minutes_and_seconds_of_the_settings_reach_the_engine():
    settings = engine_settings(
        Config(
            server=ServerSettings(job_cleanup_after_minutes=2, worker_timeout_seconds=40), global_resources={"genus": 3}
        )
    )
    # Whole minutes, strictly more than the setting.
    assert settings.job_cleanup_after_seconds == 180
    assert settings.worker_timeout_seconds == 40
    assert settings.counters == {"genus": 3}


PROGRAM = """
import sys, threading, trio
from kueue import identity, log, places
from kueue.config import Config
from kueue.server import claim, service
from kueue.settings import ServerSettings
from kueue.storage.memory import MemoryStore

class Slow(MemoryStore):
    def replay(self):
        print("loading", flush=True)
        {ready}.wait()
        return super().replay()

def let_go():
    sys.stdin.read()
    released.set()

released = threading.Event()
threading.Thread(target=let_go, daemon=True).start()
service.STOP_SECONDS = {seconds}
log.start("info")
where = places.Places(places.own_directory(sys.argv[1]))
known = identity.identities("a secret of this test, long enough", "", None)
config = Config(server=ServerSettings(bind_addresses="127.0.0.1"))
with claim.Claim(places.lock_exclusive(where.server_lock)) as own:
    trio.run(service.Service(config, where, Slow(), known, own).run)
print("over", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_signal_to_stop_is_heard_while_the_state_loads(tmp_path, number, hangs):
    program = PROGRAM.format(ready="threading.Event()" if hangs else "released", seconds=0.5 if hangs else 60)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGHUP)
            process.send_signal(number)
            while "stopping" not in (line := process.stderr.readline()):
                assert line
            if not hangs:
                process.stdin.close()
            assert process.wait(30) == 0
            # In time it ends in order, and never listens; else the guard ends it.
            assert process.stdout.read() == ("" if hangs else "over\n")
            assert "listening" not in process.stderr.read()
        finally:
            process.kill()
