"""Proving who we are to a host: keys of the agent and of files; never a question to anybody.

Why not paramiko's own order: it prompts in places, stops at the first missing file, offers every key of the agent
before the one that was named (sshd ends the connection after six), and tells only about the last key.
"""

from __future__ import annotations

import base64
import binascii
import socket
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthSource, AuthStrategy, SourceResult

from kueue_ops import patience
from kueue_ops.ssh_settings import Target
from kueue_ops.trouble import HostTrouble, trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
_MAGIC = b"openssh-key-v1\0"
"""Begin of OpenSSH's own format of private keys (PROTOCOL.key): its public half is readable without the passphrase."""


class Agent(AgentSSH):
    """The running ssh-agent; one that does not answer within the limit is none.

    paramiko's own class waits for a mute agent (a forwarded one whose other end is gone) without end.
    """

    def __init__(self, path: str, limit_seconds: float) -> None:
        super().__init__()
        self.note = ""
        """Why it is of no use; empty: it answered."""
        if not path:
            self.note = "no agent (SSH_AUTH_SOCK is not set)"
            return
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(limit_seconds)
        try:
            # To find the socket may hang, which no time limit of it bounds.
            patience.within(limit_seconds + 1.0, f"agent at {path}", lambda: channel.connect(path))
            self._connect(channel)  # type: ignore[attr-defined]  # paramiko's way, which its types leave out
        except (OSError, paramiko.SSHException) as error:
            channel.close()
            reason = getattr(error, "strerror", None) or str(error)
            self.note = f"the agent at {path} does not answer ({reason})"

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]  # as above


class KeyLogin(AuthStrategy):
    """Tries the keys of one `Target`; `authenticate` raises `HostTrouble` when none is taken."""

    def __init__(self, target: Target, limit_seconds: float) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self._target = target
        self._limit = limit_seconds
        self._locked: list[Path] = []
        self._broken: list[str] = []
        self._tried = 0

    def get_sources(self) -> Iterator[AuthSource]:
        """None: `authenticate` goes its own way."""
        return iter(())

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Returns when the host has let us in."""
        user = self._target.user
        try:
            transport.auth_none(user)
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                raise self._no_keys_wanted(error.allowed_types) from error
        else:
            return []  # a host without locks, and rightly so behind some tunnels
        agent = Agent(self._target.agent, self._limit)
        try:
            for key in self._keys(agent):
                self._tried += 1
                try:
                    more = transport.auth_publickey(user, key)
                except paramiko.BadAuthenticationType as error:
                    raise self._no_keys_wanted(error.allowed_types) from error
                except (paramiko.AuthenticationException, ValueError, OSError) as error:
                    if not transport.is_active() or "timeout" in str(error).lower():
                        raise self._ended(error) from error
                except paramiko.SSHException as error:
                    # An agent that will not sign (a confirmation was denied), or a kind of key that is not supported.
                    if not transport.is_active():
                        raise self._ended(error) from error
                    self._broken.append(str(error))
                else:
                    if more:
                        raise trouble(
                            "authentication",
                            f"{self._target.name} takes the key of {user} and wants {' or '.join(more)} on top.",
                            "Nobody is there to type it: let sshd there take the key alone for this user.",
                        )
                    return []
            raise self._none_taken(agent)
        finally:
            agent.close()

    def _keys(self, agent: Agent) -> Iterator[paramiko.PKey]:
        """Named ones first, served by the agent where it has them; then what else the agent has."""
        held = {key.asbytes(): key for key in agent.get_keys()}
        for path in self._target.key_files:
            try:
                public = _patiently(path, public_half)
                if public is None:
                    continue
                served = held.pop(public, None) if public else None
                # Without the file where the agent has it: that is what agents are for.
                yield from [served] if served is not None else _patiently(path, self._loaded)
            except OSError as error:
                self._broken.append(f"{path} cannot be used ({error.strerror or error})")
        if not self._target.only_these_keys:
            yield from held.values()

    def _loaded(self, path: Path) -> list[paramiko.PKey]:
        """The keys of one file; that none can be used is noted."""
        keys: list[paramiko.PKey] = []
        # As with ssh(1) a certificate of no use says nothing against its key.
        for load, what in ((_certified, _certificate_of(path)), (_load, path)):
            try:
                key = load(path)
            except paramiko.PasswordRequiredException:  # noqa: PERF203  with and without the certificate
                self._locked.append(path)
                break
            except (paramiko.SSHException, OSError, ValueError, TypeError, IndexError) as error:
                self._broken.append(f"{what} cannot be used ({getattr(error, 'strerror', None) or error})")
            else:
                if key is not None:
                    keys.append(key)
        return keys

    # --- what to say -------------------------------------------------------------------------------------------------

    def _none_taken(self, agent: Agent) -> HostTrouble:
        target = self._target
        remarks = [*self._broken, *([agent.note] if agent.note else [])]
        if self._locked:
            names = ", ".join(map(str, self._locked))
            why = agent.note or "the agent does not have it"
            return trouble(
                "authentication",
                f"{target.name}: the key {names} is locked and no agent has it: {why}.",
                f"ssh-add {self._locked[0]}  (and start this program where SSH_AUTH_SOCK leads to that agent)",
            )
        aside = f" ({'; '.join(remarks)})" if remarks else ""
        if not self._tried:
            return trouble(
                "authentication",
                f"{target.name}: there is no key to log in with{aside}.",
                "Make one with ssh-keygen and bring it there with ssh-copy-id, or name it in restart_workers.key_file.",
            )
        number = "the key" if self._tried == 1 else f"all {self._tried} keys"
        return trouble(
            "authentication",
            f"{target.name} refuses {number} for the login {target.user}{aside}.",
            f"ssh-copy-id {target.command_line.removeprefix('ssh ')}; right after that this must work without a "
            f"question: {target.command_line}",
        )

    def _no_keys_wanted(self, allowed: list[str]) -> HostTrouble:
        return trouble(
            "authentication",
            f"{self._target.name} does not let {self._target.user} log in by key, only by {' or '.join(allowed)}.",
            "PubkeyAuthentication must be on in its sshd_config.",
        )

    def _ended(self, error: Exception) -> HostTrouble:
        if "timeout" in str(error).lower():
            return trouble(
                "timeout",
                f"{self._target.name} did not answer the login within {self._limit:g} s.",
                self._target.command_line,
            )
        return trouble(
            "authentication",
            f"{self._target.name} ended the connection while {self._tried} keys were tried for {self._target.user}.",
            "An agent with many keys does that: name the right one in restart_workers.key_file.",
        )


def _patiently(path: Path, work: Callable[[Path], T]) -> T:
    """What `work` makes of a key file. Raises `OSError` if the file server that holds it is dead."""
    return patience.within(patience.FILE_SECONDS, f"key {path}", lambda: work(path))


def public_half(path: Path) -> bytes | None:
    """The public key, as it goes over the wire, of a private key file, locked or not.

    Empty if it cannot be told, None if there is no such file.
    """
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        if "OPENSSH PRIVATE KEY" in text:
            body = base64.b64decode("".join(line for line in text.splitlines() if not line.startswith("-----")))
            if body.startswith(_MAGIC):
                message = paramiko.Message(body[len(_MAGIC) :])
                message.get_text(), message.get_text(), message.get_string(), message.get_int()
                return bytes(message.get_string())
        public = path.with_name(f"{path.name}.pub").read_text(encoding="utf-8", errors="replace").split()
        return base64.b64decode(public[1])
    except (OSError, binascii.Error, IndexError, UnicodeDecodeError, ValueError):
        return b""


def _certificate_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-cert.pub")


def _certified(path: Path) -> paramiko.PKey | None:
    """The key of the file with its certificate; None if none lies beside it."""
    certificate = _certificate_of(path)
    if not certificate.exists():
        return None
    key = _load(path)
    key.load_certificate(str(certificate))
    return key


def _load(path: Path) -> paramiko.PKey:
    """Raises `PasswordRequiredException` for a locked one; never asks."""
    trouble_of: list[Exception] = []
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:  # noqa: PERF203  one kind after another
            raise
        except (paramiko.SSHException, ValueError, TypeError, IndexError) as error:
            trouble_of.append(error)
    raise trouble_of[-1]
