"""How to start a program whose parent ignores SIGCHLD, as some supervisors and web servers do."""

import sys

DEAF = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Put before the words of a command."""
