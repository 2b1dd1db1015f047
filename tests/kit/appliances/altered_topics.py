"""Versions of a typed topic's schema, rows of them, and what tests of them do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from tailrace import Admin, Consumer, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance

HOUR = timedelta(hours=1)


def field(name: str, kind: pa.DataType, **metadata: str) -> pa.Field:
    return pa.field(
        name, kind, metadata={f"tailrace.{key}": value for key, value in metadata.items()}
    )


FIRST = pa.schema([("id", pa.int32()), ("name", pa.utf8()), ("old", pa.utf8())])
SECOND = pa.schema(
    [
        field("id", pa.int64()),  # widened
        field("title", pa.utf8(), alias="name"),  # renamed; `old` is dropped
        field("price", pa.float64(), default="1.5"),
        field("note", pa.utf8()),
    ]
)
THIRD = pa.schema(
    [("note", pa.utf8()), ("price", pa.float64()), ("id", pa.int64()), ("title", pa.utf8()),
     ("old", pa.utf8())]
)  # fmt: skip
OLD_ROW = {"id": 1, "name": "a", "old": "x"}
NEW_ROW = {"id": 1 << 40, "title": "b", "price": 2.0, "note": "n"}
OLD_AS_SECOND = {"id": 1, "title": "a", "price": 1.5, "note": None}
OLD_AS_THIRD = {"note": None, "price": 1.5, "id": 1, "title": "a", "old": None}


def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += [record.value for record in consumer.poll(10_000)]
    return found


def frames(consumer: Consumer, count: int) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    while sum(batch.num_rows for batch in found) < count:
        found += [batch.batch for batch in consumer.poll_arrow(10_000)]
    return found


def batch_reader(running: EmbeddedAppliance, topic: str) -> Consumer:
    return Consumer(
        topic, bootstrap=running.address, auto_offset_reset="earliest", reader_schema="batch"
    )


def create_delayed(admin: Admin, name: str, schema: pa.Schema = FIRST, **configs: Any) -> None:
    admin.create_topics(NewTopic(name, 1, {"delay.enabled": True, **configs}, schema=schema))


def consumer_of(address: str, topic: str, **options: Any) -> Consumer:
    return Consumer(topic, bootstrap=address, auto_offset_reset="earliest", **options)


def due_now(admin: Admin, topic: str) -> None:
    """Make everything that waits due."""
    waiting = [delay.delay_id for delay in admin.list_delays(topic)]
    now = datetime.now(UTC)
    for outcome in admin.reschedule_delays(dict.fromkeys(waiting, now)).values():
        assert isinstance(outcome, str), outcome
