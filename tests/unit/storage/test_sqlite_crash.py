"""What was acknowledged survives kill -9 of the server at any moment."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading

import pytest

from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import live_ids

COMMITTER = """
import sys
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, done, finished, job_range, offered, submitted
store = SqliteStore(sys.argv[1], ballast_bytes=4096, is_network=sys.argv[2] == "network")
job = store.aggregates().next_job + 1
while True:
    facts = [submitted(job, job_range(20)), offered(job, job), done(job), done(job + 7)]
    rows = (finished(job), finished(job + 7))
    store.commit(batch(*facts, finished=rows, next_job=job + 19))
    print(job + 19, flush=True)
    if job % 15 == 1:
        store.tidy()
    job += 20
"""


@pytest.mark.parametrize("kind", ["local", "network"])
def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path, kind):
    path = tmp_path / "state.sqlite"
    acknowledged = 0
    for _ in range(4):
        wanted = random.randrange(1, 60)
        with subprocess.Popen(
            [sys.executable, "-c", COMMITTER, str(path), kind], stdout=subprocess.PIPE, text=True
        ) as child:
            for count, line in enumerate(child.stdout):
                acknowledged = int(line)
                if count == wanted:
                    # The child goes on committing while the signal is on its way: a moment nobody chooses.
                    threading.Thread(target=child.send_signal, args=(signal.SIGKILL,)).start()
        assert child.returncode == -signal.SIGKILL
        store = SqliteStore(path, ballast_bytes=4096, is_network=kind == "network")
        known = store.aggregates().next_job
        # One batch more than was printed may have been stored when the signal came.
        assert known - acknowledged in {0, 20}
        live = live_ids(store.replay())
        over = [row.id for row in store.finished(limit=10_000)]
        assert sorted(live + over) == list(range(1, known + 1))
        assert len(over) == known // 10
        assert all(store.finished_job(job).end is not None for job in over[:5])
        store.close()
