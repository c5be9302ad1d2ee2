"""The short way from an order to a running program, for orders that need nothing unusual: posix_spawn(3).

The child is made without a copy of the spawner's memory and runs no Python, which is most of what a start costs
otherwise. In exchange the spawner itself waits, for the directory and for exec. So this way is taken only where the
long one (`program`, a fork that hangs alone if it hangs) has just reached the same directory and program without delay;
and if the file server dies at that very moment, the keeper puts another spawner in our place.

What fails here is tried again the long way, which knows how to say why.
"""
# ruff: noqa: PTH118 (paths are bytes here)

from __future__ import annotations

import os
from typing import Any

from kueue.runner.program import DEFAULT_PATH, DISCARD, name_of_place
from kueue.runner.wire import os_bytes

WARM_SECONDS = 2.0  # who starts a program less often does not gain by the short way
OWN_UMASK = 0o077
MANY = 1000

Key = tuple[bytes, bytes, bytes]


class Launcher:
    """Starts programs; remembers which directories and programs answered lately. Times are boottime.

    `signals`: those that shall do in the child what they do by default. The process must have ``/`` as its directory
    and `OWN_UMASK`.
    """

    def __init__(self) -> None:
        self.signals: tuple[int, ...] = ()
        self._warm: dict[Key, float] = {}
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._null)

    def executed(self, key: Key, now: float, took: float) -> None:
        """The program of an order with this `key_of` was executed, after so many seconds."""
        if took >= WARM_SECONDS:
            self._warm.pop(key, None)
            return
        if len(self._warm) >= MANY:
            self._warm.clear()
        self._warm[key] = now

    def can_launch(self, order: dict[str, Any], now: float) -> bool:
        """Is this `prepared` order a usual one, from where something was started just now?"""
        return (
            order.get("stdout") in (None, DISCARD)
            and order.get("stderr") in (None, DISCARD)
            and not order.get("nice")
            and order["argv"] != []
            and order["argv"][0] != b""
            and now - self._warm.get(key_of(order), -WARM_SECONDS) < WARM_SECONDS
        )

    def launch(self, order: dict[str, Any], folder: str) -> int | None:
        """The number of the new process, which has executed its program; None: it must be done the long way.

        `folder`: where captured output goes.
        """
        cwd = os_bytes(order["cwd"])
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, self._null, 0)]
        for number, stream in ((1, "stdout"), (2, "stderr")):
            if order.get(stream) == DISCARD:
                actions.append((os.POSIX_SPAWN_DUP2, self._null, number))
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
                actions.append((os.POSIX_SPAWN_OPEN, number, f"{folder}/{stream}", flags, 0o600))
        try:
            os.chdir(cwd)
            env = {**order["env"], b"PWD": name_of_place(cwd, os_bytes(order.get("pwd") or ""))}
            os.umask(int(order.get("umask", 0o022)))
            path = _found(order["argv"][0], env)
            if path is None:
                return None
            return os.posix_spawn(
                path,
                order["argv"],
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=self.signals,
            )
        except (OSError, ValueError, RuntimeError):  # the last: this C library's cannot make a session
            return None
        finally:
            os.umask(OWN_UMASK)
            os.chdir("/")


def key_of(order: dict[str, Any]) -> Key:
    """Where it is started and what."""
    argv = order["argv"]
    return os_bytes(order["cwd"]), argv[0] if argv else b"", order["env"].get(b"PATH", DEFAULT_PATH)


def _found(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """The first of that name on the job's own PATH that can be executed."""
    if b"/" in name:
        return name
    for part in env.get(b"PATH", DEFAULT_PATH).split(b":"):
        path = os.path.join(part or b".", name)
        if os.access(path, os.X_OK):
            return path
    return None
