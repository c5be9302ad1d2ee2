"""Judges what is installed on this host and how it is set up: from what was measured to sentences and what to type.

Pure: nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from kueue.cli.doctor.finding import NOTE, OK, PROBLEM, WARNING, Answer, Facts, Finding, unmeasured

FEW_FILES = 1024
"""Descriptors: each connection of the server and each output of a worker's job takes one or two."""
FEW_PROCESSES = 512
TAG_MAX = 2**62
"""The mark of a job is a soft RLIMIT_LOCKS below this; the hard limit must leave room for it."""


def python_findings(facts: Facts) -> Iterator[Finding]:
    where = f" in the environment {facts['environment']}" if facts["environment"] else ""
    yield Finding("python", OK, f"Python {facts['version']}, {facts['executable']}{where}.", "", facts)


def version_findings(facts: Facts, shell: Answer) -> Iterator[Finding]:
    """`shell`: what a command sent over ssh finds."""
    found = shell.facts.get("programs", {})
    facts = {**facts, "programs": found}
    text = f"kueue {facts['version']} in {facts['where']}"
    missing = [name for name in ("kueue", "kueue_server", "kueue_worker") if name not in found]
    if not shell.facts.get("reached"):
        yield Finding("version", OK, f"{text}.", "", facts)
    elif "kueue_worker" in missing and shell.facts.get("placed_worker"):
        text = f"{text}; by ssh no PATH leads to it, and kueue_restart_workers starts {shell.facts['placed_worker']}."
        yield Finding("version", OK, text, "", facts)
    elif missing:
        text = f"{text}; not on the PATH of a command sent by ssh: {', '.join(missing)}."
        there = facts["beside"].get("kueue_worker")
        hint = (
            f'kueue_restart_workers may need worker_command = "{there}" in [restart_workers].'
            if there
            else "Install kueue with pip, pipx or uv; a checkout alone has no programs."
        )
        yield Finding("version", NOTE, text, hint, facts)
    else:
        yield Finding("version", OK, f"{text}; by ssh: {found['kueue_worker']}.", "", facts)


def shell_findings(answer: Answer, agent: Answer) -> Iterator[Finding]:
    facts = answer.facts
    path = facts.get("path", "")
    startup = "Look at what its start-up files (.bashrc, .zshenv, .cshrc, config.fish) do when there is no terminal."
    if answer.trouble:
        yield unmeasured("shell", f"The login shell {path}", answer, startup)
    elif not facts["reached"]:
        said = facts["said"] or ("it does not come back" if facts["code"] is None else f"exit code {facts['code']}")
        yield Finding(
            "shell", PROBLEM, f"The login shell {path} does not run a command sent by ssh: {said}.", startup, facts
        )
    elif facts["noise"]:
        text = f"{path} prints something before a command sent by ssh runs, which breaks scp and rsync: {facts['said']}"
        yield Finding("shell", WARNING, text, f"Print on a terminal only, in sh: [ -t 1 ] && echo ... {startup}", facts)
    elif not int(facts["umask"], 8) & 0o002:
        text = f"{path}; with its umask {facts['umask']} others can change what jobs write."
        yield Finding("shell", WARNING, text, "Put `umask 022` (or 077) into its start-up file.", facts)
    else:
        yield Finding("shell", OK, f"{path}, silent, umask {facts['umask']}.", "", facts)
    if agent.trouble or (agent.facts["socket"] and not agent.facts["answers"]):
        text = f"SSH_AUTH_SOCK names {agent.facts.get('socket')}, where no ssh agent answers."
        yield Finding(
            "shell.agent", NOTE, text, "Type `unset SSH_AUTH_SOCK`, or log in anew with `ssh -A`.", agent.facts
        )


def limits_findings(answer: Answer, systemd: Answer, linger: Answer) -> Iterator[Finding]:
    facts = dict(answer.facts)
    if answer.trouble:
        yield unmeasured("limits", "Looking at limits", answer)
        return
    lives = linger.facts.get("enabled") or systemd.facts.get("below_manager")
    has_scope = bool(systemd.facts.get("manager") and lives)
    facts["scope"] = has_scope
    files, processes = facts["nofile"], facts["nproc"]
    guard = "runners get a scope of their own" if has_scope else "runners stay in the session of their worker"
    text = f"Linux {facts['kernel']}, {_shown(files[1])} open files, {_shown(processes[0])} processes; {guard}."
    state = OK if facts["pidfd"] and (facts["locks_hard"] is None or facts["locks_hard"] >= TAG_MAX) else PROBLEM
    if state == OK:
        yield Finding("limits", OK, text, "", facts)
    elif not facts["pidfd"]:
        text = f"Linux {facts['kernel']} has no pidfd (5.3 and later have): processes cannot be ended safely."
        yield Finding("limits", PROBLEM, text, "Use a newer kernel; in a container let pidfd_open through.", facts)
    else:
        text = f"The hard limit of file locks is {facts['locks_hard']}: jobs cannot be marked, so none is started."
        yield Finding(
            "limits", PROBLEM, text, "Remove `locks` from /etc/security/limits.conf (`ulimit -H -x` shows it).", facts
        )
    if files[1] is not None and files[1] < FEW_FILES:
        text = f"At most {files[1]} open files: not enough for a server or a worker with many jobs."
        yield Finding(
            "limits.nofile", WARNING, text, "Raise `nofile` in /etc/security/limits.conf (`ulimit -H -n` shows it)."
        )
    if processes[0] is not None and processes[0] < FEW_PROCESSES:
        text = f"At most {processes[0]} processes and threads of this account, jobs included."
        yield Finding(
            "limits.nproc", WARNING, text, "Raise `nproc` in /etc/security/limits.conf (`ulimit -u` shows it)."
        )
    if not facts["ends_are_kept"]:
        yield Finding(
            "limits.kernel",
            NOTE,
            "Kernels older than 6.15 do not keep exit codes: if both halves of a runner are killed, its jobs count as "
            "lost and run again.",
        )
    if facts["hidepid"]:
        text = f"/proc is mounted with hidepid={facts['hidepid']}: what a job starts as another user is not seen."
        yield Finding("limits.hidepid", NOTE, text)


def systemd_findings(answer: Answer, uid: int) -> Iterator[Finding]:
    facts = answer.facts
    if answer.trouble:
        yield unmeasured("systemd", "systemd --user", answer, "Type `systemctl --user status`.")
    elif not facts["booted"] and not facts["manager"]:
        text = "This machine does not run systemd: server and workers can run in screen, or by `kueue up`."
        yield Finding("systemd", NOTE, text, "", facts)
    elif not facts["manager"]:
        hint = f"Type `export XDG_RUNTIME_DIR=/run/user/{uid}`; if that is not there, `loginctl enable-linger`."
        yield Finding("systemd", NOTE, f"The user's service manager is not reached: {facts['said']}.", hint, facts)
    else:
        yield _units(facts)
    if not answer.trouble and facts["booted"] and not facts["runtime_dir"]:
        text = "XDG_RUNTIME_DIR is not set: systemctl --user does not find its manager by itself."
        yield Finding("systemd.runtime_dir", NOTE, text, f"Type `export XDG_RUNTIME_DIR=/run/user/{uid}`.")


def _units(facts: Facts) -> Finding:
    units: dict[str, list[str]] = facts["units"]
    names = {name: name.removesuffix(".service") for name in units}
    failed = [names[name] for name, (_, _, active) in units.items() if active == "failed"]
    idle = [
        names[name]
        for name, (_, enabled, active) in units.items()
        if enabled == "enabled" and active in {"inactive", "deactivating"}
    ]
    if failed:
        hint = f"`journalctl --user -u {failed[0]}` says why; then `systemctl --user restart {' '.join(failed)}`."
        return Finding("systemd", PROBLEM, f"Failed: {', '.join(failed)}.", hint, facts)
    if idle:
        # A unit that is meant for another host of a shared home does not start here, which is as it should be.
        hint = (
            f"Type `systemctl --user start {' '.join(idle)}`; units that are meant for another host do not start here."
        )
        return Finding("systemd", NOTE, f"Enabled, but not running here: {', '.join(idle)}.", hint, facts)
    if not units:
        return Finding("systemd", OK, "The user's service manager runs; no unit of kueue is installed.", "", facts)
    shown = ", ".join(f"{names[name]} {active}" for name, (_, _, active) in units.items())
    return Finding("systemd", OK, f"The user's service manager runs: {shown}.", "", facts)


def linger_findings(answer: Answer, systemd: Answer) -> Iterator[Finding]:
    facts = answer.facts
    turn_on = f"Type `loginctl enable-linger {facts.get('user', '')}`."
    if answer.trouble:
        yield unmeasured("linger", "loginctl", answer)
    elif facts["enabled"] is None:
        yield Finding("linger", OK, "No logind here: nothing ends at logout.", "", facts)
    elif facts["enabled"]:
        yield Finding("linger", OK, f"On for {facts['user']}: services run without a login.", "", facts)
    elif facts["kills"]:
        text = "Off, and logind ends all processes of a user at logout (KillUserProcesses): workers and jobs as well."
        yield Finding("linger", WARNING, text, turn_on, facts)
    elif any(enabled == "enabled" for _, enabled, _ in systemd.facts.get("units", {}).values()):
        text = "Off: the enabled units run only while somebody is logged in as this user."
        yield Finding("linger", WARNING, text, turn_on, facts)
    else:
        text = "Off: services of systemd --user end at logout; what runs in screen or was started by hand goes on."
        yield Finding("linger", NOTE, text, turn_on, facts)


def screen_findings(answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    if answer.trouble:
        yield unmeasured("screen", "screen", answer)
        return
    dead = [name for name, state in facts["sessions"].items() if "Dead" in state]
    ours = [name for name in facts["sessions"] if name.partition(".")[2].startswith("kueue") and name not in dead]
    if not facts["path"]:
        text = "Not installed: workers are started without a session to look at."
        yield Finding("screen", NOTE, text, "Type `sudo apt install screen` (or dnf, zypper).", facts)
    elif not facts["usable"]:
        text = f"screen cannot be used: {facts['said'].rstrip('.')}."
        yield Finding("screen", WARNING, text, "Type `mkdir -p -m 700 ~/.screen; export SCREENDIR=~/.screen`.", facts)
    elif dead:
        yield Finding(
            "screen", NOTE, f"{facts['path']}; dead sessions: {', '.join(dead)}.", "Type `screen -wipe`.", facts
        )
    else:
        text = f"{facts['path']}, {'sessions: ' + ', '.join(ours) if ours else 'no session of kueue'}."
        yield Finding("screen", OK, text, "", facts)


def _shown(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
