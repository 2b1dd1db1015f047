"""The names of what lies in a data directory, and its identity: for the processes that write it and for the tools that look at it offline.

Layout of `instance.json` (`tailrace.formats.checked_json`; format 1 was plain JSON with "instance" alone):

    instance         32 hex digits made when the directory was first used. The catalog and clients know the directory, or the appliance, by it; a copy has it
    shared_memory    32 hex digits that name and mark this directory's shared memory, its alone: a copy is given others (see `appliance.identity`)
    device, inode, path    of the directory that `shared_memory` is for
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from tailrace.formats import checked_json

LOCK_FILE = "instance.lock"
IDENTITY_FILE = "instance.json"
IDENTITY_COPY_FILE = "instance.json.copy"
MANIFEST_FILE = "shm.json"
MANIFEST_COPY_FILE = "shm.json.copy"
CATALOG_FILE = "coordinator.db"
GROUPS_FILE = "groups.db"
JOURNAL_FILE = "journal"
RESERVE_FILE = "reserve"
QUARANTINE_DIRECTORY = "quarantine"


class Identity(NamedTuple):
    """What `instance.json` says."""

    instance: bytes
    shared_memory: bytes
    device: int = -1
    inode: int = -1
    path: str = ""

    @property
    def prefix(self) -> str:
        """What the names of this directory's regions of shared memory begin with."""
        return f"/tailrace-{self.shared_memory.hex()[:12]}"

    def encode(self) -> bytes:
        return checked_json.encode(
            {
                "format": 2,
                "instance": self.instance.hex(),
                "shared_memory": self.shared_memory.hex(),
                "device": self.device,
                "inode": self.inode,
                "path": self.path,
            }
        )


def decode_identity(data: bytes) -> Identity | None:
    """The identity, or None when these bytes are damaged."""
    content: Any = checked_json.decode(data)
    try:
        if content is None:  # format 1
            instance = bytes.fromhex(orjson.loads(data)["instance"])
            found = Identity(instance, instance)
        else:
            ids = bytes.fromhex(content["instance"]), bytes.fromhex(content["shared_memory"])
            found = Identity(*ids, int(content["device"]), int(content["inode"]), str(content["path"]))
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError):
        return None
    return found if len(found.instance) == len(found.shared_memory) == 16 else None


def read_identity(data_dir: str) -> Identity | None:
    """Of a directory that was used once; None when neither copy can be read."""
    for name in (IDENTITY_FILE, IDENTITY_COPY_FILE):
        try:
            found = decode_identity(checked_json.read(f"{data_dir}/{name}"))
        except OSError:
            continue
        if found is not None:
            return found
    return None
