"""Measures what joins this host to its laboratory: the settings, the way to the server, the worker.

Each function runs inside a probe. Nothing is written: no settings file, no state directory, no cache.
"""
# Strings are what the settings hold:
# ruff: noqa: PTH100, PTH111, PTH116, PTH120, PTH208

from __future__ import annotations

import errno
import os
import selectors
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any

from kueue import config as settings
from kueue import identity, places
from kueue.cli.doctor.file_facts import chosen_state
from kueue.cli.doctor.finding import Facts
from kueue.cli.doctor.probes import Note
from kueue.client import Client
from kueue.errors import ConfigError, KueueError, ProtocolError, Refused, Unreachable
from kueue.transport import Server, is_this_host

SECRETS = "secrets"
"""Key of the settings facts that must not be shown: keys and certificates as PEM, of the present secret first."""
_CONNECT_SECONDS = 2.0
_WELCOME_SECONDS = 2.5
_ROUNDS = 5
"""Questions about the time; the quickest answer tells it best."""
_CLIENT_SECTIONS = ("client_settings",)


def config_facts(path: str | None, note: Note) -> Facts:
    """The settings file and what the other probes need of it.

    `path`, `exists`, `mode` ("0600"), `open_directory`: others can replace the file; `error` and `hint` of the first
    mistake (empty: none), `warnings`; `usable`: what the command needs could be read in spite of an error. If it is:
    `fingerprint`, `previous_fingerprint` (empty: none), `server_name`, `server_port`, `state_dir`, `worker_name`,
    `output_limit_mb`, and `SECRETS`.
    """
    path = os.path.abspath(os.path.expanduser(path or settings.default_path()))
    note(f"reading {path}", path=path)
    facts: Facts = {"path": path, "exists": False, "usable": False, "error": "", "hint": "", "warnings": []}
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return facts
    above = os.stat(os.path.dirname(path))
    is_sticky = bool(above.st_mode & stat.S_ISVTX)
    facts |= {
        "exists": True,
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
        "open_directory": os.path.dirname(path) if above.st_mode & 0o022 and not is_sticky else "",
    }
    known: settings.Config | None = None
    try:
        known = settings.load(path)
    except ConfigError as error:
        facts |= {"error": str(error), "hint": error.hint}
        try:
            # A mistake in a section that the command does not use must not hide what the server says.
            known = settings.load(path, _CLIENT_SECTIONS)
        except ConfigError:
            return facts
    facts |= {
        "warnings": list(known.warnings),
        "server_name": known.common.server_name,
        "server_port": known.common.server_port,
        "state_dir": known.common.state_dir,
        "worker_name": known.worker.worker_name or socket.gethostname().partition(".")[0],
        "output_limit_mb": known.worker.output_limit_mb,
    }
    note("looking for the key of the secret", **facts)
    root, _ = chosen_state(known.common.state_dir, dict(os.environ))
    secrets = dict.fromkeys((known.common.shared_secret, known.common.shared_secret_previous))
    note("deriving the key from the secret")
    try:
        # Derived anew where no program has kept it yet; kept it is not.
        identities = [identity.kept(one, f"{root}/cache") or identity.identity_of(one) for one in secrets if one]
    except KueueError as error:
        return facts | {"error": facts["error"] or str(error), "hint": facts["hint"] or error.hint}
    prints = [*(one.fingerprint for one in identities), ""]
    return facts | {
        "usable": True,
        "fingerprint": prints[0],
        "previous_fingerprint": prints[1],
        SECRETS: [one.pem.decode("ascii") for one in identities],
    }


def server_facts(config: Facts, note: Note) -> Facts:
    """The way to the server, step by step, as far as it goes.

    `name`, `port`, `here`: the name means this host; `addresses`, or `unknown`: why the name has none; `tcp`: address
    → "open" or the name of the error ("ECONNREFUSED", "ETIMEDOUT" after `_CONNECT_SECONDS`); `local`: it answers at its
    local socket; `refusal`, `hint`: what it or the client says instead of a welcome, `refused`: for our secret;
    `previous`: it took the previous secret alone. After the welcome: `version`, `pid`, `queue_id`, `read_only`,
    `lock_trouble`, `rtt_ms`, `offset_seconds` (its clock less ours; none: it does not tell), `uncertainty_seconds`,
    `workers`.
    """
    name, port = str(config["server_name"]), int(config["server_port"])
    facts: Facts = {"name": name, "port": port, "here": is_this_host(name), "addresses": [], "tcp": {}, "local": False}
    note(f"looking up the name {name}", **facts)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        facts["unknown"] = getattr(error, "strerror", None) or str(error)
        return _by_local_socket(facts, config, note)
    facts["addresses"] = list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))
    note(f"connecting to port {port}", **facts)
    facts["tcp"] = _connected(found)
    reached = [address for address, result in facts["tcp"].items() if result == "open"]
    if not reached:
        return _by_local_socket(facts, config, note)
    note(f"waiting for the welcome of {reached[0]}, port {port}", **facts)
    known = [identity.Identity(pem.encode()) for pem in config[SECRETS]]
    for index, one in enumerate(known):
        facts.pop("refusal", None)
        facts |= {"refused": False, "previous": index > 0}
        try:
            with _client(Server(reached[0], port, (), [one])) as client:
                return facts | _asked(client)
        except Refused as error:
            facts |= {"refusal": str(error), "hint": error.hint, "refused": _is_about_secret(error)}
            if not facts["refused"]:
                break
        except (Unreachable, ProtocolError) as error:
            facts |= {"refusal": str(error), "hint": error.hint}
            break
    return {**facts, "previous": False}


def worker_facts(config: Facts, note: Note) -> Facts:
    """`name` of this host's worker, `running` and `pid` (none: nobody can say) by its lock, `log`, and `server_runs`:
    the same of the server's lock; `others`: other workers of this state directory that run, name → pid.
    """
    note("looking for the state directory")
    root, _ = chosen_state(config["state_dir"], dict(os.environ))
    name = str(config["worker_name"])
    own = places.file_name(name)
    facts: Facts = {"name": name, **_lock(f"{root}/workers/{own}/lock"), "log": f"{root}/workers/{own}/worker.log"}
    note(f"looking at the locks in {root}", **facts)
    try:
        folders = sorted(os.listdir(f"{root}/workers"))
    except OSError:
        folders = []
    locks = {folder: _lock(f"{root}/workers/{folder}/lock") for folder in folders if folder != own}
    return facts | {
        "others": {folder: lock["pid"] for folder, lock in locks.items() if lock["running"]},
        "server_runs": _lock(f"{root}/server/lock")["running"],
    }


def _lock(path: str) -> Facts:
    try:
        return {"running": places.is_locked(path), "pid": places.holder(path)}
    except OSError:
        return {"running": False, "pid": None}


def _client(server: Server) -> Client:
    client = Client(server, patience_seconds=0.0, tell=_hear)
    client.welcome_seconds = _WELCOME_SECONDS
    return client


def _is_about_secret(error: Refused) -> bool:
    """Certificates are compared by both sides; anything else that TLS stumbles over is no server of ours."""
    reason = str(getattr(error.__cause__, "reason", "") or "").upper()
    return "CERTIFICATE" in reason or "ALERT" in reason


def _hear(_: str) -> None:
    """Remarks of the client are not for anybody: the findings say all."""


def _by_local_socket(facts: Facts, config: Facts, note: Note) -> Facts:
    """Commands on the server's own host do not need the network; then the server itself can be told from the way."""
    if not facts["here"]:
        return facts
    note("looking for the server's local socket", **facts)
    root, _ = chosen_state(config["state_dir"], dict(os.environ))
    prints = [config["fingerprint"], config["previous_fingerprint"]]
    # As `Places.server_socket`, which would make the directory.
    sockets = [f"{root}/server/{facts['port']}-{one}.sock" for one in prints if one]
    try:
        with _client(Server(facts["name"], facts["port"], sockets, ())) as client:
            return facts | {"local": True} | _asked(client)
    except KueueError:
        return facts


def _asked(client: Client) -> Facts:
    """What the server says, and how its clock differs: the time of its answer lies between question and answer."""
    best: tuple[float, float | None] = (float("inf"), None)
    info: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        wall, begin = time.time(), time.monotonic()
        info = client.ask("ServerInfo")
        took = time.monotonic() - begin
        told = info.get("now_wall")
        # The first also connects; it is slower than the others and does not count for that.
        if took < best[0]:
            best = took, None if told is None else told - (wall + took / 2)
    rows = client.ask("ListWorkers")["workers"]
    took, offset = best
    return {
        **{key: info.get(key) for key in ("version", "pid", "queue_id", "read_only", "lock_trouble")},
        "rtt_ms": round(took * 1000, 2),
        "offset_seconds": None if offset is None else round(offset, 4),
        "uncertainty_seconds": round(took / 2, 4),
        "workers": [{key: row.get(key, "") for key in ("name", "state", "note", "version")} for row in rows],
    }


def _connected(found: Sequence[Any]) -> dict[str, str]:
    """How a connection to each address ends, all at once: one that is swallowed must not hide one that is open."""
    results: dict[str, str] = {}
    open_socks: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        try:
            for family, kind, protocol, _, address in found:
                if address[0] in results:
                    continue
                results[address[0]] = "ETIMEDOUT"
                try:
                    sock = socket.socket(family, kind, protocol)
                except OSError as error:  # no IPv6 in this kernel
                    results[address[0]] = _name_of(error.errno)
                    continue
                open_socks.append(sock)
                sock.setblocking(False)
                begun = sock.connect_ex(address)
                if begun == errno.EINPROGRESS:
                    selector.register(sock, selectors.EVENT_WRITE, address[0])
                else:
                    results[address[0]] = _name_of(begun)
            until = time.monotonic() + _CONNECT_SECONDS
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    ended: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets were registered
                    results[key.data] = _name_of(ended.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        finally:
            for sock in open_socks:
                sock.close()
    return results


def _name_of(number: int | None) -> str:
    return "open" if number == 0 else errno.errorcode.get(number or 0, str(number))
