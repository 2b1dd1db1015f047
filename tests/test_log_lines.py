"""Log calls of the appliance: each line is an event with named fields, and each warning and error
says what to do. docs/log.md has them all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from shm.runtime.logs.advice import LOG_EVENTS
from tests.kit.documents import ROOT, check_part

ROOMS = ("appliance", "netfront", "shm", "workers")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
SERIOUS = LEVELS[2:]
_TOKEN = re.compile(r"\w+='[^']*'|\S+")


class LogCall(NamedTuple):
    """One call of a logger."""

    place: str
    level: str
    template: str

    @property
    def event(self) -> str:
        return self.template.partition(" ")[0]


def _template(argument: ast.expr) -> str:
    """The text of a template, "" for the values of an f-string."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    if isinstance(argument, ast.JoinedStr):
        return "".join(
            _template(part) for part in argument.values if isinstance(part, ast.Constant)
        )
    return ""


def log_calls() -> Iterator[LogCall]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr in LEVELS and ast.unparse(node.func.value).startswith("logg"):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield LogCall(place, node.func.attr, _template(node.args[0]))


CALLS = list(log_calls())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.place)
def test_a_line_is_an_event_with_named_fields(call: LogCall) -> None:
    event, *fields = _TOKEN.findall(call.template)
    assert re.fullmatch(r"[a-z][a-z_]+", event), call.template
    words = [field for field in fields if not re.match(r"\w+=", field)]
    # the context of an internal error is fields of its own
    assert words == (["%s"] if event == "internal_error" else []), call.template


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.level in SERIOUS], ids=lambda call: call.place
)
def test_a_warning_says_what_to_do(call: LogCall) -> None:
    assert call.event in LOG_EVENTS, (
        f"{call.place}: give {call.event} its meaning and advice in shm/runtime/logs/advice.py"
    )


def test_every_meaning_is_of_a_line_that_there_is() -> None:
    assert set(LOG_EVENTS) == {call.event for call in CALLS if call.level in SERIOUS}


def test_the_page_of_log_lines() -> None:
    rows = [
        f"| `{event}` | {known.meaning} | {known.advice} |\n"
        for event, known in sorted(LOG_EVENTS.items())
    ]
    check_part(
        ROOT / "docs/log.md",
        "lines",
        "| line | meaning | what to do |\n|---|---|---|\n" + "".join(rows).replace("<", "\\<"),
    )
