"""``secret``: changes the shared secret of a laboratory without refusing anybody meanwhile.

Rules
- Both secrets stand in the file until everybody has it. Whoever has both is let in by whoever has one of them, so
  files may be copied and read again in any order.
- The file keeps its comments, order, line ends and mode; it is replaced whole, where a link leads to. What cannot be
  changed with certainty is left alone, and the person is told what to write.
- The old secret is given up only when the server says that nobody needs it.
"""
# pathlib is left out for the command's start-up time (5 ms):
# ruff: noqa: PTH105, PTH108, PTH110, PTH116, PTH118, PTH119, PTH120, PTH123, PTH207

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import signal
import string

from kueue import identity, places
from kueue.cli.session import Session
from kueue.client import rouse_own_server
from kueue.config import Config, load, tables
from kueue.errors import EXIT_REFUSED, ConfigError, UserError
from kueue.settings import SECTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SECRET_CHARACTERS = 64

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
# TOML knows no other line ends; `splitlines` knows ten, which stand in the middle of comments.
_SECTION = re.compile(r"\ufeff?\s*\[\[?(?P<name>[^\[\]]+)\]\]?\s*(#.*)?$")
_ENTRY = re.compile(
    r"""(?P<before>\s*(?P<prefix>common_settings\s*\.\s*)?["']?(?P<key>shared_secret(?:_previous)?)["']?\s*=\s*)"""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*')(?P<after>\s*(?:\#.*)?)$"""
)


def secret(session: Session) -> int:
    """Carries out one step of a rotation. Returns the exit code."""
    steps: dict[str, Callable[[Session, Config], int]] = {
        "rotate": _rotate,
        "status": _status,
        "finish": _finish,
        "reload": _reload,
    }
    session.config  # noqa: B018  writes the template when there is no file, and warns
    return steps[session.arguments.step](session, _read(session.config.path))


# --- the steps --------------------------------------------------------------------------------------------------------


def _rotate(session: Session, config: Config) -> int:
    if config.common.shared_secret_previous:
        raise UserError(
            f"A rotation is under way: {config.path} has a shared_secret_previous.",
            hint="`kueue secret status` shows who still needs the old one; `kueue secret finish` gives it up.",
        )
    new = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SECRET_CHARACTERS))
    old = config.common.shared_secret
    links = _rewrite(config, lambda lines: _rotated(lines, new), new, old)
    _tell_of_links(session, config, links)
    host = config.common.server_name
    session.screen.print(
        f"{config.path} has a new shared_secret; the old one is kept there as shared_secret_previous.\n"
        "Nothing that runs is disturbed by what is left to do, and nobody is refused until it is finished:\n"
        "  1. copy the file to the other machines, readable by you alone; where your home is shared it is there\n"
        f"  2. on the server's machine ({host}): kueue secret reload\n"
        "  3. on each machine with a worker: kueue secret reload\n"
        "  4. kueue secret status      names who still needs the old secret\n"
        "  5. kueue secret finish      gives the old secret up; then 1 to 3 again"
    )
    return 0


def _status(session: Session, config: Config) -> int:
    present, previous = _fingerprints(config)
    screen = session.screen
    screen.print(f"{config.path}: secret {present}, {f'the one before {previous}' if previous else 'no older one'}.")
    info = session.client.ask("ServerInfo")
    for sentence in _missing(info, present, previous):
        screen.print(sentence)
    if not previous:
        screen.print("No rotation is under way in this file.")
    elif not _missing(info, present, previous):
        screen.print("Everybody has the new secret: `kueue secret finish`.")
    return 0


def _finish(session: Session, config: Config) -> int:
    if not config.common.shared_secret_previous:
        raise UserError(
            f"No rotation is under way: {config.path} has no shared_secret_previous.",
            hint="`kueue secret rotate` begins one.",
        )
    if not session.arguments.force:
        missing = _missing(session.client.ask("ServerInfo"), *_fingerprints(config))
        if missing:
            raise UserError(
                f"The old secret is still needed. {' '.join(missing)}",
                hint="Machines that shall not come back do not count: then `kueue secret finish --force`.",
            )
    _tell_of_links(session, config, _rewrite(config, _finished, config.common.shared_secret, ""))
    session.screen.print(
        f"The old secret is out of {config.path}.\n"
        "Copy the file to the other machines, then there and here: kueue secret reload\n"
        "From then on the server refuses the old secret."
    )
    return 0


def _tell_of_links(session: Session, config: Config, links: int) -> None:
    if links > 0:
        session.screen.remark(
            f"{config.path} had {links} more name{'s' if links > 1 else ''} (hard links), which still lead to the file "
            "as it was: copy the new one there, too."
        )


def _missing(info: dict[str, Any], present: str, previous: str) -> list[str]:
    """Why the old secret cannot be given up yet, one sentence each."""
    accepted = list(info.get("secrets", ()))
    if not accepted:
        return ["The server is too old to say which secrets it knows."]
    if present not in accepted:
        return ["The server does not have the new secret: on its machine `kueue secret reload`, with the new file."]
    if accepted[0] != present:
        return ["The server still has another secret as its present one: copy the new file there."]
    workers = info.get("old_secret_workers", ())
    if workers and previous:
        return [f"Connected with the old secret: {', '.join(workers)}; there `kueue secret reload`, with the new file."]
    return []


def _reload(session: Session, config: Config) -> int:
    """SIGHUP to the server and the workers of this state directory."""
    told = code = 0
    for what, lock in _programs(config):
        pid = places.holder(lock)
        if pid is None:
            if places.is_locked(lock):
                session.report(places.nameless(f"A {what}", lock))
                code = EXIT_REFUSED
            continue
        with contextlib.suppress(ProcessLookupError):
            # The descriptor means this process alone, also if the number is given to another one meanwhile.
            process = os.pidfd_open(pid)
            try:
                if places.holder(lock) == pid:
                    signal.pidfd_send_signal(process, signal.SIGHUP)
                    told += 1
                    session.screen.print(f"The {what} (pid {pid}) reads its settings again.")
            finally:
                os.close(process)
    if not told and not code:
        raise UserError(
            "Neither a server nor a worker of this configuration runs on this machine.",
            hint="Run it on the machines where they do.",
        )
    return code


def _programs(config: Config) -> Iterator[tuple[str, str]]:
    """(what it is, its lock) of those that may run here."""
    state = places.find(config.common.state_dir)
    rouse_own_server(state)
    yield "server", state.server_lock
    for lock in sorted(glob.glob(f"{glob.escape(state.root)}/workers/*/lock")):
        yield f"worker {os.path.basename(os.path.dirname(lock))}", lock


# --- the file ---------------------------------------------------------------------------------------------------------


def _read(path: str) -> Config:
    return load(path, ("client_settings",))


def _fingerprints(config: Config) -> tuple[str, str]:
    """Of the present secret and of the one before, which may be missing."""
    cache = places.find(config.common.state_dir).cache
    common = config.common
    previous = identity.identity_of(common.shared_secret_previous, cache) if common.shared_secret_previous else None
    return identity.identity_of(common.shared_secret, cache).fingerprint, previous.fingerprint if previous else ""


def _rewrite(config: Config, change: Callable[[list[str]], list[str]], present: str, previous: str) -> int:
    """Replace the file by the changed one, if that means just what it shall. Returns how many other names (hard links)
    the old contents still have. Raises `ConfigError`.
    """
    path = os.path.realpath(config.path)
    draft = f"{_draft_prefix(path)}{os.getpid()}"
    try:
        _sweep(path)
        with open(path, encoding="utf-8", newline="") as file:
            before, about = file.read(), os.fstat(file.fileno())
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8", newline="") as new:
                os.fchmod(descriptor, about.st_mode & 0o700)
                if about.st_uid != os.geteuid():  # root: whose file it is must go on reading it
                    os.fchown(descriptor, about.st_uid, about.st_gid)
                new.write("".join(change(_LINE.findall(before))))
                new.flush()
                os.fsync(descriptor)
            _must_mean(draft, config, present, previous)
            _must_be_unchanged(path, about)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        places.sync_directory(os.path.dirname(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be changed: {error.strerror}.") from error
    return about.st_nlink - 1


def _must_be_unchanged(path: str, before: os.stat_result) -> None:
    now = os.stat(path)
    if (now.st_ino, now.st_mtime_ns, now.st_size) != (before.st_ino, before.st_mtime_ns, before.st_size):
        raise ConfigError(f"{path} was changed by somebody in this moment.", hint="Type it again.")


def _draft_prefix(path: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.")


def _sweep(path: str) -> None:
    """Remove drafts whose makers were killed: a secret stands in them."""
    prefix = _draft_prefix(path)
    for draft in glob.glob(f"{glob.escape(prefix)}*"):
        pid = draft[len(prefix) :]
        if pid.isdecimal() and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
            with contextlib.suppress(OSError):
                os.unlink(draft)


def _must_mean(draft: str, config: Config, present: str, previous: str) -> None:
    """Raises `ConfigError` unless the draft differs from the file in the two secrets alone, also in what we ignore."""
    try:
        new = load(draft, tuple(SECTIONS)).common
        is_right = (new.shared_secret, new.shared_secret_previous) == (present, previous)
        is_right = is_right and _without_secrets(draft) == _without_secrets(config.path)
    except ConfigError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{config.path} is written in a way that this command does not change; it was left as it is.",
            hint='Write the secrets each on a line of its own below [common_settings]: shared_secret = "..."',
        )


def _without_secrets(path: str) -> dict[str, Any]:
    found = tables(path)
    for key in ("shared_secret", "shared_secret_previous"):
        found["common_settings"].pop(key, None)
    return found


def _entries(lines: list[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """(index, match) of the lines with a secret."""
    section = ""
    for index, line in enumerate(lines):
        text = line.rstrip("\r\n")
        head = _SECTION.match(text)
        if head:
            section = head["name"].strip().strip("\"'")
            continue
        found = _ENTRY.match(text)
        if found and (section == "common_settings" if not found["prefix"] else not section):
            yield index, found


def _rotated(lines: list[str], new: str) -> list[str]:
    """The lines with a new secret, and the old one behind it as the previous one."""
    changed = list(lines)
    for index, found in _entries(lines):
        if found["key"] == "shared_secret_previous":
            changed[index] = ""  # an empty one, else a rotation would be under way
    for index, found in _entries(lines):
        if found["key"] == "shared_secret":
            end = lines[index][len(lines[index].rstrip("\r\n")) :]
            before = found["before"]
            key = re.sub(r"shared_secret", "shared_secret_previous", before, count=1)
            changed[index] = f'{before}"{new}"{found["after"]}{end}{"" if end else chr(10)}{key}{found["value"]}{end}'
    return changed


def _finished(lines: list[str]) -> list[str]:
    """The lines without the previous secret."""
    gone = {index for index, found in _entries(lines) if found["key"] == "shared_secret_previous"}
    return [line for index, line in enumerate(lines) if index not in gone]
