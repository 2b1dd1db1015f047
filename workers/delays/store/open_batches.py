"""Open batches: places of transactional batches of a delay log whose outcome is not decided, or
whose commit is only ingested in part.

A row of a transaction exists from its marker on. Until then only the offset of its batch is kept:
the log has the bytes, and is read anew when the marker commits them.

Owner: the scheduler, one for each partition.

Invariants:
- Offsets ascend within a transaction.
- While a commit is ingested, nothing behind its marker is read.

Crash: the manifest has what was open at its cursor; the rest is read from the log.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.format.record_batch.batch_header import CONTROL_COMMIT, BatchHeader


class LogSnapshot(NamedTuple):
    """The manifest's fields about transactions, named as in `Manifest`."""

    open_batches: list[list[int]]
    committing: list[int]
    reserved: list[list[int]]
    has_returned: bool


class OpenBatches:
    """Batches of open transactions, by (producer id, epoch)."""

    def __init__(self, open_batches: list[list[int]], committing: list[int]) -> None:
        """The arguments are the manifest's."""
        self._open: dict[tuple[int, int], list[int]] = {
            (producer_id, epoch): offsets for producer_id, epoch, *offsets in open_batches
        }
        self.committing = list(committing)
        """Base offsets of committed batches that are not ingested yet."""

    def add(self, header: BatchHeader) -> None:
        """Note a transactional batch."""
        key = header.producer_id, header.producer_epoch
        self._open.setdefault(key, []).append(header.base_offset)

    def end(self, marker: BatchHeader) -> None:
        """End a transaction. If it is committed, its batches are `committing`."""
        offsets = self._open.pop((marker.producer_id, marker.producer_epoch), [])
        if marker.control_type == CONTROL_COMMIT:
            self.committing = offsets

    def __len__(self) -> int:
        return len(self._open)

    def last_at(self, offset: int) -> int | None:
        """Return the base offset of the last batch at or before an offset, or None."""
        found = (base for offsets in self._open.values() for base in offsets if base <= offset)
        return max(found, default=None)

    def describe(self) -> list[list[int]]:
        """Return `Manifest.open_batches`."""
        return [[*key, *offsets] for key, offsets in self._open.items()]
