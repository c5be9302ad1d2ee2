"""What tokens (``%h``) and variables (``${NAME}``) stand for in the file names of ssh_config(5)."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

_TOKEN = re.compile(r"%(.?)|\$\{([^}]*)\}", re.DOTALL)


def tokens(*, host: str, original: str, alias: str, port: str, user: str, jump: str) -> dict[str, str]:
    """The letters behind ``%`` and what they stand for; `alias` is that of the host key, empty if it has none."""
    here = socket.gethostname()
    return {
        "%": "%",
        "C": hashlib.sha1(f"{here}{host}{port}{user}{jump}".encode(), usedforsecurity=False).hexdigest(),
        "d": str(Path.home()),
        "h": host,
        "i": str(os.getuid()),
        "j": jump,
        "k": alias or original,
        "L": here.partition(".")[0],
        "l": here,
        "n": original,
        "p": port,
        "r": user,
        "u": getpass.getuser(),
    }


def expanded(file: str, known: Mapping[str, str]) -> str:
    """The name with all of them filled in. Raises `ValueError` for one that stands for nothing, as ssh(1) does."""

    def value(found: re.Match[str]) -> str:
        letter, variable = found.groups()
        filled = os.environ.get(variable) if letter is None else known.get(letter)
        if filled is None:
            raise ValueError(f"{found[0]} in {file} stands for nothing")
        return filled

    return _TOKEN.sub(value, file)
