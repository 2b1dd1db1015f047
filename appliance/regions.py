"""The appliance's shared memory: what an earlier run left, what this run makes, and the manifest that names both.

Owner: the supervisor. The manifest lies in the data directory with the catalog.
Invariants: a region is named in the manifest before it exists, so that the next start knows what to look for; a ring of an earlier run that still holds
    something stays named, and there, until its flusher has drained it; regions are removed only when their rings are drained.
Crash: the next start finds by the manifest what was left, whole or half made, and drains or removes it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from appliance.memory_plan import RegionPlan, plan_regions, plan_worker
from appliance.ownership import Ownership, remove_regions
from appliance.restart_policy import ExitCode, Halt
from appliance.settings import Settings
from shm.control import Control
from shm.crash_points import crash_point
from shm.layout import RegionKind
from shm.region import Region, RegionError, RegionMissingError, RegionVersionError
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
        self.names: dict[str, str] = {}
        """Logical name -> name in shared memory, of the regions that exist."""
        self._rings: list[Ring] = []

    # ---- earlier runs ----------------------------------------------------------------------------------------------------------------

    def find_old(self) -> None:
        """Note rings that hold undrained batches, for the flushers; remove the rest. Raises Halt."""
        manifest = self._owner.read_manifest()
        candidates = _rings_named_in(manifest) if manifest else []
        rings_found = sum(self._look_at(candidate) for candidate in candidates)
        expected = len(candidates) - len(manifest["old"]) if manifest else 0
        # What was not synced is in the page cache unless the machine went down with it: then the rings are gone, too.
        self.lost_memory = self._owner.has_manifest() and (manifest is None or rings_found < expected or manifest["lost_memory"])
        self._is_recovered = False
        keep = self._kept()
        shm_names = ["/" + entry for entry in os.listdir("/dev/shm") if ("/" + entry).startswith(self._owner.prefix + "-")]
        removed = remove_regions([name for name in shm_names if name not in keep])
        if removed:
            logger.info("stale_regions_removed count=%d", removed)

    def _look_at(self, candidate: dict[str, Any]) -> bool:
        """Whether the ring is there. Raises Halt when it holds what cannot be drained now."""
        try:
            ring = Ring(Region.attach(candidate["ring"], RegionKind.RING, self._owner.instance))
        except RegionMissingError:
            return False
        except RegionVersionError as error:
            raise Halt(
                ExitCode.DATA_UNUSABLE, f"{error}: start the version that made it once, so that it can drain what it holds"
            ) from None
        except RegionError as error:
            logger.warning("stale_region_ignored name=%s reason=%r", candidate["ring"], str(error))
            return False
        if ring.settled.load() != ring.head.load():
            logger.info("undrained_ring name=%s descriptors=%d", candidate["ring"], ring.head.load() - ring.settled.load())
            if candidate["dir"] not in [owner.instance.hex() for owner in self._owners]:
                raise Halt(
                    ExitCode.DATA_UNUSABLE,
                    "an earlier run left acknowledged batches in memory for a data directory that is not configured now; "
                    "start once with the data_dirs of that run",
                )
            self.undrained.append(candidate)
        return True

    def _kept(self) -> set[str]:
        return {candidate[part] for candidate in self.undrained for part in ("ring", "table")}

    def forget_old(self) -> None:
        """The flushers have drained them."""
        kept = sorted(self._kept())
        self.undrained = []
        self._is_recovered = True
        self._write_manifest()
        remove_regions(kept)

    # ---- this run --------------------------------------------------------------------------------------------------------------------

    def name_of(self, logical_name: str) -> str:
        return f"{self._owner.prefix}-{self.run_id}-{logical_name.replace('>', '.')}"

    def names_with_spares(self) -> dict[str, str]:
        """What a child is told: also the names of regions that dedicated workers will have."""
        first = len(self._worker_dirs)
        spares = [
            plan
            for w in range(first, first + self._settings.dedicated_workers)
            for plan in plan_worker(self._settings, w, self._settings.fronts)
        ]
        return {plan.logical_name: self.name_of(plan.logical_name) for plan in spares} | self.names

    def create(self) -> Control:
        """Make everything that the shape of the appliance asks for. Raises RegionError; then nothing of it is left."""
        plans = plan_regions(self._settings, len(self._worker_dirs), self._settings.fronts, len(self._owners))
        try:
            self._make(plans)
        except RegionError:
            remove_regions(list(self.names.values()))
            self.names = {}
            self._write_manifest()  # the old rings stay named
            raise
        return Control(Region.attach(self.names["control"], RegionKind.CONTROL, self._owner.instance))

    def create_worker(self, index: int, data_dir: int) -> None:
        """Make a dedicated worker's ring and lanes, if they are not there. Raises RegionError; then none of them is left."""
        if index in self._worker_dirs:
            return
        plans = plan_worker(self._settings, index, self._settings.fronts)
        self._worker_dirs[index] = data_dir
        try:
            self._make(plans)
        except RegionError:
            remove_regions([self.names.pop(plan.logical_name) for plan in plans])
            del self._worker_dirs[index]
            self._write_manifest()
            raise

    def _make(self, plans: list[RegionPlan]) -> None:
        self.names |= {plan.logical_name: self.name_of(plan.logical_name) for plan in plans}
        self._write_manifest()
        crash_point("supervisor.after_manifest")
        for plan in plans:
            name = self.names[plan.logical_name]
            region = Region.create(name, plan.kind, plan.size, self._owner.instance, 1, plan.first, plan.second)
            if plan.kind is RegionKind.RING:
                self._rings.append(Ring(region))

    def _write_manifest(self) -> None:
        directories = [owner.instance.hex() for owner in self._owners]
        of_workers = {w: directories[d] for w, d in self._worker_dirs.items()}
        # A start that is killed before it has recovered the logs leaves its successor as ignorant as it was itself.
        self._owner.write_manifest(self.names, self.undrained, directories, of_workers, self.lost_memory and not self._is_recovered)

    def are_drained(self) -> bool:
        return all(ring.settled.load() == ring.head.load() for ring in self._rings) and not self.undrained

    def remove(self) -> None:
        """Everything is on the disk: take this run's regions away, and the manifest with them."""
        self.discard()
        self._owner.remove_manifest()

    def discard(self) -> None:
        """Take this run's regions away."""
        remove_regions(list(self.names.values()))


def _rings_named_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Every ring that may be there: those of the run that wrote the manifest, and those that it had not drained yet."""
    names, directories = manifest["regions"], manifest["directories"]
    own = []
    for worker, directory in manifest["worker_directories"].items():
        if f"ring-{worker}" in names:
            own.append({"ring": names[f"ring-{worker}"], "table": names[f"table-{directories.index(directory)}"], "dir": directory})
    return own + list(manifest["old"])
