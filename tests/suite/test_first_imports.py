"""Each process of a run imports its share of the modules of tests before it collects all."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.runs.first_imports import import_share, share


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A root whose package of tests has a module that cannot be imported, and two that can."""
    folder = tmp_path / "tests" / "shared_out"
    folder.mkdir(parents=True)
    for name, text in {"a": "import none_such", "b": "", "c": ""}.items():
        (folder / f"test_{name}.py").write_text(text)
    import tests

    monkeypatch.setattr(tests, "__path__", [str(tmp_path / "tests")])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("tests.shared_out")]:
        del sys.modules[name]


def config(root: pathlib.Path, **attributes: object) -> Any:
    return SimpleNamespace(
        rootpath=root, args_source=pytest.Config.ArgsSource.TESTPATHS, **attributes
    )


def test_shares_have_each_module_once() -> None:
    root = pathlib.Path(__file__).parents[2]
    shares = [share(root, number, 4) for number in range(4)]
    assert sorted(path for one in shares for path in one) == share(root, 0, 1)
    assert pathlib.Path("tests/suite/test_first_imports.py") in share(root, 0, 1)


def test_a_module_that_cannot_be_imported_is_left_to_the_collection(tree: pathlib.Path) -> None:
    import_share(config(tree, workerinput={"workerid": "gw0", "workercount": 2}))
    assert "tests.shared_out.test_c" in sys.modules
    assert "tests.shared_out.test_a" not in sys.modules
    assert "tests.shared_out.test_b" not in sys.modules, "another process's"


def test_a_run_of_one_process_or_of_chosen_files_imports_nothing_first(tree: pathlib.Path) -> None:
    import_share(config(tree))
    chosen = config(tree, workerinput={"workerid": "gw0", "workercount": 1})
    chosen.args_source = pytest.Config.ArgsSource.ARGS
    import_share(chosen)
    assert not [name for name in sys.modules if name.startswith("tests.shared_out.")]
