"""The order in which a run's tests begin, which of them share a process, and which take too long.

Invariants:
- Tests that share a fixture (of a module, or a Spark session) run in one process, in file order.
- Long groups begin first: those marked `slow_because`, then by their number of tests.
- A duration decides nothing about a run unless its machine is said to be idle (tests/conftest.py).
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import pytest
from xdist.scheduler import LoadScopeScheduling

SLOW_S = 10.0
"""A test that takes longer has its reason beside it: `@pytest.mark.slow_because("...")`, or is
`long`, or Spark's.
"""
_SPARK = "spark"
"""The fixture of the session that costs most: all its tests share a process."""
_WIDE = ("module", "class", "package")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def group_of(nodeid: str) -> str:
    """The name of the group that a test's process runs as a whole: its file, where tests share a
    fixture; else itself.
    """
    return _group_of_file(nodeid.partition("::")[0]) or nodeid


@functools.cache
def _group_of_file(path: str) -> str | None:
    file = pathlib.Path(path)
    if not file.exists():
        return None
    above = _wide_fixtures_above(file.parent)
    arguments = "|".join(map(re.escape, sorted({*above, _SPARK})))
    text = file.read_text()
    if "scope=" not in text and not re.search(rf"\b(?:{arguments})\s*[:,)]", text):
        return None  # most files: they need not be parsed
    functions = _functions(file)
    used = {
        argument.arg
        for function in functions
        for argument in (*function.args.args, *function.args.kwonlyargs)
    }
    if _SPARK in used:
        return _SPARK
    wide = _wide_fixtures(functions) | above
    return path if wide & used else None


@functools.cache
def _wide_fixtures_above(directory: pathlib.Path) -> frozenset[str]:
    """The shared fixtures of the conftest files of a directory and those above it."""
    above = directory.parent
    found = _wide_fixtures_above(above) if above != directory else frozenset()
    conftest = directory / "conftest.py"
    return found | _wide_fixtures(_functions(conftest)) if conftest.exists() else found


def _functions(file: pathlib.Path) -> list[Function]:
    """The functions of a module and of its classes: those that pytest looks at."""
    found, bodies = list[Function](), [ast.parse(file.read_bytes()).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, Function):
                found.append(node)
            elif isinstance(node, ast.ClassDef):
                bodies.append(node.body)
    return found


def _wide_fixtures(functions: Iterable[Function]) -> set[str]:
    """The fixtures among these that several tests share."""
    return {
        function.name
        for function in functions
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == "scope"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value in _WIDE
    }


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups, and the tests that are in none one by one. xdist's own `loadgroup` reads no
    groups with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def order(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[bool, int, int]]:
    """The key that sorts a run's tests: what is marked as slow first, then large groups, each in
    its file's order.
    """
    groups = {item: group_of(item.nodeid) for item in items}
    counts = Counter(groups.values())
    slow = {
        groups[item]
        for item in items
        if any(map(item.get_closest_marker, ("slow_because", "long", "spark")))
    }
    places = {name: place for place, name in enumerate(dict.fromkeys(groups.values()))}
    return lambda item: (groups[item] not in slow, -counts[groups[item]], places[groups[item]])


def slow_without_a_reason(reporter: pytest.TerminalReporter) -> list[tuple[float, str]]:
    """(seconds, test) of each that passed SLOW_S and has none of `slow_because`, `long` and
    `spark`: the first test of Spark's in a process starts a JVM.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    excused: set[str] = set()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
                if not report.keywords.keys().isdisjoint(("slow_because", "long", "spark")):
                    excused.add(report.nodeid)
    return sorted(
        (
            (taken, name)
            for name, taken in seconds.items()
            if taken > SLOW_S and name not in excused
        ),
        reverse=True,
    )
