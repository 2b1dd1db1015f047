"""The schema of a topic with delayed records is altered: every row arrives once, in the columns
that the topic has then.
"""

from __future__ import annotations

import asyncio
import pathlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, Producer, RecordFuture, Recurrence, ShareConsumer
from tailrace.aio import AsyncAdmin, AsyncProducer
from tailrace.core.errors import InvalidSchemaError, SchemaMismatchError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.altered_topics import (
    FIRST,
    HOUR,
    NEW_ROW,
    OLD_AS_SECOND,
    OLD_AS_THIRD,
    OLD_ROW,
    SECOND,
    THIRD,
    batch_reader,
    consumer_of,
    create_delayed,
    due_now,
    frames,
    read,
)
from tests.kit.cli import run
from tests.kit.processes import wait_until

DATABASE = "coordinator.db"
LATER = timedelta(seconds=2)
NEW_AS_THIRD = {"note": "n", "price": 2.0, "id": 1 << 40, "title": "b", "old": None}


def id_of(future: RecordFuture) -> str:
    delay_id = future.result(60).delay_id
    assert delay_id is not None
    return delay_id


def test_delayed_rows_of_all_versions_arrive_in_the_present_columns(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "all")
    with Producer(running.address) as older, Producer(running.address) as newer:
        older.send("all", OLD_ROW, deliver_after=LATER).result(60)
        newer.send("all", OLD_ROW, deliver_after=HOUR).result(60)
        admin.alter_topics(schema={"all": SECOND})
        newer.send("all", NEW_ROW, deliver_after=LATER).result(60)
        older.send("all", OLD_ROW, deliver_after=LATER).result(60)
        admin.alter_topics(schema={"all": THIRD})
        older.send("all", OLD_ROW, deliver_after=HOUR).result(60)
        newer.send("all", NEW_ROW, deliver_after=HOUR).result(60)
        newer.send_arrow(
            "all", pa.table({name: [OLD_ROW[name]] for name in OLD_ROW}), deliver_after=HOUR
        ).result(60)
        newer.send_arrow(
            "all",
            pa.table({"when": pa.array([HOUR]), **{name: [NEW_ROW[name]] for name in NEW_ROW}}),
            delay_column="when",
        ).result(60)
        with pytest.raises(SchemaMismatchError, match="'other'"):
            newer.send("all", {"id": 1, "other": 2}, deliver_after=LATER)
    due_now(admin, "all")
    with consumer_of(running.address, "all") as consumer:
        found = read(consumer, 8)
    assert sorted(found, key=str) == sorted([OLD_AS_THIRD] * 5 + [NEW_AS_THIRD] * 3, key=str)
    with batch_reader(running, "all") as consumer:
        schemas = [batch.schema for batch in frames(consumer, 8)]
    assert schemas == sorted(schemas, key=[FIRST, SECOND, THIRD].index), "the segments are in order"


def test_rows_in_files_are_cancelled_and_rescheduled_after_the_change(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "changed")
    with Producer(running.address) as producer:
        ids = [
            id_of(producer.send("changed", {**OLD_ROW, "id": n}, deliver_after=HOUR))
            for n in range(6)
        ]
        admin.alter_topics(schema={"changed": SECOND})
        ids.append(id_of(producer.send("changed", NEW_ROW, deliver_after=HOUR)))
    assert sorted(delay.delay_id for delay in admin.list_delays("changed")) == sorted(ids)
    assert admin.cancel_delays([ids[0], ids[6]]) == {ids[0]: None, ids[6]: None}
    now = datetime.now(UTC)
    admin.reschedule_delays(dict.fromkeys(ids[1:3], now))
    admin.alter_topics(schema={"changed": THIRD})
    admin.reschedule_delays(dict.fromkeys(ids[3:6], now))
    with consumer_of(running.address, "changed") as consumer:
        assert sorted(row["id"] for row in read(consumer, 5)) == [1, 2, 3, 4, 5]
    assert not list(admin.list_delays("changed"))


def test_transactions_cancel_and_send_delayed_rows_over_versions(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "transacted")
    with Producer(running.address, transactional_id="over-versions") as producer:
        producer.begin_transaction()
        ids = [
            producer.send("transacted", {**OLD_ROW, "id": n}, deliver_after=HOUR) for n in range(4)
        ]
        producer.flush()
        admin.alter_topics(schema={"transacted": SECOND})
        producer.send("transacted", {**OLD_ROW, "id": 4}, deliver_after=LATER)
        producer.send("transacted", NEW_ROW, deliver_after=LATER)
        producer.commit_transaction()
        names = [id_of(future) for future in ids]
        producer.begin_transaction()
        producer.cancel_delays(names[0])
        producer.reschedule_delays({names[1]: datetime.now(UTC)})
        admin.alter_topics(schema={"transacted": THIRD})
        producer.commit_transaction()
        producer.begin_transaction()
        producer.cancel_delays(names[2:])
        producer.abort_transaction()
        wait_until(
            lambda: (
                sorted(d.delay_id for d in admin.list_delays("transacted")) == sorted(names[2:])
            ),
            "the abort returns the rows",
        )
    due_now(admin, "transacted")
    with consumer_of(running.address, "transacted", isolation_level="read_committed") as consumer:
        found = read(consumer, 5)
    assert sorted(row["id"] for row in found) == [1, 2, 3, 4, 1 << 40]
    assert {row["price"] for row in found} == {1.5, 2.0}


def test_a_recurring_row_comes_in_each_version_of_its_life(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "recurring")
    with (
        Producer(running.address) as producer,
        batch_reader(running, "recurring") as consumer,
    ):
        producer.send(
            "recurring", OLD_ROW, repeat=Recurrence.every(timedelta(milliseconds=200))
        ).result(60)
        for schema, row in ((FIRST, OLD_ROW), (SECOND, OLD_AS_SECOND), (THIRD, OLD_AS_THIRD)):
            if schema is not FIRST:
                admin.alter_topics(schema={"recurring": schema})
            while True:
                batch = frames(consumer, 1)[-1]
                if batch.schema.names == schema.names:
                    break
            assert batch.to_pylist()[-1] == row
    (waiting,) = admin.list_delays("recurring")
    assert admin.cancel_delays(waiting.delay_id) == {waiting.delay_id: None}


def test_delays_that_are_enabled_later_know_the_versions_before(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    admin.create_topics(NewTopic("enabled", 1, schema=FIRST))
    admin.alter_topics(schema={"enabled": SECOND})
    admin.alter_topics({"enabled": {"delay.enabled": True}}, schema={"enabled": THIRD})
    with Producer(running.address) as producer:
        producer.send("enabled", OLD_ROW, deliver_after=timedelta(0)).result(60)
        producer.send_arrow(
            "enabled",
            pa.table({name: [NEW_ROW[name]] for name in NEW_ROW}),
            deliver_after=timedelta(0),
        ).result(60)
    with consumer_of(running.address, "enabled") as consumer:
        assert sorted(read(consumer, 2), key=str) == sorted([OLD_AS_THIRD, NEW_AS_THIRD], key=str)


def test_coroutines_delay_rows_over_versions(running: EmbeddedAppliance, admin: Admin) -> None:
    create_delayed(admin, "async")

    async def program() -> None:
        async with (
            AsyncAdmin(running.address) as client,
            AsyncProducer(running.address) as producer,
        ):
            await producer.send("async", OLD_ROW, deliver_after=LATER)
            await client.alter_topics(schema={"async": SECOND})
            await producer.send("async", OLD_ROW, deliver_after=timedelta(0))
            await producer.send("async", NEW_ROW, deliver_after=timedelta(0))

    asyncio.run(program())
    with consumer_of(running.address, "async") as consumer:
        found = read(consumer, 3)
    assert sorted(found, key=str) == sorted([OLD_AS_SECOND] * 2 + [NEW_ROW], key=str)


def test_a_share_group_gets_delayed_rows_of_all_versions_again_after_a_release(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "shared")
    with Producer(running.address) as producer:
        producer.send("shared", OLD_ROW, deliver_after=timedelta(0)).result(60)
        with ShareConsumer(
            "shared", group_id="sharers", bootstrap=running.address, auto_offset_reset="earliest"
        ) as consumer:
            found: list[Any] = []
            while not found:
                for record in consumer.poll(10_000):
                    found.append(record.value)
                    consumer.acknowledge(record, "release")
            assert found == [OLD_ROW]
            producer.send("shared", OLD_ROW, deliver_after=HOUR).result(60)
            admin.alter_topics(schema={"shared": SECOND})
            due_now(admin, "shared")
            found = []
            while len(found) < 2:
                for record in consumer.poll(10_000):
                    found.append(record.value)
                    consumer.acknowledge(record)
            assert found[0] in (OLD_ROW, OLD_AS_SECOND), "of the newest version that it has met"
            assert found[1] == OLD_AS_SECOND


def test_a_change_of_type_that_would_lose_pending_values_is_refused(admin: Admin) -> None:
    create_delayed(admin, "retyped", **{"schema.compatibility": "none"})
    other = pa.schema([("id", pa.utf8()), ("name", pa.utf8()), ("old", pa.utf8())])
    with pytest.raises(InvalidSchemaError, match=r"'id'.*from int32 to string.*delayed records"):
        admin.alter_topics(schema={"retyped": other})
    assert len(admin.describe_schemas("retyped")) == 1
    with pytest.raises(InvalidSchemaError, match="@due_us"):
        admin.alter_topics(schema={"retyped": pa.schema([*FIRST, ("@due_us", pa.int64())])})


def test_the_command_line_alters_topics_with_delays(
    running: EmbeddedAppliance, admin: Admin, tmp_path: pathlib.Path
) -> None:
    import pyarrow.parquet as pq

    create_delayed(admin, "flights")
    path = tmp_path / "second.parquet"
    pq.write_table(SECOND.empty_table(), path)
    run(running, "topic", "alter", "flights", "--schema", str(path))
    wider = tmp_path / "wider.parquet"
    pq.write_table(pa.table({**{n: [NEW_ROW[n]] for n in NEW_ROW}, "gate": ["B4"]}), wider)
    run(running, "produce", "flights", "--from", str(wider), "--evolve")
    assert [len(version.schema) for version in admin.describe_schemas("flights")] == [3, 4, 5]


def test_columns_of_longer_offsets_count_as_the_same(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create_delayed(admin, "large", pa.schema([("name", pa.utf8()), ("raw", pa.binary())]))
    with Producer(running.address) as producer:
        row = {"name": "a", "raw": b"b"}
        producer.send("large", row, deliver_after=HOUR).result(60)
        admin.alter_topics(
            schema={"large": pa.schema([("raw", pa.large_binary()), ("name", pa.large_utf8())])}
        )
        producer.send("large", row, deliver_after=HOUR).result(60)
    due_now(admin, "large")
    with consumer_of(running.address, "large") as consumer:
        assert read(consumer, 2) == [row] * 2
