"""Definition of a setting: everything that errors, documents and commands say about it, written
once beside its default.

Owner: pure.
Invariants:
- A setting without a unit in its definition has the unit that its name ends with.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, field
from typing import Any, NamedTuple

LARGEST = 1 << 40
SINCE_FIRST = "0.1.0"
SECRET_SHOWN = "(secret)"
_USER_OF_URL = re.compile(r"(://)[^/?#\s]*@")
_UNITS = (
    ("_ms", "ms"), (".ms", "ms"), ("_us", "us"), (".us", "us"), ("minutes", "minutes"),
    ("_bytes", "bytes"), (".bytes", "bytes"), ("_size", "bytes"),
)  # fmt: skip


class Definition(NamedTuple):
    """A setting of the appliance."""

    name: str
    """Name in the file, `--set` and the documentation."""
    field_name: str
    """Field of `Settings`."""
    kind: str
    """Type of the field, as it is annotated."""
    default: Any
    doc: str
    minimum: int = 0
    maximum: int = LARGEST
    choices: tuple[str, ...] = ()
    """The allowed texts; empty: any."""
    is_live: bool = False
    """True if a running appliance takes a new value with a reload; else a restart is needed."""
    since: str = SINCE_FIRST
    is_secret: bool = False
    """True if no command, log line or response may show the value."""

    @property
    def unit(self) -> str:
        """Unit of a number; "" if it has none."""
        return next((unit for end, unit in _UNITS if self.name.endswith(end)), "")

    @property
    def range_text(self) -> str:
        """The allowed values, for people."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind == "int":
            return f"{self.minimum} to {self.maximum}"
        return {"bool": "true, false", "list[str]": "a list of texts", "str": "a text"}.get(
            self.kind, "as described"
        )

    def shown(self, value: Any) -> Any:
        """The value, unless it is a secret. User names and passwords of a URL are left out."""
        if self.is_secret and value not in ("", None):
            return SECRET_SHOWN
        if isinstance(value, str) and "://" in value:
            return _USER_OF_URL.sub(rf"\1{SECRET_SHOWN}@", value)
        return value


def setting(
    default: Any, doc: str, *, minimum: int = 0, maximum: int = LARGEST, name: str = "",
    choices: tuple[str, ...] = (), live: bool = False, since: str = SINCE_FIRST,
    secret: bool = False,
) -> Any:  # fmt: skip
    """A field of `Settings` with its definition. `live`: a reload applies it in every process that
    uses it.
    """
    metadata = {
        "name": name, "doc": doc, "minimum": minimum, "maximum": maximum, "choices": choices,
        "is_live": live, "since": since, "is_secret": secret,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def definition_of(item: Field[Any]) -> Definition:
    """The definition of a field that `setting` made."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    rest = {key: value for key, value in item.metadata.items() if key != "name"}
    return Definition(
        item.metadata["name"] or item.name, item.name, str(item.type), default, **rest
    )
