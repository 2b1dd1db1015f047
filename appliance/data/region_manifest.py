"""The manifest of shared memory, `shm.json` and its copy: written before the regions exist, removed
by a clean stop.

Owner: the supervisor, in the data directory with the catalog.
Invariants:
- Both copies name a region before it is made, so either of them is enough.
- Each copy has a checksum and is replaced atomically.
Crash: of two complete copies the newer counts. If neither is complete, the regions themselves are
searched (see `appliance.supervise.memory.shm_regions`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import MANIFEST_COPY_FILE, MANIFEST_FILE

logger = logging.getLogger("appliance.supervise.supervisor")

FORMAT = 2
COPIES = (MANIFEST_COPY_FILE, MANIFEST_FILE)


@dataclass(frozen=True, slots=True)
class RegionManifest:
    """Regions of one run in shared memory."""

    generation: int
    """Grows with each writing; the copy with the higher one is newer."""
    boot_id: str
    pid: int
    shared_memory: str
    """Shared-memory identity that the regions belong to (see `tailrace.format.directory.data_dir`),
    32 hexadecimal digits.
    """
    path: str
    device: int
    inode: int
    """Path of the directory of these regions, which tells a copy of it from itself."""
    regions: dict[str, str]
    """Logical name -> name in shared memory."""
    old: list[dict[str, Any]]
    """Rings of earlier runs that are not drained yet: {"ring", "table": names in shared memory,
    "dir": identity of the data directory}.
    """
    directories: list[str]
    """Data directories by identity."""
    worker_directories: dict[str, str]
    """Worker -> the data directory that its ring is for."""
    lost_memory: bool
    """True if an earlier run's rings are gone and the logs have not been recovered since."""

    def rings(self) -> list[dict[str, Any]]:
        """The rings of the run that wrote this, in the form of `old`."""
        found = []
        for worker, directory in self.worker_directories.items():
            if f"ring-{worker}" in self.regions:
                table = self.regions[f"table-{self.directories.index(directory)}"]
                found.append(
                    {"ring": self.regions[f"ring-{worker}"], "table": table, "dir": directory}
                )
        return found


class FoundManifest(NamedTuple):
    """The manifest of an earlier run that did not end cleanly."""

    existed: bool
    """True if there was a manifest, damaged or not: the earlier run did not end cleanly."""
    manifest: RegionManifest | None
    """The manifest; None if it is missing, or neither copy is complete."""


def read(path: str) -> FoundManifest:
    """Read both copies."""
    existed = False
    found: list[RegionManifest] = []
    for name in COPIES:
        file_name = f"{path}/{name}"
        if not os.path.lexists(file_name):
            continue
        existed = True
        try:
            manifest = _decode(checked_json.read(file_name))
        except OSError as error:
            logger.error("manifest_not_read path=%s error=%r", file_name, str(error))
            continue
        if manifest is None:
            logger.error("manifest_damaged path=%s", file_name)
        else:
            found.append(manifest)
    return FoundManifest(
        existed, max(found, key=lambda manifest: manifest.generation, default=None)
    )


def _decode(data: bytes) -> RegionManifest | None:
    content = checked_json.decode(data)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        return None
    try:
        return RegionManifest(**content)
    except TypeError:
        return None


def write(path: str, manifest: RegionManifest) -> None:
    """Replace both copies, durably. Raises OSError."""
    data = checked_json.encode({"format": FORMAT, **asdict(manifest)})
    for name in COPIES:
        checked_json.replace(f"{path}/{name}", data)


def remove(path: str) -> None:
    """Remove both copies after a clean stop.

    Raises: OSError.
    """
    for name in reversed(COPIES):
        try:
            os.unlink(f"{path}/{name}")
        except FileNotFoundError:
            pass
