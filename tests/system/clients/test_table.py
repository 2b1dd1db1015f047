"""`tailrace.Table`: always the latest of each key, through everything that happens to a topic."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer, Table, TableChange, TopicPartition
from tailrace.aio import AsyncProducer, AsyncTable
from tailrace.core.errors import (
    ClientClosedError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidSettingError,
    RequestTimeoutError,
    TableFullError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.hosts.forks import REFUSED, in_child
from tests.kit.processes import HANG_LIMIT_S, wait_until

KEYS = [b"", *(b"k%d" % n for n in range(60))]


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(appliance.address) as made:
        yield made


@pytest.fixture
def producer(appliance: EmbeddedAppliance) -> Iterator[Producer]:
    with Producer(appliance.address) as made:
        yield made


def scanned(address: str, topic: str) -> dict[bytes, bytes]:
    table = tailrace.scan(topic, address, ["key", "value"], latest=True).read_all()
    return {row["key"]: row["value"] for row in table.to_pylist()}


def is_table_of(table: Table, address: str, topic: str) -> bool:
    try:
        return dict(table.items()) == scanned(address, topic)
    except (UnknownTopicError, InvalidRequestError):
        return False


def reaches_the_log(table: Table, address: str, topic: str) -> None:
    wait_until(lambda: is_table_of(table, address, topic), "the table has the topic's latest")


def send_randomly(producer: Producer, topic: str, partitions: int, dice: random.Random) -> Any:
    """Some records; returns the future of each."""
    return [
        producer.send(
            topic,
            None if dice.random() < 0.2 else b"%d" % dice.randrange(10**9),
            dice.choice([None, *KEYS]),
            [("h", b"1")] if dice.random() < 0.3 else None,
            partition=dice.randrange(partitions),
            timestamp=1_000 + dice.randrange(50),
        )
        for _ in range(dice.randrange(1, 80))
    ]


def test_a_table_follows_a_topic_through_transactions_and_deletions(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    dice = random.Random(7)
    admin.create_topics([NewTopic(topic, 3, {"segment.bytes": 64 << 10})])
    with Producer(appliance.address, transactional_id=topic, batch_size=1024) as writer:
        writer.init_transactions()

        def transaction() -> Any:
            writer.begin_transaction()
            sent = send_randomly(writer, topic, 3, dice)
            if dice.random() < 0.3:
                writer.abort_transaction()
                return []
            writer.commit_transaction()
            return [future.result(60) for future in sent]

        for _ in range(5):
            transaction()
        admin.delete_records({TopicPartition(topic, 0): 20})
        with Table(topic, bootstrap=appliance.address) as table:
            assert dict(table.items()) == scanned(appliance.address, topic)
            for _ in range(12):
                table.wait_until(transaction(), timeout=60)
                assert dict(table.items()) == scanned(appliance.address, topic)
            expected = scanned(appliance.address, topic)
            assert len(table) == len(expected)
            assert set(table) == set(table.keys()) == set(expected)
            for key in (*KEYS, b"none"):
                assert table.get(key) == expected.get(key)
                assert (key in table) == (key in expected)
                record = table.record(key)
                assert (record and record.value) == expected.get(key)


def test_a_program_reads_what_it_has_written(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 2)])
    with Table(topic, bootstrap=appliance.address) as table:
        for number in range(20):
            written = producer.send(topic, b"%d" % number, "u1", [("n", b"%d" % number)])
            table.wait_until(written.result(60))
            assert table["u1"] == table[b"u1"] == b"%d" % number
            record = table.record("u1")
            assert record is not None
            assert record.offset == written.result(60).offset
            assert record.headers == [("n", b"%d" % number)]
        table.wait_until([producer.send(topic, None, "u1").result(60)])
        assert "u1" not in table
        with pytest.raises(KeyError):
            _ = table["u1"]
        frame = pa.table({"key": [b"u2"], "value": [b"framed"]})
        table.wait_until(producer.send_arrow(topic, frame, partition=1).result(60))
        assert table["u2"] == b"framed"
        table.wait_until({TopicPartition(topic, 1): table.positions()[TopicPartition(topic, 1)]})
        with pytest.raises(RequestTimeoutError, match=f"{topic}-0:1000000"):
            table.wait_until({TopicPartition(topic, 0): 1_000_000}, timeout=0.01)
        with pytest.raises(InvalidRequestError, match="'other'"):
            table.wait_until({TopicPartition("other", 0): 1})
        for wrong in (written, "text", 7, [b"x"]):
            with pytest.raises(InvalidRequestError, match=r"result\(\)"):
                table.wait_until(wrong)  # type: ignore[arg-type]
        assert repr(table) == f"<Table of topic {topic!r}, 1 keys, ready>"


def test_changes_are_called_back_in_order_and_a_failing_callback_ends_nothing(
    appliance: EmbeddedAppliance,
    admin: Admin,
    producer: Producer,
    topic: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin.create_topics([NewTopic(topic)])
    producer.send(topic, b"before", b"k0").result(60)
    changes: list[TableChange] = []

    def on_change(change: TableChange) -> None:
        changes.append(change)
        if change.offset % 5 == 0:
            raise ValueError("of the callback")

    with (
        caplog.at_level(logging.ERROR, "tailrace"),
        Table(
            topic, bootstrap=appliance.address, on_change=on_change, key_deserializer=bytes.decode
        ) as table,
    ):
        for n in range(1, 41):
            producer.send(topic, None if n % 4 == 0 else b"%d" % n, b"k%d" % (n % 3))
        producer.flush(60)
        wait_until(lambda: len(changes) == 40, "all changes are called back")
        wait_until(lambda: table.metrics()["callback_errors"] == 8, "errors are counted")
        assert [change.offset for change in changes] == list(range(1, 41))
        assert [change.value for change in changes[:4]] == [b"1", b"2", b"3", None]
        assert changes[0].key == "k1"
        assert "table_callback_failed" in caplog.text


def test_more_keys_or_bytes_than_allowed_stop_the_table_with_a_sentence(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])
    with Table(topic, bootstrap=appliance.address, max_records=10) as table:
        for n in range(30):
            producer.send(topic, b"v" * 10_000, b"k%d" % (n % 10))
        table.wait_until(producer.send(topic, b"v", b"k0").result(60))
        assert len(table) == 10
        producer.send(topic, b"v", b"one more").result(60)

        def is_refused() -> bool:
            try:
                table.get("k0")
            except TableFullError as error:
                return "11 of max_records=10" in str(error)
            return False

        wait_until(is_refused, "the table has stopped")
        with pytest.raises(TableFullError):
            table.ready()
    with pytest.raises(TableFullError, match="max_bytes=65536"):
        Table(topic, bootstrap=appliance.address, max_bytes="64KiB").ready(60)


def test_added_partitions_are_read(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])
    producer.send(topic, b"old", b"k").result(60)
    with Table(topic, bootstrap=appliance.address) as table:
        admin.create_partitions({topic: 3})
        with Producer(appliance.address) as later:
            written = later.send(topic, b"new", b"k", partition=2).result(60)
        table.wait_until(written)
        assert table["k"] == b"new"


def test_a_topic_that_is_made_again_begins_anew(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])
    for n in range(10):
        producer.send(topic, b"old", b"k%d" % n)
    producer.flush(60)
    changes: list[TableChange] = []
    with Table(topic, bootstrap=appliance.address, on_change=changes.append) as table:
        assert len(table) == 10
        admin.delete_topics([topic])

        def is_gone() -> bool:
            try:
                table.get("k1")
            except UnknownTopicError:
                return True
            return False

        wait_until(is_gone, "the table knows that its topic is gone")
        wait_until(lambda: len(changes) == 10, "each key's end is called back")
        assert {change.value for change in changes} == {None}
        admin.create_topics([NewTopic(topic, 2)])
        producer.send(topic, b"new", b"k1").result(60)
        reaches_the_log(table, appliance.address, topic)
        assert dict(table.items()) == {b"k1": b"new"}


def test_records_that_are_gone_before_they_were_read_take_their_keys_with_them(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 1, {"segment.bytes": 64 << 10})])
    producer.send(topic, b"first", b"a").result(60)
    producer.send(topic, b"first", b"b").result(60)
    blocked, goes_on = threading.Event(), threading.Event()

    def on_change(change: TableChange) -> None:
        if change.key == b"block":
            blocked.set()
            assert goes_on.wait(HANG_LIMIT_S)

    try:
        with Table(
            topic,
            bootstrap=appliance.address,
            on_change=on_change,
            fetch_max_bytes=1024,
            max_partition_fetch_bytes=1024,
        ) as table:
            producer.send(topic, b"x", b"block").result(60)
            assert blocked.wait(HANG_LIMIT_S)
            for _ in range(100):
                producer.send(topic, b"v" * 5_000, b"a").result(60)
            last = producer.send(topic, b"last", b"c").result(60)
            assert last.offset is not None
            admin.delete_records({TopicPartition(topic, 0): last.offset})
            goes_on.set()
            table.wait_until(last, timeout=HANG_LIMIT_S)
            assert dict(table.items()) == {b"c": b"last"}
    finally:
        goes_on.set()


def test_a_table_outlives_its_appliance(tmp_path: pathlib.Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    running = start_embedded(data_dir=str(tmp_path / "data"), listen=address)
    try:
        with Producer(address, acks="all", delivery_timeout_ms=60_000) as producer:
            producer.send("users", b"1", b"u1").result(60)
            with Table("users", bootstrap=address) as table:
                for number in range(2, 4):
                    os.kill(running.pid, signal.SIGKILL)
                    running.stop()
                    assert table["u1"] == b"%d" % (number - 1)
                    running = start_embedded(data_dir=str(tmp_path / "data"), listen=address)
                    written = producer.send("users", b"%d" % number, b"u1").result(60)
                    table.wait_until(written, timeout=HANG_LIMIT_S)
                    assert table["u1"] == b"%d" % number
    finally:
        running.stop()


def test_a_typed_topics_rows_are_found_by_its_key_column(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    frame = pa.table({"id": pa.array([1, 2, 1, None], pa.int32()), "name": ["a", "b", "c", "d"]})
    admin.create_topics([NewTopic(topic, schema=frame)])
    producer.send_arrow(topic, frame, partition=0).result(60)
    changes: list[TableChange] = []
    with Table(
        topic, bootstrap=appliance.address, key_column="id", on_change=changes.append
    ) as table:
        assert table[1] == {"id": 1, "name": "c"}
        assert dict(table.items()) == {1: table[1], 2: {"id": 2, "name": "b"}}
        assert table.get(3) is None
        with pytest.raises(InvalidRequestError, match="'x' is no int32"):
            table.get("x")
        table.wait_until(producer.send_arrow(topic, frame.slice(0, 1), partition=0).result(60))
        assert table[1]["name"] == "a"
        wait_until(lambda: len(changes) == 1, "the change is called back")
        assert (changes[0].key, changes[0].value) == (1, {"id": 1, "name": "a"})
    with pytest.raises(InvalidSettingError, match="key_column='id'"):
        Table(topic, bootstrap=appliance.address).ready()


def test_a_close_ends_though_on_change_does_not_and_it_is_not_called_again(
    appliance: EmbeddedAppliance,
    admin: Admin,
    producer: Producer,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tailrace.consumer.table.table.CLOSE_WAIT_S", 0.0)
    admin.create_topics([NewTopic(topic)])
    began, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def on_change(_change: TableChange) -> None:
        threads.append(threading.current_thread())
        began.set()
        may_end.wait(HANG_LIMIT_S)

    table = Table(topic, bootstrap=appliance.address, on_change=on_change)
    try:
        table.ready()
        for number in range(3):
            producer.send(topic, b"%d" % number, b"key")
        assert began.wait(HANG_LIMIT_S)
        table.close()
        assert "although its thread has not ended" in caplog.text
        caplog.clear()
    finally:
        may_end.set()
    threads[0].join(HANG_LIMIT_S)
    assert not threads[0].is_alive()
    assert (len(threads), caplog.text) == (1, "")


def test_keys_and_values_have_the_programs_types(
    appliance: EmbeddedAppliance, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])
    producer.send(topic, b"1.5", b"7").result(60)
    with Table(
        topic,
        bootstrap=appliance.address,
        key_serializer=lambda key: b"%d" % key,
        key_deserializer=int,
        value_deserializer=float,
    ) as table:
        assert table[7] == 1.5
        assert dict(table.items()) == {7: 1.5}
        assert list(table.values()) == [1.5]
        with pytest.raises(InvalidRecordError, match="key_serializer"):
            table.get("x")
    with (
        Table(topic, bootstrap=appliance.address) as table,
        pytest.raises(InvalidRequestError, match="key_serializer"),
    ):
        table.get(7)
    with (
        Table(topic, bootstrap=appliance.address) as table,
        pytest.raises(InvalidRequestError, match="UTF-8"),
    ):
        table.get("\ud800")


def test_misuse_is_refused_with_a_sentence(appliance: EmbeddedAppliance, topic: str) -> None:
    for settings, words in (
        ({"max_records": 0}, "max_records is 0"),
        ({"on_change": 3}, "on_change is of type int"),
        ({"key_colum": "x"}, "did you mean key_column"),
        ({"key_column": 3}, "key_column is 3"),
        ({"bootstrap_servers": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(InvalidSettingError, match=words):
            Table(topic, **settings)
    missing = Table(topic, bootstrap=appliance.address)
    with pytest.raises(UnknownTopicError, match=topic):
        missing.ready(60)
    missing.close()
    missing.close()
    for use in (missing.ready, lambda: missing.get("x"), lambda: len(missing)):
        with pytest.raises(ClientClosedError, match="closed"):
            use()
    away = Table(topic, bootstrap="tcp://127.0.0.1:1", request_timeout_ms=200)
    with pytest.raises(InvalidRequestError, match="not ready"):
        away.get("x")
    with pytest.raises(TailraceError, match=r"127\.0\.0\.1:1"):
        away.ready(0.3)
    away.close()


def test_a_table_in_an_event_loop(appliance: EmbeddedAppliance, admin: Admin, topic: str) -> None:
    admin.create_topics([NewTopic(topic)])

    async def main() -> None:
        changes: list[tuple[TableChange, int]] = []
        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncTable(
                topic,
                bootstrap=appliance.address,
                on_change=lambda change: changes.append((change, threading.get_ident())),
            ) as table,
        ):
            for number in range(20):
                written = await (await producer.send(topic, b"%d" % number, "u1"))
                await table.wait_until(written)
                assert table["u1"] == b"%d" % number
            assert ("u1" in table, len(table), list(table)) == (True, 1, [b"u1"])
            assert dict(table.items()) == {b"u1": b"19"}
            assert list(table.values()) == [b"19"]
            while len(changes) < 20:
                await asyncio.sleep(0)
            assert {thread for _, thread in changes} == {threading.get_ident()}
            with pytest.raises(RequestTimeoutError):
                await table.wait_until({TopicPartition(topic, 0): 99}, timeout=0.01)
        with pytest.raises(ClientClosedError):
            table.get("u1")
        with pytest.raises(ClientClosedError):
            await table.ready()

    asyncio.run(main())


def test_a_callback_that_fails_in_an_event_loop_is_counted_and_a_coroutine_is_refused(
    appliance: EmbeddedAppliance, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topics([NewTopic(topic)])
    seen: list[bytes] = []

    def on_change(change: TableChange) -> None:
        seen.append(change.value)
        if change.value == b"1":
            raise ValueError("this one is wrong")

    async def too_late(change: TableChange) -> None:
        raise AssertionError(change)

    async def main() -> None:
        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncTable(topic, bootstrap=appliance.address, on_change=on_change) as table,
        ):
            for number in range(3):
                await table.wait_until(await producer.send_and_wait(topic, b"%d" % number, "u1"))
            while len(seen) < 3:
                await asyncio.sleep(0)
            assert table.metrics()["callback_errors"] == 1
        for kind in (AsyncTable, Table):
            with pytest.raises(InvalidSettingError, match="on_change is the coroutine function"):
                kind(topic, bootstrap=appliance.address, on_change=too_late)

    asyncio.run(main())
    assert seen == [b"0", b"1", b"2"]
    assert "table_callback_failed" in caplog.text


def test_a_forked_child_is_refused(appliance: EmbeddedAppliance, admin: Admin, topic: str) -> None:
    admin.create_topics([NewTopic(topic)])
    with Table(topic, bootstrap=appliance.address) as table:

        def use() -> object:
            return table.get("x")

        assert in_child(use) == REFUSED
        assert len(table) == 0
