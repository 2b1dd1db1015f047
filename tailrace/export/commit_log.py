"""The commits of an export to files: one small file for each, which says how far it goes and which files it brought.

As in Delta Lake's log (PROTOCOL.md there, "Delta Log Entries") a commit exists when the file of its number does, and is never changed.

Layout: `DIR/_tailrace/commits/NUMBER.json`, a document with its checksum (`tailrace.formats.checked_json`); `DIR/_tailrace/pending/` holds files that are
    being written, each under the name of its place below DIR with TEMPORARY behind. Names that begin with `_` are passed over by Spark, Hive and pyarrow.
Invariants: a number is given once: the file is linked to its name, which fails where there is one.
Crash: before the link, nothing was committed; behind it, all was. What is left of the temporary name is removed by the next one who opens it.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Any

from tailrace.errors import InvalidRequestError, StorageError
from tailrace.exporting.state import ExportState
from tailrace.formats import checked_json

COMMITS = "_tailrace/commits"
TEMPORARY = ".tmp"
VERSION = 1
_COMMIT_NAME = re.compile(r"([0-9]{20})\.json")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Of file systems without hard links."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit, as its file says."""

    state: ExportState
    files: tuple[str, ...]
    """Below DIR."""


def sync(path: str) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError with the path."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


class Commits:
    """Those of one directory, which the caller holds."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{COMMITS}"

    def has(self, number: int) -> bool:
        """Whether there is one of this number."""
        return os.path.exists(self._file(number))

    def last(self) -> Entry | None:
        """The newest; temporary files are removed. None: there is none. Raises StorageError."""
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
        state = ExportState.decode(content.get("state")) if isinstance(content, dict) and content.get("version") == VERSION else None
        files = content.get("files") if isinstance(content, dict) else None
        if state is None or not isinstance(files, list):
            raise StorageError(
                f"{path} is damaged, or of a later version: without it nobody knows what was exported. Export to another directory"
            )
        return Entry(state, tuple(item["path"] for item in files))

    def add(self, state: ExportState, files: list[dict[str, Any]], more: dict[str, Any]) -> None:
        """The commit of the state's number, durable when this returns. Raises InvalidRequestError when there is one, OSError."""
        path = self._file(state.number)
        temporary = f"{path}{TEMPORARY}"
        data = checked_json.encode({"version": VERSION, "state": state.encode(), "files": files, **more})
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
                f"{path} is there already: another export writes to this directory, from another host perhaps"
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
