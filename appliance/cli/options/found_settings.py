"""Settings that a start would use: the sources that a command's options choose, merged and
checked.
"""

from __future__ import annotations

from typing import Any

from appliance.cli.options.shared import parse_pairs
from appliance.config.setting_definition import Definition
from appliance.config.settings import Settings, value_of
from appliance.config.settings_sources import (
    DEFAULT_SOURCE,
    Given,
    Problem,
    gather_settings,
    problems_of_size,
    related_problems,
    settings_of,
)
from appliance.config.topology import read_topology


class FoundSettings:
    """Settings that a start with these options would use, and what is wrong with them."""

    def __init__(self, path: str | None, environment: dict[str, str], assignments: Any) -> None:
        self.path = path
        self.problems: list[Problem] = []
        flags = list(parse_pairs(tuple(assignments), "--set").items())
        self.given = gather_settings(path, environment, flags, self.problems)
        self.settings: Settings = settings_of(self.given, self.problems)
        wrong = {problem.setting for problem in self.problems}
        self.problems += related_problems(self.settings, self.given, read_topology(), wrong)
        if not self.problems:
            self.problems += problems_of_size(self.settings, self.given)

    def row(self, definition: Definition) -> dict[str, Any]:
        """A setting with its value, origin and facts."""
        name = definition.name
        given: Given | None = self.given.get(name)
        line = given.file.line_of(name) if given is not None and given.file is not None else 0
        return {
            "name": name,
            "value": definition.shown(value_of(self.settings, definition)),
            "default": definition.default,
            "source": given.source if given is not None else DEFAULT_SOURCE,
            "line": line or None,
            "unit": definition.unit,
            "reload": definition.is_live,
        }
