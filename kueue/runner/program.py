"""From a forked child to the job's program: directory, output files, environment, exec.

All of this may hang on a dead file server. It does so in the child, which already carries the tag of its attempt, so
that nobody else waits for it and it can be stopped like any job.
"""
# ruff: noqa: PTH109, PTH112, PTH116, PTH118, PTH123 (paths are bytes here, or this runs a thousand times a second)

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from typing import Any, NoReturn

from kueue.runner.wire import os_bytes, shown

DISCARD = "null"
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
NOT_EXECUTED = 127


class CannotStart(Exception):
    """`cause` as in `NotStarted`; the text names what was tried. `is_ours`: the worker's own spool takes no file, which
    is no fault of the job: it is put off.
    """

    def __init__(self, cause: str, reason: str, *, is_ours: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason
        self.is_ours = is_ours


def prepared(line: bytes) -> dict[str, Any]:
    """A `StartAttempt` with arguments and environment as bytes: done before the fork, because a child has to copy all
    memory that it writes to. Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for what is none.
    """
    order: dict[str, Any] = json.loads(line)
    order["argv"] = [os_bytes(word) for word in order["argv"]]
    order["env"] = {os_bytes(name): os_bytes(value) for name, value in order["env"]}
    return order


def execute(order: dict[str, Any], folder: str, signals: tuple[int, ...]) -> NoReturn:
    """Become the job. `order`: a `prepared` one; `folder`: where captured output goes; `signals`: those `held_back`.

    Called in a fresh child with these signals blocked. Raises `CannotStart`.
    """
    os.setsid()
    reset_signals(signals)
    _nice(int(order.get("nice") or 0))
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number, inheritable=True)
    os.umask(int(order.get("umask", 0o022)))
    argv, env = order["argv"], order["env"]
    _enter(os_bytes(order["cwd"]), os_bytes(order.get("pwd") or ""), env)
    _open_outputs(order, folder)
    _exec(argv, env)


def held_back() -> tuple[int, ...]:
    """The signals that a child must not get between the fork and `reset_signals`: we handle or ignore them."""
    return tuple(
        int(number)
        for number in signal.valid_signals()
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL
    )


def reset_signals(numbers: tuple[int, ...]) -> None:
    """These do again what they do by default, and no signal is blocked: what Python or ``nohup`` had set aside must not
    reach the job.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _nice(more: int) -> None:
    if more:
        try:
            os.nice(more)
        except OSError as error:
            raise CannotStart("limit", f"nice value {more}: {error.strerror}") from error


def _enter(cwd: bytes, pwd: bytes, env: dict[bytes, bytes]) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise CannotStart("directory", f"directory {shown(cwd)}: {error.strerror}") from error
    env[b"PWD"] = name_of_place(cwd, pwd)


def name_of_place(cwd: bytes, pwd: bytes) -> bytes:
    """PWD for a job in `cwd`, the directory we are in: `pwd` as the user wrote it if that leads here."""
    return pwd if pwd.startswith(b"/") and _is_here(pwd) else _physical(cwd)


def _is_here(path: bytes) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.stat(b"."))
    except OSError:
        return False


def _physical(cwd: bytes) -> bytes:
    try:
        return os.getcwdb()
    except OSError:
        return cwd


def _open_outputs(order: dict[str, Any], folder: str) -> None:
    wanted: list[bytes | None] = []
    for stream in ("stdout", "stderr"):
        path = order.get(stream)
        if path is None:
            wanted.append(None)
            handle = _open(os.fsencode(f"{folder}/{stream}"), os.O_APPEND, 0o600, is_ours=True)
        elif path == DISCARD:
            wanted.append(None)
            continue
        else:
            raw = os_bytes(path)
            wanted.append(raw)
            # Two descriptors of one file would overwrite each other's text; one keeps the order of what is written.
            handle = 1 if stream == "stderr" and _is_stdout(raw, wanted[0]) else _open(raw, os.O_TRUNC, 0o666)
        os.dup2(handle, 1 if stream == "stdout" else 2, inheritable=True)


def _is_stdout(path: bytes, stdout: bytes | None) -> bool:
    if stdout is None:
        return False
    if path == stdout:
        return True
    try:
        known = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(known.st_mode) and os.path.samestat(known, os.fstat(1))


def _open(path: bytes, flags: int, mode: int, *, is_ours: bool = False) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | flags, mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CannotStart("output", f"output file {shown(path)}: {why}", is_ours=is_ours) from error


def _exec(argv: list[bytes], env: dict[bytes, bytes]) -> NoReturn:
    """As execvp(3): a name without a slash is looked for along the job's own PATH, relative entries from its directory;
    a script without ``#!`` is run by /bin/sh.
    """
    name = argv[0] if argv else b""
    if not name:
        raise CannotStart("not_found", "the command is empty")
    if b"/" in name:
        candidates = [name]
    else:
        candidates = [os.path.join(part or b".", name) for part in env.get(b"PATH", DEFAULT_PATH).split(b":")]
    best: CannotStart | None = None
    for path in candidates:
        failure = _try(path, argv, env)
        if failure.cause == "limit":
            raise failure
        if best is None or best.cause == "not_found":
            best = failure
    raise best if best and best.cause != "not_found" else _not_found(name, best)


def _not_found(name: bytes, tried: CannotStart | None) -> CannotStart:
    if tried is not None and b"/" in name:
        return tried
    return CannotStart("not_found", f"{shown(name)}: command not found")


def _try(path: bytes, argv: list[bytes], env: dict[bytes, bytes]) -> CannotStart:
    """Returns only if the program was not executed."""
    try:
        os.execve(path, argv, env)  # noqa: S606 - without a shell is the point
    except ValueError as error:  # a null byte, or `=` in the name of a variable
        return CannotStart("other", f"{shown(path)}: {error}")
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            _run_as_script(path, argv, env)
        return _explain(path, argv, env, error)


def _run_as_script(path: bytes, argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Only for text, as shells do it: a binary of another machine must not be fed to the shell."""
    with open(path, "rb") as file:
        first = file.read(256).split(b"\n", 1)[0]
    if b"\0" not in first:
        os.execve(b"/bin/sh", [b"sh", path, *argv[1:]], env)  # noqa: S606 - it is the shell


def _explain(path: bytes, argv: list[bytes], env: dict[bytes, bytes], error: OSError) -> CannotStart:
    what = f"{shown(path)}: {error.strerror}"
    if error.errno == errno.E2BIG:
        size = sum(len(word) + 1 for word in argv) + sum(len(name) + len(value) + 2 for name, value in env.items())
        stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
        limit = f"{stack // 4}" if stack > 0 else "about 6 million"
        return CannotStart(
            "limit",
            f"arguments and environment are too long: {size} bytes (this machine takes {limit}, a single one 131071)",
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.lexists(path):
            return CannotStart("not_executable", f"{shown(path)}: its interpreter or the target of the link is missing")
        return CannotStart("not_found", what)
    if error.errno == errno.EACCES and os.path.isdir(path):
        return CannotStart("not_executable", f"{shown(path)}: is a directory")
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return CannotStart("limit", what)
    return CannotStart("not_executable", what)
