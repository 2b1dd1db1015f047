"""Beginning of a log: retention by bytes and time, deleted records, leases."""

from __future__ import annotations

import pathlib

import pytest

from tailrace import Admin, Consumer, TopicPartition
from tailrace.core.errors import InvalidRequestError, OffsetOutOfRangeError
from tests.kit.appliances.orders import (
    ORDERS,
    consumer,
    create,
    kill_everything,
    produce,
    read,
    segments,
    start,
)
from tests.kit.processes import wait_until


def test_retention_by_bytes_moves_the_log_start_and_readers_below_it_are_told(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    try:
        create(running, segment_bytes=1 << 16, retention_bytes=1 << 17)
        produce(running, 0, 2000, size=400)
        wait_until(lambda: len(segments(tmp_path)) <= 4, "retention removes the oldest segments")
        with consumer(running) as reader:
            first = reader.beginning_offsets([ORDERS])[ORDERS]
            assert first > 0
            with pytest.raises(OffsetOutOfRangeError):
                reader.poll(60_000)
        with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as reader:
            assert reader.poll(60_000)[0].offset == first
    finally:
        assert running.stop() == 0


def test_delete_records_moves_the_log_start_over_restarts(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 10, each=True)
    with Admin(running.address) as admin:
        assert admin.delete_records({ORDERS: 4}) == {ORDERS: 4}
        with pytest.raises(
            OffsetOutOfRangeError, match="ends at offset 10; offset is 11: give one up to the end"
        ):
            admin.delete_records({ORDERS: 11})
        with pytest.raises(InvalidRequestError, match="has partitions 0 to 0, not 1"):
            admin.delete_records({TopicPartition(ORDERS.topic, 1): 0})
    kill_everything(running)
    again = start(tmp_path)
    try:
        with pytest.raises(OffsetOutOfRangeError):
            read(again, 1, 3)
        assert read(again, 6, 4) == [4, 5, 6, 7, 8, 9]
        with Admin(again.address) as admin:
            assert admin.delete_records({ORDERS: -1}) == {ORDERS: 10}
        produce(again, 10, 11)
        assert read(again, 1, 10) == [10]
    finally:
        assert again.stop() == 0


def test_a_lease_keeps_segments_from_retention_until_it_ends(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    try:
        create(running, segment_bytes=1 << 16, retention_bytes=1 << 16)
        produce(running, 0, 10, size=400)
        with Admin(running.address) as admin:
            admin.lease_offsets("job", {ORDERS: 0}, 60_000)
            produce(running, 10, 1000, size=400)
            assert read(running, 1000) == list(range(1000))
            admin.lease_offsets("job", {ORDERS: 0}, 0)
        wait_until(lambda: len(segments(tmp_path)) <= 3, "what the lease kept goes")
    finally:
        assert running.stop() == 0


def test_retention_by_time_removes_what_is_old_and_a_reader_below_follows_its_reset(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    try:
        create(running, retention_ms=300)
        produce(running, 0, 20, each=True)
        with consumer(running) as reader:
            wait_until(
                lambda: reader.beginning_offsets([ORDERS])[ORDERS] == 20,
                "every record is older than 300 ms",
            )
            with pytest.raises(OffsetOutOfRangeError):
                reader.poll(60_000)
        with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as reader:
            reader.seek(ORDERS, 0)
            with Admin(running.address) as admin:
                admin.alter_topics({"orders": {"retention.ms": -1}})
            produce(running, 20, 21)
            assert [record.offset for record in reader.poll(60_000)] == [20]
    finally:
        assert running.stop() == 0
