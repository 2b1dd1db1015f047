"""Positions of a consumer: seeks, offsets by time, resets, pauses, waiting."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest

from tailrace import Admin, Consumer, Producer, TopicPartition
from tailrace.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.topics import create


class TestConsumer:
    """Positions and waiting, on one partition of 100 records."""

    @pytest.fixture
    def filled(self, appliance: EmbeddedAppliance, topic: str) -> TopicPartition:
        """A partition with records 0 to 99, batches of 10, one millisecond apart."""
        create(appliance, topic)
        with Producer(appliance.address) as producer:
            for start in range(0, 100, 10):
                for number in range(start, start + 10):
                    producer.send(topic, b"%d" % number, timestamp=1_000_000 + number)
                producer.flush()
        return TopicPartition(topic, 0)

    def consumer(
        self, appliance: EmbeddedAppliance, key: TopicPartition, **settings: Any
    ) -> Consumer:
        consumer = Consumer(bootstrap=appliance.address, **settings)
        consumer.assign([key])
        return consumer

    def test_seeks(self, appliance: EmbeddedAppliance, filled: TopicPartition) -> None:
        with self.consumer(appliance, filled) as consumer:
            for offset in (55, 0, 99, 3):
                consumer.seek(filled, offset)
                assert consumer.position(filled) == offset
                assert consumer.poll(60_000, max_records=2)[0].offset == offset
            consumer.seek_to_beginning(filled)
            assert [r.offset for r in consumer.poll(60_000, max_records=3)] == [0, 1, 2]
            assert consumer.position(filled) == 3
            consumer.seek_to_end()
            assert consumer.position(filled) == 100
            assert consumer.poll(0) == []
            assert consumer.lag(filled) == 0

    def test_arrow_after_records_goes_on_where_records_stopped(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(appliance, filled, auto_offset_reset="earliest") as consumer:
            assert len(consumer.poll(60_000, max_records=7)) == 7
            batch = consumer.poll_arrow(60_000)[0]
            assert batch.base_offset == 7
            assert batch.batch.column("value").to_pylist()[0] == b"7"

    def test_offsets(self, appliance: EmbeddedAppliance, filled: TopicPartition) -> None:
        with self.consumer(appliance, filled) as consumer:
            assert consumer.beginning_offsets([filled]) == {filled: 0}
            assert consumer.end_offsets([filled]) == {filled: 100}
            for milliseconds, offset in ((0, 0), (1_000_000, 0), (1_000_042, 42), (1_000_099, 99)):
                found = consumer.offsets_for_times({filled: milliseconds})[filled]
                assert found is not None
                assert (found.offset, found.timestamp) == (offset, 1_000_000 + offset)
            assert consumer.offsets_for_times({filled: 2_000_000}) == {filled: None}

    @pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
    def test_the_appliance_finds_the_record_of_a_time_in_its_batch(
        self, appliance: EmbeddedAppliance, filled: TopicPartition, compression: str
    ) -> None:
        with Producer(
            appliance.address, compression_type=compression, linger_ms=60_000
        ) as producer:
            for milliseconds in (2_000, 5_000, 1_000, 5_000, 9_000):
                producer.send(filled.topic, b"x" * 100, timestamp=milliseconds * 1_000)
            producer.flush()
        with Admin(appliance.address) as admin:
            for seconds, offset in (
                (1_000.05, 50),
                (1_500, 100),
                (2_001, 101),
                (5_000, 101),
                (5_000.5, 104),
                (9_001, -1),
            ):
                found = admin.offsets({filled: dt.datetime.fromtimestamp(seconds, dt.UTC)})[filled]
                assert (found["offset"], found["exact"]) == (offset, True)

    @pytest.mark.parametrize(("reset", "first"), [("earliest", 0), ("latest", None)])
    def test_auto_offset_reset_after_falling_out_of_the_log(
        self, appliance: EmbeddedAppliance, filled: TopicPartition, reset: str, first: int | None
    ) -> None:
        with self.consumer(appliance, filled, auto_offset_reset=reset) as consumer:
            consumer.seek(filled, 5000)
            records = consumer.poll(1_000 if first is None else 60_000)
            assert (records[0].offset if records else None) == first

    def test_auto_offset_reset_none_raises(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(appliance, filled, auto_offset_reset="none") as consumer:
            with pytest.raises(OffsetOutOfRangeError, match="has no position"):
                consumer.poll(60_000)
            consumer.seek(filled, 5000)
            with pytest.raises(OffsetOutOfRangeError, match="has offsets 0 to 100"):
                consumer.poll(60_000)
            consumer.seek(filled, 50)
            assert consumer.poll(60_000)[0].offset == 50

    def test_pause_and_resume(self, appliance: EmbeddedAppliance, filled: TopicPartition) -> None:
        with self.consumer(appliance, filled, auto_offset_reset="earliest") as consumer:
            assert consumer.poll(60_000, max_records=5)[-1].offset == 4
            consumer.pause(filled)
            assert consumer.paused() == [filled]
            assert consumer.poll(50) == []
            consumer.resume(filled)
            assert consumer.poll(60_000)[0].offset == 5

    def test_small_fetches_still_get_on(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(
            appliance,
            filled,
            auto_offset_reset="earliest",
            fetch_max_bytes=1024,
            max_partition_fetch_bytes=1024,
        ) as consumer:
            seen = 0
            while seen < 100:
                records = consumer.poll(60_000)
                assert records[0].offset == seen
                seen += len(records)

    def test_a_long_poll_is_woken_by_a_record(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with (
            self.consumer(appliance, filled, fetch_max_wait_ms=30_000) as consumer,
            Producer(appliance.address) as producer,
        ):
            consumer.seek_to_end()
            assert consumer.poll(0) == []
            timer = threading.Timer(0.05, lambda: producer.send(filled.topic, b"late").result(60))
            timer.start()
            assert [r.value for r in consumer.poll(60_000)] == [b"late"]
            timer.join()

    def test_iteration_gives_records_without_end(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(appliance, filled, auto_offset_reset="earliest") as consumer:
            seen = []
            for record in consumer:
                seen.append(record.offset)
                if len(seen) == 100:
                    break
        assert seen == list(range(100))

    def test_an_iteration_that_is_left_loses_nothing(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(appliance, filled, auto_offset_reset="earliest") as consumer:
            assert [next(iter(consumer)).offset for _ in range(3)] == [0, 1, 2]
            for record in consumer:
                if record.offset == 10:
                    break
            assert consumer.position(filled) == 11
            assert consumer.poll(60_000, 1)[0].offset == 11
            left = iter(consumer)
            assert next(left).offset > 11
            consumer.seek(filled, 50)
            left.close()  # type: ignore[attr-defined]
            assert consumer.poll(60_000)[0].offset == 50, "where the program has put it"

    def test_what_needs_a_group_is_refused_without_one_and_names_are_subscribed_to_all_the_same(
        self, appliance: EmbeddedAppliance, filled: TopicPartition
    ) -> None:
        with self.consumer(appliance, filled) as consumer:
            for call in (
                consumer.commit,
                consumer.commit_async,
                lambda: consumer.committed([]),
                consumer.memberid,
            ):
                with pytest.raises(InvalidRequestError, match="give it a group_id"):
                    call()
            with pytest.raises(InvalidRequestError, match="topic names only"):
                consumer.subscribe(pattern="x")
            consumer.unsubscribe()
            assert consumer.assignment() == []
            consumer.subscribe([filled.topic])
            assert (consumer.assignment(), consumer.subscription()) == ([filled], set())
        with (
            Consumer(bootstrap=appliance.address) as nothing,
            pytest.raises(InvalidRequestError, match="nothing is assigned"),
        ):
            nothing.poll(0)
