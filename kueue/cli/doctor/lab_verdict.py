"""Judges settings, server, clock and worker: from what was measured to sentences and what to type. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kueue import __version__
from kueue.cli.doctor.finding import NOTE, OK, PROBLEM, WARNING, Answer, Facts, Finding, unmeasured
from kueue.cli.doctor.lab_facts import SECRETS

CLOCK_SECONDS = 2.0
"""Leases do not depend on wall clocks; above this, dates in listings and file times of a shared home look wrong."""
SLOW_MS = 200.0
"""A round trip above which every command feels slow."""

_ERRORS = {
    "ECONNREFUSED": (
        "nobody listens there: the server is not running, or server_port is wrong",
        "On the server: `kueue up` or `systemctl --user start kueue-server`. Compare server_port there and here.",
    ),
    "ETIMEDOUT": (
        "it does not answer: a firewall drops the connection, or the machine is off",
        (
            "Is it on (`ping`)? If so, on the server: `sudo ufw allow {port}/tcp` or "
            "`sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload`."
        ),
    ),
    "EHOSTUNREACH": (
        "there is no way to that host: it is off, or a firewall rejects the connection",
        "Is it on (`ping`)? If so, on the server: `sudo ufw allow {port}/tcp`.",
    ),
    "ENETUNREACH": ("this machine has no route to that network", "`ip route` shows the routes; is the cable in?"),
}


def config_findings(answer: Answer) -> Iterator[Finding]:
    facts = {key: value for key, value in answer.facts.items() if key != SECRETS}
    answer = answer._replace(facts=facts)
    if answer.trouble:
        yield unmeasured("config", "Reading the settings", answer, "If the home is on a file server, is that one up?")
        return
    path = facts["path"]
    if facts["error"]:
        yield Finding("config", PROBLEM, facts["error"], facts["hint"] or f"Correct {path}.", facts)
    elif not facts["exists"]:
        yield Finding(
            "config",
            PROBLEM,
            f"There is no settings file {path}.",
            "Copy that of the lab there (`chmod 600`); to try kueue on this machine alone: `kueue up`.",
            facts,
        )
    else:
        text = f"{path}, mode {facts['mode']}, secret {facts['fingerprint']}."
        yield Finding("config", OK, text, "", facts)
    if facts.get("open_directory"):
        folder = facts["open_directory"]
        text = f"Others can write into {folder}: they could put settings of their own there."
        yield Finding("config.directory", WARNING, text, f"Type `chmod go-w {folder}`.")
    if facts.get("previous_fingerprint"):
        yield Finding(
            "config.rotation",
            NOTE,
            f"shared_secret_previous is set (secret {facts['previous_fingerprint']}): the secret is being changed.",
            "`kueue secret status` says who still needs the old one; then `kueue secret finish`.",
        )
    for number, warning in enumerate(facts["warnings"], 1):
        is_secret = "unknown" not in warning
        kind = "secret" if is_secret else "key" if number == 1 else f"key{number}"
        text = (
            warning if warning.endswith((".", "?")) else f"{warning}?" if "did you mean" in warning else f"{warning}."
        )
        hint = (
            "Put 64 random characters on all machines." if is_secret else f"Correct the line in {path}, or remove it."
        )
        yield Finding(f"config.{kind}", WARNING, text, hint)


def server_findings(answer: Answer, worker: Answer) -> Iterator[Finding]:
    """`worker`: its facts say whether a server of this user runs on this host."""
    facts = answer.facts
    where = f"{facts.get('name')}, port {facts.get('port')}"
    if answer.trouble and not facts.get("version"):
        hint = "Does `getent hosts NAME` answer? If not, the name server is out of reach."
        if facts.get("addresses"):
            hint = "Does something else listen on that port? On the server: `kueue doctor`."
        yield unmeasured("server", f"The server {where},", answer, hint)
        return
    text, hint = _way(facts, where, is_running=bool(worker.facts.get("server_runs")))
    if text:
        yield Finding("server", WARNING if facts["local"] else PROBLEM, text, hint, facts)
        if not facts["local"]:
            return
    else:
        version = facts["version"]
        text = f"{where} answers in {facts['rtt_ms']:g} ms: kueue {version}, pid {facts['pid']}."
        yield Finding("server", OK, text, "", facts)
    yield from _server_details(facts)


def _way(facts: Facts, where: str, *, is_running: bool) -> tuple[str, str]:
    """What is wrong with the way to the server, and what to do; empty: nothing."""
    local = (
        " Commands on this machine reach it by its local socket; workers elsewhere do not." if facts["local"] else ""
    )
    if facts.get("unknown"):
        return (
            f"The server's name {facts['name']} is not known here: {facts['unknown']}.{local}",
            "Correct server_name in the settings, or add the name to the name server or to /etc/hosts.",
        )
    opened = [address for address, result in facts["tcp"].items() if result == "open"]
    if not opened:
        # Of several addresses the one that got furthest tells most.
        order = [*_ERRORS, ""]
        address, error = min(facts["tcp"].items(), key=lambda one: order.index(one[1] if one[1] in _ERRORS else ""))
        what, hint = _ERRORS.get(error, (f"connecting fails ({error})", "`kueue doctor` on the server tells more."))
        if error == "ECONNREFUSED" and facts["here"] and not is_running:
            what, hint = (
                "no server runs on this machine",
                "`kueue up` starts one, `systemctl --user start kueue-server` as well.",
            )
        return f"{where} ({address}) is not reached: {what}.{local}", hint.format(port=facts["port"])
    if facts.get("refused"):
        return (
            f"{where} does not take our secret ({facts['name']} has another one, or is somebody else's server).",
            (
                "Copy the settings file of the server (`kueue doctor` there shows the fingerprint of its secret), "
                "or choose another server_port."
            ),
        )
    if str(facts.get("refusal")).startswith("Authentication failed"):
        # TLS broke off before certificates were compared.
        return f"What listens at {where} is no kueue server.", "Choose another server_port in the settings everywhere."
    if facts.get("refusal"):
        return facts["refusal"], facts["hint"]
    return "", ""


def _server_details(facts: Facts) -> Iterator[Finding]:
    version = facts["version"]
    if version != __version__:
        yield Finding(
            "server.version",
            WARNING,
            f"The server is kueue {version}, this is {__version__}.",
            "Upgrade the older one; first the server, then the workers one by one.",
        )
    if facts.get("previous"):
        yield Finding(
            "server.secret",
            WARNING,
            "The server takes the previous secret only: it has not read the new one yet.",
            "Copy the settings file to the server and reload it: `kill -HUP` its pid, or restart it.",
        )
    if facts.get("read_only"):
        text = f"The server accepts nothing at the moment: {str(facts['read_only']).rstrip('.')}."
        yield Finding("server.read_only", PROBLEM, text, "Free space on the server's disk: `kueue clean-jobs` helps.")
    if facts.get("lock_trouble"):
        yield Finding(
            "server.lock",
            PROBLEM,
            f"{facts['lock_trouble']}.",
            "The server's log names who holds it. Once it can be put back, the next command has the server do it.",
        )
    if facts["rtt_ms"] > SLOW_MS:
        yield Finding("server.slow", NOTE, f"A question to the server takes {facts['rtt_ms']:.0f} ms.")
    for address, result in facts["tcp"].items():
        if result != "open" and "open" in facts["tcp"].values():
            yield Finding(
                f"server.address.{address}",
                WARNING,
                f"{facts['name']} has the address {address}, where the server is not reached ({result}): "
                "each connection may try it first and wait.",
                "Add it to bind_addresses in the server's settings, or take it out of the name server.",
            )
    is_loopback = all(one.startswith("127.") or one == "::1" for one in facts["addresses"])
    if not is_loopback or facts["name"] in {"127.0.0.1", "::1"} or not facts["addresses"]:
        return
    if facts["name"] == "localhost":
        text = "server_name is localhost, which is another machine on every machine."
        yield Finding("server.name", NOTE, text, "For more than one machine set server_name to the server's host name.")
        return
    yield Finding(
        "server.name",
        NOTE if facts["here"] else WARNING,
        f"{facts['name']} is {facts['addresses'][0]} here, an address that no other machine can reach "
        "(/etc/hosts of Debian and Ubuntu says so).",
        "Keep bind_addresses at its default, or write the real address beside the name in /etc/hosts.",
    )


def clock_findings(server: Answer, ntp: Answer) -> Iterator[Finding]:
    """`server`: carries the difference; `ntp`: what this machine says of itself."""
    offset, error = server.facts.get("offset_seconds"), server.facts.get("uncertainty_seconds", 0.0)
    synchronised = ntp.facts.get("synchronised")
    value = {"offset_seconds": offset, "uncertainty_seconds": error, "synchronised": synchronised}
    state, hint = OK, ""
    if offset is None:
        text = "Not compared: the server was not reached or does not tell its time."
        state = NOTE
    else:
        side = "ahead of" if offset >= 0 else "behind"
        text = f"The server's clock is {abs(offset):.3f} s {side} ours (give or take {error:.3f} s)."
        if abs(offset) - error > CLOCK_SECONDS:
            state = WARNING
            hint = "On the machine that is wrong: `sudo timedatectl set-ntp true`. Jobs are safe, dates shown are not."
    if synchronised is False and state != WARNING:
        state = NOTE
        text += " This machine's clock is not synchronised."
        hint = "Type `sudo timedatectl set-ntp true`."
    yield Finding("clock", state, text, hint, value)


def worker_findings(answer: Answer, server: Answer) -> Iterator[Finding]:
    facts = dict(answer.facts)
    if answer.trouble:
        yield unmeasured("worker", "Looking for the worker of this host", answer)
        return
    name, reached = facts["name"], "workers" in server.facts
    rows = [row for row in server.facts.get("workers", ()) if row["name"] == name and row["state"] != "away"]
    row = rows[0] if rows else None
    facts |= {"seen": row is not None, "state": row["state"] if row else "", "version": row["version"] if row else ""}
    pid = f" (pid {facts['pid']})" if facts["pid"] else ""
    if facts["running"]:
        yield _running_worker(facts, row, f"The worker {name}{pid}", reached=reached)
    elif row and row["state"] in {"online", "offline"}:
        text = f"A worker {name} is {row['state']} at the server, but none runs with this state directory."
        hint = "It is another user's or another host's: give each its own worker_name."
        yield Finding("worker", NOTE, text, hint, facts)
    elif row:
        text = f"The worker {name} does not run, and the server waits for it ({row['state']})."
        yield Finding("worker", WARNING, text, "Start it: `kueue_worker`, `kueue up`, or its unit.", facts)
    else:
        others = ", ".join(facts["others"])
        text = f"No worker {name} runs here{f' (but {others})' if others else ''}."
        yield Finding("worker", NOTE, text, "If jobs shall run here: `kueue_worker`, `kueue up`, or its unit.", facts)


def _running_worker(facts: Facts, row: Facts | None, who: str, *, reached: bool) -> Finding:
    log = f"What it says is in {facts['log']}, in the journal or in its screen session."
    if row is None:
        text = f"{who} runs{', but the server does not know it' if reached else '; the server was not asked'}."
        return Finding("worker", PROBLEM if reached else NOTE, text, log if reached else "", facts)
    note = f": {row['note']}" if row["note"] else ""
    if row["state"] == "offline":
        hint = f"Type `kueue node online {facts['name']}`."
        return Finding("worker", NOTE, f"{who} runs and is offline: it gets no new jobs{note}.", hint, facts)
    if row["state"] != "online":
        return Finding("worker", PROBLEM, f"{who} runs, but is {row['state']} at the server{note}.", log, facts)
    if row["version"] and row["version"] != __version__:
        end = f"kill {facts['pid']}" if facts["pid"] else "Stop it"
        return Finding(
            "worker",
            WARNING,
            f"{who} is kueue {row['version']}, installed is {__version__}.",
            f"Restart it, its jobs go on: `{end}`, then start it again (or `systemctl --user restart kueue-worker`).",
            facts,
        )
    return Finding("worker", OK, f"{who} runs and is online{note}.", "", facts)


def without_settings(why: str) -> Iterator[Finding]:
    """What is said of server and worker when the settings cannot be used."""
    yield Finding("server", NOTE, f"Not asked: {why}.")
    yield Finding("worker", NOTE, f"Not looked for: {why}.")
