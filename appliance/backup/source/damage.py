"""Damage of a segment file whose copy in the target was found damaged.

A target that shares segments with the data has one file for both: the copy is damaged because the
segment is. The backup says so, for it cannot mend it.

Owner: reads the flusher's files.
"""

from __future__ import annotations

import os

from tailrace.format.directory.data_dir import PARTITION_FILE
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments.segment import (
    Ending,
    Walk,
    file_name,
    schema_message_length,
    walk_batches,
)


def damage_of(directory: str, base: int) -> str:
    """Check all batches of a segment. Returns a sentence, or "" if it is intact or was removed, or
    if the damage is known. Raises OSError.
    """
    path = f"{directory}/{file_name(base)}"
    try:
        with open(f"{directory}/{PARTITION_FILE}", "rb") as file:
            metadata = PartitionMetadata.decode(file.read())
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:

        def read_at(length: int, position: int) -> bytes:
            return os.pread(fd, length, position)

        length = schema_message_length(read_at)
        walk = Walk(length, base)
        if metadata is None:
            return ""  # the backup has said so
        if length:
            for _ in walk_batches(read_at, os.fstat(fd).st_size, walk, metadata.seed):
                pass
    finally:
        os.close(fd)
    known = any(each.start <= walk.next_offset < each.end for each in metadata.damage)
    if (length and walk.ending is not Ending.TORN) or known:
        return ""
    return (
        f"{path} is damaged at offset {walk.next_offset}, and so is its copy in this backup: "
        "restore an older backup beside it, or see `tailrace log verify`."
    )
