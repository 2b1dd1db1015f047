"""The tests of what has changed: `python -P tools/changed_tests.py [BASE]` prints pytest's
arguments, one a line.

A file counts as changed when it differs from where this branch left BASE (the upstream branch, else
HEAD), or is not committed. Its tests are those of its room:

- `room/sub/module.py`: the nearest existing folder of `tests/room/sub`.
- a test: itself; a module of `tests/kit` or another helper: the tests outside `tests/system` that
  import it.
- `docs/*.md` and other pages: `tests/test_docs.py` and its neighbours.

`tests/test_imports.py` always runs. Deleted files count; whole appliances (`tests/system`) run with
`make test`.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterable

ALWAYS = "tests/test_imports.py"
PRODUCT = ("tailrace", "shm", "workers", "netfront", "appliance", "spark_bridge", "bench", "tools")
SLOW = "tests/system"


def changed_files(root: pathlib.Path, base: str = "") -> list[str]:
    """Paths of files that differ from `base`, and of those that are not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        ).stdout.strip()

    upstream = (
        base or git("rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}") or "HEAD"
    )
    left_at = git("merge-base", "HEAD", upstream) or "HEAD"
    listed = (
        git("diff", "--name-only", left_at)
        + "\n"
        + git("ls-files", "--others", "--exclude-standard")
    )
    return sorted({path for path in listed.splitlines() if path})


def tests_of(root: pathlib.Path, changed: Iterable[str]) -> list[str]:
    """Arguments for pytest, without what another argument holds already."""
    wanted = {ALWAYS}
    for path in changed:
        wanted.update(_tests_of_one(root, pathlib.PurePosixPath(path)))
    found = {each for each in wanted if (root / each).exists()}
    return sorted(
        each
        for each in found
        if not any(str(parent) in found for parent in pathlib.PurePosixPath(each).parents)
    )


def _tests_of_one(root: pathlib.Path, path: pathlib.PurePosixPath) -> set[str]:
    room, name = path.parts[0], path.name
    if path.suffix == ".md" or room == "docs":
        return {str(each.relative_to(root)) for each in (root / "tests").glob("test_docs*.py")}
    if room == "tests":
        if name.startswith("test_"):
            return {str(path)}
        if name == "conftest.py" and len(path.parts) > 2:
            return {str(path.parent)}
        return _importers(root, path) if path.suffix == ".py" else set()
    if room not in PRODUCT:
        return set()
    folder = pathlib.PurePosixPath("tests", *path.parts[:-1])
    while not (root / folder).is_dir():
        folder = folder.parent
    return {str(folder)} if folder.name != "tests" else set()


def _importers(root: pathlib.Path, path: pathlib.PurePosixPath) -> set[str]:
    """Test modules outside SLOW that import this module."""
    dotted = ".".join(path.with_suffix("").parts)
    found = set()
    for test in (root / "tests").rglob("test_*.py"):
        relative = str(test.relative_to(root))
        if not relative.startswith(SLOW) and dotted in _imports(test):
            found.add(relative)
    return found


def _imports(path: pathlib.Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def main() -> int:
    root = pathlib.Path(__file__).parents[1]
    print("\n".join(tests_of(root, changed_files(root, *sys.argv[1:2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
