"""What ~/.ssh/config and the settings together say about one host: address, login, keys, known hosts, way there.

Rules
- As ssh(1): the first value obtained counts; the user's file comes before the system's; ``Include`` is followed.
- The login is that of ``user@host``; else ``ssh_user`` of the settings; else ``User`` of the file; else our own name.
  A jump host has its own login: ``user@`` in ProxyJump, ``User`` of the file, our own name.
- An unknown host key is refused. Only ``StrictHostKeyChecking accept-new`` or ``no`` in the file, which somebody wrote
  there on purpose, takes it, remembers it and says so. A changed key is refused whatever the file says.
"""

from __future__ import annotations

import getpass
import glob
import ipaddress
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paramiko
import psutil

from kueue_ops import patience
from kueue_ops.address import HostAddress, parse_host
from kueue_ops.known_hosts import SSH_PORT, entry_name
from kueue_ops.ssh_tokens import expanded, tokens
from kueue_ops.trouble import HostTrouble, trouble

USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_MATCH_SECONDS = 5.0
_CRITERIA = frozenset({"all", "canonical", "final", "host", "originalhost", "user", "localuser"})
"""Of ``Match``: those that paramiko judges as ssh(1) does."""
_INCLUDE_DEPTH = 16
"""As in ssh_config(5)'s implementation: deeper ones go round in circles."""
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s)", re.IGNORECASE)


class Target(NamedTuple):
    """One machine to log in to, all questions answered."""

    name: str
    """As it was written: what a person types after ``ssh``."""
    host: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    """Keys to try; those that are not there are passed over."""
    only_these_keys: bool
    """The agent may serve these keys, and no other."""
    agent: str
    """Path of the agent's socket; empty: there is none."""
    known_as: str
    """Name in the known_hosts files when ``HostKeyAlias`` gives one; else empty."""
    known_hosts: tuple[Path, ...]
    keys_kept_in: Path | None
    """Where a new host key is remembered: the first of the user's own files; None: nowhere."""
    accepts_new_key: bool
    jump: tuple[HostAddress, ...]
    """Hosts to go through, the first one first."""
    proxy_command: str
    """Shell command whose standard streams are the connection; empty: none."""

    @property
    def known_port(self) -> int:
        """An alias stands for one host key whatever the port (ssh_config(5))."""
        return SSH_PORT if self.known_as else self.port

    @property
    def entry(self) -> str:
        """How known_hosts names it."""
        return entry_name(self.known_as or self.host, self.known_port)

    @property
    def command_line(self) -> str:
        """What a person types to try the same."""
        port = f"-p {self.port} " if self.port != SSH_PORT else ""
        return f"ssh {port}{self.user}@{self.name}"


class SshConfig:
    """The text of the configuration files, read once for each connection: it may change while we run."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: this file alone instead of the user's and the system's, as ``ssh -F``.

        Raises `HostTrouble` if a file is there and cannot be read.
        """
        files = [path] if path else [Path(USER_CONFIG).expanduser(), Path(SYSTEM_CONFIG)]
        self._files = files
        names = " and ".join(map(str, files))
        try:
            self._text = patience.within(
                patience.FILE_SECONDS,
                f"ssh configuration in {names}",
                lambda: "\nHost *\n".join("\n".join(_with_includes(file)) for file in files),
            )
        except OSError as error:
            raise trouble("ssh", f"{names} cannot be read: {error.strerror}.", f"ls -l {files[0]}") from error

    def target(
        self,
        address: HostAddress,
        *,
        default_user: str = "",
        key_file: str = "",
    ) -> Target:
        """Raises `HostTrouble` if the files cannot be understood."""
        user = address.user or default_user
        # Put in front, so that they win, and so that %p, %r and `Match user` see them.
        first = [
            "Host *",
            *([f"Port {address.port}"] if address.port else []),
            *([f"User {user}"] if user else []),
        ]
        try:
            options = _Config.from_text("\n".join([*first, "Host *", self._text])).lookup(address.host)
            return self._target(address, dict(options), key_file)
        except HostTrouble:
            raise
        # Whatever is wrong with a file of somebody else's grammar is that file's trouble and this host's line.
        except Exception as error:
            names = " and ".join(str(file) for file in self._files)
            raise trouble(
                "ssh", f"The ssh configuration for {address} cannot be understood: {error}.", f"Look at {names}."
            ) from error

    @staticmethod
    def _target(address: HostAddress, options: dict[str, str | list[str] | None], key_file: str) -> Target:
        def word(key: str, default: str = "") -> str:
            value = options.get(key)
            return value.strip() if isinstance(value, str) else default

        user = word("user") or getpass.getuser()
        host = word("hostname", address.host)
        named = options.get("identityfile")
        listed = [file for file in (named if isinstance(named, list) else []) if file.lower() != "none"]
        port, known_as = word("port", str(SSH_PORT)), word("hostkeyalias")
        jump = "" if word("proxyjump").lower() == "none" else word("proxyjump")
        filled = partial(
            expanded,
            known=tokens(host=host, original=address.host, alias=known_as, port=port, user=user, jump=jump),
        )
        keys = [key_file] if key_file else [filled(file) for file in listed or DEFAULT_KEYS]
        users_files = [
            _path(filled(file)) for file in _files(word("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
        ]
        global_files = [
            _path(file)
            for file in _files(word("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"))
        ]
        return Target(
            name=address.host,
            host=host,
            port=int(port),
            user=user,
            key_files=tuple(_path(file) for file in keys),
            only_these_keys=word("identitiesonly").lower() == "yes",
            agent=_agent(word("identityagent"), filled),
            known_as=known_as,
            known_hosts=(*users_files, *global_files),
            keys_kept_in=users_files[0] if users_files else None,
            accepts_new_key=word("stricthostkeychecking").lower() in {"no", "off", "accept-new"},
            jump=tuple(_hop(hop) for hop in jump.split(",")) if jump else (),
            # ssh_config(5): of the two the one that stands first counts; both in one file is a rarity.
            proxy_command="" if jump else word("proxycommand"),
        )


class _Config(paramiko.SSHConfig):
    """Runs the commands of ``Match exec`` itself: paramiko waits for them without end, and lends them our terminal.

    It leaves the names of keys as they are: of their tokens paramiko knows half.
    """

    TOKENS_BY_CONFIG_KEY = {**paramiko.SSHConfig.TOKENS_BY_CONFIG_KEY, "identityfile": []}  # noqa: RUF012  paramiko's

    def _does_match(
        self,
        match_list: list[dict[str, Any]],
        target_hostname: str,
        canonical: bool,
        final: bool,
        options: dict[str, Any],
    ) -> bool:
        def holds(conditions: list[dict[str, Any]]) -> bool:
            if not conditions:
                return True
            return bool(super(_Config, self)._does_match(conditions, target_hostname, canonical, final, options))  # type: ignore[misc]  # not in its types

        others: list[dict[str, Any]] = []
        for one in match_list:
            if one["type"] in _CRITERIA:
                others.append(one)
                continue
            if one["type"] == "localnetwork":
                if _is_on(one["param"]) == one["negate"]:
                    return False
                continue
            # paramiko takes criteria that it does not know for fulfilled.
            if one["type"] != "exec":
                return False
            # As with ssh(1) it is run only where what stands before it holds.
            if not holds(others):
                return False
            command = self._tokenize(options, target_hostname, "match-exec", one["param"])  # type: ignore[attr-defined]  # as above
            if _succeeds(command) == one["negate"]:
                return False
        return bool(match_list) and holds(others)  # a `Host` block has no criteria


def _is_on(networks: str) -> bool:
    """Has this machine an address in one of these networks, ``10.0.0.0/8,192.168.1.0/24``?"""
    ours = [
        ipaddress.ip_address(one.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family in {socket.AF_INET, socket.AF_INET6}
    ]
    wanted = [ipaddress.ip_network(word, strict=False) for word in networks.split(",")]
    return any(address in network for address in ours for network in wanted)


def _succeeds(command: str) -> bool:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return process.wait(_MATCH_SECONDS) == 0
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise trouble(
            "ssh", f"'Match exec {command}' of the ssh configuration did not end within {_MATCH_SECONDS:g} s."
        ) from error


def _hop(word: str) -> HostAddress:
    """One hop of ProxyJump: as our own addresses, or an ssh:// URI."""
    return parse_host(word.strip().removeprefix("ssh://").rstrip("/"))


def _agent(setting: str, filled: Callable[[str], str]) -> str:
    """``IdentityAgent``: a path, ``SSH_AUTH_SOCK``, ``$NAME`` or none; without it the environment says."""
    if setting.lower() == "none":
        return ""
    if variable := _VARIABLE.fullmatch(setting):
        return os.environ.get(variable[1], "")
    if setting and setting != "SSH_AUTH_SOCK":
        return str(_path(filled(setting)))
    return os.environ.get("SSH_AUTH_SOCK", "")


def _path(file: str) -> Path:
    """Of an unknown user (``~nobody/key``) it stays as it is, and is not there; pathlib raises RuntimeError."""
    return Path(os.path.expanduser(file))  # noqa: PTH111  as said


def _files(setting: str) -> list[str]:
    return [file for file in shlex.split(setting) if file.lower() != "none"]


def _with_includes(file: Path, depth: int = 0) -> list[str]:
    """The lines of the file with those of included ones in place; paramiko passes ``Include`` over."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise trouble("ssh", f"{file} cannot be read: {error.strerror}.", f"ls -l {file}") from error
    result = []
    block = "Host *"
    for line in lines:
        include = _INCLUDE.match(line)
        if _BLOCK.match(line):
            block = line
        if include is None:
            result.append(line)
        elif depth >= _INCLUDE_DEPTH:
            raise trouble("ssh", f"{file} includes itself, or too deep.", f"Look at the Include lines of {file}.")
        else:
            for pattern in shlex.split(include.group(1)):
                # Relative to ~/.ssh in the user's file, to /etc/ssh in the system's.
                place = os.path.join(file.parent, os.path.expanduser(pattern))  # noqa: PTH118, PTH111  glob wants text
                for found in sorted(glob.glob(place)):  # noqa: PTH207  as above
                    # A block of the included file ends with it.
                    result += [*_with_includes(Path(found), depth + 1), block]
    return result
