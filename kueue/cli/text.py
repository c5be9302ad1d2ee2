"""How much room a text takes on a terminal, how it is shortened, and how it is made harmless.

Widths follow Unicode UAX #11 (East Asian width) and the practice of terminals: marks and joiners take no cell,
an emoji sequence takes two.
"""

from __future__ import annotations

from kueue.units import os_from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ELLIPSIS = "..."

_JOINER = "\u200d"
_EMOJI_STYLE = "\ufe0f"


def harmless(text: str) -> str:
    """The text with control characters, direction marks and lone surrogates made visible: it moves no cursor."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _escaped(character) for character in text)


def harmless_lines(text: str) -> str:
    """As `harmless`, but line feeds and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or _is_harmless(c) else _escaped(c) for c in text)


def shown(value: str | dict[str, str] | None) -> str:
    """A string of the operating system, for people: bytes that are not UTF-8 become the replacement sign."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return os_from_wire(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def width(text: str) -> int:
    """Cells that a harmless text takes."""
    if text.isascii():
        return len(text)
    return sum(cells for _, cells in _clusters(text))


def keep_start(text: str, cells: int) -> str:
    """At most `cells` wide: the start of the text and ``...`` if it is longer."""
    if width(text) <= cells:
        return text
    if cells <= len(ELLIPSIS):
        return ELLIPSIS[: max(0, cells)]
    kept, room = [], cells - len(ELLIPSIS)
    for cluster, size in _clusters(text):
        if size > room:
            break
        kept.append(cluster)
        room -= size
    return "".join(kept) + ELLIPSIS


def keep_end(text: str, cells: int) -> str:
    """At most `cells` wide: ``...`` and the end of the text if it is longer."""
    if width(text) <= cells:
        return text
    if cells <= len(ELLIPSIS):
        return ELLIPSIS[: max(0, cells)]
    kept, room = [], cells - len(ELLIPSIS)
    for cluster, size in reversed(list(_clusters(text))):
        if size > room:
            break
        kept.append(cluster)
        room -= size
    return ELLIPSIS + "".join(reversed(kept))


def pad(text: str, cells: int, *, right: bool = False) -> str:
    """Filled with blanks to `cells`; at the left if `right`-aligned."""
    blanks = " " * (cells - width(text))
    return blanks + text if right else text + blanks


def _is_harmless(character: str) -> bool:
    # Printable leaves out what unicode calls Other and Separator; joiners are needed by scripts and emoji.
    return character.isprintable() or character in "\u200c\u200d"


def _escaped(character: str) -> str:
    code = ord(character)
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _clusters(text: str) -> Iterator[tuple[str, int]]:
    """What the eye takes for one character, with its width."""
    import unicodedata  # noqa: PLC0415 - a table of ASCII alone need not load it

    cluster, cells = "", 0
    is_joined = False
    for character in text:
        size = _cells(character, unicodedata)
        is_flag = _is_flag(character) and _is_flag(cluster[-1:]) and len(cluster) == 1
        if cluster and (size == 0 or is_joined or is_flag):
            cluster += character
            if character == _EMOJI_STYLE or is_flag:
                cells = 2
        else:
            if cluster:
                yield cluster, cells
            cluster, cells = character, size
        is_joined = character == _JOINER and cells == 2
    if cluster:
        yield cluster, cells


def _is_flag(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _cells(character: str, unicodedata: object) -> int:
    code = ord(character)
    if code < 0x300:
        return 1 if code != 0xAD else 0
    # Vowels and finals of Hangul syllables join the leading consonant; skin tones join the emoji before them.
    if 0x1160 <= code <= 0x11FF or 0x1F3FB <= code <= 0x1F3FF:
        return 0
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:  # type: ignore[attr-defined]
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1  # type: ignore[attr-defined]
