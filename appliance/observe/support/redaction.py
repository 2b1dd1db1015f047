"""Log lines and texts without what belongs to the users: payloads, keys, headers, secrets.

A log line keeps its event, its numbers and its names (topics, groups, paths, codes). Of a sentence
that may quote a client, the quotations go. A line of unknown form goes entirely.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

SECRET = "(secret)"
TEXT = "(text)"
UNKNOWN_LINE = "(a line of another form is left out)"
_SENTENCES = ("reason", "error", "detail", "message", "lost")
"""Fields that are sentences, which may quote."""
_HIDDEN = re.compile(
    r"key|keys|value|values|headers?|payload|body|.*(token|password|secret|credential).*"
)
"""Names of fields that are left out."""
_NAMED_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:passw(?:or)?d|secret|token|authorization|credential|api[_-]?key|"
    r"private[_-]?key)[\w.-]*[\"']?\s*[=:]\s*)((?:bearer\s+|basic\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;}\]]+))"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}")
_USER_INFO = re.compile(r"(\w+://)[^/\s@'\"]+@|\b()[\w.%-]+:[^\s/@:'\"]+@")
_QUERY = re.compile(r"(\w+://[^\s?'\"]+\?)[^\s'\"]+")
_QUOTED = re.compile(r"b?\\?\"[^\"]*\"|b?\\?'[^']*'")
_PLAIN = re.compile(r"[\w./:@,+=()<>*%-]*")
_LINE = re.compile(
    r"^(?P<before>.*?\bprocess=tr-[\w-]+ )(?P<event>[a-z][a-z_]+)(?P<rest>(?: .*)?)$"
)
_TOKEN = re.compile(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\S*)|\S+")
_SYSTEMD = re.compile(r"^\S+ \S+ systemd\[\d+\]: ")
_FRAME = re.compile(r'^\s+File "[^"]+", line \d+, in \S+$')
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt))(?::.*)?$")
_TRACEBACK = "Traceback (most recent call last):"


def without_secrets(text: str) -> str:
    """A text without user names and queries in URLs, and without values that are named a secret."""
    text = _USER_INFO.sub(lambda found: f"{found[1] or ''}{SECRET}@", text)
    text = _QUERY.sub(rf"\g<1>{SECRET}", text)
    text = _NAMED_SECRET.sub(rf"\g<1>{SECRET}", text)
    return _BEARER.sub(rf"\g<1> {SECRET}", text)


def sentence(text: str) -> str:
    """A sentence without its quotations, which may be a client's."""
    return without_secrets(_QUOTED.sub(TEXT, text))


def log_lines(lines: Iterable[str]) -> Iterator[str]:
    """Each line as it may be given away."""
    for line in lines:
        line = line.rstrip("\n")
        if line.startswith("{"):
            yield _json_line(line)
        elif found := _LINE.match(line):
            yield f"{found['before']}{found['event']}{_fields(found['event'], found['rest'])}"
        elif _SYSTEMD.match(line):
            yield without_secrets(line)
        elif line == _TRACEBACK or _FRAME.match(line):
            yield line
        elif raised := _RAISED.match(line):
            yield f"{raised['kind']}: {TEXT}"
        elif line.startswith("tailrace: "):
            yield sentence(line)
        elif line.strip():
            yield UNKNOWN_LINE


def _fields(event: str, rest: str) -> str:
    """The fields of a line. Words without a name are parts of a client's text."""
    found = []
    for token in _TOKEN.finditer(rest):
        name, value = token[1], token[2]
        found.append(f"{name}={_field(event, name, value)}" if name else TEXT)
    return "".join(f" {field}" for field in found)


def _field(event: str, name: str, value: str) -> str:
    if _HIDDEN.fullmatch(name):
        return SECRET
    if name == "advice":
        return value
    is_quoted = value[:1] in ("'", '"')
    inner = value[1:-1] if is_quoted else value
    if event == "internal_error" and name == "reason":
        return f"'{inner.partition(':')[0]}: {TEXT}'"
    if name in _SENTENCES:
        return f"'{sentence(inner)}'"
    return without_secrets(value) if _PLAIN.fullmatch(inner) else TEXT


def _json_line(line: str) -> str:
    try:
        found = orjson.loads(line)
        event, fields = str(found["event"]), dict(found["fields"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return UNKNOWN_LINE
    kept: dict[str, Any] = {
        name: found[name] for name in ("time", "level", "process", "event") if name in found
    }
    kept["fields"] = {
        name: _field(event, name, value) if isinstance(value, str) else value
        for name, value in fields.items()
        if isinstance(value, (str, int, float, bool))
    }
    return orjson.dumps(kept).decode()
