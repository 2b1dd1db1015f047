"""Directories of partitions, and the metadata file of each: what a start without a usable catalog
finds in the data directories.

Owner: pure; it only reads files.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import NamedTuple

from tailrace.core.schedule.delays import DELAY_SUFFIX, delay_log_name
from tailrace.format.directory.data_dir import BIN_DIRECTORY, bin_name
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.segments.segment import OLD_SEGMENT_SUFFIX, SEGMENT_SUFFIX

_DIRECTORY = re.compile(r"(.+)-([0-9]{1,4})")


class FoundPartition(NamedTuple):
    """A directory with the name of a partition."""

    path: str
    topic: str
    partition: int
    data_dir: int
    """Index of the data directory."""
    file: PartitionMetadata | None
    """The metadata file; None if it is missing or damaged."""
    has_records: bool
    is_in_bin: bool = False


def survey(data_dirs: list[str]) -> list[FoundPartition]:
    """Every partition's directory, and those in the bins that belong to these topics: a deletion
    was not complete, or a topic was coming back. Raises OSError.
    """
    found = []
    for index, data_dir in enumerate(data_dirs):
        for name in _directories_in(data_dir):
            matched = _DIRECTORY.fullmatch(name)
            if matched is not None:
                found.append(
                    _read_partition_directory(
                        f"{data_dir}/{name}", matched[1], int(matched[2]), index
                    )
                )
    return [*found, *_of_present_topics(survey_bins(data_dirs), found)]


def survey_bins(data_dirs: list[str]) -> list[FoundPartition]:
    """The partitions of deleted topics whose metadata can be read. Raises OSError."""
    found = []
    for index, data_dir in enumerate(data_dirs):
        path = f"{data_dir}/{BIN_DIRECTORY}"
        for name in _directories_in(path) if os.path.isdir(path) else ():
            each = _read_partition_directory(f"{path}/{name}", "", 0, index)
            file = each.file
            if file is not None and bin_name(file.topic_id, file.partition) == name:
                found.append(
                    each._replace(topic=file.topic, partition=file.partition, is_in_bin=True)
                )
    return found


def _directories_in(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _of_present_topics(
    binned: list[FoundPartition], found: list[FoundPartition]
) -> list[FoundPartition]:
    """Partitions in the bin of a topic that has others in their place, or whose delay log has. They
    get the topic's present name.
    """
    names = {each.file.topic_id: each.topic for each in found if each.file is not None}
    for each in found:
        delay_of = each.file.decision.delay_of if each.file and each.file.decision else ""
        if delay_of:
            owner = each.topic.removesuffix(DELAY_SUFFIX)
            names.setdefault(bytes.fromhex(delay_of), owner)
    present = []
    for each in binned:
        assert each.file is not None, "those without are left out"
        file, decision = each.file, each.file.decision
        name = names.get(file.topic_id)
        if name is None and decision is not None and decision.delay_of:
            owner_name = names.get(bytes.fromhex(decision.delay_of))
            name = delay_log_name(owner_name) if owner_name is not None else None
        if name is not None:
            present.append(each._replace(topic=name, file=replace(file, topic=name)))
    return present


def partition_directories(data_dirs: list[str]) -> list[tuple[str, str]]:
    """(name, path) of what has a partition's name and its file. Raises OSError."""
    return [
        (name, f"{data_dir}/{name}")
        for data_dir in data_dirs
        for name in sorted(os.listdir(data_dir))
        if _DIRECTORY.fullmatch(name) and os.path.lexists(f"{data_dir}/{name}/{PARTITION_FILE}")
    ]


def has_identity_of(path: str, name: str) -> bool:
    """True if a directory's metadata file names the partition and topic that the directory is named
    for.

    Raises: OSError.
    """
    file = _read_partition_directory(path, "", 0, 0).file
    return (
        file is not None and file.decision is not None and f"{file.topic}-{file.partition}" == name
    )


def _read_partition_directory(
    path: str, topic: str, partition: int, data_dir: int
) -> FoundPartition:
    file = None
    try:
        fd = os.open(
            f"{path}/{PARTITION_FILE}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        with open(fd, "rb") as opened:
            file = PartitionMetadata.decode(opened.read())
    except FileNotFoundError:
        pass  # treated as damaged
    head = (
        max((len(message) for message in file.schemas.values()), default=0)
        if file is not None
        else 0
    )
    with os.scandir(path) as entries:
        suffixes = (SEGMENT_SUFFIX, OLD_SEGMENT_SUFFIX)
        segments = [
            entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.name.endswith(suffixes)
        ]
    has_records = any(size > head for size in segments) or (
        file is not None and file.log_start_offset > 0
    )
    return FoundPartition(path, topic, partition, data_dir, file, has_records)
