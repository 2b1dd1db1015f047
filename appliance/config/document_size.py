"""Size of the document of settings in force, which every process reads in shared memory.

Invariants:
- A configuration that `checked_settings` accepts fits by itself, with REPORT_BYTES to spare. So a
  start, and a supervisor that leaves out settings of the catalog, always has room.
- A change of the catalog's settings is accepted only if the whole document has room with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from appliance.config.setting_definition import Definition
from appliance.config.settings import Settings, definitions, value_of

SETTINGS_BYTES = 128 << 10
"""Largest document of settings in force."""
OVERRIDES_BYTES = 32 << 10
"""Largest document of settings from the catalog."""
REPORT_BYTES = 8 << 10
"""Part of the document that stays free for the report of a reload."""
_RUN_BYTES = 8 << 10
"""Bytes for what processes get beside the settings: places of workers, sockets, this run."""


class Excess(NamedTuple):
    """A document without room."""

    size_bytes: int
    longest: str
    """The setting with the longest value."""

    def __str__(self) -> str:
        return (
            f"the settings have {self.size_bytes} bytes as the processes share them, and at most "
            f"{SETTINGS_BYTES - REPORT_BYTES} fit; shorten {self.longest}, the longest"
        )


def config_row(definition: Definition, value: Any, source: str, line: int) -> dict[str, Any]:
    """A setting as DESCRIBE_CONFIGS says it."""
    return {
        "name": definition.name,
        "value": definition.shown(value),
        "default": definition.shown(definition.default),
        "source": source,
        "line": line,
        "reload": definition.is_live,
    }


def excess_of_configuration(settings: Settings, sources: Mapping[str, str]) -> Excess | None:
    """Excess of the document that a start with these settings publishes, at its largest. `sources`:
    setting -> its origin.
    """
    rows = [
        config_row(d, value_of(settings, d), sources.get(d.name, "default"), 1_000_000)
        for d in definitions().values()
    ]
    parts = {row["name"]: row["value"] for row in rows}
    return _excess(document_bytes({"settings": parts, "configs": rows}) + _RUN_BYTES, rows)


def excess_with_overrides(
    document: Mapping[str, Any], values: Mapping[str, Any], before: Mapping[str, Any]
) -> Excess | None:
    """Excess of the document in force if the catalog's settings are `values` instead of `before`;
    None also if they make it no larger.
    """
    changed = _with_overrides(document, values)
    found = _excess(document_bytes(changed), changed["configs"])
    if found is None or found.size_bytes <= document_bytes(_with_overrides(document, before)):
        return None
    return found


def document_bytes(document: Mapping[str, Any]) -> int:
    """Bytes of a document in its block."""
    return len(orjson.dumps(document))


def _excess(size_bytes: int, rows: Iterable[Mapping[str, Any]]) -> Excess | None:
    if size_bytes <= SETTINGS_BYTES - REPORT_BYTES:
        return None
    longest = max(rows, key=lambda row: len(orjson.dumps([row["value"], row.get("without")])))
    return Excess(size_bytes, longest["name"])


def _with_overrides(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The document as it would be, without its report."""
    settings, rows = dict(document.get("settings", {})), []
    for row in document.get("configs", []):
        name, base = row["name"], row.get("without", row["value"])
        if name in values:
            row = {**row, "value": values[name], "source": "config set", "without": base}
        elif "without" in row:
            row = {key: value for key, value in row.items() if key != "without"} | {"value": base}
        if name in values or name in settings:
            settings[name] = row["value"]
        rows.append(row)
    return {**document, "settings": settings, "configs": rows, "reload": {}}
