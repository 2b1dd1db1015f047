"""Transactions of a delay log, as the scheduler follows them: batches whose outcome is not decided,
and rows that undecided changes have reserved.

Owner: the scheduler, one for each partition.

Invariants:
- A row of a transaction exists from its marker on: ordinals closed there are over.
- A commit is ingested some megabytes at a time. Until it is done, the log is not read on.

Crash: the manifest has what was open at its cursor. The log is read again from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shm.tables.partition_table import PartitionState
from tailrace.format.record_batch.batch_header import BatchHeader
from workers.delays.delay_log.batches import LogBatch
from workers.delays.delay_log.ingest import GATHERED_BYTES, LogIngest
from workers.delays.delay_log.reservations import Reservations
from workers.delays.delay_log.tailer import LogTailer
from workers.delays.store.open_batches import LogSnapshot, OpenBatches


class LogTransactions:
    """Transactions of one delay log."""

    def __init__(
        self,
        intake: LogIngest,
        tailer: LogTailer,
        log_state: Callable[[], PartitionState],
        max_message_bytes: Callable[[], int],
        snapshot: LogSnapshot,
    ) -> None:
        """`tailer` reads batches of transactions again, when they are needed. `snapshot` is the
        manifest's. Raises OSError.
        """
        self._intake = intake
        self._tailer = tailer
        self._log_state = log_state
        self._max_message_bytes = max_message_bytes
        self._batches = OpenBatches(snapshot.open_batches, snapshot.committing)
        self.reservations = Reservations(intake, snapshot.reserved, self._batch_at)
        self._has_returned = snapshot.has_returned
        intake.is_reserved = lambda offset: self.reservations.key_of(offset) is not None

    def close(self) -> None:
        self._tailer.close()

    @property
    def is_committing(self) -> bool:
        """True while a commit is ingested in part."""
        return bool(self._batches.committing)

    @property
    def has_open(self) -> bool:
        """True if the outcome of a transaction is not read."""
        return bool(len(self._batches) or len(self.reservations))

    def describe(self) -> LogSnapshot:
        """Return what the manifest keeps."""
        return LogSnapshot(
            self._batches.describe(),
            list(self._batches.committing),
            self.reservations.describe(),
            self._has_returned,
        )

    # ---- the delay log ---------------------------------------------------------------------------

    def add(self, header: BatchHeader, data: memoryview) -> None:
        """Add a batch of an open transaction. What was read before must be ingested. Raises
        OSError.
        """
        if header.due_us <= 0:
            self._batches.add(header)
            return
        batch = self._kept(header, data)
        if batch is not None:
            self._intake.answer(batch, self.reservations.reserve(batch))

    def end(self, marker: BatchHeader, closed: int) -> bool:
        """End a transaction. `closed` is the ordinal that is closed at its marker. Return True if
        batches must be ingested before the log is read on. Raises OSError.
        """
        returned = self.reservations.end(marker, closed)
        self._has_returned = self._has_returned or returned
        self._batches.end(marker)
        return self.is_committing

    def ingest(self, closed: int) -> int:
        """Ingest some batches of the transaction whose commit was read last. Raises OSError."""
        committing = self._batches.committing
        state = self._log_state()
        gathered: list[LogBatch] = []
        byte_count = count = 0
        for offset in committing:
            found = self._read_at(offset, state)
            count += 1
            if found is None:
                continue
            header, data = replace(found[0], min_tick=closed), found[1]
            batch = self._intake.proven(header, data, self._max_message_bytes())
            if batch is not None:
                gathered.append(batch)
                byte_count += batch.rows.nbytes + len(data)
            if byte_count > GATHERED_BYTES:
                break
        self._intake.add(gathered)
        del committing[:count]
        return count

    def has_row(self, offset: int) -> bool:
        """True if this row was sent in a transaction whose outcome is not read. Raises OSError."""
        base = self._batches.last_at(offset)
        found = None if base is None else self._read_at(base, self._log_state())
        return found is not None and offset < found[0].next_offset

    def _read_at(self, offset: int, state: PartitionState) -> tuple[BatchHeader, memoryview] | None:
        """Read a batch below the high watermark. Return None for damage that recovery has recorded,
        and that is logged. Raises OSError.
        """
        self._tailer.seek(offset)
        found = next(self._tailer.read(state), None)
        if found is not None and found[0].base_offset == offset:
            return found
        if self._tailer.next_offset <= offset:
            raise OSError(f"delayed records of a transaction at offset {offset} cannot be read")
        self._tailer.close()
        return None

    def _batch_at(self, offset: int) -> LogBatch | None:
        found = self._read_at(offset, self._log_state())
        return None if found is None else self._kept(*found)

    def _kept(self, header: BatchHeader, data: memoryview) -> LogBatch | None:
        """Decode a change, copied, since it is kept until its transaction ends."""
        return self._intake.proven(header, memoryview(bytes(data)), self._max_message_bytes())
