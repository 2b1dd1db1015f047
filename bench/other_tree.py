"""Another commit's tree beside this one, made ready as an installation is: compiled kernel, byte
code.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("tailrace", "shm", "workers", "netfront", "appliance")


def short_name(commit: str) -> str:
    """The commit's abbreviated hash."""
    return subprocess.run(
        ["git", "rev-parse", "--short", commit],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.strip()


def environment_of(tree: pathlib.Path) -> dict[str, str]:
    """For a process that is to run the code of `tree`; its working directory has to be `tree`
    too.
    """
    return {**os.environ, "PYTHONPATH": str(tree)}


def prepare(tree: pathlib.Path) -> None:
    """Do what an installation does once: without it the first start pays for all."""
    if (tree / "tailrace/kernel/build.py").exists() and not list(
        (tree / "tailrace/kernel").glob("_native.*.so")
    ):
        subprocess.run(
            [sys.executable, "-P", "tailrace/kernel/build.py"],
            cwd=tree,
            env=environment_of(tree),
            check=True,
            stdout=subprocess.DEVNULL,
        )
    subprocess.run([sys.executable, "-m", "compileall", "-q", *PACKAGES], cwd=tree, check=False)


@contextmanager
def tree_of(commit: str) -> Iterator[pathlib.Path]:
    """A worktree of `commit`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tailrace-base-") as directory:
        tree = pathlib.Path(directory) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
            check=True,
            cwd=ROOT,
        )
        try:
            prepare(tree)
            yield tree
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], check=True, cwd=ROOT
            )
