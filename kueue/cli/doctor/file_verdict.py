"""Judges home, current directory, state and spool: from what was measured to sentences and what to type. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kueue.cli.doctor.finding import NOTE, OK, PROBLEM, WARNING, Answer, Facts, Finding, unmeasured
from kueue.storage.limits import BALLAST_BYTES

LITTLE_MB = 1024
"""Below this much room people should know: one stream of a job may fill as much with the default settings."""
FULL_MB = 2 * BALLAST_BYTES // 2**20
"""Below this the server soon accepts nothing."""
FEW_INODES = 1000
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FILE_SERVER = "Is its file server up, and the network? `findmnt {mount}` shows where it comes from."


def home_findings(answer: Answer, quota: Answer, uid: int) -> Iterator[Finding]:
    facts = answer.facts
    path = facts.get("path", "the home")
    if answer.trouble:
        yield unmeasured("home", f"The home {path}, {_kind(facts)},", answer, _server_hint(facts))
        return
    text = f"{path}, {_kind(facts)}."
    state, hint = OK, ""
    if not facts["exists"] or not facts["directory"]:
        state, text = PROBLEM, f"The home {path} is not there."
        hint = "Is its file system mounted (`findmnt`)? Without it there is no shared configuration."
    elif facts["read_only"] or not facts["writable"]:
        why = "is mounted read-only" if facts["read_only"] else "is not writable for this account"
        state, text, hint = WARNING, f"{text[:-1]}, {why}.", f"Look at `findmnt {facts['mount']}` and `ls -ld {path}`."
    elif facts["owner"] != uid:
        state, text = WARNING, f"{text[:-1]}, belongs to another user (uid {facts['owner']})."
        hint = "Is HOME set as it should be? `echo $HOME`"
    elif facts["account_path"] not in {path, ""}:
        state, text = NOTE, f"{text[:-1]}; the account's is {facts['account_path']}: HOME says otherwise."
    elif facts["free_mb"] < FULL_MB:
        state, text, hint = (
            WARNING,
            f"{text[:-1]}, has only {facts['free_mb']} MB left.",
            f"Make room: `du -xsh {path}`",
        )
    yield Finding("home", state, text, hint, facts)
    if quota.facts.get("over"):
        text = f"This account is over its quota: {quota.facts['text']}."
        yield Finding("home.quota", WARNING, text, "Remove files, or ask for more: `quota -s` shows how much.")


def cwd_findings(answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    path = facts.get("path", "")
    if answer.trouble:
        yield unmeasured("cwd", f"The current directory {path}", answer, _server_hint(facts))
    elif not facts["exists"]:
        yield Finding("cwd", WARNING, "The current directory was removed.", "Go to another one: `cd`", facts)
    elif facts["network"]:
        yield Finding("cwd", OK, f"{path}, {_kind(facts)}.", "", facts)
    else:
        text = f"{path}, {_kind(facts)}: jobs from here run only where this directory is, too."
        yield Finding("cwd", NOTE, text, "", facts)


def state_findings(answer: Answer, uid: int) -> Iterator[Finding]:
    facts = answer.facts
    path = facts.get("path", "")
    if answer.trouble:
        yield unmeasured("state", f"The state directory {path}", answer, _server_hint(facts))
        return
    because = f" ({facts['reason']})" if facts["reason"] else ""
    text = f"{path}{because}, {_kind(facts)}, {_room(facts)}."
    yield _state(facts, uid, path, text)
    if facts["network"]:
        local = f"/var/tmp/kueue-{uid}"  # noqa: S108  where state goes by itself then
        yield Finding(
            "state.network",
            WARNING,
            f"{path} is on a network file system ({facts['fstype']}): locks and databases are not safe there.",
            f'Name a directory on a local disk, for example state_dir = "{local}", or remove the setting.',
        )
    if facts["fstype"] in _IN_MEMORY:
        yield Finding(
            "state.memory",
            WARNING,
            f"{path} is in memory ({facts['fstype']}): the queue is gone when the machine restarts.",
            "Name a directory on a disk in state_dir or KUEUE_STATE_DIR.",
        )


def spool_findings(answer: Answer, limit_mb: int) -> Iterator[Finding]:
    """`limit_mb`: most that is kept of one stream; 0: all."""
    facts = {key: value for key, value in answer.facts.items() if key != "tmpdir"}
    path = facts.get("path", "")
    if answer.trouble:
        yield unmeasured("spool", f"The spool {path}", answer._replace(facts=facts), _server_hint(facts))
        return
    text = f"{path}, {_kind(facts)}, {_room(facts)}."
    if facts["free_mb"] < max(LITTLE_MB, limit_mb):
        text = f"{text[:-1]}: the output of jobs may not fit."
        hint = f"Make room on {facts['mount']}, `kueue clean-jobs`, or lower output_limit_mb."
        yield Finding("spool", WARNING, text, hint, facts)
    else:
        yield Finding("spool", OK, text, "", facts)
    temporary = answer.facts.get("tmpdir")
    if temporary and not (temporary["exists"] and temporary["directory"] and temporary["writable"]):
        text = f"TMPDIR is {temporary['path']}, which {'is not writable' if temporary['exists'] else 'is not there'}."
        yield Finding("spool.tmpdir", WARNING, text, "Type `unset TMPDIR`, or make that directory.", temporary)
    elif temporary and temporary["free_mb"] < FULL_MB:
        text = f"TMPDIR is {temporary['path']}, where only {temporary['free_mb']} MB are left."
        yield Finding("spool.tmpdir", WARNING, text, "Make room there, or name another directory.", temporary)


def _state(facts: Facts, uid: int, path: str, text: str) -> Finding:
    if facts["exists"] and facts["owner"] != uid:
        hint = "Name another directory in state_dir or KUEUE_STATE_DIR."
        return Finding("state", PROBLEM, f"{path} belongs to another user (uid {facts['owner']}).", hint, facts)
    if not facts["directory"]:
        return Finding("state", PROBLEM, f"{path} is not a directory.", f"Look at `ls -ld {path}`.", facts)
    if facts["read_only"] or not facts["writable"]:
        why = "its file system is mounted read-only" if facts["read_only"] else "it is not writable for this account"
        verb = "used" if facts["exists"] else "made"
        hint = f"Look at `findmnt {facts['mount']}`, or name another directory in state_dir or KUEUE_STATE_DIR."
        return Finding("state", PROBLEM, f"{path} cannot be {verb}: {why}.", hint, facts)
    if facts["exists"] and int(facts["mode"], 8) & 0o022:
        text = f"Others can write into {path} (mode {facts['mode']}): server and worker refuse that."
        return Finding("state", PROBLEM, text, f"Type `chmod go-w {path}`.", facts)
    inodes = facts["free_inodes"]
    if facts["free_mb"] < FULL_MB or inodes == 0:
        hint = f"Make room on {facts['mount']}: `du -xh {facts['mount']} | sort -h | tail`, `kueue clean-jobs`."
        return Finding("state", PROBLEM, f"{text[:-1]}: too little for the queue.", hint, facts)
    if facts["free_mb"] < LITTLE_MB or (inodes is not None and inodes < FEW_INODES):
        return Finding("state", WARNING, f"{text[:-1]}: not much.", f"Make room on {facts['mount']}.", facts)
    return Finding("state", OK, text, "", facts)


def _kind(facts: Facts) -> str:
    kind = facts.get("fstype") or "of an unknown kind"
    return f"{kind} from {facts['source']}" if facts.get("network") else f"local ({kind})"


def _room(facts: Facts) -> str:
    inodes = facts["free_inodes"]
    few = f" and {inodes} files" if inodes is not None and inodes < FEW_INODES else ""
    free = facts["free_mb"]
    return f"{f'{free / 1024:.0f} GB' if free >= 10240 else f'{free} MB'} free{few}"


def _server_hint(facts: Facts) -> str:
    return _FILE_SERVER.format(mount=facts.get("mount", "/")) if facts.get("network") else ""
