"""`make check` runs the tests of the rooms that changed, and of nothing else."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
from types import ModuleType

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools/changed_tests.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed_tests", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    files = {
        "workers/log/segment.py": "", "workers/append/worker.py": "", "docs/log.md": "",
        "systemd/unit": "",
        "tests/kit/disks.py": "", "tests/test_docs.py": "", "tests/test_docs_limits.py": "",
        "tests/test_imports.py": "",
        "tests/workers/test_worker.py": "from tests.kit import disks\n",
        "tests/workers/log/test_segment.py": "",
        "tests/system/test_everything.py": "from tests.kit.disks import Disk\n",
        "tests/netfront/conftest.py": "", "tests/netfront/test_front.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "requested"),
    [
        (["workers/log/segment.py"], ["tests/workers/log"]),
        (["workers/log/deeper/new.py"], ["tests/workers/log"]),
        (["workers/append/worker.py", "workers/log/segment.py"], ["tests/workers"]),
        (["tests/kit/disks.py"], ["tests/workers/test_worker.py"]),
        (["tests/system/test_everything.py"], ["tests/system/test_everything.py"]),
        (["tests/netfront/conftest.py"], ["tests/netfront"]),
        (["docs/log.md"], ["tests/test_docs.py", "tests/test_docs_limits.py"]),
        (["shm/queues/ring.py", "systemd/unit", "Makefile", "tests/workers/test_gone.py"], []),
    ],
)
def test_a_change_is_tested_by_the_nearest_folder(
    tool: ModuleType, tree: pathlib.Path, changed: list[str], requested: list[str]
) -> None:
    assert tool.tests_of(tree, changed) == sorted([*requested, tool.ALWAYS])


def test_what_is_committed_on_a_branch_changed_and_new_is_found(
    tool: ModuleType, tree: pathlib.Path
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments],
            cwd=tree,
            check=True,
            capture_output=True,
        )

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-qm", "all")
    assert tool.changed_files(tree) == []
    git("checkout", "-qb", "work")
    (tree / "workers/append/worker.py").write_text("one = 1\n")
    git("commit", "-qam", "committed")
    (tree / "docs/log.md").write_text("changed\n")
    (tree / "workers/new.py").write_text("")
    assert tool.changed_files(tree) == ["docs/log.md", "workers/new.py"]
    assert tool.changed_files(tree, "main") == [
        "docs/log.md",
        "workers/append/worker.py",
        "workers/new.py",
    ]
