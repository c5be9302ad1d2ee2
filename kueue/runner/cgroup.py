"""Cgroups of attempts (the unified kind, cgroups(7)), where the runner was given a part of the tree to divide.

    <ours>/runner         keeper and spawners
    <ours>/attempt-<n>    one attempt: whatever its processes do to session, parent, environment or limits, they stay

Rules
- Never required: what is missing or not ours counts as nothing, and the tag does the work alone.
- A directory may hold directories that the job has made; what is said about it holds for all of them.
"""
# ruff: noqa: PTH102, PTH106, PTH116, PTH123 (this runs a thousand times a second, and pathlib would cost memory)

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator

LEAF = "runner"
FREEZE_WAITS = 4
FREEZE_WAIT_SECONDS = 0.0005  # a process freezes when it is next scheduled; then the caller looks again later
_ESCAPED = re.compile(r"\\([0-7]{3})")


def own_directory(mounts: str, membership: str) -> str:
    """Where we are in the unified tree; empty if that is not mounted or does not show us.

    `mounts`: text of ``/proc/self/mountinfo``; `membership`: of ``/proc/self/cgroup``.
    """
    ours = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "")
    if not ours.startswith("/"):
        return ""
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        if tail.split(" ", 1)[0] != "cgroup2":
            continue
        root, point = (_unescaped(word) for word in head.split(" ")[3:5])
        shown = "" if root == "/" else root
        if ours == shown or ours.startswith(f"{shown}/"):
            return f"{point}{ours[len(shown) :]}".rstrip("/")
    return ""


def _unescaped(word: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), word)


def divide() -> str:
    """Move this process into a leaf of its cgroup, so that attempts can have theirs beside it. Returns the cgroup's
    directory; empty: it is not ours to divide.
    """
    try:
        ours = own_directory(_text("/proc/self/mountinfo"), _text("/proc/self/cgroup"))
        if ours:
            enter(f"{ours}/{LEAF}")
    except OSError:
        return ""
    return ours


def fresh_directory(ours: str, offer: int) -> str:
    """For a new attempt; not made yet. `ours` as `divide` returned it. Empty: there is none."""
    path, number = f"{ours}/attempt-{offer}", 1
    while ours and os.path.lexists(path):  # what an attempt of another queue left in the background
        number += 1
        path = f"{ours}/attempt-{offer}.{number}"
    return path if ours else ""


def enter(directory: str) -> None:
    """Move this process there; the directory is made. Raises `OSError`."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    _write(f"{directory}/cgroup.procs", b"0")


def members(directory: str) -> list[int]:
    """Numbers of the processes in it; a zombie whose threads have all ended is not shown."""
    found: list[int] = []
    for path in _directories(directory):
        with contextlib.suppress(OSError):
            found += [int(word) for word in _text(f"{path}/cgroup.procs").split()]
    return [pid for pid in found if pid]  # 0 stands for those that our process namespace does not show


def is_frozen(directory: str) -> bool:
    """Is every process in it frozen?"""
    try:
        return "frozen 1" in _text(f"{directory}/cgroup.events")
    except OSError:
        return False


def freeze(directory: str) -> bool:
    """True: all that is in it is frozen. False: not all of it yet; or there is no such thing."""
    if is_frozen(directory):
        return True
    try:
        _write(f"{directory}/cgroup.freeze", b"1")
    except OSError:
        return False
    for _ in range(FREEZE_WAITS):
        if is_frozen(directory):
            return True
        time.sleep(FREEZE_WAIT_SECONDS)
    return is_frozen(directory)


def thaw(directory: str) -> None:
    with contextlib.suppress(OSError):
        _write(f"{directory}/cgroup.freeze", b"0")


def kill(directory: str) -> bool:
    """SIGKILL to all in it, of whatever user, faster than they can fork. False: this kernel cannot (before 5.14)."""
    try:
        _write(f"{directory}/cgroup.kill", b"1")
    except OSError:
        return False
    return True


def remove(directory: str) -> bool:
    """False: somebody still lives in it, or dies at this moment."""
    try:
        for path in reversed(list(_directories(directory))):
            os.rmdir(path)
    except OSError:
        return False
    return True


def _directories(directory: str) -> Iterator[str]:
    """It and all below it, parents first."""
    try:
        is_alone = os.stat(directory).st_nlink == 2  # itself, and its name in its parent
    except OSError:
        return
    yield directory
    if is_alone:
        return
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for name in [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]:
            yield from _directories(f"{directory}/{name}")


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(path: str, value: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, value)
    finally:
        os.close(handle)
