"""Batch validation of the worker: checksums, structure and schema, and the error code of a refusal.

Owner: pure, except for log lines.

Invariants: any bytes give a header or an error code.
"""

from __future__ import annotations

import logging

from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import (
    BatchChecksumError,
    BatchFormatError,
    BatchHeader,
    verify_batch,
)
from tailrace.format.record_batch.batch_validation import (
    UnpackedTooLargeError,
    UnsafeBatchError,
    null_count_of,
    validate_batch,
)
from workers.append.partitions import Partition

logger = logging.getLogger(__name__)


def checked_header(
    partition: Partition, batch: memoryview, *, is_ours: bool, has_owner: bool = False
) -> tuple[BatchHeader | None, ErrorCode]:
    """Return the header of a batch that may be stored in this partition, or None and the error
    code.

    `is_ours` is True for batches made by the scheduler, `has_owner` for those of a delay log in
    which the front has named an owner.
    """
    assignment = partition.assignment
    try:
        header = verify_batch(batch, partition.seed)
        if header.schema_id != assignment.schema_id:
            return None, ErrorCode.SCHEMA_MISMATCH
        validate_batch(
            batch,
            header,
            partition.layout,
            max_message_bytes=partition.max_message_bytes,
            is_ours=is_ours,
            is_delay_log=partition.is_delay_log,
            has_owner=has_owner and partition.is_delay_log,
        )
        if partition.key_node >= 0 and (count := null_count_of(batch, partition.key_node)):
            logger.info(
                "records_without_key_refused topic=%s partition=%d count=%d",
                assignment.topic, assignment.partition, count,
            )  # fmt: skip
            return None, ErrorCode.INVALID_RECORD
    except BatchChecksumError:
        return None, ErrorCode.CORRUPT_BATCH
    except (BatchFormatError, UnsafeBatchError) as error:
        code = _code_of(error)
        logger.warning(
            "batch_refused topic=%s partition=%d code=%s reason=%r",
            assignment.topic,
            assignment.partition,
            code.name,
            str(error),
        )
        return None, code
    return header, ErrorCode.OK


def _code_of(error: BatchFormatError | UnsafeBatchError) -> ErrorCode:
    if isinstance(error, BatchFormatError):
        return ErrorCode.UNSUPPORTED_BATCH
    return (
        ErrorCode.RECORD_TOO_LARGE
        if isinstance(error, UnpackedTooLargeError)
        else ErrorCode.UNSAFE_BATCH
    )
