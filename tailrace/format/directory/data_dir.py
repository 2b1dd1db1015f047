"""File names and identity of a data directory, for the appliance and the offline tools.

Layout of `instance.json` (`tailrace.format.directory.checked_json`; format 1 was plain JSON with
"instance" only):

    instance         32 hex digits made at first use. The catalog and clients know the directory, or
                     the appliance, by it. A copy of the directory keeps it.
    shared_memory    32 hex digits that name and mark this directory's shared memory. A copy gets
                     others (see `appliance.data.data_dir_identity`).
    device, inode, path    the directory that `shared_memory` belongs to
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from tailrace.format.directory import checked_json

LOCK_FILE = "instance.lock"
IDENTITY_FILE = "instance.json"
IDENTITY_COPY_FILE = "instance.json.copy"
MANIFEST_FILE = "shm.json"
MANIFEST_COPY_FILE = "shm.json.copy"
PARTITION_FILE = "partition.json"
SWAP_FILE = "swap.json"
"""Beside the segments while cleaned ones take their place (`workers.segment.segment_swap`)."""
CATALOG_FILE = "coordinator.db"
GROUPS_FILE = "groups.db"
JOURNAL_FILE = "journal"
RESERVE_FILE = "reserve"
CONTROL_SOCKET = "control.sock"
QUARANTINE_DIRECTORY = "quarantine"
BIN_DIRECTORY = "bin"
"""Holds the partitions of deleted topics that can come back, each named by `bin_name`."""
MOVING_DIRECTORY = "moving"
"""Holds the copies of partitions that are about to move to this directory."""
BACKUP_RESULTS_DIRECTORY = "backups"
"""Holds the last result of the backups to each target (`appliance.data.backup_results`)."""
UNFINISHED_RESTORE_FILE = "restore.unfinished"
"""There from the beginning of a restore to its end."""


ARRIVAL_FILE = "arrival.new"
"""In a complete copy in the bin: the move that it is of. An opened partition has no files *.new."""
COPIED_FILE = "copied.json"
"""In a copy in MOVING_DIRECTORY: file name -> [inode, size, time in ns] of what was copied."""


def arrival_content(move: str) -> bytes:
    """Content of the file that tells which move a complete copy in the bin is of."""
    return checked_json.encode({"move": move})


def bin_name(topic_id: bytes, partition: int) -> str:
    """Name of a partition of a deleted topic in BIN_DIRECTORY."""
    return f"{topic_id.hex()}-{partition}"


class Identity(NamedTuple):
    """The contents of `instance.json`."""

    instance: bytes
    shared_memory: bytes
    device: int = -1
    inode: int = -1
    path: str = ""

    @property
    def prefix(self) -> str:
        """The prefix of the names of this directory's shared memory regions."""
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
    """Decode the identity. None if the bytes are damaged."""
    content: Any = checked_json.decode(data)
    try:
        if content is None:  # format 1
            instance = bytes.fromhex(orjson.loads(data)["instance"])
            found = Identity(instance, instance)
        else:
            ids = bytes.fromhex(content["instance"]), bytes.fromhex(content["shared_memory"])
            found = Identity(
                *ids, int(content["device"]), int(content["inode"]), str(content["path"])
            )
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError):
        return None
    return found if len(found.instance) == len(found.shared_memory) == 16 else None


def read_identity(data_dir: str) -> Identity | None:
    """Read the identity of a used directory. None if neither copy can be read."""
    for name in (IDENTITY_FILE, IDENTITY_COPY_FILE):
        try:
            found = decode_identity(checked_json.read(f"{data_dir}/{name}"))
        except OSError:
            continue
        if found is not None:
            return found
    return None
