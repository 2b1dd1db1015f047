"""Change batches: rows that cancel or replace delayed records, as batches of their delay log.

Owner: the scheduler, one for each partition.

Invariants: the worker accepts a batch with a token from the scheduler only.
"""

from __future__ import annotations

import pyarrow as pa

from tailrace.core.errors import UnsupportedBatchError
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_TRANSACTIONAL,
    BatchHeader,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import insert_header
from workers.delays.changing_transaction import ChangingTransaction
from workers.delays.store.log_versions import LogVersions


class ChangeBatches:
    """Encodes the changes of one partition."""

    def __init__(self, versions: LogVersions, log_seed: int, payload_max: int) -> None:
        """`log_seed`: the checksum seed of the delay log. `payload_max`: the largest batch that the
        lane to the worker takes, in bytes.
        """
        self.payload_max = payload_max
        self._versions = versions
        self._seed = log_seed

    def encode(
        self, rows: pa.RecordBatch, token: int, wall_us: int, schema_id: int,
        transaction: ChangingTransaction | None = None, owner: int = 0,
    ) -> bytearray:  # fmt: skip
        """Encode rows that cancel or replace others.

        `token`, above 0, identifies the request when the batch is read. Rows of a `transaction`
        come in pairs (see `reservations`). `owner` is that of all rows that it changes.
        """
        header = BatchHeader(
            record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1,
            first_timestamp_us=wall_us, max_timestamp_us=wall_us,
            schema_id=schema_id, due_us=token, delay_position=owner or -1,
        )  # fmt: skip
        if transaction is not None:
            header.attributes = ATTRIBUTE_TRANSACTIONAL
            header.producer_id, header.producer_epoch = transaction.key
            header.previous_position = transaction.number
        return insert_header(rows.serialize(), header, self._seed)

    def renewed(self, change: bytearray, schema_id: int) -> bytearray:
        """Return a batch of `encode` in the log's newest version, `schema_id`, or as it is if that
        cannot hold its values or is too long.
        """
        header = verify_batch(memoryview(change), self._seed)
        rows = pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(change)), self._versions.schema(header.schema_id)
        )
        try:
            data = self._versions.to_newest(rows).serialize()
        except UnsupportedBatchError:
            return change
        header.schema_id = schema_id
        made = insert_header(data, header, self._seed)
        return made if len(made) <= self.payload_max else change
