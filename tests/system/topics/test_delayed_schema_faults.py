"""Faults around an alteration of the schema of a topic with delayed records: killed processes, lost
files, values that do not fit, and requests of other programs.
"""

from __future__ import annotations

import base64
import os
import pathlib
import signal
import threading
from datetime import UTC, date, datetime, timedelta
from typing import Any

import orjson
import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer, RecordFuture, Recurrence
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidSchemaError, SchemaMismatchError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.directory.partition_metadata import PARTITION_FILE
from tailrace.format.schema import delay_schema, to_message
from tailrace.protocol.frame import Api
from tests.kit.appliances.altered_topics import (
    FIRST,
    HOUR,
    NEW_ROW,
    OLD_AS_SECOND,
    OLD_AS_THIRD,
    OLD_ROW,
    SECOND,
    THIRD,
    consumer_of,
    create_delayed,
    due_now,
    read,
)
from tests.kit.appliances.backups import back_up, restore
from tests.kit.hosts.wall_clock import WallClock
from tests.kit.processes import children, wait_until

DATABASE = "coordinator.db"


def pending_in_all_versions(address: str, topic: str) -> None:
    with Admin(address) as admin, Producer(address) as producer:
        create_delayed(admin, topic)
        for schema in (FIRST, SECOND, THIRD):
            if schema is not FIRST:
                admin.alter_topics(schema={topic: schema})
            producer.send(topic, OLD_ROW, deliver_after=HOUR).result(60)
            producer.send(topic, OLD_ROW, repeat=Recurrence.every(HOUR)).result(60)


def check_all_come(address: str, topic: str) -> None:
    """All six rows come, after one more alteration."""
    with Admin(address) as admin, Producer(address) as producer:
        wait_until(lambda: len(list(admin.list_delays(topic))) == 6, "all of them wait")
        admin.alter_topics(schema={topic: pa.schema([*THIRD, ("more", pa.utf8())])})
        producer.send(topic, OLD_ROW, deliver_after=HOUR).result(60)
        due_now(admin, topic)
        with consumer_of(address, topic) as consumer:
            assert read(consumer, 7) == [{**OLD_AS_THIRD, "more": None}] * 7


def test_a_backup_a_lost_catalog_and_the_bin_keep_pending_rows_of_all_versions(
    tmp_path: pathlib.Path,
) -> None:
    data, target, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    with tailrace.embedded(auto_create_topics=False, data_dir=str(data)) as appliance:
        pending_in_all_versions(appliance.address, "kept")
        back_up(data, target)
        check_all_come(appliance.address, "kept")
    restore(target, restored)
    (restored / DATABASE).unlink()
    with tailrace.embedded(
        auto_create_topics=False,
        data_dir=str(restored),
        settings={"topic.delete.retention.ms": "3600000"},
    ) as appliance:
        with Admin(appliance.address) as admin:
            admin.delete_topics("kept")
            admin.undelete_topic("kept", "returned")
        check_all_come(appliance.address, "returned")


def test_a_delay_log_that_lost_an_alteration_gets_it_by_the_next_one(
    tmp_path: pathlib.Path,
) -> None:
    """Its files were restored from before the alteration, and the catalog was lost."""
    with (
        tailrace.embedded(auto_create_topics=False, data_dir=str(tmp_path)) as appliance,
        Admin(appliance.address) as admin,
        Producer(appliance.address) as producer,
    ):
        create_delayed(admin, "behind")
        producer.send("behind", OLD_ROW, deliver_after=HOUR).result(60)
        file = tmp_path / "behind@delay-0" / PARTITION_FILE
        before = file.read_bytes()
        admin.alter_topics(schema={"behind": SECOND})
    file.write_bytes(before)
    (tmp_path / DATABASE).unlink()
    with (
        tailrace.embedded(auto_create_topics=False, data_dir=str(tmp_path)) as appliance,
        Admin(appliance.address) as admin,
        Producer(appliance.address) as producer,
    ):
        with pytest.raises(SchemaMismatchError, match="'title'"):
            producer.send("behind", NEW_ROW, deliver_after=timedelta(0)).result(
                60
            )  # not as a row of the first version
        admin.alter_topics(schema={"behind": SECOND})
        producer.send("behind", NEW_ROW, deliver_after=HOUR).result(60)
        wait_until(lambda: len(list(admin.list_delays("behind"))) == 2, "both wait")
        due_now(admin, "behind")
        with consumer_of(appliance.address, "behind") as consumer:
            assert sorted(read(consumer, 2), key=str) == [OLD_AS_SECOND, NEW_ROW]


@pytest.mark.parametrize(
    "name", ["tr-controller-0", "tr-scheduler-0", "tr-flusher-0", "tr-worker-0", "tr-front-0"]
)
def test_a_process_killed_beside_an_alteration_loses_and_repeats_no_delayed_row(
    running: EmbeddedAppliance, admin: Admin, name: str
) -> None:
    topic = f"killed-{name}"
    create_delayed(admin, topic)
    futures: list[RecordFuture] = []

    def send(producer: Producer, count: int) -> None:
        for _ in range(count):
            row = {**OLD_ROW, "id": len(futures)}
            futures.append(producer.send(topic, row, deliver_after=timedelta(seconds=1)))
        producer.flush()

    with Producer(running.address) as producer:
        send(producer, 200)
        for schema in (SECOND, THIRD):
            before = children(running)[name]
            altering = threading.Thread(target=alter_until_done, args=(admin, topic, schema))
            altering.start()
            os.kill(before, signal.SIGKILL)
            send(producer, 100)
            altering.join()
            wait_until(lambda before=before: children(running).get(name, before) != before, name)  # type: ignore[misc]
            send(producer, 100)
        for future in futures:
            future.result(60)
    with consumer_of(running.address, topic) as consumer:
        found = read(consumer, len(futures))
    assert sorted(row["id"] for row in found) == list(range(len(futures)))
    assert [len(version.schema) for version in admin.describe_schemas(topic)] == [3, 4, 5]


def alter_until_done(admin: Admin, topic: str, schema: pa.Schema) -> None:
    while True:
        try:
            return admin.alter_topics(schema={topic: schema})
        except TailraceError as error:
            if not error.retriable:
                raise


def test_what_the_delay_log_has_no_room_for_changes_neither(
    running: EmbeddedAppliance, admin: Admin
) -> None:
    """The versions of a delay log have three columns more, so they are full before the topic's."""
    create_delayed(admin, "full")
    with Producer(running.address) as producer:
        producer.send("full", OLD_ROW, deliver_after=HOUR).result(60)
        count, width, refusal = 1, 60, ""
        while "full@delay" not in refusal:
            columns = [(f"{'x' * 900}{count}-{n}", pa.int8()) for n in range(width)]
            try:
                admin.alter_topics(schema={"full": pa.schema([*FIRST, *columns])})
                count += 1
            except InvalidSchemaError as error:
                refusal, width = str(error), width - 1
        assert len(admin.describe_schemas("full")) == count
        producer.send("full", OLD_ROW, deliver_after=HOUR).result(60)
        due_now(admin, "full")
        with consumer_of(running.address, "full") as consumer:
            assert [row["id"] for row in read(consumer, 2)] == [1, 1]


@pytest.mark.parametrize(
    ("delayed", "reason"),
    [
        (None, "delay_schema"),
        ("AAAA", "Arrow"),
        (FIRST, "@due_us"),
        (delay_schema(FIRST), "@due_us"),
        (delay_schema(pa.schema([field.remove_metadata() for field in SECOND])), "tailrace.alias"),
    ],
)
def test_a_schema_of_the_delay_log_that_is_not_the_topics_is_refused(
    running: EmbeddedAppliance, admin: Admin, delayed: object, reason: str
) -> None:
    """Other programs than the SDK send what they like."""
    if "bent" not in admin.list_topics():
        create_delayed(admin, "bent")
    item: dict[str, Any] = {"name": "bent", "schema": base64.b64encode(to_message(SECOND)).decode()}
    if delayed is not None:
        message = delayed if isinstance(delayed, str) else base64.b64encode(to_message(delayed))
        item["delay_schema"] = message if isinstance(message, str) else message.decode()
    connection = Connection(running.address, "other")
    try:
        request = orjson.dumps({"topics": [item], "validate_only": False})
        answer = call_now(connection, Api.ALTER_TOPICS, [request], 40_000)
    finally:
        connection.close()
    (result,) = orjson.loads(answer.body[0])["results"]
    assert result["code"] == ErrorCode.INVALID_SCHEMA
    assert reason in result["message"]
    assert len(admin.describe_schemas("bent")) == 1


def test_a_value_that_the_present_type_cannot_hold_is_set_aside_alone(
    tmp_path: pathlib.Path,
) -> None:
    days = pa.schema([("n", pa.int32()), ("day", pa.date32())])
    times = pa.schema([("n", pa.int32()), ("day", pa.timestamp("us", "UTC"))])
    never = 2**31 - 1
    rows = [pa.array([1, 2, 3], pa.int32()), pa.array([0, never, 1], pa.int32()).view(pa.date32())]
    clock, data = WallClock(tmp_path), tmp_path / "data"
    with clock.installed():
        appliance = tailrace.embedded(auto_create_topics=False, data_dir=str(data)).start()
    try:
        with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
            admin.create_topics(NewTopic("dates", 1, {"delay.enabled": True}, schema=days))
            batch = pa.RecordBatch.from_arrays(rows, schema=days)
            producer.send_arrow("dates", batch, deliver_after=HOUR).result(60)
            admin.alter_topics(schema={"dates": times})
            waiting = [delay.delay_id for delay in admin.list_delays("dates")]
            refused = [
                outcome
                for outcome in admin.reschedule_delays(
                    dict.fromkeys(waiting, datetime.now(UTC) + 2 * HOUR)
                ).values()
                if not isinstance(outcome, str)
            ]
            assert len(refused) == 1
            assert "column 'day' has a value" in str(refused[0])
            assert len(list(admin.list_delays("dates"))) == 3, "the refused one waits as it did"
            clock.jump(3 * 3_600)
            with consumer_of(appliance.address, "dates") as consumer:
                found = read(consumer, 2)
            assert [(row["n"], row["day"].date()) for row in found] == [
                (1, date(1970, 1, 1)), (3, date(1970, 1, 2)),
            ]  # fmt: skip
            directory = data / "dates@delay-0"
            wait_until(lambda: bool([*directory.glob("*.refused")]), "it is set aside")
            (file,) = directory.glob("*.refused")
            kept = pa.ipc.open_stream(file.read_bytes()).read_next_batch()
            assert kept.schema.field("day").type == pa.date32()
            assert kept.column("n").to_pylist() == [2]
    finally:
        appliance.stop()
