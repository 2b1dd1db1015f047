"""Regions that an earlier run left in shared memory, found by its manifest and by their headers.

Owner: the supervisor, at start, with the data directory locked. Reads only;
`appliance.supervise.memory.shm_regions` decides what to do with them.
Invariants:
- A region is this directory's only if its header names this directory's shared-memory identity, or
  if it is unfinished under this identity's prefix, which no other program uses.
- A copy of a directory has another identity, and nothing of its original is touched.

    manifest               regions of     rings        memory counts as lost
                           this identity  checked
    complete, of this      any            named and    if a named ring is missing
    directory and boot                    found
    complete, of another   none possible  none         yes
    boot
    damaged, both copies   some           found        unless control, tables and first
                                                       rings of that run are there
    damaged, both copies   none           none         yes
    none                   none           none         no: a clean stop
    none                   some           found        unless control, tables and first
                                                       rings of that run are there
    of another directory   any            found        yes; refused when that directory is
    (a copy)                                           gone and its rings hold batches (it
                                                       was moved to another file system
                                                       after a kill)

Crash: reads only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from appliance.data import region_manifest as manifest
from appliance.data.data_dir_lock import DataDirLock
from appliance.data.region_manifest import RegionManifest
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from shm.memory.layout import RegionKind
from shm.memory.region import (
    Region,
    RegionError,
    RegionHeader,
    RegionVersionError,
    boot_id,
    names_with,
    owner_of,
    remove,
)
from shm.queues.ring import Ring

logger = logging.getLogger("appliance.supervise.supervisor")


@dataclass(slots=True)
class OrphanedRegions:
    """Regions of an earlier run."""

    existed: bool = False
    """True if the earlier run did not end cleanly."""
    lost_memory: bool = False
    original: str = ""
    """The directory that this one is a copy of, taken before that one stopped cleanly; else ""."""
    expected: int = 0
    """Number of rings that the run had."""
    rings: list[dict[str, Any]] = field(default_factory=list)
    """Rings that may hold batches: {"ring", "table": names in shared memory, "dir": identity of the
    data directory}.
    """
    regions: list[str] = field(default_factory=list)
    """Every existing region of this directory."""


def find_orphaned(owner: DataDirLock) -> OrphanedRegions:
    """Find the regions of earlier runs.

    Raises: Halt if acknowledged batches must not be drained into this directory.
    """
    found = manifest.read(owner.path)
    mine = owner.identity.shared_memory
    left = OrphanedRegions(
        existed=found.existed,
        regions=[
            name
            for name in names_with(owner.identity.prefix + "-")
            if owner_of(name) in (mine, bytes(16))
        ],
    )
    named = found.manifest
    if named is not None and named.boot_id != boot_id().hex():
        left.lost_memory = True
        return left
    if named is not None and named.shared_memory != mine.hex():
        _refuse_if_moved(owner, named)
        left.lost_memory = True
        left.original = named.path
        named = None
    unnamed = _rings_in(left.regions, mine)
    if named is not None:
        own = named.rings()
        left.expected = len(own)
        left.rings = own + named.old
        left.lost_memory = named.lost_memory
    else:
        left.expected = len(unnamed)
        if (left.existed or left.regions) and not left.lost_memory:
            left.existed = True
            left.lost_memory = not _are_complete(left.regions, mine)
            logger.error(
                "manifest_replaced_by_what_is_there path=%s rings=%d complete=%s",
                owner.path,
                len(unnamed),
                not left.lost_memory,
            )
    known = {candidate["ring"] for candidate in left.rings}
    left.rings += [candidate for candidate in unnamed if candidate["ring"] not in known]
    return left


def remove_regions(names: list[str]) -> int:
    """Unlink regions; returns how many there were."""
    return sum(1 for name in names if remove(name))


def _refuse_if_moved(owner: DataDirLock, named: RegionManifest) -> None:
    """Handle a manifest of another directory, of which this one is a copy.

    Raises: Halt if that directory is gone and its rings hold batches.
    """
    undrained = []
    for candidate in [*named.rings(), *named.old]:
        try:
            ring = Ring(
                Region.attach(
                    candidate["ring"], RegionKind.RING, bytes.fromhex(named.shared_memory)
                )
            )
        except RegionError:
            continue
        if ring.producer_position.load() != ring.settled.load():
            undrained.append(f"/dev/shm{candidate['ring']}")
    if not undrained or _is_there(named):
        return
    raise Halt(
        ExitCode.DATA_UNUSABLE,
        f"the data directory {owner.path} is a copy of {named.path}, which is gone, and "
        f"{', '.join(undrained)} may hold batches that were acknowledged there and had not "
        "reached the disk. Move the original back to its place and start it once there, or "
        "remove those regions to give the batches up.",
    )


def _is_there(named: RegionManifest) -> bool:
    """True if the directory that wrote the manifest is where it was."""
    try:
        found = os.stat(named.path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (named.device, named.inode)


def _header(name: str, kind: RegionKind, mine: bytes) -> RegionHeader | None:
    try:
        region = Region.attach(name, kind, mine)
    except RegionError:
        return None
    header = region.header
    region.close()
    return header


def _run_of(name: str) -> str:
    """/tailrace-INSTANCE-RUN-LOGICAL-NAME -> /tailrace-INSTANCE-RUN."""
    return "-".join(name.split("-")[:3])


def _rings_in(names: list[str], mine: bytes) -> list[dict[str, Any]]:
    """Find rings by their own headers, each with the table of its run and data directory."""
    tables: dict[tuple[str, bytes], str] = {}
    for name in names:
        header = _header(name, RegionKind.TABLE, mine)
        if header is not None:
            tables[_run_of(name), header.directory] = name
    found = []
    for name in names:
        try:
            region = Region.attach(name, RegionKind.RING, mine)
        except RegionVersionError:
            directory = bytes(16)  # checked again where it is refused
        except RegionError:
            continue
        else:
            directory = region.header.directory
            region.close()
        table = tables.get((_run_of(name), directory), f"{_run_of(name)}-table")
        found.append({"ring": name, "table": table, "dir": directory.hex()})
    return found


def _are_complete(names: list[str], mine: bytes) -> bool:
    """True if each run that left regions left its control region and the rings that it started
    with.
    """
    for run in {_run_of(name) for name in names}:
        control = _header(f"{run}-control", RegionKind.CONTROL, mine)
        if control is None or any(
            _header(f"{run}-ring-{w}", RegionKind.RING, mine) is None for w in range(control.first)
        ):
            return False
    return bool(names)
