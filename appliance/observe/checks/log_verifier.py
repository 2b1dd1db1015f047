"""Verifies the files of a data directory offline: checksums, index entries, offsets, timestamps,
producer sequences, transactions, delayed records.

Owner: reads only; changes nothing and takes no lock. A live appliance may go on writing; its
appends can look like a torn tail.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from appliance.observe.checks.findings import Totals
from appliance.observe.checks.partition_check import PartitionCheck
from tailrace.format.directory.delay_files import (
    BUCKET_SUFFIX,
)
from tailrace.format.directory.partition_metadata import PARTITION_FILE
from tailrace.format.segments.segment import (
    OLD_SEGMENT_SUFFIX,
    SEGMENT_SUFFIX,
    segment_bases,
)


def partition_directories(path: str) -> list[str]:
    """`path` itself when it is a partition's directory, else those in it."""
    if _is_partition(path):
        return [path]
    return sorted(
        entry.path for entry in os.scandir(path) if entry.is_dir() and _is_partition(entry.path)
    )


def _is_partition(path: str) -> bool:
    names = os.listdir(path)
    return PARTITION_FILE in names or bool(
        segment_bases(names) or segment_bases(names, OLD_SEGMENT_SUFFIX)
    )


def data_bytes(directories: list[str]) -> int:
    """Bytes that a check will read."""
    return sum(
        entry.stat().st_size
        for directory in directories
        for entry in os.scandir(directory)
        if entry.name.endswith((SEGMENT_SUFFIX, OLD_SEGMENT_SUFFIX, BUCKET_SUFFIX))
    )


def check(directories: list[str], advance: Callable[[int], None] = lambda _: None) -> Totals:
    """Check partitions one after the other; `advance` is called with the bytes done.

    Raises: OSError.
    """
    totals = Totals()
    for directory in directories:
        PartitionCheck(directory, totals, advance).run()
    return totals
