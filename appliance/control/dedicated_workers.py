"""Which spare worker serves which partition of topics with `worker.dedicated`.

Owner: the coordinator writes DEDICATED_TO and DEDICATED_DIR of the spare workers' slots; the supervisor obeys them; flushers look there for rings to follow.
Invariants: a partition keeps its worker as long as the appliance runs; a spare worker that once served a data directory serves no other one in this run,
    for that directory's flusher follows its ring.
Crash: the words outlive the coordinator. The supervisor's end ends them: then every partition is given a worker anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from shm.control import ProcessSlot
from shm.layout import ProcessWord
from tailrace.errors import InvalidSettingError


class DedicatedWorkers:
    """The spare workers of one appliance."""

    def __init__(self, spares: Mapping[int, ProcessSlot], data_dirs: int) -> None:
        """`spares`: worker -> its slot."""
        self._spares = spares
        self._data_dirs = data_dirs

    def worker_of(self, partition_slot: int) -> int | None:
        """The worker of a partition, None when it has none."""
        for worker, slot in self._spares.items():
            if slot.load(ProcessWord.DEDICATED_TO) == partition_slot + 1:
                return worker
        return None

    def data_dir_of(self, worker: int) -> int:
        """The index of the data directory that a worker serves; -1: none yet."""
        return self._spares[worker].load(ProcessWord.DEDICATED_DIR) - 1

    def check_room(self, count: int) -> None:
        """Raise InvalidSettingError unless `count` more partitions can have a worker."""
        free = sum(
            not slot.load(ProcessWord.DEDICATED_TO) and (self._data_dirs == 1 or not slot.load(ProcessWord.DEDICATED_DIR))
            for slot in self._spares.values()
        )
        if count > free:
            raise InvalidSettingError(
                f"worker.dedicated needs {count} workers more and {free} of dedicated_workers = {len(self._spares)} are free; "
                "raise it in the configuration, or make the topic without"
            )

    def give(self, partition_slot: int, data_dir: int) -> int:
        """The worker of a partition, from now on; one that knows the directory first. Raises InvalidSettingError when all are taken."""
        known = self.worker_of(partition_slot)
        if known is not None:
            return known
        for wanted in (data_dir + 1, 0):
            for worker, slot in self._spares.items():
                if not slot.load(ProcessWord.DEDICATED_TO) and slot.load(ProcessWord.DEDICATED_DIR) == wanted:
                    slot.store(ProcessWord.DEDICATED_DIR, data_dir + 1)
                    slot.store(ProcessWord.DEDICATED_TO, partition_slot + 1)
                    return worker
        raise InvalidSettingError(
            f"topics with worker.dedicated have more partitions than dedicated_workers = {len(self._spares)}; raise it"
        )

    def lacks_memory(self, partition_slot: int) -> bool:
        """Whether a partition's worker cannot be started for want of shared memory."""
        worker = self.worker_of(partition_slot)
        return worker is not None and bool(self._spares[worker].load(ProcessWord.WITHOUT_MEMORY))

    def take_back(self, partition_slot: int) -> None:
        """The partition is gone."""
        worker = self.worker_of(partition_slot)
        if worker is not None:
            self._spares[worker].store(ProcessWord.DEDICATED_TO, 0)

    def existing(self) -> list[int]:
        """Workers whose rings are there: they were started at least once."""
        return [worker for worker, slot in self._spares.items() if slot.load(ProcessWord.GENERATION)]
