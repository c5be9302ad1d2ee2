"""What people type and read: durations, sizes, dates, id ranges, resources; and text that may not be UTF-8.

Rules
- Pure, and cheap to import: the command pays for this module at every start, so nothing but built-ins is loaded
  before it is needed.
- A text that cannot be understood raises `UserError` with a sentence that quotes it.
"""

from __future__ import annotations

from kueue.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

ID_MAX = 2**63 - 1
"""The largest id a store can hold."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration(text: str) -> float:
    """Seconds of ``45``, ``90m``, ``1h30m``, ``2d``, ``1.5h``; units w d h m s, each at most once; never negative."""
    import re  # noqa: PLC0415  only commands with a duration pay for it

    compact = "".join(text.split()).lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        return _finite(float(compact), text)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([wdhms])", compact)
    units = [unit for _, unit in parts]
    if not parts or "".join(number + unit for number, unit in parts) != compact or len(set(units)) != len(units):
        raise UserError(f"Not a duration: '{text}'.", hint="Write for example 45 (seconds), 90m, 1h30m or 2d.")
    return _finite(sum(float(number) * _SECONDS[unit] for number, unit in parts), text)


def _finite(seconds: float, text: str) -> float:
    # 10^10 seconds are 300 years: above it sums with clocks lose whole seconds and mean nothing to anybody.
    if seconds > 1e10:
        raise UserError(f"Too long a duration: '{text}'.")
    return seconds


def format_elapsed(seconds: float) -> str:
    """``0h:00m:05s``; hours are not padded; fractions are cut off; negative spans count as none."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}h:{whole // 60 % 60:02}m:{whole % 60:02}s"


def format_date(wall: float, now_wall: float) -> str:
    """Local time as ``today 12:00:00``, ``yesterday 23:59:59``, else ``2024-03-03 12:00:00``; by calendar day."""
    from datetime import datetime, timedelta  # noqa: PLC0415  a listing without dates need not pay for it

    try:
        moment = datetime.fromtimestamp(int(wall)).astimezone()
        today = datetime.fromtimestamp(int(now_wall)).astimezone().date()
    except (OverflowError, ValueError, OSError):
        return f"@{wall:.0f}"  # a clock that stood outside the calendar; better a number than no listing
    clock = moment.strftime("%H:%M:%S")
    if moment.date() == today:
        return f"today {clock}"
    if moment.date() == today - timedelta(days=1):
        return f"yesterday {clock}"
    return f"{moment.strftime('%Y-%m-%d')} {clock}"


def parse_id_ranges(text: str) -> list[tuple[int, int]]:
    """Inclusive ranges of ``3``, ``3-7``, ``1,4-6`` as typed: neither sorted nor merged, never empty."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = _id(first, text)
        end = _id(last, text) if dash else begin
        if end < begin:
            raise UserError(f"Not a range of ids: '{text}'.", hint=f"Did you mean {end}-{begin}?")
        ranges.append((begin, end))
    return ranges


def _id(digits: str, text: str) -> int:
    digits = digits.strip()
    if digits.isascii() and digits.isdigit() and len(digits) < 20 and int(digits) <= ID_MAX:
        return int(digits)
    raise UserError(f"Not an id: '{text}'.", hint="Write for example 3, 3-7 or 1,4-6.")


def format_id_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """``1,4-6``: what `parse_id_ranges` reads."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def merge_id_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ids in ascending ranges that neither touch nor overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def subtract_id_ranges(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ids of `ranges` that are not in `others`, ascending; costs nothing for ranges of any length."""
    left = []
    holes = merge_id_ranges(others)
    for first, last in merge_id_ranges(ranges):
        begin = first
        for hole_first, hole_last in holes:
            if hole_last < begin or hole_first > last:
                continue
            if hole_first > begin:
                left.append((begin, hole_first - 1))
            begin = hole_last + 1
        if begin <= last:
            left.append((begin, last))
    return left


def parse_bind(text: str) -> tuple[str, int]:
    """(host, port) of ``127.0.0.1:9100``, ``[::1]:9100``, ``localhost:9100``; that of ``:9100`` is empty: any host.

    Port 0 is any free one.
    """
    host, colon, port = text.strip().rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_host = is_bracketed or not set(host) & set(":[]")
    if not (colon and is_host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise UserError(
            f"Not an address and port: '{text}'.", hint="Write for example 127.0.0.1:9100, [::1]:9100 or :9100."
        )
    if host == "[]" or any(character.isspace() or character in "/@" for character in host):
        raise UserError(f"Not a host: '{host}'.", hint="Write for example 127.0.0.1:9100, [::1]:9100 or :9100.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_resource_name(name: str) -> bool:
    """Letters, digits and ``_ . + : @ / -``, beginning with a letter, a digit or ``_``; at most 64 of them."""
    # Without blanks, commas and '=' a name can stand in a list, and without controls it can stand in a table.
    return (
        0 < len(name) <= 64
        and (name[0].isalnum() or name[0] == "_")
        and all(character.isalnum() or character in "_.+:@/-" for character in name)
    )


def parse_resource(text: str) -> tuple[str, int]:
    """Name and amount of ``genus`` (one of it) or ``primelib=4``; amounts are whole and at least 1."""
    name, equals, amount = text.partition("=")
    if "=" in amount:
        raise UserError(f"Failed to parse resource: {text}", hint="Write NAME or NAME=NUMBER.")
    if not is_resource_name(name):
        raise UserError(
            f"Failed to parse resource: '{text}', the name is not made of letters, digits and _ . + : @ / - alone"
        )
    if not equals:
        return name, 1
    if not (amount.isascii() and amount.isdigit()):
        raise UserError(f"Failed to parse resource: '{text}', the amount is not a whole number")
    if len(amount) > 18:
        raise UserError(f"Failed to parse resource: '{text}', the amount is too large")
    if int(amount) < 1:
        raise UserError(f"Failed to parse resource: '{text}', the amount must be at least 1")
    return name, int(amount)


def parse_resources(texts: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Sorted (name, amount) pairs; of a name given twice the last counts."""
    return tuple(sorted(dict(parse_resource(text) for text in texts).items()))


def os_to_wire(text: str) -> str | dict[str, str]:
    """The JSON form of an operating-system string: itself, or ``{"b64": …}`` if its bytes are not UTF-8.

    `text` may hold surrogate escapes, as `os.fsdecode` gives them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        from binascii import b2a_base64  # noqa: PLC0415  rare

        return {"b64": b2a_base64(text.encode("utf-8", "surrogateescape"), newline=False).decode("ascii")}
    return text


def os_from_wire(value: str | dict[str, str]) -> str:
    """The string with surrogate escapes that `os_to_wire` was given."""
    if isinstance(value, dict):
        from binascii import a2b_base64  # noqa: PLC0415  rare

        return a2b_base64(value["b64"]).decode("utf-8", "surrogateescape")
    return value
