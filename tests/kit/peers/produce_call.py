"""One batch, as a test made it, over a connection of the SDK's: what the SDK itself would refuse to
send.
"""

from __future__ import annotations

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import error_for
from tailrace.format.crc32c import Readable
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api


def produce(
    connection: Connection,
    topic_id: bytes,
    batch: Readable,
    *,
    partition: int = 0,
    timeout_ms: int = 1_000,
) -> produce_messages.ProducedEntry:
    """Produce with acks=all and return the result. Raises what its refusal says."""
    head = produce_messages.ProduceBatches(
        produce_messages.ACKS_ALL,
        timeout_ms,
        [produce_messages.ProduceEntry(topic_id, partition, 0, len(batch))],
    )
    answer = call_now(
        connection, Api.PRODUCE, [produce_messages.encode_produce_batches(head), batch], 20_000
    )
    (entry,) = produce_messages.decode_produced_batches(answer.body[0])
    if entry.error:
        code: ErrorCode = code_of(entry.error)
        raise error_for(code, ERROR_TABLE[code].meaning)
    return entry
