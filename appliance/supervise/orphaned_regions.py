"""What an earlier run left in shared memory, found by its manifest and by the regions themselves.

Owner: the supervisor, at start, with the data directory locked. Reads; what to do with what is found is decided in `appliance.regions`.
Invariants: a region is this directory's only if its header names this directory's shared-memory identity (or it is unfinished, under this identity's
    prefix, which no other program makes); a copy of a directory has another identity, and nothing of its original is touched.

    manifest                            regions of this identity    rings looked at            memory counts as lost
    whole, of this directory and boot   any                         those named, those found   when a named ring is missing
    whole, of another boot              none can be there           none                       yes
    damaged, both copies                some                        those found                unless control, tables and first rings of that run are there
    damaged, both copies                none                        none                       yes
    none                                none                        none                       no: a clean stop
    none                                some                        those found                unless control, tables and first rings of that run are there
    of another directory (a copy)       any                         those found                yes; refused when that directory is gone and its rings hold
                                                                                               batches: it was moved to another file system after a kill

Crash: reading only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from appliance import manifest
from appliance.manifest import Manifest
from appliance.ownership import Ownership
from appliance.restart_policy import ExitCode, Halt
from shm.layout import RegionKind
from shm.region import Region, RegionError, RegionHeader, RegionVersionError, boot_id, names_with, owner_of, remove
from shm.ring import Ring

logger = logging.getLogger("appliance.supervisor")


@dataclass(slots=True)
class Left:
    """What an earlier run left."""

    existed: bool = False
    """It did not end cleanly."""
    lost_memory: bool = False
    expected: int = 0
    """How many rings of that run there must be."""
    rings: list[dict[str, Any]] = field(default_factory=list)
    """Where batches may lie: {"ring", "table": names in shared memory, "dir": identity of the data directory}."""
    regions: list[str] = field(default_factory=list)
    """Every region of this directory that there is."""


def find_left(owner: Ownership) -> Left:
    """Look at everything. Raises Halt when acknowledged batches are there that must not be drained into this directory."""
    found = manifest.read(owner.path)
    mine = owner.identity.shared_memory
    left = Left(
        existed=found.existed, regions=[name for name in names_with(owner.identity.prefix + "-") if owner_of(name) in (mine, bytes(16))]
    )
    named = found.manifest
    if named is not None and named.boot_id != boot_id().hex():
        left.lost_memory = True
        return left
    if named is not None and named.shared_memory != mine.hex():
        _refuse_if_moved(owner, named)
        left.lost_memory = True
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
            logger.error("manifest_replaced_by_what_is_there path=%s rings=%d complete=%s", owner.path, len(unnamed), not left.lost_memory)
    known = {candidate["ring"] for candidate in left.rings}
    left.rings += [candidate for candidate in unnamed if candidate["ring"] not in known]
    return left


def remove_regions(names: list[str]) -> int:
    """Unlink regions; returns how many there were."""
    return sum(1 for name in names if remove(name))


def _refuse_if_moved(owner: Ownership, named: Manifest) -> None:
    """The manifest is another directory's, of which this one is a copy. Raises Halt when that one is gone and its rings hold batches."""
    undrained = []
    for candidate in [*named.rings(), *named.old]:
        try:
            ring = Ring(Region.attach(candidate["ring"], RegionKind.RING, bytes.fromhex(named.shared_memory)))
        except RegionError:
            continue
        if ring.head.load() != ring.settled.load():
            undrained.append(f"/dev/shm{candidate['ring']}")
    if not undrained or _is_there(named):
        return
    raise Halt(
        ExitCode.DATA_UNUSABLE,
        f"the data directory {owner.path} is a copy of {named.path}, which is gone, and {', '.join(undrained)} may hold batches that were acknowledged there "
        "and had not reached the disk. Move the original back to its place and start it once there, or remove those regions to give the batches up.",
    )


def _is_there(named: Manifest) -> bool:
    """Whether the directory that wrote the manifest is where it was."""
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
    """Rings by their own headers, each with the table of its run and data directory."""
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
            directory = bytes(16)  # looked at again where it is refused
        except RegionError:
            continue
        else:
            directory = region.header.directory
            region.close()
        table = tables.get((_run_of(name), directory), f"{_run_of(name)}-table")
        found.append({"ring": name, "table": table, "dir": directory.hex()})
    return found


def _are_complete(names: list[str], mine: bytes) -> bool:
    """Whether each run that left something left its control region and the rings that it was started with."""
    for run in {_run_of(name) for name in names}:
        control = _header(f"{run}-control", RegionKind.CONTROL, mine)
        if control is None or any(_header(f"{run}-ring-{w}", RegionKind.RING, mine) is None for w in range(control.first)):
            return False
    return bool(names)
