"""Batches that clients of Kafka sent: Produce requests of librdkafka 2.16 and aiokafka 0.14.

Each has the same five records, in another compression. aiokafka's snappy has xerial's framing.
"""

from __future__ import annotations

import pathlib

import pytest

from netfront.kafka.records.incoming import to_batches
from netfront.kafka.records.outgoing import from_batch
from tests.netfront.kafka.records.batches import LAYOUT, SEED, Row, read_kafka, read_ours

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
ROWS: list[Row] = [
    (b"k1", b"v1", 1_700_000_000_000, [("trace", b"\x00\x01"), ("empty", b""), ("null", None)]),
    (None, b"no key", 1_700_000_000_005, []),
    (b"tombstone", None, 1_699_999_999_999, []),
    (b"", b"", 1, [("ü", "ß".encode())]),
    (b"long", bytes(range(256)) * 12, 4_000_000_000_000, []),
]


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("kafka_*.bin")), ids=lambda file: file.stem)
def test_a_captured_batch_is_read_and_served(file: pathlib.Path) -> None:
    sent = file.read_bytes()
    (batch,) = to_batches(sent, seed=SEED, now_us=0, max_message_bytes=1 << 20)
    header, rows = read_ours(batch.data)
    expected = list(ROWS)
    if "aiokafka" in file.stem:  # it has no headers without a value
        key, value, time_ms, headers = ROWS[0]
        expected[0] = key, value, time_ms, [(name, content or b"") for name, content in headers]
    assert rows == expected
    assert (header.producer_id >= 0, header.producer_epoch, header.base_sequence) == (True, 0, 0)
    served = from_batch(batch.data, seed=SEED, schema=LAYOUT)
    assert read_kafka(served) == list(enumerate(expected))
    if file.stem.endswith("none"):
        assert served[17:] == sent[17:]
