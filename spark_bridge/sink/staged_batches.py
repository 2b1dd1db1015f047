"""Readers of one partition's batches: from its files if they are on this host, else over ZeroMQ.

Owner: one reader; it reads only settled batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tailrace import kernel
from tailrace.admin.admin import Admin
from tailrace.batch.arrow_codec import decode
from tailrace.client.topic_metadata import TopicInfo
from tailrace.scanning.batch import Source
from tailrace.scanning.local_source import LocalSource, read_partition_file
from tailrace.scanning.options import ScanSettings
from tailrace.scanning.planner import opens_here, own_directories
from tailrace.scanning.remote_source import RemoteSource

BatchSource = Source
CLIENT_ID = "spark-sink"


class Sources:
    """Opens the partitions of an appliance."""

    def __init__(self, admin: Admin, timeout_ms: int) -> None:
        self._admin = admin
        self._settings = ScanSettings(client_id=CLIENT_ID, request_timeout_ms=timeout_ms)
        self._directories: list[str] | None = None
        self._open: list[Source] = []

    def remote(self, info: TopicInfo, partition: int) -> Source:
        """A reader over ZeroMQ, for short ranges that are just being written."""
        source = RemoteSource(
            self._admin.settings.bootstrap_servers,
            info.name,
            info.topic_id,
            partition,
            self._settings,
            info.schema,
        )
        self._open.append(source)
        return source

    def of(self, info: TopicInfo, partition: int, *, headers_only: bool) -> Source:
        """The fastest reader here: files, else ZeroMQ."""
        if self._directories is None:
            self._directories = own_directories(self._admin)
        for data_dir in self._directories:
            directory = f"{data_dir}/{info.name}-{partition}"
            if (
                opens_here(directory, info.topic_id)
                and (partition_file := read_partition_file(directory)) is not None
            ):
                return LocalSource(
                    directory, partition_file, headers_only=headers_only, schema=info.schema
                )
        return self.remote(info, partition)

    def close(self) -> None:
        """Close all readers."""
        for source in self._open:
            source.close()
        self._open.clear()


def decode_values(
    source: Source, info: TopicInfo, start: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """(offset, value) of each record. Raises TailraceError."""
    for frame in source.frames(start, end):
        assert frame.data is not None
        header, rows = decode(
            memoryview(frame.data), info.schema, info.seeds[source_partition(source)]
        )
        values = rows.column("value")
        for row in range(max(0, start - header.base_offset), rows.num_rows):
            yield header.base_offset + row, values[row].as_py()


def source_partition(source: Source) -> int:
    """Number of the partition that a source reads."""
    assert isinstance(source, (RemoteSource, LocalSource))
    return source.key.partition


def writable(data: pa.Buffer | memoryview) -> bytearray:
    """A copy of a batch whose header can be rewritten."""
    return kernel.copied(data)
