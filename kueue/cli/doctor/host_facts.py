"""Measures what is installed on this host and how it is set up: limits, kernel, systemd, linger, screen, shell, clock.

Each function runs inside a probe. Other programs are asked questions only.
"""
# pathlib would need a line for each of these looks at /proc and /run:
# ruff: noqa: PTH110, PTH111, PTH112, PTH119, PTH120, PTH123

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import socket
import sys
import time

import kueue
from kueue.cli.doctor.file_facts import MOUNTINFO
from kueue.cli.doctor.finding import Facts
from kueue.cli.doctor.probes import Note, run
from kueue.cli.program_places import PLACES
from kueue.errors import UserError

UNITS = ("kueue-server.service", "kueue-worker.service", "kueue-restart-workers.service")
PROGRAMS = ("kueue", "kueue_server", "kueue_worker", "kueue_restart_workers")
MARK = "=== kueue doctor ==="
PLACED = "in its place: "
SSHD_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"
"""What Debian's sshd gives to a command; others differ in what nobody installs kueue to."""
_ASK_SECONDS = 2.5
_SHELL_SECONDS = 4.0
_RLIMIT_LOCKS = 10  # asm-generic/resource.h; the module `resource` has no name for it


def python_facts() -> Facts:
    """`version` ("3.11.7"), `executable`, `environment` (the folder of a virtual environment, else empty)."""
    return {
        "version": "{}.{}.{}".format(*sys.version_info[:3]),
        "executable": sys.executable,
        "environment": sys.prefix if sys.prefix != sys.base_prefix else "",
    }


def version_facts() -> Facts:
    """`version`, `where` (the package), `beside`: the programs of this installation, by name."""
    folder = os.path.dirname(sys.executable)
    beside = {name: f"{folder}/{name}" for name in PROGRAMS if os.path.exists(f"{folder}/{name}")}
    return {"version": kueue.__version__, "where": os.path.dirname(kueue.__file__), "beside": beside}


def shell_facts(note: Note, shell: str = "") -> Facts:
    """The login shell (or `shell`) as ssh uses it for one command.

    `path`; `reached`: the command ran; `noise`: what the shell's own files print, in characters; `code`, `said` if it
    was not reached; then `umask` ("022"), `search_path` and `programs` (name → path) as the command finds them, and
    `placed_worker`: the program in one of the `PLACES` where it is looked for without a PATH; empty: in none.
    """
    account = _account()
    path = shell or account.pw_shell or "/bin/sh"
    facts: Facts = {"path": path, "reached": False, "noise": 0}
    note(f"running {path} as ssh does", **facts)
    # One word in all shells: csh and fish know neither functions nor $(...).
    places = " ".join(f'"{place}"' for place in PLACES)
    question = (
        f'echo "{MARK}"; umask; echo "$PATH"; for p in {" ".join(PROGRAMS)}; do command -v $p; done; '
        f'for d in {places}; do if [ -x "$d/kueue_worker" ]; then echo "{PLACED}$d/kueue_worker"; break; fi; done; '
        "exit 0"
    )
    environ = {
        "HOME": os.path.expanduser("~"),
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": path,
        "PATH": SSHD_PATH,
        # bash reads its files for a command of ssh: told by these, or by a socket as its stdin.
        "SSH_CLIENT": "127.0.0.1 1 22",
        "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22",
    }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        said = run([path, "-c", f"sh -c '{question}'"], _SHELL_SECONDS, environ=environ, stdin=theirs.fileno())
    if said is None:
        return {**facts, "code": None, "said": "" if os.access(path, os.X_OK) else "it is not there"}
    before, mark, after = said.out.partition(f"{MARK}\n")
    facts |= {"code": said.code, "noise": len(said.err.strip()) + len(before.strip()) if mark else 0}
    if not mark:
        return {**facts, "said": said.words}
    umask, search_path, *found = after.splitlines()
    programs = {os.path.basename(one): one for one in found if one.startswith("/")}
    return {
        **facts,
        "reached": True,
        "said": " ".join(f"{before} {said.err}".split())[:200],
        "umask": umask,
        "search_path": search_path,
        "programs": programs,
        "placed_worker": next((one.removeprefix(PLACED) for one in found if one.startswith(PLACED)), ""),
    }


def agent_facts(note: Note) -> Facts:
    """`socket`: SSH_AUTH_SOCK; `answers`: somebody listens there."""
    path = os.environ.get("SSH_AUTH_SOCK", "")
    if not path:
        return {"socket": "", "answers": False}
    note(f"calling the ssh agent at {path}", socket=path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ASK_SECONDS)
        try:
            probe.connect(path)
        except OSError:
            return {"socket": path, "answers": False}
    return {"socket": path, "answers": True}


def limits_facts(note: Note) -> Facts:
    """`nofile`, `nproc` (soft and hard, none: unlimited), `locks_hard`, `kernel`, `pidfd`, `ends_are_kept` (6.15),
    `hidepid`, `cgroup2`.
    """
    note("looking at limits and kernel")
    release = os.uname().release
    numbers = [int(one) for one in re.findall(r"\d+", release)[:2]]
    return {
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "nproc": _limit(resource.RLIMIT_NPROC),
        "locks_hard": _limit(_RLIMIT_LOCKS)[1],
        "kernel": release,
        "pidfd": _has_pidfd(),
        "ends_are_kept": numbers >= [6, 15],
        "hidepid": _hidepid(),
        "cgroup2": os.path.exists("/sys/fs/cgroup/cgroup.controllers"),
    }


def systemd_facts(note: Note) -> Facts:
    """`booted` (sd_booted(3)), `runtime_dir` (as set), `manager`: the user's manager answers, `said` if not;
    `units`: name → [load, enabled, active] of those that are installed; `below_manager`: this process is in one.
    """
    facts: Facts = {
        "booted": os.path.isdir("/run/systemd/system"),
        "runtime_dir": os.environ.get("XDG_RUNTIME_DIR", ""),
        "manager": False,
        "below_manager": _is_below_manager(),
        "units": {},
        "said": "",
    }
    if not facts["booted"] and not shutil.which("systemctl"):
        return facts
    note("asking systemctl --user", **facts)
    usual = f"/run/user/{os.getuid()}"
    environ = {**os.environ, "LC_ALL": "C", "XDG_RUNTIME_DIR": facts["runtime_dir"] or usual}
    properties = "Id,LoadState,UnitFileState,ActiveState"
    said = run(["systemctl", "--user", "show", "-p", properties, *UNITS], _ASK_SECONDS, environ=environ)
    if said is None:
        return {**facts, "said": "it does not answer" if shutil.which("systemctl") else "there is no systemctl"}
    if said.code != 0:
        return {**facts, "said": said.words}
    for block in said.out.split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if unit.get("LoadState", "not-found") != "not-found":
            facts["units"][unit["Id"]] = [unit.get(key, "") for key in ("LoadState", "UnitFileState", "ActiveState")]
    return {**facts, "manager": True}


def linger_facts(note: Note) -> Facts:
    """`user`, `enabled` (none: nobody can say), `kills`: logind ends the processes of a user at logout."""
    name = _account().pw_name
    facts: Facts = {"user": name, "enabled": None, "kills": None, "logind": os.path.isdir("/run/systemd/system")}
    note("asking loginctl", **facts)
    said = run(["loginctl", "show-user", "-p", "KillUserProcesses", "-p", "KillExcludeUsers"], _ASK_SECONDS)
    if said is not None and said.code == 0:
        known = dict(line.split("=", 1) for line in said.out.splitlines() if "=" in line)
        facts["logind"] = True
        facts["kills"] = (
            known.get("KillUserProcesses") == "yes" and name not in known.get("KillExcludeUsers", "").split()
        )
    if facts["logind"]:
        said = run(["loginctl", "show-user", name, "-p", "Linger"], _ASK_SECONDS)
        if said is not None and said.code == 0:
            facts["enabled"] = said.out.strip() == "Linger=yes"
        else:
            # A user who is neither logged in nor lingers is unknown to logind; the file is what it keeps.
            facts["enabled"] = os.path.exists(f"/var/lib/systemd/linger/{name}")
    return facts


def screen_facts(note: Note) -> Facts:
    """`path` (empty: not installed), `usable`, `said` if it is not, `sessions`: "17.kueue_worker" → "Detached"."""
    path = shutil.which("screen") or ""
    facts: Facts = {"path": path, "usable": False, "said": "", "sessions": {}}
    if not path:
        return facts
    note("asking screen -ls", **facts)
    said = run([path, "-ls"], _ASK_SECONDS)
    if said is None:
        return {**facts, "said": "it does not answer"}
    # Its exit code depends on its version; what it says when its directory can be used is always one of these.
    if not re.search(r"No Sockets found|There (is a|are) ", said.out):
        return {**facts, "said": said.words}
    sessions = re.findall(r"^\s+(\d+\.\S+)\s.*\(([^()]+)\)\s*$", said.out, re.MULTILINE)
    return {**facts, "usable": True, "sessions": dict(sessions)}


def time_facts(note: Note) -> Facts:
    """`synchronised` by NTP; none where `timedatectl` cannot tell."""
    note("asking timedatectl")
    said = run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], _ASK_SECONDS)
    known = said.out.strip() if said is not None and said.code == 0 else ""
    return {"synchronised": {"yes": True, "no": False}.get(known), "measured_wall": time.time()}


def _account() -> pwd.struct_passwd:
    """Raises `UserError` where nobody knows this account: mostly a directory service that is out of reach."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        raise UserError(
            f"no account has the number {os.getuid()}: is the directory service (sssd, LDAP, NIS) up? "
            f"`getent passwd {os.getuid()}` must answer"
        ) from None


def _is_below_manager() -> bool:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return f"/user@{os.getuid()}.service/" in file.read()
    except OSError:
        return False


def _limit(kind: int) -> list[int | None]:
    return [None if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(kind)]


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _hidepid() -> str:
    """The option of /proc (proc(5)); empty if there is none."""
    with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as table:
        options = [line.split()[-1] for line in table if line.split()[4] == "/proc"]
    found = re.search(r"hidepid=([^,\s]+)", options[-1] if options else "")
    return "" if found is None or found[1] in {"0", "off"} else found[1]
