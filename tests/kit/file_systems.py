"""A file system of the test's own, small enough to be filled. Mounting it needs root."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_file_system(directory: pathlib.Path, size_mib: int) -> Iterator[pathlib.Path]:
    """A tmpfs at `directory`/disk, which only its owner may enter; unmounted at the end."""
    path = directory / "disk"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0700", "tmpfs", str(path)],
        check=True,
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
