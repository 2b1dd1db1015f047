"""`shm.json` and its copy: which regions of shared memory exist, written before they do, gone after a clean stop.

Owner: the supervisor, in the data directory with the catalog.
Invariants: both copies name a region before it is made, so either of them is enough; each carries a checksum and is replaced atomically.
Crash: between the two copies, the newer of two whole ones counts. When neither is whole, the regions speak for themselves (see `appliance.regions`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tailrace.formats import checked_json
from tailrace.formats.data_directory import MANIFEST_COPY_FILE, MANIFEST_FILE

logger = logging.getLogger("appliance.supervisor")

FORMAT = 2
COPIES = (MANIFEST_COPY_FILE, MANIFEST_FILE)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one run has in shared memory."""

    generation: int
    """Grows with each writing; of two copies, the higher is the newer."""
    boot_id: str
    pid: int
    shared_memory: str
    """Whose regions these are (see `tailrace.formats.data_directory`), 32 hexadecimal digits."""
    path: str
    device: int
    inode: int
    """The directory that they belong to, to tell a copy of it from itself."""
    regions: dict[str, str]
    """Logical name -> name in shared memory."""
    old: list[dict[str, Any]]
    """Rings of earlier runs that are not drained yet: {"ring", "table": names in shared memory, "dir": identity of the data directory}."""
    directories: list[str]
    """Data directories by identity."""
    worker_directories: dict[str, str]
    """Worker -> the data directory that its ring is for."""
    lost_memory: bool
    """An earlier run's rings are gone, and the logs have not been recovered since."""

    def rings(self) -> list[dict[str, Any]]:
        """The rings of the run that wrote this, in the form of `old`."""
        found = []
        for worker, directory in self.worker_directories.items():
            if f"ring-{worker}" in self.regions:
                table = self.regions[f"table-{self.directories.index(directory)}"]
                found.append({"ring": self.regions[f"ring-{worker}"], "table": table, "dir": directory})
        return found


class FoundManifest(NamedTuple):
    """What a start finds of an earlier run that did not end cleanly."""

    existed: bool
    """Whether there was a manifest, damaged or not: the earlier run did not end cleanly."""
    manifest: Manifest | None
    """None: there is none, or neither copy is whole."""


def read(path: str) -> FoundManifest:
    """Look at both copies."""
    existed = False
    found: list[Manifest] = []
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
    return FoundManifest(existed, max(found, key=lambda manifest: manifest.generation, default=None))


def _decode(data: bytes) -> Manifest | None:
    content = checked_json.decode(data)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        return None
    try:
        return Manifest(**content)
    except TypeError:
        return None


def write(path: str, manifest: Manifest) -> None:
    """Replace both copies, durably. Raises OSError."""
    data = checked_json.encode({"format": FORMAT, **asdict(manifest)})
    for name in COPIES:
        checked_json.replace(f"{path}/{name}", data)


def remove(path: str) -> None:
    """After a clean stop. Raises OSError."""
    for name in reversed(COPIES):
        try:
            os.unlink(f"{path}/{name}")
        except FileNotFoundError:
            pass
