"""Imports of tests and benchmarks: no circle anywhere, and nothing is borrowed from another test.

The product's own contracts are import-linter's (pyproject.toml).
"""

from __future__ import annotations

import pathlib

import pytest

from tests.kit.runs.import_graph import Graph, circles, graph_of, modules_under

ROOT = pathlib.Path(__file__).parents[1]
TOOLS = ("tests.crash", "tests.fuzz", "tests.sim")
"""Folders that are programs too (`make torture`, `make fuzz`, `make simulate`): other tests may use
their parts.
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(modules_under(ROOT, ["tests", "bench"]))


def test_no_modules_import_each_other(graph: Graph) -> None:
    found = circles(graph)
    assert found == [], (
        "cut each circle: have the caller hand in what the lower module needs, or move what is "
        "shared below both"
    )


def test_no_module_imports_a_test(graph: Graph) -> None:
    borrowed = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if other.rpartition(".")[2].startswith("test_")
    }
    assert borrowed == set(), "move what is shared to tests/kit"


def test_what_tests_of_two_folders_share_is_in_the_kit(graph: Graph) -> None:
    borrowed = set()
    for name, others in graph.items():
        for other in others - {"tests"}:
            if not other.startswith("tests."):
                continue
            folder, _, last = other.rpartition(".")
            is_shared = last == "kit" or other.startswith(("tests.kit", *TOOLS))
            if not is_shared and not name.startswith(f"{folder}."):
                borrowed.add((name, other))
    assert borrowed == set(), "move what is shared to tests/kit"


def test_a_circle_is_found_also_by_lazy_and_type_only_imports(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "rooms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def late() -> None:\n    from rooms import two\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .three import name\n"
    )
    (package / "three.py").write_text("import rooms.one\n")
    (package / "four.py").write_text("from rooms.one import late\n")
    assert circles(graph_of(modules_under(tmp_path, ["rooms"]))) == [
        ["rooms.one", "rooms.three", "rooms.two"]
    ]
