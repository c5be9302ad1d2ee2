"""The runner as a program: packed into one file of the state directory and started from there.

Rules
- The file is named by its version, which holds the checksum of its content: a runner never runs what was changed under
  it, and an upgrade makes a new file.
- A runner gets nothing of what systemd meant for the worker alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

import trio

from kueue import __version__, threads, whole_file
from kueue.errors import KueueError
from kueue.worker.scope import Scopes

LAUNCH_SECONDS = 30.0  # Python starts from a cold, slow disk
SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")
SYSTEMD_PREFIXES = ("WATCHDOG_", "LISTEN_")

T = TypeVar("T")


class RunnerProgram:
    """The runner of this release. `state_dir` is the worker's own directory.

    `scopes`: where a runner is to be put; None: a new session has to do. `is_local`: to look at it never hangs.
    """

    def __init__(
        self, state_dir: Path, identity: str, *, scopes: Scopes | None, linger_seconds: float, is_local: bool = True
    ) -> None:
        self._state = state_dir
        self._identity = identity
        self._scopes = scopes
        self._linger_seconds = linger_seconds
        self._is_local = is_local
        self._path = Path()
        self._is_whole = False
        """The file was seen to hold what it should."""
        self.version = ""
        """Of the release with the checksum of the program; known after `prepare`."""

    def prepare(self) -> None:
        """Write the file, and drop those of other releases. Blocks on the disk.

        Raises `KueueError`: the version is known all the same unless kueue itself cannot be read, and each launch tries
        again.
        """
        self._pack()
        with contextlib.suppress(OSError):
            for old in self._state.glob("runner-*.pyz"):
                if old != self._path:  # a runner has loaded all it needs before it serves anybody
                    with contextlib.suppress(OSError):
                        old.unlink()

    async def launch(self, meet: Callable[[Path], Awaitable[T]]) -> T:
        """Start one and return what `meet` makes of its directory; `meet` raises `KueueError` if it does not answer.

        Raises `KueueError`.
        """
        prefix = await self._scopes.prefix(token := secrets.token_hex(4)) if self._scopes is not None else ()
        if self._scopes is not None and prefix:
            try:
                return await meet(await self._launch(token, prefix))
            except KueueError as error:
                self._scopes.failed(str(error))
        return await meet(await self._launch(secrets.token_hex(4), ()))

    async def _launch(self, token: str, prefix: Sequence[str]) -> Path:
        """`prefix`: what puts it into a scope of its own, if any."""
        await threads.patiently(self._pack)
        name = f"{self.version}-{token}"
        command = [*prefix, *self._python(), "run", "--state", str(self._state), "--runner", name]
        command += ["--identity", self._identity, "--version", self.version, "--linger", str(self._linger_seconds)]
        if prefix:
            command += ["--delegated", "yes"]
        if not self._is_local:
            command += ["--local", "no"]
        try:
            with threads.wanted("start of the runner"), trio.fail_after(LAUNCH_SECONDS):
                result = await trio.run_process(
                    command, check=False, env=_clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
        except OSError as error:
            raise KueueError(f"The runner cannot be started: {error}", hint="Try the command by hand.") from error
        except trio.TooSlowError as error:
            what = f"The start of the runner has taken longer than {LAUNCH_SECONDS:.0f} s."
            raise KueueError(what, hint="If it comes up after all, it is used.") from error
        folder = self._state / "runners" / name
        if result.returncode:
            raise KueueError("The runner cannot be started.", hint=f"{folder}/log says why.")
        return folder

    def _pack(self) -> None:
        """The file is there after this, also if somebody has removed it."""
        with contextlib.suppress(OSError):
            if self._is_whole and self._path.is_file():
                return
        try:
            content = runner_archive()
        except OSError as error:
            raise KueueError(
                f"{error.filename or 'The program of the runner'} cannot be read: {error.strerror}.",
                hint="No runner of the jobs can be started until that is mended.",
            ) from error
        self.version = f"{__version__}+{hashlib.sha256(content).hexdigest()[:10]}"
        self._path = self._state / f"runner-{self.version}.pyz"
        try:
            # Not what is above them: whoever has removed the state has removed the lock on it.
            for place in (self._state / "runners", self._state / "spool"):
                place.mkdir(mode=0o700, exist_ok=True)
            place = self._path
            if not _holds(place, content):
                whole_file.write(place, content)
        except OSError as error:
            raise KueueError(
                f"{place} cannot be written: {error.strerror}.",
                hint="The runner of the jobs starts from there; none can be started until that is mended.",
            ) from error
        self._is_whole = True

    def _python(self) -> list[str]:
        # Not the link in a virtual environment: without it the runner does not look there for anything.
        return [os.path.realpath(sys.executable), "-I", "-S", "-B", str(self._path)]


def _holds(path: Path, content: bytes) -> bool:
    """A power loss may leave the name and half of the file: then no job would ever start."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def runner_archive() -> bytes:
    """The package `kueue.runner` as a zip file that Python can run; the same bytes for the same source."""
    package = resources.files("kueue").joinpath("runner")
    files = {
        "kueue/__init__.py": "",
        "__main__.py": "import sys\nfrom kueue.runner.main import main\nsys.exit(main())\n",
    }
    for item in package.iterdir():
        if item.name.endswith(".py"):
            files[f"kueue/runner/{item.name}"] = item.read_text(encoding="utf-8")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    return buffer.getvalue()


def _clean_environment() -> dict[str, str]:
    """Ours without what systemd meant for the worker alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SYSTEMD_VARIABLES and not name.startswith(SYSTEMD_PREFIXES)
    }
