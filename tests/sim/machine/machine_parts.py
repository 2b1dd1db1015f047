"""Parts of the simulated machine: bells, files, a reader pool and the controller's view of disks
that need no system call; its settings.

Owner: `tests.sim.machine.world.World`. Each stands in for the part of the real machine that it
    names; what it does must be what that part promises, and no more.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from appliance.config.settings import Settings
from appliance.control.host_view import Host
from appliance.groups.store.group_store import GroupStore
from shm.memory.layout import RegionKind, Role
from shm.memory.region import Region, RegionMissingError
from shm.queues.doorbell import Doorbell
from shm.queues.ring import Ring
from shm.runtime.agent_runner import Agent, Clock, ProcessContext, ProcessSpec, process_name
from tailrace.core.errors import DiskFullError
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.segment.files import read_whole

MS = 1_000_000
SECOND = 1_000_000_000
INSTANCE = bytes(range(16))
ADDRESS = "tcp://simulated:1"
SETTINGS = Settings(
    ring_bytes=1 << 16, ring_descriptors=128, lane_bytes=1 << 15, slots=16, dedicated_workers=7
)
"""Small on purpose: rings and lanes wrap and fill within a schedule."""
CHILD_SETTINGS = {
    "producer.id.expiration.ms": 86_400_000, "producer.ids.max": 10_000,
    "checkpoint_bytes": 12 << 10, "journal_bytes": 48 << 10,
    "reserve_bytes": 0, "slots": SETTINGS.slots,
    "listen": [ADDRESS], "ring_bytes": 1 << 26, "lane_bytes": SETTINGS.lane_bytes,
    "credit_bytes": 1 << 20, "auto_create_topics": False,
    "group.assignors": [], "group.members.max": 100, "groups.max": 100,
    "group.session.timeout.min.ms": 1_000, "group.session.timeout.max.ms": 1_800_000,
    "offsets.retention.minutes": 10_080, "http.listen": "", "flush.linger_ms": 0,
    "flush.batch_size": 1 << 20, "fronts": 1,
    "transaction.max.timeout.ms": 900_000, "transactional.id.expiration.ms": 604_800_000,
    "transaction.prepared.max.ms": 604_800_000,
    "transactional.ids.max": 100, "topic_defaults": {}, "retention.check.interval.ms": 3_600_000,
    "cleaner.check.interval.ms": 15_000, "cleaner.dedupe.buffer.size": 1 << 20,
    "cleaner.io.max.bytes.per.second": 0,
    "topic.delete.retention.ms": 0, "quotas": [], "audit": None,
}  # fmt: skip


class Killed(BaseException):
    """SIGKILL, wherever the process is."""


class PowerLost(BaseException):
    """The plug is pulled: every process is gone, with all that was not synced."""


class SimBell(Doorbell):
    """A doorbell without a system call."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        super().__init__(-1)
        self.is_set = False

    def ring(self) -> None:
        self.is_set = True

    def clear(self) -> None:
        self.is_set = False


class SimMachine(Host):
    def __init__(self, files: SimFiles) -> None:
        self._files = files

    def free_and_total_bytes(self, path: str) -> tuple[int, int]:
        return self._files.free_bytes(path), self._files.total_bytes(path)

    def names(self, path: str) -> list[str]:
        return self._files.list(path) if self._files.exists(path) else []

    def size_of(self, path: str) -> int:
        return 0

    def read_partition_file(self, directory: str) -> PartitionMetadata | None:
        path = f"{directory}/{PARTITION_FILE}"
        return (
            PartitionMetadata.decode(read_whole(self._files, path))
            if self._files.exists(path)
            else None
        )


class ColdFiles(SimFiles):
    """Files of which some pages are not in the page cache."""

    def __init__(self, disk: SimDisk, rng: random.Random) -> None:
        super().__init__(disk)
        self._rng = rng

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        if not blocking and self._rng.random() < 0.05:
            raise BlockingIOError
        return super().read_into(fd, target, position, blocking=blocking)


class SimPool:
    """`netfront.fetch.reader_pool.AsyncReader`: what is asked for is there when the front looks
    next.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._tokens: list[object] = []

    def submit(self, fd: int, position: int, length: int, token: object) -> None:
        self._tokens.append(token)
        self._wake()

    def completed(self) -> list[object]:
        tokens, self._tokens = self._tokens, []
        return tokens


class SimGroupStore(GroupStore):
    """`appliance.groups.store.group_store` on a disk that may be full, and whose process may die
    before and behind each commit.
    """

    def __init__(self, path: str, world: GroupsWorld) -> None:
        super().__init__(path)
        self._db.execute("PRAGMA synchronous=OFF")  # nobody pulls the plug of the real machine
        self._world = world

    def commit(self) -> None:
        self._world.fate.count_down()
        if not self._world.disk.free and self.is_in_transaction:
            raise DiskFullError("groups.db cannot grow: its disk is full")
        super().commit()
        self._world.fate.count_down()


class SimGroups:
    """The database of groups: a real file, which outlives its process and, as what is committed is
    synced, everything else.
    """

    def __init__(self, world: GroupsWorld) -> None:
        self._world = world
        self._directory = ""
        self._store: SimGroupStore | None = None

    @property
    def exist(self) -> bool:
        """True if there is a database."""
        return bool(self._directory)

    def open(self, _path: str) -> SimGroupStore:
        self.close()
        if not self._directory:
            self._directory = tempfile.mkdtemp(prefix="tailrace-sim-")
        self._store = SimGroupStore(f"{self._directory}/groups.db", self._world)
        return self._store

    def close(self) -> None:
        """Close the database. What a process had not committed is gone with it."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def remove(self) -> None:
        """The world ends."""
        self.close()
        if self._directory:
            shutil.rmtree(self._directory)


@dataclass(slots=True)
class Child:
    """One process that should be running."""

    role: Role
    index: int
    name: str
    bell: SimBell
    agent: Agent | None = None
    generation: int = 0
    starts_at_ns: int = 0
    """While it is dead: when its successor is started."""
    stopped_until_ns: int = 0
    """SIGSTOP."""
    is_asleep: bool = False
    deadline_ns: int | None = None


class Counting(Protocol):
    """`tests.sim.machine.fate.Fate`, as what may be interrupted sees it."""

    def count_down(self) -> None: ...


class GroupsWorld(Protocol):
    """Place of the database of groups."""

    disk: SimDisk

    @property
    def fate(self) -> Counting: ...


class HostView(Protocol):
    """A process's view of its machine."""

    regions: dict[str, Region]
    bells: dict[str, SimBell]


class SimContext(ProcessContext):
    """A child's view of the world."""

    def __init__(self, spec: ProcessSpec, clock: Clock, world: HostView) -> None:
        self._world = world
        super().__init__(spec, clock)

    def attach_named(self, name: str, kind: RegionKind) -> Region:
        region = self._world.regions.get(name)
        if region is None or region.header.kind is not kind:
            raise RegionMissingError(name)
        return region

    def bell(self, role: Role, index: int) -> Doorbell:
        return self._world.bells[process_name(role, index)]

    def ring_everybody(self) -> None:
        for bell in self._world.bells.values():
            bell.ring()


def is_undrained(ring: Ring) -> bool:
    """True if a ring holds batches that are not settled."""
    return ring.settled.load() != ring.producer_position.load()
