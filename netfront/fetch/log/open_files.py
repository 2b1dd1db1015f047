"""Open files of a front: descriptors by path, of which the least recently read are closed first.

Owner: one front's `LogReader`.

Invariants:
- Between reads at most `open_files_max` files are open.
- A file that was removed is closed by the next `close_unused`, whether or not its partition is
  read again. One that was not read since UNREAD_MAX such calls is closed, too: a reader at the
  log's end leaves each segment behind with the files that it has opened of it.
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
UNREAD_MAX = 12
"""Calls of `close_unused` after which a file that was not read is closed: a minute."""
Opened = TypeVar("Opened")


class _Open:
    """An open file."""

    __slots__ = ("fd", "last_round")

    def __init__(self, fd: int, last_round: int) -> None:
        self.fd = fd
        self.last_round = last_round
        """The number of calls of `close_unused` before it was read last."""


class OpenFiles:
    """Files that are open for reading."""

    def __init__(self, files: FileReader, open_files_max: int) -> None:
        self._files = files
        self._open_files_max = open_files_max
        self._open: OrderedDict[str, _Open] = OrderedDict()
        """The least recently read first."""
        self._round = 0

    def open(self, path: str) -> int:
        """Return the descriptor of a file.

        Raises LogReadError (NOT_READY) if descriptors or memory are short, and OSError.
        """
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            found.last_round = self._round
            return found.fd
        fd = self.with_descriptors(self._files.open_for_read, path)
        self._open[path] = _Open(fd, self._round)
        while len(self._open) > self._open_files_max:
            self._close_oldest()
        return fd

    def _close_oldest(self) -> None:
        self._files.close(self._open.popitem(last=False)[1].fd)

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
                if not self._open:
                    raise LogReadError(
                        ErrorCode.NOT_READY,
                        f"the front cannot open a file now: {error.strerror}; try again",
                    ) from None
                for _ in range(min(CLOSED_AT_ONCE, len(self._open))):
                    self._close_oldest()

    def close(self, paths: Iterable[str]) -> None:
        """Close those of these files that are open."""
        for path in paths:
            found = self._open.pop(path, None)
            if found is not None:
                self._files.close(found.fd)

    def close_below(self, prefix: str) -> None:
        """Close all files whose paths begin with `prefix`."""
        self.close([path for path in self._open if path.startswith(prefix)])

    def close_unused(self) -> bool:
        """Close files that were removed or replaced, which frees their room on the disk, and files
        that were not read for long. Returns True if others are open. To be called at even times.
        """
        self._round += 1
        while self._open and next(iter(self._open.values())).last_round < self._round - UNREAD_MAX:
            self._close_oldest()
        self.close([path for path, each in self._open.items() if self._files.is_removed(each.fd)])
        return bool(self._open)
