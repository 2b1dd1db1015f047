"""The modules of tests are compiled once a run: each of xdist's processes begins with its share.

pytest compiles a module that it has not seen, which takes four times the CPU of its import. Every
process collects all modules in the same order: without shares each compiles nearly all of them.

Owner: each process of a run. Invariant: what cannot be imported here is left to the collection,
which reports it.
"""

from __future__ import annotations

import importlib
import pathlib

import pytest


def import_share(config: pytest.Config) -> None:
    """Import this process's share, where it is one of several and the run is of all tests."""
    given = getattr(config, "workerinput", None)
    if given is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number = int(given["workerid"].removeprefix("gw"))
    for file in share(config.rootpath, number, given["workercount"]):
        above = [folder / "conftest.py" for folder in reversed(file.parents)]
        conftests = [path for path in above if (config.rootpath / path).exists()]
        try:
            for path in [*conftests, file]:
                importlib.import_module(".".join(path.with_suffix("").parts))
        except (Exception, pytest.skip.Exception):
            continue


def share(root: pathlib.Path, number: int, count: int) -> list[pathlib.Path]:
    """The modules of tests that process `number` of `count` imports first, from `root` on."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [path.relative_to(root) for path in found[number::count]]
