"""The configuration file that an installation gets: every setting as a comment, with its meaning.

Owner: pure.
Invariants:
- Without its comments it gives exactly what it was asked for.
- Each name is written whole, so that a line may be uncommented wherever it stands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from appliance.config.setting_definition import Definition
from appliance.config.settings import definitions

_WIDTH = 96
HEADER = """\
# Configuration of Tailrace, in TOML. Each setting stands here with its default, as a comment.
# To change one, remove the # before its name. Numbers take units in quotes: "64MiB", "1h30m".
#
# The order, later ones win: defaults; this file; conf.d/*.toml beside it, by name; environment
# (TAILRACE_RING_BYTES for ring_bytes); flags of `tailrace serve`; `tailrace config set`.
#
# Check it with `tailrace config check`. `tailrace reload` applies what may change while the
# appliance runs, and says what needs a restart.
"""


def default_file(given: Mapping[str, Any] | None = None) -> str:
    """The text of the file. Settings in `given` are set, the others are comments.

    Raises: KeyError for a name that is no setting.
    """
    values = dict(given or {})
    parts = [HEADER]
    for name, definition in definitions().items():
        is_given = name in values
        value = values.pop(name) if is_given else definition.default
        comment = [
            *textwrap.wrap(definition.doc, _WIDTH, break_on_hyphens=False),
            facts(definition),
        ]
        parts.append("\n" + "".join(f"# {line}\n" for line in comment))
        parts.append(f"{'' if is_given else '# '}{name} = {in_toml(value)}\n")
    if values:
        raise KeyError(f"no settings: {', '.join(values)}")
    return "".join(parts)


def facts(definition: Definition) -> str:
    """Range, unit, way of a change, and version of a setting, in one line."""
    unit = f", {definition.unit}" if definition.unit else ""
    change = "A reload applies it" if definition.is_live else "Needs a restart"
    return f"Values: {definition.range_text}{unit}. {change} (since {definition.since})."


def in_toml(value: Any) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(in_toml(item) for item in value)}]"
    if isinstance(value, str):
        escaped = "".join(
            f"\\u{ord(c):04x}" if ord(c) < 0x20 or c == "\x7f" else c
            for c in value.replace("\\", "\\\\").replace('"', '\\"')
        )
        return f'"{escaped}"'
    return str(value)
