"""Log calls of the appliance: each line is an event with named fields, and each warning and error
says what to do. docs/log.md has them all.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

from shm.runtime.logs.advice import LOG_EVENTS
from tests.kit.runs.documents import ROOT, check_part

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


@functools.cache
def log_calls(path: str) -> tuple[LogCall, ...]:
    """The log calls of a file."""
    return tuple(
        LogCall(f"{path}:{node.lineno}", node.func.attr, _template(node.args[0]))
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and ast.unparse(node.func.value).startswith("logg")
    )


@functools.cache
def files() -> list[str]:
    """The files that may log."""
    return [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if "logg" in path.read_text()
    ]


def test_a_line_is_an_event_with_named_fields() -> None:
    for call in (call for path in files() for call in log_calls(path)):
        event, *fields = _TOKEN.findall(call.template)
        assert re.fullmatch(r"[a-z][a-z_]+", event), call
        words = [field for field in fields if not re.match(r"\w+=", field)]
        # the context of an internal error is fields of its own
        assert words == (["%s"] if event == "internal_error" else []), call


def test_a_warning_says_what_to_do_and_every_meaning_is_of_a_line_that_there_is() -> None:
    """shm/runtime/logs/advice.py has the meaning and the advice of each."""
    serious = {
        call.event: call.place
        for path in files()
        for call in log_calls(path)
        if call.level in SERIOUS
    }
    without = {event: place for event, place in serious.items() if event not in LOG_EVENTS}
    assert not without, "give these their meaning and advice"
    assert set(LOG_EVENTS) == set(serious)


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
