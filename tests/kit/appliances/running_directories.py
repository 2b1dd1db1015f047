"""Copies of data directories, also of running and killed appliances."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat


def copy_of_running(source: str | os.PathLike[str], target: pathlib.Path) -> None:
    """Copy a data directory without its socket, which is no file to copy."""

    def sockets(directory: str, names: list[str]) -> list[str]:
        return [
            name for name in names if stat.S_ISSOCK(os.lstat(os.path.join(directory, name)).st_mode)
        ]

    shutil.copytree(source, target, ignore=sockets)
