"""Assignment of spare workers to partitions of topics with `worker.dedicated`.

Owner: the controller writes DEDICATED_TO and DEDICATED_DIR of the spare workers' slots. The
supervisor starts workers by them. Flushers find the rings to follow there.
Invariants:
- A partition in its place keeps its worker as long as the appliance runs: the transaction
  coordinator forgets a decision that every worker has carried out. One that moves has a worker in
  either place, until the former one is not needed (docs/adr/0059).
- A spare worker serves one data directory in a run, for that directory's flusher follows its ring.
Crash: the words outlive the controller. After a restart of the supervisor every partition is given
a worker again.
"""

from __future__ import annotations

from collections.abc import Mapping

from shm.memory.layout import ProcessWord
from shm.tables.control import ProcessSlot
from tailrace.core.errors import InvalidSettingError


class DedicatedWorkers:
    """The spare workers of one appliance."""

    def __init__(self, spares: Mapping[int, ProcessSlot], data_dirs: int) -> None:
        """`spares`: worker -> its slot."""
        self._spares = spares
        self._data_dirs = data_dirs

    def worker_of(self, partition_slot: int) -> int | None:
        """The worker of a partition; None if it has none."""
        for worker, slot in self._spares.items():
            if slot.load(ProcessWord.DEDICATED_TO) == partition_slot + 1:
                return worker
        return None

    def data_dir_of(self, worker: int) -> int:
        """The index of a worker's data directory; -1 before the first."""
        return self._spares[worker].load(ProcessWord.DEDICATED_DIR) - 1

    def has_room_in(self, data_dir: int) -> bool:
        """True if one more partition of a data directory can have a worker."""
        return any(
            not slot.load(ProcessWord.DEDICATED_TO)
            and slot.load(ProcessWord.DEDICATED_DIR) in (0, data_dir + 1)
            for slot in self._spares.values()
        )

    def check_room(self, count: int) -> None:
        """Raise InvalidSettingError unless `count` more partitions can have a worker."""
        free = sum(
            not slot.load(ProcessWord.DEDICATED_TO)
            and (self._data_dirs == 1 or not slot.load(ProcessWord.DEDICATED_DIR))
            for slot in self._spares.values()
        )
        if count > free:
            raise InvalidSettingError(
                f"worker.dedicated needs {count} more workers, and {free} of dedicated_workers "
                f"= {len(self._spares)} are free: raise dedicated_workers in the configuration, "
                "or create the topic without worker.dedicated"
            )

    def assign(self, partition_slot: int, data_dir: int) -> int:
        """Assign a worker to a partition, preferably one that has served its directory.

        Raises: InvalidSettingError if all are in use.
        """
        known = self.worker_of(partition_slot)
        if known is not None:
            return known
        for requested in (data_dir + 1, 0):
            for worker, slot in self._spares.items():
                if (
                    not slot.load(ProcessWord.DEDICATED_TO)
                    and slot.load(ProcessWord.DEDICATED_DIR) == requested
                ):
                    slot.store(ProcessWord.DEDICATED_DIR, data_dir + 1)
                    slot.store(ProcessWord.DEDICATED_TO, partition_slot + 1)
                    return worker
        raise InvalidSettingError(
            "topics with worker.dedicated have more partitions than dedicated_workers = "
            f"{len(self._spares)}: raise it"
        )

    def lacks_memory(self, partition_slot: int) -> bool:
        """True if a partition's worker cannot be started for lack of shared memory."""
        worker = self.worker_of(partition_slot)
        return worker is not None and bool(self._spares[worker].load(ProcessWord.WITHOUT_MEMORY))

    def release(self, partition_slot: int) -> None:
        """Free the worker of a deleted partition."""
        worker = self.worker_of(partition_slot)
        if worker is not None:
            self._spares[worker].store(ProcessWord.DEDICATED_TO, 0)

    def existing(self) -> list[int]:
        """Workers that were started at least once and have rings."""
        return [
            worker for worker, slot in self._spares.items() if slot.load(ProcessWord.GENERATION)
        ]
