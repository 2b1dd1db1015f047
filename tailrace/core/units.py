"""Parsers for numbers with a unit: "1h30m" for milliseconds, "64MiB" for bytes.

All functions are pure. The setting's name gives its unit (`retention.ms`, `segment.bytes`), and a
plain number is in that unit. This is not a library because duration parsers guess ("1:30", "2
mths"), and a wrongly guessed retention deletes records.
"""

from __future__ import annotations

import re

_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", re.ASCII)
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE_NAMES = ("bytes", "_size", "_memory")
TEXT_MAX = 60
DIGITS_MAX = 18


def digits_in(text: str) -> int | None:
    """The number of a text of ASCII digits; None: it has others, none, or more than DIGITS_MAX.

    `str.isdigit` takes "²" and 5,000 digits, which `int` refuses.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    return int(text) if is_number else None


def whole_number(name: str, given: object) -> int | None:
    """The value of the setting `name` in its own unit, from a number or text.

    None if it is not a whole number of that unit.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if not isinstance(given, str) or len(given) > TEXT_MAX:
        return None
    text = given.strip()
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text)
    plain = name.replace(".", "_")
    if plain.endswith("_ms"):
        return duration_ms(text)
    return _bytes(text) if plain.endswith(_SIZE_NAMES) else None


def examples(name: str) -> str:
    """Examples of allowed values, for an error message."""
    plain = name.replace(".", "_")
    if plain.endswith("_ms"):
        return " (in ms), or a time such as 500ms, 1h30m or 7d"
    return " (of bytes), or a size such as 64MiB or 1GB" if plain.endswith(_SIZE_NAMES) else ""


def duration_ms(text: str) -> int | None:
    """Parse "500ms", "1h30m" or "7d" into milliseconds. None if it is no whole number of them."""
    total, position = 0.0, 0
    if len(text) > TEXT_MAX:
        return None
    while position < len(text):
        part = _DURATION_PART.match(text, position)
        if part is None:
            return None
        total += float(part[1]) * _MS[part[2]]
        position = part.end()
    return _whole(total) if text else None


def shown_duration(us: int) -> str:
    """Format microseconds as "1h30m", "10s" or "50ms", which `duration_ms` reads."""
    ms, rest_us = divmod(us, 1000)
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, ms = divmod(ms, _MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    if ms or rest_us:
        parts.append(f"{ms}.{rest_us:03d}ms" if rest_us else f"{ms}ms")
    return "".join(parts) or "0s"


def bytes_of(text: str) -> int | None:
    """Bytes of a number without unit, or of one such as "50MB" or "64MiB"; None: it is none."""
    plain = digits_in(text)
    return _bytes(text) if plain is None else plain


def _bytes(text: str) -> int | None:
    found = _SIZE.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        return None
    return _whole(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def _whole(number: float) -> int | None:
    """The number as an int. None if it is not whole, or from 2**53 on, where floats are inexact."""
    return int(number) if number == int(number) and number < 2**53 else None
