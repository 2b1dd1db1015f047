"""Status of a data directory as workers see it: it takes batches, is full, or is lost.

Owner: the flusher. In shared memory: the word DISK_FULL of its process.

Invariants:
- Each change of the status wakes all workers.
- When the directory is lost, every log of it is offline.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from shm.memory.layout import DirectoryState, ProcessWord
from shm.queues.doorbell import Doorbell
from shm.tables.control import ProcessSlot
from workers.log.log_set import LogSet
from workers.segment.directory_watch import DirectoryWatch
from workers.segment.disk_space import DiskSpace
from workers.segment.files import NO_SPACE

logger = logging.getLogger(__name__)


class DirectoryStatus:
    """The status of one data directory."""

    def __init__(
        self,
        data_dir: str,
        space: DiskSpace,
        watch: DirectoryWatch | None,
        logs: LogSet,
        slot: ProcessSlot,
        workers: Mapping[int, Doorbell],
    ) -> None:
        self._data_dir = data_dir
        self._space = space
        self._watch = watch
        self._logs = logs
        self._slot = slot
        self._workers = workers
        self.is_short = False
        """True while writing waits for descriptors or memory."""

    def show(self) -> None:
        """Publish the status, and wake the workers."""
        is_lost = self._watch is not None and bool(self._watch.reason)
        state = DirectoryState.LOST if is_lost else DirectoryState(int(self._space.is_full))
        self._slot.store(ProcessWord.DISK_FULL, state)
        for bell in self._workers.values():
            bell.ring()

    def on_watched(self, reason: str) -> None:
        """The directory is gone for a reason, or back (""). When it is gone, take every log
        offline: what is written to its open files would be found by no start.
        """
        if not reason:
            logger.info("data_dir_is_back path=%s", self._data_dir)
        else:
            logger.error(
                "data_dir_lost path=%s reason=%r advice=%r", self._data_dir, reason,
                "mount the disk again and run tailrace topic online TOPIC for each topic, or "
                "restart",
            )  # fmt: skip
            for log in self._logs.all():
                if log.is_open and not log.refusal:
                    self._logs.take_offline(log, OSError(errno.ENODEV, reason))
        self.show()

    def note_shortage(self, error: OSError | None, now_ns: int) -> None:
        """Log why writing waits.

        On a full disk producers get DISK_FULL, otherwise they wait for their acks.
        """
        if error is not None and error.errno in NO_SPACE:
            if self._space.note_full(now_ns):
                logger.warning("disk_full path=%s", self._data_dir)
                self.show()
        elif error is not None and not self.is_short:
            self.is_short = True
            logger.error(
                "writing_waits data_dir=%s error=%r advice='allow more open files "
                "(LimitNOFILE=65536 in the unit) or more memory; it is tried again'",
                self._data_dir, str(error),
            )  # fmt: skip

    def note_written(self) -> None:
        """Log that writing goes on after a shortage."""
        logger.info("writing_again data_dir=%s", self._data_dir)
        self.is_short = False
