"""Placement of partitions on workers: the workers of the data directory in turn, or a dedicated
one.

A topic's delay log is placed like the topic's partitions, so that a record and its delivery meet in
one ring.

Owner: the controller; in shared memory the words that ask the supervisor for dedicated workers
(`dedicated_workers`).
Invariants:
- A partition's worker follows from its slot and directory alone, at any time.
- A dedicated worker is assigned before it is asked for.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from shm.queues.doorbell import Doorbell
from tailrace.core.schedule.delays import DELAY_SUFFIX


class PartitionPlacement:
    """See the module's docstring."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        dir_numbers: list[int],
        worker_dirs: list[int],
        dedicated: DedicatedWorkers,
        supervisor_bell: Doorbell,
    ) -> None:
        """`topics`: by name, as the controller knows them now; `dir_numbers`: the catalog's number
        of each data directory, in this run's order; `worker_dirs`: worker -> index in that order.
        """
        self._topics = topics
        self._dir_numbers = dir_numbers
        self._dir_index = {number: index for index, number in enumerate(dir_numbers)}
        self._workers_of = [
            [w for w, d in enumerate(worker_dirs) if d == index]
            for index in range(len(dir_numbers))
        ]
        self._dedicated = dedicated
        self._supervisor_bell = supervisor_bell

    def dir_index(self, row: PartitionRow) -> int:
        """The index in this run of a partition's data directory."""
        return self._dir_index[row.data_dir]

    def dir_number(self, index: int) -> int:
        """The catalog's number of a data directory of this run."""
        return self._dir_numbers[index]

    def index_of(self, number: int) -> int:
        """The index in this run of the data directory of this number."""
        return self._dir_index[number]

    def known_dir_index(self, row: PartitionRow) -> int | None:
        """The index of a partition's data directory; None if this run does not have it."""
        return self._dir_index.get(row.data_dir)

    def worker_of(self, topic: Topic, row: PartitionRow) -> int:
        """The worker of a partition."""
        owner = self._topics.get(topic.name.removesuffix(DELAY_SUFFIX)) if topic.delay_of else None
        if owner is not None and owner.topic_id == topic.delay_of:  # the same worker has both
            return self.worker_of(owner, owner.partitions[row.partition])
        if topic.given.get("worker.dedicated"):
            worker = self._dedicated.worker_of(row.slot)
            assert worker is not None, "given when the topic was made, or at the start"
            return worker
        workers = self._workers_of[self.dir_index(row)]
        return workers[row.slot % len(workers)]

    def assign(self, topic: Topic) -> None:
        """Assign a worker to each partition of a topic with worker.dedicated.

        Raises: InvalidSettingError if there are too few.
        """
        if topic.given.get("worker.dedicated") and topic.state != "deleting":
            for row in topic.partitions:
                self._dedicated.assign(row.slot, self.dir_index(row))
            self._supervisor_bell.ring()

    def has_room_in(self, topic: Topic, data_dir: int) -> bool:
        """False if a partition of a topic with worker.dedicated cannot have a worker in a data
        directory.
        """
        return not topic.given.get("worker.dedicated") or self._dedicated.has_room_in(data_dir)

    def former_worker_of(self, topic: Topic, row: PartitionRow) -> int:
        """The worker of a partition's former place. After a restart of the appliance that is a
        common one, for the former files alone.
        """
        dedicated = self._dedicated.worker_of(row.slot)
        if dedicated is not None:
            return dedicated
        return self.worker_of(topic._replace(given={}, delay_of=b""), row)

    def release_place(self, row: PartitionRow) -> None:
        """Free the dedicated worker of a place that a partition has left."""
        self._dedicated.release(row.slot)
        self._supervisor_bell.ring()

    def lacks_memory(self, topic: Topic) -> bool:
        """True if a dedicated worker of a topic cannot be started for lack of shared memory."""
        is_dedicated = topic.given.get("worker.dedicated") and topic.state != "deleting"
        return bool(is_dedicated) and any(
            self._dedicated.lacks_memory(row.slot) for row in topic.partitions
        )

    def release(self, topic: Topic) -> None:
        """Free the dedicated workers of a deleted topic."""
        for row in topic.partitions:
            self._dedicated.release(row.slot)
        self._supervisor_bell.ring()

    def awaits_workers(self, connected: Container[int]) -> bool:
        """True if a topic in use has a dedicated worker that the supervisor has not started yet, as
        at the start of the appliance. `connected`: workers that have a lane.
        """
        return any(
            topic.state == "active" and self.awaits_workers_of(topic, connected)
            for topic in self._topics.values()
        )

    def awaits_workers_of(self, topic: Topic, connected: Container[int]) -> bool:
        """True if a dedicated worker of a topic has no lane yet. A front that knew of it would open
        a ring that is not there.
        """
        return bool(topic.given.get("worker.dedicated")) and any(
            self.worker_of(topic, row) not in connected for row in topic.partitions
        )
