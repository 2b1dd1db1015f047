"""Tables of the stand-ins for deltalake and pyiceberg: a directory of numbered commits, each a file
that is renamed to its name whole. `fail_at` has the next commit end before or behind that.
"""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import Any

fail_at = ""


class Interrupted(BaseException):
    """Exception that acts as a kill on code that cleans up nothing."""


def commits(path: str) -> list[Any]:
    files = sorted(pathlib.Path(path).glob("*.commit"))
    return [pickle.loads(file.read_bytes()) for file in files]


def add(path: str, commit: Any) -> None:
    global fail_at
    where, fail_at = fail_at, ""
    os.makedirs(path, exist_ok=True)
    number = len(list(pathlib.Path(path).glob("*.commit")))
    (pathlib.Path(path) / f"{number}.new").write_bytes(pickle.dumps(commit))
    if where == "before":
        raise Interrupted
    os.rename(f"{path}/{number}.new", f"{path}/{number:09d}.commit")
    if where == "behind":
        raise Interrupted
