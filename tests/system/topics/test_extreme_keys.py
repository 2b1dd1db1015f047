"""Compaction of keys that are empty or as large as a record may be, of one key for everything, and
of very many tombstones.
"""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, Table, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance

MIB = 1 << 20
CONFIGS = {
    "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 1, "segment.bytes": 4 * MIB,
    "delete.retention.ms": 0,
}  # fmt: skip


def latest(running: EmbeddedAppliance, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Keys and values of all records that are stored."""
    found = tailrace.scan(topic, running.address, ["key", "value"]).read_all()
    return sorted(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))


def test_keys_of_no_byte_and_of_a_mebibyte_are_different_keys(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    keys = [b"", b"x" * MIB, b"x" * MIB + b"y", b"\0", b"x" * (MIB - 1)]
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, max_request_size=2_000_000) as producer,
    ):
        configs = {**CONFIGS, "max.message.bytes": 2_000_000}
        admin.create_topics(NewTopic(topic, 1, configs))
        for number in range(4):
            for key in keys:
                producer.send(topic, b"%d" % number, key)
        producer.flush()
        admin.compact_topic(topic)
    assert latest(appliance, topic) == sorted((key, b"3") for key in keys)
    with Table(topic, appliance.address) as table:
        assert [table[key] for key in keys] == [b"3"] * len(keys)


def test_one_key_for_everything_leaves_one_record(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 1, CONFIGS))
        for begin in range(0, 200_000, 20_000):
            values = [b"%d" % n for n in range(begin, begin + 20_000)]
            producer.send_arrow(topic, pa.table({"key": [b"k"] * len(values), "value": values}))
        producer.flush()
        admin.compact_topic(topic)
        assert latest(appliance, topic) == [(b"k", b"199999")]
    with Consumer(bootstrap=appliance.address) as consumer:
        key = TopicPartition(topic, 0)
        assert consumer.end_offsets([key]) == {key: 200_000}


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_nothing_is_left_of_very_many_deleted_keys(
    appliance: EmbeddedAppliance, topic: str, count: int
) -> None:
    """The table of a pass has room for some of them."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 1, CONFIGS))
        for is_deletion in (False, True):
            for begin in range(0, count, 10_000):
                keys = [b"key-%d" % n for n in range(begin, begin + 10_000)]
                values = [None] * 10_000 if is_deletion else [b"value"] * 10_000
                frame = {"key": keys, "value": pa.array(values, pa.binary())}
                producer.send_arrow(topic, pa.table(frame))
        producer.send(topic, b"last", b"stays")
        producer.flush()
        admin.compact_topic(topic)
        admin.compact_topic(topic)  # the first pass met the tombstones
    assert latest(appliance, topic) == [(b"stays", b"last")]
    size = sum(
        entry.stat().st_size
        for entry in os.scandir(f"{appliance.data_dir}/{topic}-0")
        if entry.name.endswith(".arrows")
    )
    assert size < 100_000
