"""Markers and transaction indexes in the files of a real partition."""

from __future__ import annotations

import pathlib

from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.format.segments.segment import (
    Walk,
    schema_message_length,
    segment_bases,
    walk_batches,
)


def _headers(directory: pathlib.Path) -> list[tuple[pathlib.Path, int, BatchHeader]]:
    """(file, position, header) of every batch of a partition."""
    known = PartitionMetadata.decode((directory / PARTITION_FILE).read_bytes())
    assert known is not None
    found = []
    for base in segment_bases([path.name for path in directory.iterdir()]):
        path = directory / f"{base:020d}.arrows"
        data = path.read_bytes()

        def read_at(length: int, position: int, data: bytes = data) -> bytes:
            return data[position : position + length]

        walk = Walk(schema_message_length(read_at), base)
        found += [
            (path, position, header)
            for position, header in walk_batches(read_at, len(data), walk, known.seed)
        ]
    return found


def markers_in(directory: pathlib.Path) -> int:
    """The number of a partition's markers."""
    return sum(header.is_marker for *_, header in _headers(directory))


def flip_bit_in(directory: pathlib.Path, suffix: str) -> None:
    """Flip a bit: of the first marker (.arrows), or of the first index (.txnindex)."""
    path, position = next(iter(sorted(directory.glob(f"*{suffix}")))), 20
    if suffix == ".arrows":
        path, begin, header = next(each for each in _headers(directory) if each[2].is_marker)
        position = begin + header.batch_length // 2
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(bytes(data))
