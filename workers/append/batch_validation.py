"""Is a batch sound, by its checksums, its structure and its partition's schema? The refusal that its sender gets, where it is not.

Owner: pure, but for a line in the log. Invariants: whatever the bytes are, they end in a header or in a code.
"""

from __future__ import annotations

import logging

from tailrace.formats.batch_header import BatchChecksumError, BatchFormatError, BatchHeader, verify_batch
from tailrace.formats.structure import UnpackedTooLargeError, UnsafeBatchError, check_structure
from tailrace.protocol.errors import ErrorCode
from workers.partitions import Partition

logger = logging.getLogger(__name__)


def checked_header(partition: Partition, batch: memoryview, *, is_ours: bool) -> tuple[BatchHeader | None, ErrorCode]:
    """The header of a batch that may be stored in this partition, or None and why not. `is_ours`: the scheduler made it."""
    assignment = partition.assignment
    try:
        header = verify_batch(batch, partition.seed)
        if header.schema_id != assignment.schema_id:
            return None, ErrorCode.SCHEMA_MISMATCH
        check_structure(
            batch,
            header,
            partition.layout,
            max_message_bytes=partition.max_message_bytes,
            is_ours=is_ours,
            is_delay_log=partition.is_delay_log,
        )
    except BatchChecksumError:
        return None, ErrorCode.CORRUPT_BATCH
    except (BatchFormatError, UnsafeBatchError) as error:
        code = _code_of(error)
        logger.warning(
            "batch_refused topic=%s partition=%d code=%s reason=%r", assignment.topic, assignment.partition, code.name, str(error)
        )
        return None, code
    return header, ErrorCode.OK


def _code_of(error: BatchFormatError | UnsafeBatchError) -> ErrorCode:
    if isinstance(error, BatchFormatError):
        return ErrorCode.UNSUPPORTED_BATCH
    return ErrorCode.RECORD_TOO_LARGE if isinstance(error, UnpackedTooLargeError) else ErrorCode.UNSAFE_BATCH
