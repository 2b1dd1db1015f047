"""Open files of a front: descriptors by path, of which the least recently read are closed first.

Owner: one front's `LogReader`.

Invariants:
- Between reads at most `open_files_max` files are open.
- A file that was removed is closed by the next `close_removed`, whether or not its partition is
  read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from netfront.fetch.log.file_reader import SHORTAGES, FileReader
from netfront.fetch.log.read_result import LogReadError
from tailrace.core.error_codes import ErrorCode

OPEN_FILES_MAX = 512
CLOSED_AT_ONCE = 8
Opened = TypeVar("Opened")


class OpenFiles:
    """Files that are open for reading."""

    def __init__(self, files: FileReader, open_files_max: int) -> None:
        self._files = files
        self._open_files_max = open_files_max
        self._fds: OrderedDict[str, int] = OrderedDict()

    def open(self, path: str) -> int:
        """Return the descriptor of a file.

        Raises LogReadError (NOT_READY) if descriptors or memory are short, and OSError.
        """
        fd = self._fds.get(path)
        if fd is not None:
            self._fds.move_to_end(path)
            return fd
        fd = self.with_descriptors(self._files.open_for_read, path)
        self._fds[path] = fd
        while len(self._fds) > self._open_files_max:
            self._files.close(self._fds.popitem(last=False)[1])
        return fd

    def with_descriptors(self, opens: Callable[[str], Opened], path: str) -> Opened:
        """Return `opens(path)`. When descriptors or memory are short, close the least recently read
        files and retry.

        Raises LogReadError (NOT_READY) if that does not help, and OSError for other errors.
        """
        while True:
            try:
                return opens(path)
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                if not self._fds:
                    raise LogReadError(
                        ErrorCode.NOT_READY,
                        f"the front cannot open a file now: {error.strerror}; try again",
                    ) from None
                for _ in range(min(CLOSED_AT_ONCE, len(self._fds))):
                    self._files.close(self._fds.popitem(last=False)[1])

    def close(self, paths: Iterable[str]) -> None:
        """Close those of these files that are open."""
        for path in paths:
            fd = self._fds.pop(path, None)
            if fd is not None:
                self._files.close(fd)

    def close_below(self, prefix: str) -> None:
        """Close all files whose paths begin with `prefix`."""
        self.close([path for path in self._fds if path.startswith(prefix)])

    def close_removed(self) -> bool:
        """Close files that were removed or replaced, which frees their room on the disk. Returns
        whether others are open.
        """
        self.close([path for path, fd in self._fds.items() if self._files.is_removed(fd)])
        return bool(self._fds)
