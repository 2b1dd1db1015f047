"""Partitioners: Kafka's vectors, stickiness."""

from __future__ import annotations

import pytest

from tailrace.partitioners import DefaultPartitioner, murmur2, partition_for_key


# From org.apache.kafka.common.utils.UtilsTest#testMurmur2.
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(data: bytes, expected: int) -> None:
    assert murmur2(data) == expected & 0xFFFFFFFF


def test_keys_go_where_kafka_puts_them() -> None:
    # toPositive(murmur2("foobar")) % 10, computed from the vector above.
    assert partition_for_key(b"foobar", 10) == (-790332482 & 0x7FFFFFFF) % 10
    partitioner = DefaultPartitioner()
    assert [partitioner("t", b"foobar", n) for n in (10, 7)] == [partition_for_key(b"foobar", n) for n in (10, 7)]


def test_records_without_a_key_stay_until_the_batch_is_sent_then_move() -> None:
    partitioner = DefaultPartitioner(seed=1)
    first = partitioner("t", None, 5)
    assert {partitioner("t", None, 5) for _ in range(100)} == {first}
    partitioner.on_batch_sent("t", 5)
    assert partitioner("t", None, 5) != first
    assert 0 <= partitioner("t", None, 1) < 1
