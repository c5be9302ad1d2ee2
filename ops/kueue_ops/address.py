"""Addresses of hosts as people write them into the settings: ``host``, ``user@host``, ``host:port``, ``[v6]:port``."""

from __future__ import annotations

import re

import msgspec

from kueue import log
from kueue.errors import ConfigError

WHERE = "restart_workers.hostnames"

_USER = re.compile(r"[^\s@,:/\[\]'\"\\$`;&|<>!-][^\s@,:/\[\]'\"\\$`;&|<>!]*")
_HOST = re.compile(r"[^\W_](?:[\w.-]*\w)?\.?")
"""Letters of any script: a name may be an alias of ssh_config, and names from the DNS may be international."""
_V6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?")
_PORT_MAX = 65535
_PORT_DIGITS = 5


class HostAddress(msgspec.Struct, frozen=True):
    """One host to log in to; equal if they lead to the same login, however they were written."""

    text: str
    """As it stands in the settings: the word for tables and logs."""
    user: str | None
    """None: as the settings or ssh_config say."""
    host: str
    """Name, alias of ssh_config, or IP address, without brackets."""
    port: int | None = None
    """None: as ssh_config says, else 22."""

    @property
    def login(self) -> tuple[str | None, str, int | None]:
        """What makes two addresses one: host names have no letter case."""
        return (self.user, self.host.lower(), self.port)

    def __str__(self) -> str:
        return self.text


def parse_hosts(text: str) -> tuple[HostAddress, ...]:
    """The addresses in the order written, each once; words are parted by blanks, newlines or commas.

    Raises `ConfigError` naming the word that is none. What was written twice is told by `duplicates`.
    """
    found: dict[tuple[str | None, str, int | None], HostAddress] = {}
    for address in _words(text):
        found.setdefault(address.login, address)
    return tuple(found.values())


def duplicates(text: str) -> tuple[str, ...]:
    """The words that `parse_hosts` left out because an earlier one leads to the same login."""
    seen: set[tuple[str | None, str, int | None]] = set()
    again = []
    for address in _words(text):
        if address.login in seen:
            again.append(address.text)
        seen.add(address.login)
    return tuple(again)


def parse_host(word: str) -> HostAddress:
    """The address that `word` writes. Raises `ConfigError` naming it if it writes none."""
    user, has_user, rest = word.rpartition("@")
    if has_user and not _USER.fullmatch(user):
        raise _wrong(word, "before the @ there must be a login name")
    port = ""
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or not _V6.fullmatch(host) or (tail and not tail.startswith(":")):
            raise _wrong(word, "an IPv6 address with a port is written [address]:port")
        has_port, port = bool(tail), tail[1:]
    elif rest.count(":") > 1:
        host, has_port = rest, False
        if not _V6.fullmatch(host):
            raise _wrong(word, "it is neither host:port nor an IPv6 address")
    else:
        host, colon, port = rest.partition(":")
        has_port = bool(colon)
        if not _HOST.fullmatch(host):
            raise _wrong(word, "it is no host name" if host else "the host is missing")
    if has_port and not (
        port.isascii() and port.isdecimal() and len(port) <= _PORT_DIGITS and 0 < int(port) <= _PORT_MAX
    ):
        raise _wrong(word, f"the port must be a number from 1 to {_PORT_MAX}")
    return HostAddress(word, user if has_user else None, host, int(port) if has_port else None)


def check_login(name: str) -> None:
    """Raises `ConfigError` if that is no login name: commands of ssh_config are made of it."""
    if name and not _USER.fullmatch(name):
        raise ConfigError(
            f"restart_workers.ssh_user: '{_shown(name)}' is no login name.",
            hint='A login name has no blanks and quotes and does not begin with "-".',
        )


def _words(text: str) -> list[HostAddress]:
    return [parse_host(word) for word in text.replace(",", " ").split()]


def _shown(word: str) -> str:
    cut = word[:100]
    return cut if cut.isprintable() else log.safe(cut)


def _wrong(word: str, why: str) -> ConfigError:
    return ConfigError(
        f"{WHERE}: '{_shown(word)}' cannot be read: {why}.",
        hint="Hosts are written host, user@host, host:port or user@[IPv6 address]:port, parted by blanks.",
    )
