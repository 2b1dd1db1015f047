"""Record of an installation: the files that it wrote, with checksums of every content they had.

Invariants: a file's new checksum is in the record before the file is written. So whatever an
interrupted run has left is recognised as written by us, and not as somebody's change.
Crash: a run that is killed leaves a whole record, old or new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field

PATH = "var/lib/tailrace-install/installed.json"


@dataclass(slots=True)
class Record:
    """Path -> SHA-256 of the contents that were written there."""

    files: dict[str, list[str]] = field(default_factory=dict)
    version: str = ""

    @classmethod
    def read(cls, root: str) -> Record:
        """The record under this root directory; an empty one if there is none."""
        try:
            with open(os.path.join(root, PATH), encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            return cls()
        return cls({path: list(sums) for path, sums in found["files"].items()}, found["version"])

    def wrote(self, path: str, content: str) -> bool:
        """True if an installation wrote this content to the path."""
        return checksum(content) in self.files.get(path, [])

    def add(self, path: str, content: str) -> None:
        """Note a content that will be written."""
        sums = self.files.setdefault(path, [])
        if checksum(content) not in sums:
            sums.append(checksum(content))

    def write(self, root: str) -> None:
        """Replace the stored record. Raises OSError."""
        text = json.dumps({"version": self.version, "files": self.files}, indent=1, sort_keys=True)
        write_file(os.path.join(root, PATH), text + "\n", 0o644)


def checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def write_file(path: str, content: str, mode: int) -> None:
    """Write a file whole or not at all, and make its directories. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    beside = f"{path}.tailrace-part"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
