"""Programs that benches and tools start in processes of their own are code that the type checker
sees: a script in a string is seen by nothing until it runs.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(
    path
    for room in ("bench", "tools", "examples")
    for path in (ROOT / room).rglob("*.py")
    if "node_modules" not in path.parts
)
MAKEFILE_MODULE = re.compile(r"python -P -m ([\w.]+)")


def commands(tree: ast.AST) -> Iterator[list[ast.expr]]:
    """The parts of each list that begins with this interpreter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            first = node.elts[0]
            if isinstance(first, ast.Attribute) and first.attr == "executable":
                yield node.elts


def words(command: list[ast.expr]) -> list[str | None]:
    """Its constant parts; None for the others."""
    return [
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None
        for part in command
    ]


def faults(source: str) -> list[str]:
    """Scripts in strings, and modules that are not there."""
    found = []
    for command in commands(ast.parse(source)):
        parts = words(command)
        if "-c" in parts:
            found.append(f"line {command[0].lineno}: a script in a string")
        if "-m" in parts:
            name = parts[parts.index("-m") + 1]
            if name is None or importlib.util.find_spec(name) is None:
                found.append(f"line {command[0].lineno}: no module {name}")
    return found


def test_a_process_of_its_own_runs_a_module_that_is_there() -> None:
    found = {path: faults(path.read_text(encoding="utf-8")) for path in FILES}
    assert found
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_a_script_in_a_string_and_a_missing_module_are_found() -> None:
    assert faults("run([sys.executable, '-P', '-c', code])") == ["line 1: a script in a string"]
    assert faults("run([sys.executable, '-m', 'bench.gone'])") == ["line 1: no module bench.gone"]
    assert faults("run(['redis-benchmark', '-c', '4'])") == []


def test_each_module_that_make_runs_is_there() -> None:
    names = MAKEFILE_MODULE.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is None] == []
