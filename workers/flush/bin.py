"""The bin of a data directory: removes the partitions of deleted topics for good.

    <topic id>-<partition>            kept: it can come back
    <topic id>-<partition>.deleted    half removed

`PartitionDirectory` moves partitions in and out. The controller decides how long they stay
(`appliance.control.topics.bin`).

Owner: the flusher.
Invariants: a partition has its second name before the first of its files is removed.
Crash: a successor removes what has the second name, and is asked for the rest by the controller,
until nothing of the topic is left.
"""

from __future__ import annotations

import logging

from shm.crash_points import crash_point
from tailrace.format.directory.data_dir import BIN_DIRECTORY
from workers.segment.files import Files, remove_tree

logger = logging.getLogger(__name__)

REMOVED_SUFFIX = ".deleted"


class Bin:
    """See the module's docstring."""

    def __init__(self, files: Files, data_dir: str) -> None:
        self._files = files
        self._path = f"{data_dir}/{BIN_DIRECTORY}"
        self._topics: dict[str, None] = {}
        """Topics that are being removed: the beginning of their partitions' names."""

    @property
    def is_idle(self) -> bool:
        """True if no topic is being removed."""
        return not self._topics

    def purge(self, topic_id: bytes) -> None:
        """Remove the partitions of this topic, in later steps."""
        self._topics[f"{topic_id.hex()}-"] = None

    def purge_removed(self) -> None:
        """Remove what a predecessor left half removed."""
        for name in self._files.list(self._path):
            if name.endswith(REMOVED_SUFFIX):
                self._topics[name] = None

    def step(self) -> int:
        """Remove one partition. Return the amount of work done."""
        prefix = next(iter(self._topics), None)
        if prefix is None:
            return 0
        try:
            name = self._next(prefix)
            if name is None:
                del self._topics[prefix]
            else:
                self._remove(name)
        except OSError as error:
            del self._topics[prefix]  # the controller asks again
            logger.error(
                "bin_not_purged path=%s error=%r advice=%r", self._path, str(error),
                "repair the disk; it is tried again",
            )  # fmt: skip
        return 1

    def _next(self, prefix: str) -> str | None:
        names = self._files.list(self._path) if self._files.exists(self._path) else []
        return next((name for name in names if name.startswith(prefix)), None)

    def _remove(self, name: str) -> None:
        files, path = self._files, f"{self._path}/{name}"
        if not name.endswith(REMOVED_SUFFIX):
            files.rename(path, path + REMOVED_SUFFIX)
            files.sync_directory(self._path)
            path += REMOVED_SUFFIX
        crash_point("flusher.in_purge")
        remove_tree(files, path)
        files.sync_directory(self._path)  # ext4 frees blocks with the commit of its journal
