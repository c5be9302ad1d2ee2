"""Files that are replaced in one step: whoever reads one sees the old or the new one, whole.

Nothing is flushed to the platter unless that is asked for: after a loss of power either may be there, or an empty one.
`kueue.runner.whole_file` is the runner's own.
"""
# ruff: noqa: PTH105, PTH108, PTH123 (imported by the command on its fastest path: no pathlib)

from __future__ import annotations

import contextlib
import os


def write(
    path: str | os.PathLike[str], body: bytes, mode: int = 0o600, *, draft: str = "", is_flushed: bool = False
) -> None:
    """Raises `OSError`; then the old file stays, and nothing is left beside it.

    `mode`: whatever the umask says. `draft`: its path until it is whole; by default a name of this process alone, for
    others may write the same file. `is_flushed`: before it gets its name.
    """
    draft = draft or f"{os.fspath(path)}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        # Others may write into the directory: no link of theirs is followed.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(body)
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
