"""The appliance's shared memory: regions of an earlier run, regions of this run, and the manifest
that names both.

Owner: the supervisor. The manifest lies in the data directory with the catalog.
Invariants:
- The manifest names a region before it exists, so that the next start can find it.
- A ring of an earlier run stays, and stays named, until its flusher has drained it.
- Regions are removed only when their rings are drained.
Crash: the next start finds the regions, complete or half made, and drains or removes them (see
`appliance.supervise.memory.orphaned_regions`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from appliance.config.settings import Settings
from appliance.data import region_manifest as manifest
from appliance.data.data_dir_lock import DataDirLock
from appliance.data.directory_errors import DataDirectoryError, unusable
from appliance.data.region_manifest import RegionManifest
from appliance.supervise.memory.memory_plan import (
    RegionPlan,
    plan_groups,
    plan_regions,
    plan_transactions,
    plan_worker,
)
from appliance.supervise.memory.orphaned_regions import find_orphaned, remove_regions
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from shm.crash_points import crash_point
from shm.memory.layout import RegionKind
from shm.memory.region import (
    Region,
    RegionError,
    RegionForeignError,
    RegionMissingError,
    RegionVersionError,
    boot_id,
)
from shm.queues.ring import Ring
from shm.tables.control import Control
from shm.tables.settings_block import SettingsBlock

logger = logging.getLogger("appliance.supervise.supervisor")


class Regions:
    """Everything of one run, and what is left of earlier ones."""

    def __init__(
        self, owners: list[DataDirLock], settings: Settings, worker_dirs: list[int]
    ) -> None:
        """`owners`: one for each data directory, the one with the catalog first; `worker_dirs`:
        worker -> index of its data directory.
        """
        self._owners = owners
        self._owner = owners[0]
        self._settings = settings
        self._worker_dirs = dict(enumerate(worker_dirs))
        self.run_id = os.urandom(4).hex()
        self.lost_memory = False
        """True if rings of an earlier run are missing: batches that were not synced may be lost."""
        self._is_recovered = True
        """True if the flushers of this run have recovered their logs."""
        self.undrained: list[dict[str, Any]] = []
        """Rings of earlier runs that hold something: {"ring", "table": names in shared memory,
        "dir": identity of the data directory}.
        """
        self._generation = time.time_ns()
        """Generation of the manifest. Later runs write higher ones; copies of one run differ by
        counting.
        """
        self.names: dict[str, str] = {}
        """Logical name -> name in shared memory, of the regions that exist."""
        self._rings: list[Ring] = []

    # ---- earlier runs ----------------------------------------------------------------------------

    def find_old(self) -> None:
        """Note rings that hold undrained batches, for the flushers; remove the rest. Raises
        Halt.
        """
        left = find_orphaned(self._owner)
        rings_found = sum(self._check_region(candidate) for candidate in left.rings)
        self.lost_memory = left.lost_memory or (left.existed and rings_found < left.expected)
        self._is_recovered = False
        if left.original:
            logger.warning(
                "memory_not_copied data_dir=%s original=%s",
                self._owner.path, left.original,
            )  # fmt: skip
        elif self.lost_memory:
            logger.error(
                "memory_lost data_dir=%s rings_found=%d rings_expected=%d",
                self._owner.path, rings_found, left.expected,
            )  # fmt: skip
        removed = remove_regions([name for name in left.regions if name not in self._kept()])
        if removed:
            logger.info("stale_regions_removed count=%d", removed)

    def _check_region(self, candidate: dict[str, Any]) -> bool:
        """True if the ring exists.

        Raises: Halt if it holds batches that cannot be drained now.
        """
        try:
            ring = Ring(
                Region.attach(
                    candidate["ring"], RegionKind.RING, self._owner.identity.shared_memory
                )
            )
        except RegionMissingError:
            return False
        except RegionVersionError as error:
            raise Halt(
                ExitCode.DATA_UNUSABLE,
                f"{error}: start the version that made it once, so that it drains the ring",
            ) from None
        except RegionForeignError as error:
            raise Halt(ExitCode.DATA_UNUSABLE, str(error)) from None
        except RegionError as error:
            logger.warning("stale_region_ignored name=%s reason=%r", candidate["ring"], str(error))
            return False
        count = ring.producer_position.load() - ring.settled.load()
        if count:
            logger.info("undrained_ring name=%s descriptors=%d", candidate["ring"], count)
            if candidate["dir"] not in [owner.instance.hex() for owner in self._owners]:
                raise Halt(
                    ExitCode.DATA_UNUSABLE,
                    "an earlier run left acknowledged batches in memory for a data directory "
                    "that is not configured now: start once with the data_dirs of that run",
                )
            self._check_table(candidate, count)
            self.undrained.append(candidate)
        return True

    def _check_table(self, candidate: dict[str, Any], count: int) -> None:
        """Refuse a ring whose partition table is missing: the partitions of its batches are
        unknown.

        Raises: Halt.
        """
        try:
            Region.attach(
                candidate["table"], RegionKind.TABLE, self._owner.identity.shared_memory
            ).close()
        except RegionError as error:
            raise Halt(
                ExitCode.DATA_UNUSABLE,
                f"/dev/shm{candidate['ring']} holds {count} descriptors of an earlier run with "
                f"batches that may be acknowledged, and {error}: their partitions are unknown. "
                f"Remove /dev/shm{candidate['ring']} to give them up, then start again.",
            ) from None

    def _kept(self) -> set[str]:
        return {candidate[part] for candidate in self.undrained for part in ("ring", "table")}

    def forget_old(self) -> None:
        """Note that the flushers have drained the old rings, and remove these."""
        kept = sorted(self._kept())
        self.undrained = []
        self._is_recovered = True
        try:
            self._write_manifest()
        except DataDirectoryError as error:
            logger.error("drained_rings_kept reason=%r", str(error))
            return  # the manifest names them still
        remove_regions(kept)

    # ---- this run --------------------------------------------------------------------------------

    def name_of(self, logical_name: str) -> str:
        """The shared-memory name of a region of this run (`ring-0`, `front-0>worker-1`)."""
        return f"{self._owner.identity.prefix}-{self.run_id}-{logical_name.replace('>', '.')}"

    def names_with_spares(self) -> dict[str, str]:
        """Names of all regions for a child, those of future dedicated workers, of the group
        coordinator and of transactions included.
        """
        first = len(self._worker_dirs)
        spares = plan_groups(self._settings.front_count)
        for w in range(first, first + self._settings.dedicated_workers):
            spares += plan_worker(self._settings, w, self._settings.front_count)
        for w in range(first + self._settings.dedicated_workers):
            spares += plan_transactions(w)
        return {plan.logical_name: self.name_of(plan.logical_name) for plan in spares} | self.names

    def create(self) -> Control:
        """Make everything that the shape of the appliance asks for. Raises RegionError,
        DataDirectoryError; then nothing of it is left.
        """
        plans = plan_regions(
            self._settings, len(self._worker_dirs), self._settings.front_count, len(self._owners)
        )
        try:
            self._make(plans)
        except (RegionError, DataDirectoryError):
            remove_regions(list(self.names.values()))
            self.names = {}
            self._try_to_write_manifest()  # the old rings stay named
            raise
        return Control(
            Region.attach(
                self.names["control"], RegionKind.CONTROL, self._owner.identity.shared_memory
            )
        )

    def settings_block(self, logical_name: str) -> SettingsBlock:
        """A block of settings of this run: "settings" or "overrides"."""
        return SettingsBlock(
            Region.attach(
                self.names[logical_name], RegionKind.SETTINGS, self._owner.identity.shared_memory
            )
        )

    def create_worker(self, index: int, data_dir: int) -> None:
        """Make a dedicated worker's ring and lanes, if they are not there. Raises RegionError,
        DataDirectoryError; then none of them is left.
        """
        if index in self._worker_dirs:
            return
        self._worker_dirs[index] = data_dir
        try:
            self._make_all_or_none(plan_worker(self._settings, index, self._settings.front_count))
        except (RegionError, DataDirectoryError):
            del self._worker_dirs[index]
            self._try_to_write_manifest()
            raise

    def create_groups(self) -> None:
        """Make the lanes of the process of groups, if they are not there. Raises RegionError,
        DataDirectoryError; then none of them is left.
        """
        plans = plan_groups(self._settings.front_count)
        if plans[0].logical_name in self.names:
            return
        try:
            self._make_all_or_none(plans)
        except (RegionError, DataDirectoryError):
            self._try_to_write_manifest()
            raise

    def create_transactions(self) -> list[int]:
        """Make the lanes between the transaction coordinator and each worker that has none. Return
        these workers. Raises RegionError, DataDirectoryError; then none of them has lanes.
        """
        plans = {
            worker: plan_transactions(worker)
            for worker in self._worker_dirs
            if plan_transactions(worker)[0].logical_name not in self.names
        }
        try:
            if plans:
                self._make_all_or_none([plan for each in plans.values() for plan in each])
        except (RegionError, DataDirectoryError):
            self._try_to_write_manifest()
            raise
        return list(plans)

    def _make_all_or_none(self, plans: list[RegionPlan]) -> None:
        try:
            self._make(plans)
        except (RegionError, DataDirectoryError):
            remove_regions([self.names.pop(plan.logical_name) for plan in plans])
            raise

    def _make(self, plans: list[RegionPlan]) -> None:
        self.names |= {plan.logical_name: self.name_of(plan.logical_name) for plan in plans}
        self._write_manifest()
        crash_point("supervisor.after_manifest")
        for plan in plans:
            name, instance = self.names[plan.logical_name], self._owner.identity.shared_memory
            region = Region.create(
                name,
                plan.kind,
                plan.size,
                instance,
                1,
                plan.first,
                plan.second,
                self._directory_of(plan),
            )
            if plan.kind is RegionKind.RING:
                self._rings.append(Ring(region))

    def _directory_of(self, plan: RegionPlan) -> bytes:
        """The data directory that a ring or a table is for, as its header says it; zeroes for the
        rest.
        """
        _, _, number = plan.logical_name.rpartition("-")
        if plan.kind is RegionKind.RING:
            return self._owners[self._worker_dirs[int(number)]].instance
        return self._owners[int(number)].instance if plan.kind is RegionKind.TABLE else bytes(16)

    def _write_manifest(self) -> None:
        """Write the manifest.

        Raises: DataDirectoryError when the disk refuses.
        """
        directories = [owner.instance.hex() for owner in self._owners]
        identity = self._owner.identity
        self._generation += 1
        manifest_now = RegionManifest(
            generation=self._generation, boot_id=boot_id().hex(), pid=os.getpid(),
            shared_memory=identity.shared_memory.hex(), path=self._owner.path,
            device=identity.device, inode=identity.inode, regions=self.names, old=self.undrained,
            directories=directories,
            worker_directories={str(w): directories[d] for w, d in self._worker_dirs.items()},
            # Until the logs are recovered, a successor must assume lost memory too.
            lost_memory=self.lost_memory and not self._is_recovered,
        )  # fmt: skip
        try:
            manifest.write(self._owner.path, manifest_now)
        except OSError as error:
            raise unusable(self._owner.path, error) from None

    def _try_to_write_manifest(self) -> None:
        """Write the manifest after a failure. An error is only logged, for names of removed regions
        do no harm.
        """
        try:
            self._write_manifest()
        except DataDirectoryError as error:
            logger.error("manifest_not_written reason=%r", str(error))

    def are_drained(self) -> bool:
        """True if every ring of this run and of earlier ones has been written to the disk."""
        return (
            all(ring.settled.load() == ring.producer_position.load() for ring in self._rings)
            and not self.undrained
        )

    def remove(self) -> None:
        """Remove this run's regions and the manifest, when everything is on the disk."""
        self.discard()
        try:
            manifest.remove(self._owner.path)
        except OSError as error:
            logger.error("manifest_not_removed path=%s error=%r", self._owner.path, str(error))

    def discard(self) -> None:
        """Remove this run's regions."""
        remove_regions(list(self.names.values()))
