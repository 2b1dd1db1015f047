"""JSON in printable ASCII: texts that the process of groups keeps have no other characters."""

from __future__ import annotations

import json
from typing import Any


def plain_json(value: Any) -> str:
    """The value as JSON, every other character escaped."""
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f")
