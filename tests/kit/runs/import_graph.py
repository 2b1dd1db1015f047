"""The import graph of the repository, of every `import`: also in functions and under TYPE_CHECKING.

A package's `__init__` is a module like the others; importing a submodule counts as importing that
submodule alone. Circles are strongly connected components (Tarjan).
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator, Mapping

Graph = dict[str, set[str]]


def modules_under(root: pathlib.Path, packages: Iterable[str]) -> dict[str, pathlib.Path]:
    """Dotted name -> file of each module of these packages."""
    found: dict[str, pathlib.Path] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph_of(modules: Mapping[str, pathlib.Path]) -> Graph:
    """Module -> the modules of these that it imports."""
    return {name: set(_imported(name, path, modules)) - {name} for name, path in modules.items()}


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All of them, of functions too, without a look at expressions, which are most of a tree."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())


def _imported(name: str, path: pathlib.Path, modules: Mapping[str, pathlib.Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            requested = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*above, *filter(None, [node.module])])
            requested = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in requested:
            while each and each not in modules:
                each = each.rpartition(".")[0]
            if each:
                yield each


def circles(graph: Graph) -> list[list[str]]:
    """The groups of modules that import each other, each sorted."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = stack.index(module)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for module in graph:
        if module not in order:
            visit(module)
    return sorted(found)
