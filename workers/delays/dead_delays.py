"""Dead delayed records: rows that cannot be delivered, kept in a bounded number of files for
operators.

`<first offset>.refused` is beside the delay log. It is an Arrow stream: the delay log's schema
message, of the rows' version, then a batch as it was read, or one row.

Owner: the scheduler, one for each partition. The files are deleted with the topic. Before that an
operator reads (`pyarrow.ipc.open_stream`) and removes them.

Invariants:
- Files <= FILES_MAX, their bytes <= BYTES_MAX.
- A batch that is kept already is not written or logged again.

Crash: a file is complete or missing. A successor keeps the batch when it reads it again.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.format.crc32c import Readable
from workers.delays.store.log_versions import LogVersions, version_of
from workers.segment.files import Files, write_durably

logger = logging.getLogger(__name__)

REFUSED_SUFFIX = ".refused"
FILES_MAX = 1_000
BYTES_MAX = 64 << 20


class DeadDelays:
    """Dead records of one partition."""

    def __init__(self, files: Files, directory: str, versions: LogVersions) -> None:
        self._files = files
        self._directory = directory
        self._versions = versions
        self._kept: dict[str, int] | None = None
        """Bytes by file name, at most FILES_MAX files. Loaded at the first use."""
        self.row_count = 0
        """Number of dead rows in this incarnation."""

    def keep(
        self, offset: int, row_count: int, reason: str, data: Readable, schema_id: int
    ) -> None:
        """Count, log and keep rows from `offset` on.

        `data` is their encapsulated Arrow message, of the version `schema_id`. Raises OSError.
        """
        self.row_count += row_count
        kept = self._known()
        name = f"{offset:020d}{REFUSED_SUFFIX}"
        if name in kept:
            return
        content = self._versions.message(schema_id) + bytes(data)
        has_room = len(kept) < FILES_MAX and sum(kept.values()) + len(content) <= BYTES_MAX
        if has_room:
            write_durably(self._files, self._directory, name, content)
            kept[name] = len(content)
        logger.error(
            "delays_refused directory=%s offset=%d rows=%d reason=%r kept=%s", self._directory,
            offset, row_count, reason[:300],
            name if has_room else "no (the directory is full: remove .refused files)",
        )  # fmt: skip

    def keep_row(self, offset: int, row: pa.RecordBatch, reason: str) -> None:
        """Keep one row. Raises OSError."""
        data = arrow_codec.cut_out(row, 0, row.num_rows).serialize()
        self.keep(offset, 1, reason, data, version_of(row))

    def _known(self) -> dict[str, int]:
        if self._kept is None:
            self._kept = {}
            for name in self._files.list(self._directory):
                if name.endswith(REFUSED_SUFFIX):
                    fd = self._files.open_for_read(f"{self._directory}/{name}")
                    try:
                        self._kept[name] = self._files.size(fd)
                    finally:
                        self._files.close(fd)
        return self._kept
