"""The latest record of each key: `scan(latest=True)`, `latest('topic')` in SQL, against a
dictionary.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import InvalidSettingError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.scanning.dataset import topic_dataset
from tests.kit.cli import run
from tests.kit.transactional.visibility import await_visible

KEYS = [None, b"", *(b"k%d" % n for n in range(300))]
MEMORY_MIN = 1 << 16
CLOCK_MS = 1_000_000


class Row(NamedTuple):
    value: bytes
    partition: int
    offset: int


def model(
    address: str, topic: str, end: dict[TopicPartition, int] | None = None
) -> dict[bytes, Row]:
    """Key -> its latest row, by reading all records one by one."""
    newest: dict[tuple[int, bytes], tuple[int, Any]] = {}
    for batch in tailrace.scan(topic, address, end=end):
        for row in batch.to_pylist():
            if row["key"] is not None:
                time_us = int(row["timestamp"].timestamp() * 1_000_000)
                known_us, _ = newest.get((row["partition"], row["key"]), (0, None))
                newest[row["partition"], row["key"]] = (
                    max(time_us, known_us),
                    Row(row["value"], row["partition"], row["offset"]),
                )
    found: dict[bytes, tuple[int, Any]] = {}
    for (_, key), (time_us, row) in sorted(newest.items()):
        if key not in found or time_us >= found[key][0]:
            found[key] = time_us, row
    return {key: row for key, (_, row) in found.items() if row.value is not None}


def read(address: str, topic: str, **settings: Any) -> dict[bytes, Row]:
    table = tailrace.scan(topic, address, latest=True, **settings).read_all()
    rows = {
        row["key"]: Row(row["value"], row["partition"], row["offset"]) for row in table.to_pylist()
    }
    assert len(rows) == len(table), "a key came twice"
    return rows


def send_randomly(address: str, topic: str, partitions: int, count: int, seed: int) -> None:
    """Records with and without keys, tombstones, transactions that end either way."""
    dice = random.Random(seed)
    with Producer(address, transactional_id=f"{topic}-{seed}", batch_size=2048) as producer:
        producer.init_transactions()
        for _ in range(10):
            producer.begin_transaction()
            for _ in range(count // 10):
                producer.send(
                    topic,
                    None if dice.random() < 0.2 else b"v%d" % dice.randrange(10**9),
                    dice.choice(KEYS),
                    partition=dice.randrange(partitions),
                    timestamp=CLOCK_MS + dice.randrange(40),
                )
            if dice.random() < 0.3:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    await_visible(address, topic, partitions)


@pytest.mark.parametrize("partitions", [1, 3])
def test_the_latest_rows_are_those_of_a_dictionary(
    appliance: EmbeddedAppliance, topic: str, partitions: int
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions, {"segment.bytes": 64 << 10})])
        send_randomly(appliance.address, topic, partitions, 1_500, seed=1)
        keys = [TopicPartition(topic, number) for number in range(partitions)]
        middle = {
            key: end["end"] // 2
            for key, end in admin.offsets(dict.fromkeys(keys, "latest")).items()
        }
        admin.delete_records({keys[0]: 100})
    expected = model(appliance.address, topic)
    assert len(expected) > 100
    for settings in (
        {},
        {"from_files": False},
        {"latest_memory_bytes": MEMORY_MIN},
        {"partitions": list(range(partitions))},
    ):
        assert read(appliance.address, topic, **settings) == expected, settings
    earlier = {key: max(offset, 100) for key, offset in middle.items()}
    assert read(appliance.address, topic, end=earlier) == model(appliance.address, topic, earlier)


def test_keys_beyond_the_memory_are_read_several_times(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    frame = pa.table({"n": pa.array([*range(20_000), *range(0, 20_000, 2)], pa.int64())})
    frame = frame.append_column("word", pa.array([f"w{n}" for n in range(frame.num_rows)]))
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, schema=frame)])
        producer.send_arrow(topic, frame, partition=0).result(60)
    settings: dict[str, Any] = {"key_column": "n", "columns": ["word"]}
    found = [
        tailrace.scan(topic, appliance.address, latest=True, latest_memory_bytes=size, **settings)
        .read_all()
        .column("word")
        .to_pylist()
        for size in (MEMORY_MIN, 256 << 20)
    ]
    expected = [f"w{n}" for n in (*range(1, 20_000, 2), *range(20_000, 30_000))]
    assert found == [expected, expected]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(), pa.uint64(), pa.utf8(), pa.large_utf8(), pa.binary(), pa.binary(3), pa.bool_(),
        pa.date32(), pa.timestamp("us", "UTC"), pa.decimal128(9, 2),
    ],
    ids=str,
)  # fmt: skip
def test_keys_have_any_exact_type(appliance: EmbeddedAppliance, topic: str, kind: Any) -> None:
    one, other = {
        pa.bool_(): (True, False),
        pa.binary(): (b"a", b""),
        pa.binary(3): (b"abc", b"abd"),
        pa.utf8(): ("ä", ""),
        pa.large_utf8(): ("ä", ""),
        pa.date32(): (dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        pa.decimal128(9, 2): (decimal.Decimal(1), decimal.Decimal("1.01")),
        pa.timestamp("us", "UTC"): (dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 2)),
    }.get(kind, (1, 2))
    frame = pa.table({"id": pa.array([one, other, None, one], kind), "n": [0, 1, 2, 3]})
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, schema=frame)])
        producer.send_arrow(topic, frame, partition=0).result(60)
    rows = tailrace.scan(topic, appliance.address, ["n"], latest=True, key_column="id").read_all()
    assert rows.column("n").to_pylist() == [1, 3]


def test_the_latest_of_a_compressed_topic(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, {"compression.type": "zstd"})])
    send_randomly(appliance.address, topic, 1, 1_000, seed=2)
    assert read(appliance.address, topic) == model(appliance.address, topic)


def test_an_empty_topic_has_no_latest_rows(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    table = tailrace.scan(topic, appliance.address, latest=True).read_all()
    assert table.num_rows == 0
    assert table.schema.names[0] == "key"


def test_a_wrong_key_column_is_named(appliance: EmbeddedAppliance, topic: str) -> None:
    frame = pa.table({"id": [1], "x": [1.5], "l": [[1]]})
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, schema=frame), NewTopic(f"{topic}-plain")])
    for name, settings, words in (
        (topic, {}, r"key_column='id'"),
        (topic, {"key_column": "ix"}, r"no column 'ix'"),
        (topic, {"key_column": "x"}, r"'x' .* double"),
        (topic, {"key_column": "l"}, r"'l' .* list"),
        (topic, {"key_column": 7}, r"key_column is 7"),
        (topic, {"latest_memory_bytes": 1}, r"latest_memory_bytes is 1"),
        (f"{topic}-plain", {"key_column": "value"}, r"leave it out"),
    ):
        with pytest.raises(InvalidSettingError, match=words):
            tailrace.scan(name, appliance.address, latest=True, **settings)
    with pytest.raises(InvalidSettingError, match="latest=True"):
        tailrace.scan(topic, appliance.address, key_column="id")


def test_a_dataset_finds_the_latest_once_for_all_its_scans(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for n in range(10):
            producer.send(topic, b"%d" % n, b"k%d" % (n % 3))
        producer.flush(60)
        dataset = topic_dataset(topic, appliance.address, latest=True)
        producer.send(topic, b"later", b"k0").result(60)
    for _ in range(2):
        rows = dataset.scanner(["value"]).to_table().column("value").to_pylist()
        assert rows == [b"7", b"8", b"9"]
    dataset.close()


def test_sql_has_the_latest_as_a_table(appliance: EmbeddedAppliance, topic: str) -> None:
    frame = pa.table({"tail": ["a", "b", "a"], "n": [1, 2, 3]})
    name = topic.replace("-", "_")
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(name, 2), NewTopic(f"{name}_typed", schema=frame)])
        producer.send_arrow(f"{name}_typed", frame, partition=0).result(60)
        for key, value in ((b"u1", b"old"), (b"u2", b"x"), (b"u1", b"new"), (b"u2", None)):
            producer.send(name, value, key)
        producer.flush(60)

    def rows(query: str) -> Any:
        return json.loads(run(appliance, "sql", query, "--json", "--topics-only").stdout)

    assert rows(f"select decode(key) k, decode(value) v from latest('{name}')") == [
        {"k": "u1", "v": "new"}
    ]
    assert rows(f"select count(*) n from LATEST({name}) l join {name} t using (key)") == [{"n": 2}]
    typed = f"latest('{name}_typed', key_column := 'tail')"
    assert rows(f"select tail, n from {typed} where n > 2") == [{"tail": "a", "n": 3}]
    for query, words in (
        (f"select * from latest('{name}x')", f"did you mean {name}"),
        (f"select * from latest('{name}_typed')", "key_column"),
        (f"select * from latest('{name}_typed', key_column := 'tall')", "tail"),
    ):
        failed = run(appliance, "sql", query, status=1)
        assert words in failed.stderr.decode(), failed.stderr.decode()


def test_the_latest_begins_at_a_time(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for n in range(10):
            producer.send(topic, b"%d" % n, b"k%d" % (n % 3), timestamp=CLOCK_MS + n)
        producer.flush(60)
    start = dt.datetime.fromtimestamp((CLOCK_MS + 8) / 1000, dt.UTC)
    assert {row.value for row in read(appliance.address, topic, start=start).values()} == {
        b"8",
        b"9",
    }
