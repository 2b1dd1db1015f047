"""The order in which a run's tests begin, which of them share a process, and which take too long.

Invariants:
- Tests that share a fixture (of a module, or a Spark session) run in one process, in file order.
- Long groups begin first: those marked `slow_because`, then by their number of tests.
- A duration decides nothing about a run unless its machine is said to be idle (tests/conftest.py).
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SLOW_S = 10.0
"""A test that takes longer has its reason beside it: `@pytest.mark.slow_because("...")`, or is
`long`, or Spark's.
"""
_SPARK = "spark"
"""The fixture of the session that costs most: all its tests share a process."""
_DEF = r"(?:async )?def "
_METHOD = rf"    {_DEF}(?!__init__)\w+\(\s*self,"
_ARGUMENTS = re.compile(
    rf"^(?:{_DEF}\w+\(|{_METHOD})(.*?)\)(?: ->.*?)?:$", re.DOTALL | re.MULTILINE
)
_ARGUMENT_NAME = re.compile(r"(\w+)\s*(?::[^,]*)?,")
_WIDE_FIXTURE = re.compile(
    rf"^@pytest\.fixture\([^)]*\bscope=\"(?:module|class|package)\".*?^{_DEF}(\w+)",
    re.DOTALL | re.MULTILINE,
)
"""Modules are read by these in place of a parser, which takes ten times as long: a name too many
keeps tests together that need not be.
"""


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
    text = file.read_text()
    used = {
        name
        for arguments in _ARGUMENTS.findall(text)
        for name in _ARGUMENT_NAME.findall(f"{arguments},")
    }
    if _SPARK in used:
        return _SPARK
    return path if used & (_wide_fixtures_above(file.parent) | _wide_fixtures(text)) else None


@functools.cache
def _wide_fixtures_above(directory: pathlib.Path) -> frozenset[str]:
    """The shared fixtures of the conftest files of a directory and those above it."""
    above = directory.parent
    found = _wide_fixtures_above(above) if above != directory else frozenset()
    conftest = directory / "conftest.py"
    return found | _wide_fixtures(conftest.read_text()) if conftest.exists() else found


def _wide_fixtures(text: str) -> set[str]:
    """The fixtures that a module defines for several tests."""
    return set(_WIDE_FIXTURE.findall(text)) if "scope=" in text else set()


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups, and the tests that are in none one by one. xdist's own `loadgroup` reads no
    groups with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Also forget a group that has ended: for each test, the base class counts what is pending
        in all groups that its process was ever given.
        """
        super().mark_test_complete(node, item_index, duration)
        group = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][group].values()):
            del self.assigned_work[node][group]


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
