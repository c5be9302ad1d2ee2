"""Measures directories: what file system they are on, whose they are, what room there is. Nothing is made or written.

Each function runs inside a probe: any of its calls may hang on a dead file server.
"""
# Strings are what the mount table and the JSON hold:
# ruff: noqa: PTH100, PTH109, PTH111, PTH116, PTH117, PTH120, PTH123

from __future__ import annotations

import os
import pwd
import stat
from functools import partial

from kueue import places
from kueue.cli.doctor.finding import Facts
from kueue.cli.doctor.probes import Note, run

MEGABYTE = 2**20
MOUNTINFO = "/proc/self/mountinfo"


def home_facts(note: Note) -> Facts:
    """The home directory: as `directory_facts`, with the path of the account database where HOME says another."""
    path = os.path.expanduser("~")
    entered = _entered_home()
    facts: Facts = {"path": path, "account_path": entered}
    return {**facts, **directory_facts(path, partial(note, **facts))}


def cwd_facts(note: Note) -> Facts:
    """The current directory; its path is empty if it was removed."""
    note("asking for the current directory")
    try:
        path = os.getcwd()
    except FileNotFoundError:
        return {"path": "", "exists": False}
    return directory_facts(path, note)


def directory_facts(path: str, note: Note) -> Facts:
    """A directory, or the nearest one above it that is there.

    `path`, `fstype`, `source`, `mount` (the mount point), `network`; `exists`, `directory`, `inode`, `owner` (uid),
    `mode` ("0700"), `writable`; `free_mb`, `total_mb`, `free_inodes` (none where the file system does not count them),
    `read_only`. The facts of the mount table come first: they need no answer of the file server.
    """
    facts: Facts = {"path": path, **mount_facts(path)}
    note(f"looking at {path}", **facts)
    real = os.path.realpath(path)
    facts |= {"real_path": real, **mount_facts(real)}
    there = real
    while not os.path.lexists(there) and there != "/":
        there = os.path.dirname(there)
    found = os.stat(there)
    room = os.statvfs(there)
    return facts | {
        "exists": there == real,
        "directory": stat.S_ISDIR(found.st_mode),
        "inode": found.st_ino,
        "owner": found.st_uid,
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
        "writable": os.access(there, os.W_OK | os.X_OK),
        "free_mb": room.f_bavail * room.f_frsize // MEGABYTE,
        "total_mb": room.f_blocks * room.f_frsize // MEGABYTE,
        "free_inodes": room.f_favail if room.f_files else None,
        "read_only": bool(room.f_flag & os.ST_RDONLY),
    }


def mount_facts(path: str, mountinfo: str = MOUNTINFO) -> Facts:
    """`fstype`, `source`, `mount` and `network` of the path as it is written, from the mount table alone."""
    longest, facts = -1, {"fstype": "", "source": "", "mount": "", "network": False}
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if "-" not in fields[6:]:
                continue
            dash = fields.index("-", 6)
            point = _unescaped(fields[4])
            # Of two mounts on one point the later hides the earlier.
            if len(point) >= longest and (path == point or path.startswith(f"{point.rstrip('/')}/")):
                longest = len(point)
                facts |= {"fstype": fields[dash + 1], "source": _unescaped(fields[dash + 2]), "mount": point}
    facts["network"] = places.is_network_type(str(facts["fstype"]))
    return facts


def chosen_state(setting: str, environ: dict[str, str]) -> tuple[str, str]:
    """The root of local state that `places.find` would take, and why; nothing is made. It may hang, as that would."""
    named = environ.get(places.ENVIRONMENT) or setting
    if named:
        origin = places.ENVIRONMENT if environ.get(places.ENVIRONMENT) else "common_settings.state_dir"
        return os.path.abspath(os.path.expanduser(named)), f"named by {origin}"
    base = environ.get("XDG_STATE_HOME", "")
    home = f"{base if os.path.isabs(base) else os.path.expanduser('~/.local/state')}/kueue"
    substitute = f"/var/tmp/kueue-{os.getuid()}"  # noqa: S108  see `places.find`
    if not os.path.isabs(home):
        return substitute, "there is no home directory"
    if places.is_network(home):
        return substitute, f"{home} is on a network file system ({places.file_system(home)})"
    trouble = _unusable(home)
    return (substitute, f"{home} {trouble}") if trouble else (home, "")


def state_facts(setting: str, environ: dict[str, str], note: Note) -> Facts:
    """The root of local state, as `directory_facts`, and `reason`: why it is not the usual place."""
    note("looking for the state directory")
    root, reason = chosen_state(setting, environ)
    return {"reason": reason, **directory_facts(root, partial(note, reason=reason))}


def spool_facts(setting: str, environ: dict[str, str], worker_name: str, note: Note) -> Facts:
    """Where this host's worker keeps output, as `directory_facts`; `tmpdir`: the same of TMPDIR if that is set."""
    note("looking for the state directory")
    root, _ = chosen_state(setting, environ)
    facts = directory_facts(f"{root}/workers/{places.file_name(worker_name)}/spool", note)
    temporary = environ.get("TMPDIR", "")
    if temporary:
        note(f"looking at {temporary}")
        facts["tmpdir"] = directory_facts(temporary, note)
    return facts


def quota_facts(note: Note) -> Facts:
    """`installed`; `over`: file systems on which the account is above a limit; `text`: what `quota` said."""
    note("asking `quota` for the limits of this account")
    said = run(["quota", "-w"], 3.0)
    if said is None:
        return {"installed": False, "over": False, "text": ""}
    # quota(1): not zero if a file system is over quota; a file server that does not tell is on stderr.
    return {"installed": True, "over": said.code != 0 and "*" in said.out, "text": said.words}


def _entered_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _unusable(path: str) -> str:
    """What keeps a directory from being ours, as the second half of a sentence; empty: nothing."""
    there = path
    while not os.path.lexists(there) and there != "/":
        there = os.path.dirname(there)
    try:
        found = os.lstat(there)
        if stat.S_ISLNK(found.st_mode):
            if there == path and found.st_uid != os.getuid():
                return "is a symbolic link of another user"
            found = os.stat(there)
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory" if there == path else f"cannot be made: {there} is not a directory"
    if there == path and found.st_uid != os.getuid():
        return f"belongs to another user (uid {found.st_uid})"
    if there != path and not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be made: {there} is not writable"
    return ""


def _unescaped(field: str) -> str:
    """With the octal escapes of the mount table undone (blank, tab, newline, backslash)."""
    first, *rest = field.split("\\")
    return first + "".join(chr(int(piece[:3], 8)) + piece[3:] for piece in rest)
