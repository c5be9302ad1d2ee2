"""The command ``kueue_worker``: options, exit code, and the last sentence of a worker that cannot run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kueue import __version__
from kueue.errors import KueueError

PROGRAM = "kueue_worker"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after an orderly stop, 1 when the worker cannot run."""
    options = _parser().parse_args(arguments)
    import trio  # noqa: PLC0415  --help and --version do not wait for it

    from kueue import log  # noqa: PLC0415
    from kueue.worker.program import Program  # noqa: PLC0415

    log.start("info")
    try:
        trio.run(Program(options.config, options.name).run)
    except KueueError as error:
        sys.stderr.write(f"Error: {error}\n" + (f"Hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Runs jobs of the kueue server on this machine, in the foreground."
    )
    parser.add_argument(
        "-c", "--config", metavar="PATH", type=_absolute, help="configuration file instead of the usual one"
    )
    parser.add_argument("--name", default="", help="name of this worker; another name is another worker")
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def _absolute(path: str) -> str:
    """The worker leaves the directory it was started in."""
    return str(Path(path).expanduser().absolute())


if __name__ == "__main__":
    sys.exit(main())
