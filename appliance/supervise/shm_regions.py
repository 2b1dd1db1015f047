"""The appliance's shared memory: what an earlier run left, what this run makes, and the manifest that names both.

Owner: the supervisor. The manifest lies in the data directory with the catalog.
Invariants: a region is named in the manifest before it exists, so that the next start knows what to look for; a ring of an earlier run that still holds
    something stays named, and there, until its flusher has drained it; regions are removed only when their rings are drained.
Crash: the next start finds what was left, whole or half made, and drains or removes it (see `appliance.left_regions`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from appliance import manifest
from appliance.directory_errors import DataDirectoryError, unusable
from appliance.left_regions import find_left, remove_regions
from appliance.manifest import Manifest
from appliance.memory_plan import RegionPlan, plan_groups, plan_regions, plan_worker
from appliance.ownership import Ownership
from appliance.restart_policy import ExitCode, Halt
from appliance.settings import Settings
from shm.control import Control
from shm.crash_points import crash_point
from shm.layout import RegionKind
from shm.region import Region, RegionError, RegionForeignError, RegionMissingError, RegionVersionError, boot_id
from shm.ring import Ring

logger = logging.getLogger("appliance.supervisor")


class Regions:
    """Everything of one run, and what is left of earlier ones."""

    def __init__(self, owners: list[Ownership], settings: Settings, worker_dirs: list[int]) -> None:
        """`owners`: one for each data directory, the one with the catalog first; `worker_dirs`: worker -> index of its data directory."""
        self._owners = owners
        self._owner = owners[0]
        self._settings = settings
        self._worker_dirs = dict(enumerate(worker_dirs))
        self.run_id = os.urandom(4).hex()
        self.lost_memory = False
        """Whether an earlier run ended without its rings being there now: what was not synced may be lost."""
        self._is_recovered = True
        """Whether the flushers of this run have recovered their logs."""
        self.undrained: list[dict[str, Any]] = []
        """Rings of earlier runs that hold something: {"ring", "table": names in shared memory, "dir": identity of the data directory}."""
        self._generation = time.time_ns()
        """Of the manifest: later runs write higher ones; two copies of one run differ by counting."""
        self.names: dict[str, str] = {}
        """Logical name -> name in shared memory, of the regions that exist."""
        self._rings: list[Ring] = []

    # ---- earlier runs ----------------------------------------------------------------------------------------------------------------

    def find_old(self) -> None:
        """Note rings that hold undrained batches, for the flushers; remove the rest. Raises Halt."""
        left = find_left(self._owner)
        rings_found = sum(self._look_at(candidate) for candidate in left.rings)
        self.lost_memory = left.lost_memory or (left.existed and rings_found < left.expected)
        self._is_recovered = False
        if self.lost_memory:
            logger.error(
                "memory_lost data_dir=%s rings_found=%d rings_expected=%d what was acknowledged with acks=1 or durability=memory and had not reached the "
                "disk is gone; leader epochs are raised, and readers beyond the end are told",
                self._owner.path, rings_found, left.expected,
            )  # fmt: skip
        removed = remove_regions([name for name in left.regions if name not in self._kept()])
        if removed:
            logger.info("stale_regions_removed count=%d", removed)

    def _look_at(self, candidate: dict[str, Any]) -> bool:
        """Whether the ring is there. Raises Halt when it holds what cannot be drained now."""
        try:
            ring = Ring(Region.attach(candidate["ring"], RegionKind.RING, self._owner.identity.shared_memory))
        except RegionMissingError:
            return False
        except RegionVersionError as error:
            raise Halt(
                ExitCode.DATA_UNUSABLE, f"{error}: start the version that made it once, so that it can drain what it holds"
            ) from None
        except RegionForeignError as error:
            raise Halt(ExitCode.DATA_UNUSABLE, str(error)) from None
        except RegionError as error:
            logger.warning("stale_region_ignored name=%s reason=%r", candidate["ring"], str(error))
            return False
        count = ring.head.load() - ring.settled.load()
        if count:
            logger.info("undrained_ring name=%s descriptors=%d", candidate["ring"], count)
            if candidate["dir"] not in [owner.instance.hex() for owner in self._owners]:
                raise Halt(
                    ExitCode.DATA_UNUSABLE,
                    "an earlier run left acknowledged batches in memory for a data directory that is not configured now; "
                    "start once with the data_dirs of that run",
                )
            self._check_table(candidate, count)
            self.undrained.append(candidate)
        return True

    def _check_table(self, candidate: dict[str, Any], count: int) -> None:
        """Without its partition table nothing says which partitions a ring's batches are for. Raises Halt."""
        try:
            Region.attach(candidate["table"], RegionKind.TABLE, self._owner.identity.shared_memory).close()
        except RegionError as error:
            raise Halt(
                ExitCode.DATA_UNUSABLE,
                f"/dev/shm{candidate['ring']} holds {count} descriptors of an earlier run with batches that may be acknowledged, and {error}: nothing says "
                f"which partitions they are for. Remove /dev/shm{candidate['ring']} to give them up, then start again.",
            ) from None

    def _kept(self) -> set[str]:
        return {candidate[part] for candidate in self.undrained for part in ("ring", "table")}

    def forget_old(self) -> None:
        """The flushers have drained them."""
        kept = sorted(self._kept())
        self.undrained = []
        self._is_recovered = True
        try:
            self._write_manifest()
        except DataDirectoryError as error:
            logger.error("drained_rings_kept reason=%r the next start removes them", str(error))
            return  # the manifest names them still
        remove_regions(kept)

    # ---- this run --------------------------------------------------------------------------------------------------------------------

    def name_of(self, logical_name: str) -> str:
        """The shared-memory name of a region of this run (`ring-0`, `front-0>worker-1`)."""
        return f"{self._owner.identity.prefix}-{self.run_id}-{logical_name.replace('>', '.')}"

    def names_with_spares(self) -> dict[str, str]:
        """What a child is told: also the names of regions that dedicated workers and the process of groups will have."""
        first = len(self._worker_dirs)
        spares = plan_groups(self._settings.fronts)
        for w in range(first, first + self._settings.dedicated_workers):
            spares += plan_worker(self._settings, w, self._settings.fronts)
        return {plan.logical_name: self.name_of(plan.logical_name) for plan in spares} | self.names

    def create(self) -> Control:
        """Make everything that the shape of the appliance asks for. Raises RegionError, DataDirectoryError; then nothing of it is left."""
        plans = plan_regions(self._settings, len(self._worker_dirs), self._settings.fronts, len(self._owners))
        try:
            self._make(plans)
        except (RegionError, DataDirectoryError):
            remove_regions(list(self.names.values()))
            self.names = {}
            self._try_to_write_manifest()  # the old rings stay named
            raise
        return Control(Region.attach(self.names["control"], RegionKind.CONTROL, self._owner.identity.shared_memory))

    def create_worker(self, index: int, data_dir: int) -> None:
        """Make a dedicated worker's ring and lanes, if they are not there. Raises RegionError, DataDirectoryError; then none of them is left."""
        if index in self._worker_dirs:
            return
        self._worker_dirs[index] = data_dir
        try:
            self._make_all_or_none(plan_worker(self._settings, index, self._settings.fronts))
        except (RegionError, DataDirectoryError):
            del self._worker_dirs[index]
            self._try_to_write_manifest()
            raise

    def create_groups(self) -> None:
        """Make the lanes of the process of groups, if they are not there. Raises RegionError, DataDirectoryError; then none of them is left."""
        plans = plan_groups(self._settings.fronts)
        if plans[0].logical_name in self.names:
            return
        try:
            self._make_all_or_none(plans)
        except (RegionError, DataDirectoryError):
            self._try_to_write_manifest()
            raise

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
            region = Region.create(name, plan.kind, plan.size, instance, 1, plan.first, plan.second, self._directory_of(plan))
            if plan.kind is RegionKind.RING:
                self._rings.append(Ring(region))

    def _directory_of(self, plan: RegionPlan) -> bytes:
        """The data directory that a ring or a table is for, as its header says it; zeroes for the rest."""
        _, _, number = plan.logical_name.rpartition("-")
        if plan.kind is RegionKind.RING:
            return self._owners[self._worker_dirs[int(number)]].instance
        return self._owners[int(number)].instance if plan.kind is RegionKind.TABLE else bytes(16)

    def _write_manifest(self) -> None:
        """Raises DataDirectoryError when the disk refuses."""
        directories = [owner.instance.hex() for owner in self._owners]
        identity = self._owner.identity
        self._generation += 1
        told = Manifest(
            generation=self._generation, boot_id=boot_id().hex(), pid=os.getpid(), shared_memory=identity.shared_memory.hex(), path=self._owner.path,
            device=identity.device, inode=identity.inode, regions=self.names, old=self.undrained, directories=directories,
            worker_directories={str(w): directories[d] for w, d in self._worker_dirs.items()},
            # A start that is killed before it has recovered the logs leaves its successor as ignorant as it was itself.
            lost_memory=self.lost_memory and not self._is_recovered,
        )  # fmt: skip
        try:
            manifest.write(self._owner.path, told)
        except OSError as error:
            raise unusable(self._owner.path, error) from None

    def _try_to_write_manifest(self) -> None:
        """After a failure: names of regions that are gone do no harm."""
        try:
            self._write_manifest()
        except DataDirectoryError as error:
            logger.error("manifest_not_written reason=%r", str(error))

    def are_drained(self) -> bool:
        """Whether every ring of this run and of earlier ones has been written to the disk."""
        return all(ring.settled.load() == ring.head.load() for ring in self._rings) and not self.undrained

    def remove(self) -> None:
        """Everything is on the disk: take this run's regions away, and the manifest with them."""
        self.discard()
        try:
            manifest.remove(self._owner.path)
        except OSError as error:
            logger.error("manifest_not_removed path=%s error=%r", self._owner.path, str(error))

    def discard(self) -> None:
        """Take this run's regions away."""
        remove_regions(list(self.names.values()))
