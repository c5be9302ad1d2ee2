r"""What is sent to a host and how its answer is read: one script for ``sh``, whatever the login shell is.

Rules
- The login shell sees one line without anything that bash, zsh, fish, tcsh or dash read differently: ``exec /bin/sh``
  and words in single quotes, in which every other character than the plain ones is written as ``\0ooo`` for
  ``printf %b``. Options and functions that the login shell hands down to a bash that plays ``sh`` are taken back.
  Not on standard input: a start-up file that reads would eat it.
- Every line that counts begins with a marker that nobody can guess or echo: its two halves are put together there. So
  what start-up files print, in whatever order, is told from the answer, and no exit code decides anything.
- An answer without the end mark is none.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

PROLOGUE = r"""
t=@A@; t=${t}@B@
exec 5>&1
set +f
unset -f command eval cat cut grep head id kill mkdir rm sed sleep tail tr screen timeout systemctl 2>/dev/null
PATH=${PATH:-/usr/bin}:/usr/local/bin:/usr/bin:/bin
: "${HOME:=$(getent passwd "$(id -u)" | cut -d: -f6)}"
export PATH HOME
say() { printf '\n%s %s %s\n' "$t" "$1" "$2" >&5; }
tell() { while IFS= read -r l || [ -n "$l" ]; do say "$1" "$l"; done; }
limited() { if command -v timeout >/dev/null 2>&1; then timeout "$@"; else shift; "$@"; fi; }
nap() { sleep 0.25 2>/dev/null || sleep 1; }
asked() {
  { { eval "$2"; say "$1.exit" "$?"; } 2>&1 >&4 4>&- </dev/null | tell "$1.err" 4>&-; } 4>&1 | tell "$1.out"
}
"""
"""``asked NAME COMMAND`` tells what a command writes as NAME.out, NAME.err and NAME.exit."""
EPILOGUE = "\nsay end .\n"

_PLAIN = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ._-/=:,;()[]{}<>|&+%@$"#*?~^`')
_WORD_MAX = 1000
"""Characters of one word; old versions of csh refuse longer ones than 1024."""
_LINE = re.compile(r"([a-z_]+(?:\.[a-z]+)?) (.*)")


class Request(NamedTuple):
    """A script, packed."""

    command: str
    """For the login shell."""
    marker: str
    """What every line of the answer begins with."""

    @property
    def end(self) -> str:
        """The last line of a whole answer."""
        return f"\n{self.marker} end ."


class Answer:
    """The lines of an answer by key, in the order told."""

    def __init__(self, marker: str, text: str) -> None:
        self._lines: dict[str, list[str]] = {}
        for line in text.split("\n"):
            if line.startswith(f"{marker} ") and (found := _LINE.fullmatch(line.rstrip("\r"), len(marker) + 1)):
                self._lines.setdefault(found[1], []).append(found[2])

    @property
    def is_whole(self) -> bool:
        """The script ran to its end."""
        return "end" in self._lines

    def lines(self, key: str) -> tuple[str, ...]:
        return tuple(self._lines.get(key, ()))

    def text(self, key: str) -> str:
        """All lines of the key as they were written."""
        return "\n".join(self._lines.get(key, ()))

    def word(self, key: str) -> str:
        """The last value of the key; empty if there is none."""
        return self._lines.get(key, [""])[-1]

    def has(self, key: str) -> bool:
        return key in self._lines


def pack(script: str) -> Request:
    """The script between prologue and epilogue, ready to be sent."""
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    whole = PROLOGUE.replace("@A@", first).replace("@B@", second) + script + EPILOGUE
    words = " ".join(f"'{word}'" for word in _words(whole))
    return Request(f'exec /bin/sh -c \'set +eu; unset -f printf; eval "$(printf %b "$@")"\' sh {words}', first + second)


def quote(text: str) -> str:
    """`text` as one word for ``sh``."""
    return "'" + text.replace("'", "'\\''") + "'"


def _words(text: str) -> list[str]:
    words, word = [], ""
    for byte in text.encode("utf-8", "surrogateescape"):
        character = chr(byte)
        piece = character if character in _PLAIN else f"\\0{byte:03o}"
        if len(word) + len(piece) > _WORD_MAX:
            words.append(word)
            word = ""
        word += piece
    return [*words, word]
