"""Event and fields of a log call, from its template and arguments.

A template is `event key=%s key=%r advice='...'`. Its fields keep the types of the arguments, for
JSON and for the journal.

Owner: pure.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r"(\w+)=('[^']*'|\S*)|\S+")
_CONVERSION = re.compile(r"%[#0\- +]*\d*(?:\.\d+)?[a-zA-Z]")
_PAIR = re.compile(r"(\w+)=(\S+)")
REST = "detail"
"""Field for words that have no name."""


def event_of(record: logging.LogRecord) -> str:
    """The first word of the line."""
    return _text(record).partition(" ")[0]


def event_and_fields(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """(event, fields by name). A line that follows no template is an event with `detail`."""
    template, arguments = str(record.msg), record.args
    if not isinstance(arguments, tuple):
        arguments = (arguments,) if arguments else ()
    try:
        tokens = list(_filled(template, arguments))
    except (TypeError, ValueError, IndexError):
        tokens = [("", word) for word in _text(record).split()]
    event, fields, rest = "", {}, []
    for name, value in tokens:
        if name:
            fields[name] = value
        elif not event:
            event = str(value)
        else:
            pairs = _PAIR.findall(str(value))
            fields |= pairs
            if not pairs:
                rest.append(str(value))
    if rest:
        fields[REST] = " ".join(rest)
    return event, fields


def _filled(template: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """(name or "", value) of each word of a template."""
    left = list(arguments)
    for token in _TOKEN.finditer(template):
        name, pattern = token[1] or "", token[2] if token[1] else token[0]
        values = tuple(left.pop(0) for _ in _CONVERSION.findall(pattern) if arguments)
        if len(values) == 1 and _CONVERSION.fullmatch(pattern):
            is_plain = isinstance(values[0], (bool, int, float)) and pattern in ("%d", "%s", "%r")
            yield name, values[0] if is_plain else _shown(pattern, values[0])
        else:
            yield name, (pattern % values if arguments else pattern).strip("'")


def _shown(pattern: str, value: Any) -> str:
    """A text as it is, without the quotes of `%r`."""
    return str(value) if pattern in ("%s", "%r") else pattern % value


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return str(record.msg)
