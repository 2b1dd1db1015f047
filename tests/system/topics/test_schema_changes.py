"""A typed topic's schema changes while producers and readers of every kind go on."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import pathlib
import signal
import sqlite3
import threading
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer
from tailrace.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    InvalidSettingError,
    SchemaMismatchError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import API_VERSIONS, Api
from tests.kit.appliances.altered_topics import (
    FIRST,
    NEW_ROW,
    OLD_AS_SECOND,
    OLD_ROW,
    SECOND,
    THIRD,
    batch_reader,
    field,
    frames,
    read,
)
from tests.kit.cli import run
from tests.kit.processes import wait_until


def create(admin: Admin, name: str, partitions: int = 1, **configs: Any) -> None:
    admin.create_topics(NewTopic(name, partitions, configs, schema=FIRST))


def filled(running: EmbeddedAppliance, admin: Admin, name: str) -> None:
    """A row of each of the first two versions."""
    create(admin, name)
    with Producer(running.address) as producer:
        producer.send(name, OLD_ROW).result(60)
        admin.alter_topics(schema={name: SECOND})
        producer.send(name, NEW_ROW).result(60)


def test_each_version_has_a_number_a_time_and_an_author(admin: Admin) -> None:
    create(admin, "listed")
    admin.alter_topics(schema={"listed": SECOND})
    admin.alter_topics(schema={"listed": SECOND})  # changes nothing
    first, second = admin.describe_schemas("listed")
    assert (first.schema, second.schema) == (FIRST, SECOND)
    assert first.schema_id < second.schema_id
    assert 0 < first.created_us <= second.created_us
    assert "@" in first.author
    assert "@" in second.author
    assert second.schema.field("title").metadata == {b"tailrace.alias": b"name"}


def test_an_older_producer_goes_on_and_a_newer_one_learns_the_new_columns(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "producers")
    with (
        Producer(running.address, linger_ms=60_000) as older,
        Producer(running.address) as newer,
    ):
        older.send("producers", OLD_ROW)
        newer.send("producers", OLD_ROW).result(60)
        pending = older.send("producers", OLD_ROW)  # in a batch of the first version
        admin.alter_topics(schema={"producers": SECOND})
        newer.send("producers", NEW_ROW).result(60)
        newer.send_arrow("producers", pa.table({name: [NEW_ROW[name]] for name in NEW_ROW}))
        newer.send_arrow("producers", pa.table({name: [OLD_ROW[name]] for name in OLD_ROW}))
        newer.flush()
        older.flush()
        pending.result(60)
        older.send("producers", OLD_ROW)
        older.flush()
        with pytest.raises(SchemaMismatchError, match="'other'"):
            newer.send("producers", {"id": 1, "other": 2})
        with pytest.raises(SchemaMismatchError, match="not in the topic: other"):
            newer.send_arrow("producers", pa.table({"id": [1], "other": [2]}))
    with Consumer("producers", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert read(consumer, 7) == [
            OLD_AS_SECOND, NEW_ROW, NEW_ROW, OLD_AS_SECOND, OLD_AS_SECOND, OLD_AS_SECOND,
            OLD_AS_SECOND,
        ]  # fmt: skip
    batches = frames(batch_reader(running, "producers"), 7)
    assert [batch.schema for batch in batches] == [FIRST, *[SECOND] * (len(batches) - 1)]


def has_row(table: tailrace.Table, key: Any) -> bool:
    """False also while the table reads its topic again."""
    try:
        return key in table
    except InvalidRequestError:
        return False


def test_a_column_that_a_row_leaves_out_has_its_default(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    filled(running, admin, "defaults")
    with Producer(running.address) as producer:
        producer.send("defaults", {"id": 3}).result(60)
        producer.send("defaults", {"id": 4, "price": None}).result(60)
    with Consumer("defaults", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert [row["price"] for row in read(consumer, 4)] == [1.5, 2.0, 1.5, None]


def test_a_consumer_shows_all_versions_as_the_newest_or_each_as_it_is(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    filled(running, admin, "consumed")
    with Consumer("consumed", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert read(consumer, 2) == [OLD_AS_SECOND, NEW_ROW]
        admin.alter_topics(schema={"consumed": THIRD})
        with Producer(running.address) as producer:
            producer.send("consumed", {"id": 5, "old": "new"}).result(60)
            producer.send("consumed", OLD_ROW).result(60)
        assert read(consumer, 2) == [
            {"note": None, "price": None, "id": 5, "title": None, "old": "new"},
            {"note": None, "price": 1.5, "id": 1, "title": "a", "old": None},
        ]
    with Consumer("consumed", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert {batch.schema for batch in frames(consumer, 4)} == {THIRD}
    with batch_reader(running, "consumed") as consumer:
        found = frames(consumer, 4)
        assert [batch.schema for batch in found] == [FIRST, SECOND, THIRD, THIRD]
        assert found[0].to_pylist() == [OLD_ROW]
    with batch_reader(running, "consumed") as consumer:
        assert read(consumer, 2)[:2] == [OLD_ROW, NEW_ROW]


def test_coroutines_produce_alter_and_read(running: EmbeddedAppliance, admin: Admin) -> None:
    create(admin, "async")

    async def program() -> list[Any]:
        async with (
            AsyncAdmin(running.address) as client,
            AsyncProducer(running.address) as producer,
            AsyncConsumer(
                "async", bootstrap=running.address, auto_offset_reset="earliest"
            ) as consumer,
        ):
            await producer.send("async", OLD_ROW)
            found = [record.value for record in await consumer.poll(10_000)]
            await client.alter_topics(schema={"async": SECOND})
            assert len(await client.describe_schemas("async")) == 2
            await producer.send("async", NEW_ROW)
            await producer.send_arrow(
                "async", pa.table({name: [OLD_ROW[name]] for name in OLD_ROW})
            )
            await producer.flush()
            while len(found) < 3:
                found += [record.value for record in await consumer.poll(10_000)]
            return found

    assert asyncio.run(program()) == [OLD_ROW, NEW_ROW, OLD_AS_SECOND]


def test_a_share_group_delivers_all_versions_as_the_newest(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "shared")
    with (
        Producer(running.address) as producer,
        ShareConsumer(
            "shared", bootstrap=running.address, group_id="g", auto_offset_reset="earliest"
        ) as consumer,
    ):
        producer.send("shared", OLD_ROW).result(60)
        found: list[Any] = []
        while not found:
            found = [record.value for record in consumer.poll(10_000)]
        admin.alter_topics(schema={"shared": SECOND})
        producer.send("shared", NEW_ROW).result(60)
        producer.send("shared", OLD_ROW).result(60)
        while len(found) < 3:
            found += [record.value for record in consumer.poll(10_000)]
    assert found == [OLD_ROW, NEW_ROW, OLD_AS_SECOND]


@pytest.mark.parametrize("from_files", [True, False])
def test_a_scan_and_its_latest_rows_have_the_newest_schema(
    running: EmbeddedAppliance, admin: Admin, from_files: bool
) -> None:
    name = f"scanned-{from_files}"
    filled(running, admin, name)

    def scan(**settings: Any) -> list[dict[str, Any]]:
        reader = tailrace.scan(name, running.address, from_files=from_files, **settings)
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
        return rows

    assert scan() == [OLD_AS_SECOND, NEW_ROW]
    assert scan(columns=["title", "_offset"]) == [
        {"title": "a", "_offset": 0},
        {"title": "b", "_offset": 1},
    ]
    assert scan(columns=["note"], end=1) == [{"note": None}]
    with Producer(running.address) as producer:
        producer.send(name, {"id": 1, "title": "again"}).result(60)
    assert scan(latest=True, key_column="id") == [
        NEW_ROW,
        {"id": 1, "title": "again", "price": 1.5, "note": None},
    ]


def test_a_table_goes_on_over_a_change(running: EmbeddedAppliance, admin: Admin) -> None:
    create(admin, "table")
    with Producer(running.address) as producer:
        producer.send("table", {"id": 1, "name": "a", "old": "key"}).result(60)
        producer.send("table", {"id": 2, "name": "b", "old": "other"}).result(60)
        with tailrace.Table("table", bootstrap=running.address, key_column="name") as table:
            assert table["a"] == {"id": 1, "name": "a", "old": "key"}
            altered = pa.schema([("name", pa.utf8()), ("id", pa.int64()), ("more", pa.utf8())])
            admin.alter_topics(schema={"table": altered})
            producer.send("table", {"id": 1 << 40, "name": "b", "more": "m"}).result(60)
            wait_until(lambda: table["b"]["id"] == 1 << 40, "the table has the row")
            assert table["a"] == {"name": "a", "id": 1, "more": None}
            assert table["b"] == {"name": "b", "id": 1 << 40, "more": "m"}
            keyed = pa.schema([("name", pa.large_binary()), ("id", pa.int64())])
            admin.alter_topics({"table": {"schema.compatibility": "none"}}, schema={"table": keyed})
            with pytest.raises(
                SchemaMismatchError, match="'name' is string, and the topic has bin"
            ):
                producer.send("table", {"name": "c", "id": 3}).result(60)
            producer.send("table", {"name": b"c", "id": 3}).result(60)
            wait_until(lambda: has_row(table, b"c"), "the table has read the keys again")
            assert table[b"c"] == {"name": b"c", "id": 3}


def test_a_table_whose_key_is_the_topics_goes_on_over_a_change(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    """The program names no key: `key.column` of the topic has it."""
    admin.create_topics(NewTopic("keyed-table", 1, {"key.column": "id"}, schema=FIRST))
    with (
        Producer(running.address) as producer,
        tailrace.Table("keyed-table", bootstrap=running.address) as table,
    ):
        table.wait_until(producer.send("keyed-table", {"id": 1, "name": "a"}).result(60), 60)
        altered = pa.schema([("more", pa.utf8()), ("name", pa.utf8()), ("id", pa.int32())])
        admin.alter_topics(schema={"keyed-table": altered})
        table.wait_until(producer.send("keyed-table", {"id": 2, "more": "m"}).result(60), 60)
        assert table[1] == {"more": None, "name": "a", "id": 1}
        assert table[2] == {"more": "m", "name": None, "id": 2}


def test_a_table_goes_on_when_its_key_gets_another_name(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "renamed-key")
    with (
        Producer(running.address) as producer,
        tailrace.Table("renamed-key", bootstrap=running.address, key_column="id") as table,
    ):
        table.wait_until(producer.send("renamed-key", {"id": 1, "name": "a"}).result(60), 60)
        uid = pa.field("uid", pa.int32(), metadata={"tailrace.alias": "id"})
        for kind in (pa.int32(), pa.int64()):  # renamed, then widened: then it is read again
            altered = pa.schema([("name", pa.utf8()), uid.with_type(kind)])
            admin.alter_topics(schema={"renamed-key": altered})
            sent = producer.send("renamed-key", {"uid": 2, "name": str(kind)}).result(60)
            wait_until(lambda: has_row(table, 2), "it goes on")
            table.wait_until(sent, 60)
            assert table[1] == {"name": "a", "uid": 1}
            assert table[2] == {"name": str(kind), "uid": 2}


def test_of_two_alterations_for_one_version_the_second_is_refused(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "twice")
    (version,) = admin.describe_schemas("twice")
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def alter(column: str) -> None:
        with Admin(running.address) as client:
            barrier.wait()
            try:
                client.alter_topics(
                    schema={"twice": FIRST.append(pa.field(column, pa.utf8()))},
                    schema_id=version.schema_id,
                )
                outcomes.append("done")
            except InvalidSchemaError as error:
                outcomes.append(error.detail)

    threads = [threading.Thread(target=alter, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[0] == "done"
    assert "was altered meanwhile" in sorted(outcomes)[1]
    assert len(admin.describe_schemas("twice")) == 2


def test_an_old_producer_and_an_old_reader_meet_five_newer_versions(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "five", 2)
    schema = FIRST
    with (
        Producer(running.address) as producer,
        Consumer("five", bootstrap=running.address, auto_offset_reset="earliest") as consumer,
    ):
        producer.send("five", OLD_ROW, partition=0).result(60)
        assert read(consumer, 1) == [OLD_ROW]
        for number in range(5):
            schema = schema.append(field(f"c{number}", pa.int64(), default=str(number)))
            admin.alter_topics(schema={"five": schema})
        for partition in (0, 1):
            producer.send("five", OLD_ROW, partition=partition).result(60)
        added = {f"c{number}": number for number in range(5)}
        assert read(consumer, 2) == [{**OLD_ROW, **added}] * 2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (pa.schema([("id", pa.int16()), ("name", pa.utf8()), ("old", pa.utf8())]), "'id'"),
        (pa.schema([(f"c{n}", pa.int8()) for n in range(10_000)]), "the limit is"),
        (pa.schema([("id", pa.int32()), ("id", pa.int32())]), "'id' is empty or used twice"),
        (pa.schema([("id", pa.int32()), ("@due_us", pa.int64())]), "names that begin with @"),
        (pa.schema([]), "no columns"),
        (pa.schema([("id", pa.int32()), ("timestamp", pa.timestamp("us", "UTC"))]), "timestamp"),
    ],
)
def test_a_bad_schema_is_refused_with_a_sentence_and_changes_nothing(
    admin: Admin, schema: pa.Schema, reason: str
) -> None:
    if "bad" not in admin.list_topics():
        create(admin, "bad")
    with pytest.raises(InvalidSchemaError, match=reason):
        admin.alter_topics({"bad": {"retention.ms": 5_000}}, schema={"bad": schema})
    assert len(admin.describe_schemas("bad")) == 1
    assert admin.topic_info("bad")["bad"].settings["retention.ms"] != 5_000


def test_a_topic_without_a_schema_of_its_own_keeps_its_columns(admin: Admin) -> None:
    admin.create_topics(NewTopic("plain"))
    with pytest.raises(InvalidSchemaError, match="was created without a schema"):
        admin.alter_topics(schema={"plain": SECOND})


def test_a_compacted_topic_is_cleaned_over_its_versions(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    configs = {"cleanup.policy": "compact", "key.column": "old"}
    admin.create_topics(NewTopic("cleaned", configs=configs, schema=FIRST))
    with pytest.raises(InvalidSchemaError, match="has the keys of the topic"):
        admin.alter_topics(schema={"cleaned": SECOND})
    newer = pa.schema(
        [("old", pa.utf8()), field("id", pa.int64()), field("more", pa.utf8(), default='"m"')]
    )
    with Producer(running.address) as producer:
        for number in range(40):
            producer.send("cleaned", {"id": number, "name": "n", "old": f"k{number % 4}"})
        producer.flush()
        admin.alter_topics(schema={"cleaned": newer})
        for number in range(40, 60):
            producer.send("cleaned", {"id": 1 << 40, "old": f"k{number % 2}", "more": "x"})
        producer.flush()
    admin.compact_topic("cleaned")
    expected = [
        {"old": "k2", "id": 38, "more": "m"},
        {"old": "k3", "id": 39, "more": "m"},
        {"old": "k0", "id": 1 << 40, "more": "x"},
        {"old": "k1", "id": 1 << 40, "more": "x"},
    ]
    for settings in ({}, {"from_files": False}, {"latest": True}):
        found = tailrace.scan("cleaned", running.address, **settings)  # type: ignore[arg-type]
        assert found.read_all().to_pylist() == expected
    with Consumer("cleaned", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert read(consumer, 4) == expected
    with batch_reader(running, "cleaned") as consumer:
        assert {batch.schema for batch in frames(consumer, 4)} == {FIRST, newer}


def test_a_column_that_was_added_later_cannot_be_the_key_of_all_rows(admin: Admin) -> None:
    create(admin, "keyed-later")
    admin.alter_topics(schema={"keyed-later": FIRST.append(pa.field("key", pa.utf8()))})
    compact = {"cleanup.policy": "compact"}
    with pytest.raises(InvalidSettingError, match="an earlier version of the schema"):
        admin.alter_topics({"keyed-later": {**compact, "key.column": "key"}})
    admin.alter_topics({"keyed-later": {**compact, "key.column": "name"}})


def test_a_producer_that_has_not_met_a_widening_sends_floats_as_they_were_given(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    """It encodes them in the narrower type first, and is refused."""
    narrow, wide = (
        pa.schema([("id", pa.int64()), ("price", kind)]) for kind in (pa.float32(), pa.float64())
    )
    sends: list[Any] = [
        lambda producer, name: producer.send(name, {"id": 1, "price": 19.99}),
        lambda producer, name: producer.send_arrow(name, pa.table({"id": [1], "price": [19.99]})),
    ]
    for number, send in enumerate(sends):
        name = f"prices-{number}"
        admin.create_topics(NewTopic(name, configs={"delay.enabled": True}, schema=narrow))
        with Producer(running.address) as producer:
            producer.send(name, {"id": 0, "price": 0.5}).result(60)
            admin.alter_topics(schema={name: wide})
            send(producer, name).result(60)
            producer.send(
                name, {"id": 2, "price": 19.99}, deliver_after=dt.timedelta(milliseconds=1)
            ).result(60)
        with Consumer(name, bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            found = [row["price"] for row in read(consumer, 3)]
        assert found == [0.5, 19.99, 19.99]


def test_a_value_that_the_newest_schema_cannot_hold_names_its_offsets(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    admin.create_topics(NewTopic("dates", schema=pa.schema([("d", pa.date32())])))
    with Producer(running.address) as producer:
        far = pa.table({"d": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())})
        producer.send_arrow("dates", far)
        producer.flush()
        admin.alter_topics(schema={"dates": pa.schema([("d", pa.timestamp("us", "UTC"))])})
        producer.send_arrow("dates", pa.table({"d": pa.array([0], pa.int32()).cast(pa.date32())}))
        producer.flush()
    with Consumer("dates", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        with pytest.raises(tailrace.TailraceError, match="offsets 0 to 0 do not fit") as caught:
            read(consumer, 1)
        consumer.seek(tailrace.TopicPartition("dates", 0), caught.value.next_offset)  # type: ignore[attr-defined]
        assert len(read(consumer, 1)) == 1


def kill(admin: Admin, role: str) -> None:
    """SIGKILL for the processes of a role."""
    for process in admin.describe_cluster()["processes"]:
        if process["name"].partition("-")[0] == role and process["pid"]:
            os.kill(process["pid"], signal.SIGKILL)


@pytest.mark.parametrize("role", ["flusher", "worker", "controller", "front"])
def test_a_kill_between_a_change_and_its_first_segment_loses_and_mixes_nothing(
    tmp_path: pathlib.Path, role: str
) -> None:
    with tailrace.embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False) as appliance:
        with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
            create(admin, "killed")
            schema, count = FIRST, 0
            for number in range(3):
                handles = []
                for _ in range(50):
                    handles.append(producer.send("killed", {"id": count, "name": "n", "old": "o"}))
                    count += 1
                schema = schema.append(field(f"c{number}", pa.int64(), default=str(number)))
                admin.alter_topics(schema={"killed": schema})
                kill(admin, role)
                for _ in range(50):
                    handles.append(producer.send("killed", {"id": count, "name": "n", "old": "o"}))
                    count += 1
                for handle in handles:
                    handle.result(60)
            assert len(admin.describe_schemas("killed")) == 4
        expected = {"name": "n", "old": "o", "c0": 0, "c1": 1, "c2": 2}
        with Consumer(
            "killed", bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            found = read(consumer, count)
        assert [row.pop("id") for row in found] == list(range(count))
        assert all(row == expected for row in found[-50:])
        scanned = tailrace.scan("killed", appliance.address, columns=["id"]).read_all()
        assert scanned.column("id").to_pylist() == list(range(count))
        run(appliance, "log", "verify", str(tmp_path / "data"))


def test_an_older_client_gets_an_error_for_an_altered_topic_and_no_wrong_values(
    running: EmbeddedAppliance, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(running, admin, "for-old-clients")
    create(admin, "unaltered")
    with Producer(running.address) as producer:
        producer.send("unaltered", OLD_ROW).result(60)
    monkeypatch.setitem(API_VERSIONS, Api.FETCH, (2, 3))
    with Consumer("unaltered", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert read(consumer, 1) == [OLD_ROW]
    with (
        Consumer(
            "for-old-clients", bootstrap=running.address, auto_offset_reset="earliest"
        ) as consumer,
        pytest.raises(tailrace.TailraceError) as caught,
    ):
        read(consumer, 1)
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_a_data_directory_of_the_version_before_is_taken_and_altered(
    tmp_path: pathlib.Path,
) -> None:
    data = str(tmp_path / "data")
    with (
        tailrace.embedded(data_dir=data, auto_create_topics=False) as appliance,
        Admin(appliance.address) as client,
        Producer(appliance.address) as producer,
    ):
        create(client, "before")
        producer.send("before", OLD_ROW).result(60)
    catalog = sqlite3.connect(f"{data}/coordinator.db", isolation_level=None)
    catalog.executescript(
        """
        DROP TABLE schema_versions;
        CREATE TABLE former (schema_id INTEGER PRIMARY KEY, message BLOB NOT NULL UNIQUE) STRICT;
        INSERT INTO former SELECT * FROM schemas;
        DROP TABLE schemas;
        ALTER TABLE former RENAME TO schemas;
        UPDATE meta SET value = 6 WHERE name = 'schema_version';
        """
    )
    catalog.close()
    with (
        tailrace.embedded(data_dir=data, auto_create_topics=False) as appliance,
        Admin(appliance.address) as client,
        Producer(appliance.address) as producer,
        Consumer("before", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        (version,) = client.describe_schemas("before")
        assert (version.schema, version.author) == (FIRST, "")
        client.alter_topics(schema={"before": SECOND})
        producer.send("before", NEW_ROW).result(60)
        assert read(consumer, 2)[1:] == [NEW_ROW]
        scanned = tailrace.scan("before", appliance.address).read_all()
        assert scanned.to_pylist() == [OLD_AS_SECOND, NEW_ROW]


def test_a_group_goes_on_over_a_change_and_commits_what_it_has_read(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "grouped", 2)
    with Producer(running.address) as producer:
        with Consumer(
            "grouped", bootstrap=running.address, group_id="schemas", auto_offset_reset="earliest"
        ) as consumer:
            for partition in (0, 1):
                producer.send("grouped", OLD_ROW, partition=partition).result(60)
            assert read(consumer, 2) == [OLD_ROW] * 2
            admin.alter_topics(schema={"grouped": SECOND})
            for partition in (0, 1):
                producer.send("grouped", NEW_ROW, partition=partition).result(60)
            assert read(consumer, 2) == [NEW_ROW] * 2
        producer.send("grouped", OLD_ROW, partition=0).result(60)
        with Consumer("grouped", bootstrap=running.address, group_id="schemas") as consumer:
            assert read(consumer, 1) == [OLD_AS_SECOND]


def test_a_transaction_over_a_change_is_whole(running: EmbeddedAppliance, admin: Admin) -> None:
    create(admin, "transacted")
    with Producer(running.address, transactional_id="over-a-change", linger_ms=60_000) as producer:
        producer.init_transactions()
        for is_kept in (True, False):
            producer.begin_transaction()
            producer.send("transacted", OLD_ROW)
            producer.flush()
            producer.send("transacted", OLD_ROW)
            version = admin.describe_schemas("transacted")[-1]
            column = f"c{len(admin.describe_schemas('transacted'))}"
            newer = version.schema.append(pa.field(column, pa.int8()))
            admin.alter_topics(schema={"transacted": newer})
            producer.send("transacted", {**OLD_ROW, column: 1})
            if is_kept:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    rows = tailrace.scan("transacted", running.address).read_all().to_pylist()
    assert [(row["c1"], row["c2"]) for row in rows] == [(None, None), (None, None), (1, None)]
    with Consumer(
        "transacted", bootstrap=running.address, auto_offset_reset="earliest"
    ) as consumer:
        assert len(read(consumer, 3)) == 3


def test_hash_slots_that_move_while_the_schema_changes_keep_all_rows(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "slotted", partitioner="hash_slots")
    with Producer(running.address, linger_ms=60_000) as producer:
        for number in range(200):
            producer.send("slotted", {**OLD_ROW, "id": number}, key=f"k{number}".encode())
            if number == 50:
                producer.flush()
            elif number == 100:
                admin.alter_topics(schema={"slotted": SECOND})
                admin.create_partitions({"slotted": 3})
        producer.flush()
    rows = tailrace.scan("slotted", running.address, columns=["id", "_partition"]).read_all()
    assert sorted(rows.column("id").to_pylist()) == list(range(200))
    assert set(rows.column("_partition").to_pylist()) == {0, 1, 2}


def test_times_are_found_in_batches_of_every_version(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    time_type = pa.timestamp("us", "UTC")
    first = pa.schema([("timestamp", time_type), ("n", pa.int8())])
    second = pa.schema([("more", pa.utf8()), ("n", pa.int64()), ("timestamp", time_type)])
    admin.create_topics(NewTopic("timed", schema=first))
    moments = [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in range(1, 9)]
    with Producer(running.address) as producer:
        for schema, part in ((first, moments[:4]), (second, moments[4:])):
            if schema is second:
                admin.alter_topics(schema={"timed": second})
            rows = [{"timestamp": moment, "n": moment.day, "more": "m"} for moment in part]
            table = pa.Table.from_pylist(
                [{name: row[name] for name in schema.names} for row in rows], schema=schema
            )
            producer.send_arrow("timed", table)
            producer.flush()
    key = tailrace.TopicPartition("timed", 0)
    with Consumer(bootstrap=running.address) as consumer:
        for offset, moment in enumerate(moments):
            found = consumer.offsets_for_times({key: int(moment.timestamp() * 1000)})[key]
            assert found is not None
            assert found.offset == offset
    for start, count in ((moments[2], 6), (moments[6], 2)):
        assert tailrace.scan("timed", running.address, start=start).read_all().num_rows == count


def test_delays_that_are_enabled_after_a_change_take_rows_of_the_versions_before(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    create(admin, "enabled-later")
    admin.alter_topics(schema={"enabled-later": SECOND})
    admin.alter_topics({"enabled-later": {"delay.enabled": True}})
    now = dt.timedelta(0)
    with Producer(running.address) as producer:
        producer.send("enabled-later", OLD_ROW, deliver_after=now).result(60)
        table = pa.table({name: [OLD_ROW[name]] for name in OLD_ROW})
        producer.send_arrow("enabled-later", table, deliver_after=now).result(60)
        table = table.append_column("when", pa.array([now]))
        producer.send_arrow("enabled-later", table, delay_column="when").result(60)
    with Consumer(
        "enabled-later", bootstrap=running.address, auto_offset_reset="earliest"
    ) as consumer:
        assert read(consumer, 3) == [OLD_AS_SECOND] * 3
