"""A process that has the state open, as a server whose lock and sockets were removed has it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_OPEN = """
import sys
from pathlib import Path
from kueue.storage.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]), is_network=sys.argv[2] == "1", ballast_bytes=4096)
print(flush=True)
input()
store.close()
"""


@contextlib.contextmanager
def in_use(state: Path, *, is_network: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which ends in order behind the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(state), str(int(is_network))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(20)
