"""Definitions of Kafka's messages: their fields by version, and the value of a missing one.

`definitions.json` has Apache Kafka's message definitions (Apache License 2.0), distilled by
`tools/kafka_definitions.py`. `decoding` and `encoding` make functions of them.

Owner: pure, but for the file, which is read once.
"""

from __future__ import annotations

import os.path
import struct
from functools import cache
from typing import Any

import orjson

ZERO_UUID = bytes(16)
NULL_UUID = ZERO_UUID
Readable = bytes | memoryview
Message = dict[str, Any]

INT16, INT32, INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
FIXED = {
    "int8": struct.Struct(">b"), "int16": INT16, "int32": INT32, "int64": INT64,
    "uint16": struct.Struct(">H"), "uint32": struct.Struct(">I"), "float64": struct.Struct(">d"),
    "bool": struct.Struct(">?"),
}  # fmt: skip
_ZERO: dict[str, Any] = {
    **dict.fromkeys(FIXED, 0), "bool": False, "float64": 0.0, "string": "", "bytes": b"",
    "records": None, "uuid": ZERO_UUID,
}  # fmt: skip


@cache
def definitions() -> dict[str, Any]:
    """All definitions: of APIs by their number, of structures by their name."""
    path = os.path.join(os.path.dirname(__file__), "definitions.json")
    with open(path, "rb") as file:
        found: dict[str, Any] = orjson.loads(file.read())
    return found


def definition(api: int) -> dict[str, Any] | None:
    """The definition of an API; None: there is none."""
    found: dict[str, Any] | None = definitions().get(str(api))
    return found


def is_flexible(api: int, version: int) -> bool:
    """True if this version of the API has tagged fields and compact lengths."""
    found = definition(api)
    return found is not None and version >= found["flexible"]


def default_of(field: dict[str, Any]) -> Any:
    """The value of a field that is missing."""
    if "default" in field:
        return field["default"]
    kind: str = field["type"]
    if kind.startswith("[]"):
        return []
    if kind == "struct":
        return {inner["name"]: default_of(inner) for inner in field["fields"]}
    return _ZERO[kind]
