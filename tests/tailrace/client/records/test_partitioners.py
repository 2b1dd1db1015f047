"""Partitioners: Kafka's vectors, stickiness, the names that there are."""

from __future__ import annotations

import zlib

import pytest

from tailrace.client.records.partitioners import (
    NAMES,
    DefaultPartitioner,
    StickyPartitioner,
    chosen_by,
    murmur2,
    partition_for_key,
    plain_name,
)
from tailrace.core.errors import InvalidRecordError, InvalidSettingError


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
    assert [partitioner("t", b"foobar", n) for n in (10, 7)] == [
        partition_for_key(b"foobar", n) for n in (10, 7)
    ]


def test_records_without_a_key_stay_until_the_batch_is_sent_then_move() -> None:
    partitioner = DefaultPartitioner(seed=1)
    first = partitioner("t", None, 5)
    assert {partitioner("t", None, 5) for _ in range(100)} == {first}
    partitioner.on_batch_sent("t", 5)
    assert partitioner("t", None, 5) != first
    assert 0 <= partitioner("t", None, 1) < 1


def test_round_robin_takes_each_partition_in_turn_for_each_topic() -> None:
    choose = chosen_by("round_robin")
    assert [choose("t", b"k", 3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert choose("u", None, 3) == 0


def test_sticky_does_not_look_at_keys_and_moves_with_every_batch() -> None:
    choose = chosen_by("sticky")
    assert isinstance(choose, StickyPartitioner)
    assert choose.notifies_every_batch
    assert not choose.remembers_keys
    first = choose("t", b"a", 5)
    assert {choose("t", key, 5) for key in (b"b", None, b"c")} == {first}
    choose.on_batch_sent("t", 5)
    assert choose("t", b"a", 5) != first


@pytest.mark.parametrize(
    ("key", "partition"),
    [(b"0", 0), (b"7", 3), (b"-1", 3), (b"+6", 2), (b"12345678901234567890123", 3)],
)
def test_modulo_is_of_the_number(key: bytes, partition: int) -> None:
    assert chosen_by("modulo")("t", key, 4) == partition == int(key) % 4


@pytest.mark.parametrize("key", [b"", b"a", b"1.5", b"1_000", b" 1", b"\xd9\xa1", b"9" * 5000])
def test_modulo_of_what_is_no_number_is_refused(key: bytes) -> None:
    with pytest.raises(InvalidRecordError, match="modulo"):
        chosen_by("modulo")("t", key, 4)


def test_consistent_random_is_librdkafkas_default() -> None:
    assert chosen_by("consistent_random")("t", b"key", 7) == zlib.crc32(b"key") % 7
    assert 0 <= chosen_by("random")("t", b"key", 7) < 7


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("murmur2_random", "murmur2"),
        ("org.apache.kafka.clients.producer.RoundRobinPartitioner", "round_robin"),
        ("org.apache.kafka.clients.producer.internals.DefaultPartitioner", "murmur2"),
        ("UniformStickyPartitioner", "sticky"),
        *((name, name) for name in NAMES),
    ],
)
def test_names_of_other_clients_are_taken(written: str, meant: str) -> None:
    assert plain_name(written) == meant


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        InvalidSettingError, match=r"fnv1a.*murmur2, sticky, round_robin, modulo, hash_slots"
    ):
        chosen_by("fnv1a")
