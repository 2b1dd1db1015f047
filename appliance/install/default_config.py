"""Configuration file of a new installation: every setting, most of them as comments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from appliance.config.settings import setting_names


def default_file(given: Mapping[str, Any]) -> str:
    """The text of the file. Settings in `given` are set, the others are comments."""
    parts = ["# Configuration of Tailrace. Check it with `tailrace serve --check --config FILE`.\n"]
    for name, item in setting_names().items():
        default = item.default if item.default_factory is MISSING else item.default_factory()
        lines = textwrap.wrap(item.metadata["doc"], 96, break_on_hyphens=False)
        parts.append("\n" + "".join(f"# {line}\n" for line in lines))
        value = json.dumps(given.get(name, default))
        parts.append(f"{'' if name in given else '# '}{name} = {value}\n")
    return "".join(parts)
