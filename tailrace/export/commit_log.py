"""Commit log of a file export: one small file per commit, with its offsets and files.

As in Delta Lake's log (PROTOCOL.md there, "Delta Log Entries"), a commit exists if the file of its
number does, and never changes.

Layout: `DIR/_tailrace/commits/NUMBER.json` is a document with a checksum
(`tailrace.format.directory.checked_json`). `DIR/_tailrace/pending/` has unfinished files, each
under the name of its final path below DIR plus TEMPORARY. Spark, Hive and pyarrow skip names that
begin with `_`.

Invariants:
- A number is used once: the file is linked to its name, which fails if the name exists.

Crash: before the link nothing is committed, after it everything is. The next open removes a left
temporary name.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Any

from tailrace.core.errors import InvalidRequestError, StorageError
from tailrace.export.checkpoint import ExportCheckpoint
from tailrace.format.directory import checked_json

COMMITS = "_tailrace/commits"
TEMPORARY = ".tmp"
VERSION = 1
_COMMIT_NAME = re.compile(r"([0-9]{20})\.json")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit, as read from its file."""

    state: ExportCheckpoint
    files: tuple[str, ...]
    """Paths below DIR."""


def sync(path: str) -> None:
    """Sync a file, or the names in a directory. Raises OSError with the path."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


class CommitLog:
    """The commits of one directory. The caller holds the directory's lock."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{COMMITS}"

    def has(self, number: int) -> bool:
        """True if a commit of this number exists."""
        return os.path.exists(self._file(number))

    def last(self) -> Entry | None:
        """The newest commit, None if there is none. Removes
        temporary files. Raises StorageError.
        """
        if not os.path.isdir(self._path):
            return None
        for name in os.listdir(self._path):
            if name.endswith(TEMPORARY):
                os.unlink(f"{self._path}/{name}")
        numbers = self._numbers()
        if not numbers:
            return None
        path = self._file(max(numbers))
        content = checked_json.decode(checked_json.read(path))
        state = (
            ExportCheckpoint.decode(content.get("state"))
            if isinstance(content, dict) and content.get("version") == VERSION
            else None
        )
        files = content.get("files") if isinstance(content, dict) else None
        if state is None or not isinstance(files, list):
            raise StorageError(
                f"{path} is damaged or of a later version, so the exported offsets are unknown; "
                "export to another directory"
            )
        return Entry(state, tuple(item["path"] for item in files))

    def add(
        self, state: ExportCheckpoint, files: list[dict[str, Any]], more: dict[str, Any]
    ) -> None:
        """Add the commit of the state's number. It is durable on return.

        Raises InvalidRequestError if the number is used, OSError.
        """
        path = self._file(state.number)
        temporary = f"{path}{TEMPORARY}"
        data = checked_json.encode(
            {"version": VERSION, "state": state.encode(), "files": files, **more}
        )
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        try:
            checked_json.write_all(fd, data, 0)
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, temporary) from None
        finally:
            os.close(fd)
        try:
            os.link(temporary, path)
            os.unlink(temporary)
        except FileExistsError:
            raise InvalidRequestError(
                f"{path} already exists; another export writes to this directory, perhaps from "
                "another host: stop it, or export to another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(temporary, path)
        sync(self._path)

    def _numbers(self) -> list[int]:
        names = os.listdir(self._path) if os.path.isdir(self._path) else []
        return [int(match[1]) for name in names if (match := _COMMIT_NAME.fullmatch(name))]

    def _file(self, number: int) -> str:
        return f"{self._path}/{number:020d}.json"
