"""Small batches that grow together in a real appliance: what every reader sees before, during and
after the merge.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.cleaned_segments import is_merged
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until
from tests.kit.transactional.visibility import await_visible

CONFIGS: dict[str, Any] = {"small.batch.bytes": 16 << 10, "segment.bytes": 640 << 10}
START_MS = 1_700_000_000_000
CLEANER = "tr-cleaner-0"
Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]


@pytest.fixture(scope="module")
def merging() -> Iterator[EmbeddedAppliance]:
    """An appliance that looks for something to merge all the time."""
    running = start_embedded(auto_create_topics=False, settings={"cleaner.check.interval.ms": 50})
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


def create(appliance: EmbeddedAppliance, topic: str, **configs: Any) -> TopicPartition:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, {**CONFIGS, **configs})])
    return TopicPartition(topic, 0)


def write(
    producer: Producer, topic: str, count: int, rng: random.Random, first: int = 0
) -> dict[int, Row]:
    """Send records in small batches. Returns them by offset."""
    sent = []
    for number in range(first, first + count):
        row: Row = (
            None if number % 3 else b"k%d" % (number % 50),
            rng.randbytes(rng.randrange(500, 1_000)),
            [("h", b"%d" % number)] if number % 5 == 0 else [], START_MS + number,
        )  # fmt: skip
        headers: Any = row[2] or None
        sent.append((producer.send(topic, row[1], row[0], headers=headers, timestamp=row[3]), row))
    producer.flush(60)
    found = {}
    for handle, row in sent:
        offset = handle.result(60).offset
        assert offset is not None
        found[offset] = row
    return found


def read(address: str, key: TopicPartition, position: int = 0, **settings: Any) -> dict[int, Row]:
    found: dict[int, Row] = {}
    with Consumer(bootstrap=address, **settings) as consumer:
        consumer.assign([key])
        consumer.seek(key, position)
        end = consumer.end_offsets([key])[key]
        while consumer.position(key) < end:
            for record in consumer.poll(1_000):
                assert record.offset > max(found, default=-1), "in order, and once"
                found[record.offset] = (
                    record.key, record.value, list(record.headers), record.timestamp
                )  # fmt: skip
    return found


def sealed(appliance: EmbeddedAppliance, topic: str) -> list[pathlib.Path]:
    directory = pathlib.Path(f"{appliance.data_dir}/{topic}-0")
    return sorted(directory.glob("*.arrows"))[:-1]


def wait_for_merge(appliance: EmbeddedAppliance, topic: str) -> None:
    wait_until(
        lambda: all(map(is_merged, sealed(appliance, topic))), "the sealed segments are merged"
    )
    wait_until(lambda: CLEANER not in children(appliance), "nothing is left to do")


def test_every_reader_sees_what_it_saw_before(merging: EmbeddedAppliance, topic: str) -> None:
    key, rng = create(merging, topic), random.Random(1)
    with Producer(merging.address, linger_ms=0, batch_size=1_024) as producer:
        written = write(producer, topic, 1_200, rng)
        wait_for_merge(merging, topic)
        assert len(sealed(merging, topic)) >= 2
        assert read(merging.address, key) == written
        with Consumer(bootstrap=merging.address, max_poll_records=1) as consumer:
            consumer.assign([key])
            assert consumer.beginning_offsets([key]) == {key: 0}
            assert consumer.end_offsets([key]) == {key: 1_200}
            for position in range(0, 1_200, 97):
                consumer.seek(key, position)
                (record,) = consumer.poll(60_000)
                assert (record.offset, record.value) == (position, written[position][1])
                found = consumer.offsets_for_times({key: START_MS + position})[key]
                assert found is not None
                assert found.offset == position
        rows = tailrace.scan(topic, merging.address).read_all()
        assert rows.column("value").to_pylist() == [row[1] for row in written.values()]
        written |= write(producer, topic, 100, rng, 1_200)  # its sequence goes on
    kill_and_wait_for_successor(merging, "tr-flusher-0")
    assert read(merging.address, key) == written
    with Admin(merging.address) as admin:
        admin.alter_topics({topic: {"cleanup.policy": "compact,delete", "retention.ms": -1}})
        admin.alter_topics({topic: {"cleanup.policy": "delete"}})


def test_transactions_are_as_before_for_both_isolation_levels(
    merging: EmbeddedAppliance, topic: str
) -> None:
    key, rng = create(merging, topic), random.Random(2)
    committed: dict[int, Row] = {}
    everything: dict[int, Row] = {}
    with (
        Producer(
            merging.address, transactional_id=topic, linger_ms=0, batch_size=1_024
        ) as producer,
        Producer(merging.address, linger_ms=0, batch_size=1_024) as other,
    ):
        for number in range(12):
            producer.begin_transaction()
            attempt = write(producer, topic, 100, rng)
            if number % 4 == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                committed |= attempt
            everything |= attempt
            beside = write(other, topic, 20, rng)
            committed |= beside
            everything |= beside
        wait_for_merge(merging, topic)
        assert read(merging.address, key) == committed
        assert read(merging.address, key, isolation_level="read_uncommitted") == everything
        producer.begin_transaction()
        attempt = write(producer, topic, 100, rng)
        producer.commit_transaction()
    await_visible(merging.address, topic)
    assert read(merging.address, key) == committed | attempt


def test_a_reader_goes_on_while_segments_are_merged_under_it(
    merging: EmbeddedAppliance, topic: str
) -> None:
    key, rng = create(merging, topic), random.Random(3)
    seen: dict[int, bytes | None] = {}
    with (
        Producer(merging.address, linger_ms=0, batch_size=1_024) as producer,
        Consumer(
            bootstrap=merging.address, max_partition_fetch_bytes=2_048, fetch_max_bytes=2_048,
            max_poll_records=100,
        ) as consumer,
    ):  # fmt: skip
        consumer.assign([key])
        consumer.seek_to_beginning(key)
        written: dict[int, Row] = {}
        for turn in range(6):
            written |= write(producer, topic, 200, rng, turn * 200)
            for _ in range(4):
                for record in consumer.poll(1_000):
                    assert record.offset == len(seen)
                    seen[record.offset] = record.value
        while consumer.position(key) < 1_200:
            for record in consumer.poll(1_000):
                assert record.offset == len(seen)
                seen[record.offset] = record.value
    assert seen == {offset: row[1] for offset, row in written.items()}


def test_everything_killed_after_a_merge_has_all_records_and_sequences(
    tmp_path: pathlib.Path, topic: str
) -> None:
    def start() -> EmbeddedAppliance:
        return start_embedded(
            data_dir=str(tmp_path), listen=f"ipc://{tmp_path}/socket",
            settings={"cleaner.check.interval.ms": 50},
        )  # fmt: skip

    running, rng = start(), random.Random(4)
    key = create(running, topic)
    with Producer(running.address, linger_ms=0, batch_size=1_024) as producer:
        written = write(producer, topic, 1_200, rng)
        wait_for_merge(running, topic)
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        running = start()
        assert read(running.address, key) == written
        written |= write(producer, topic, 500, rng, 1_200)
    assert read(running.address, key) == written
    assert running.stop() == 0
