"""Making a topic and reading it whole, by the SDK."""

from __future__ import annotations

import base64
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Record
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.schema import DEFAULT_SCHEMA
from tests.kit.batches import TOPIC_ID


def create(
    appliance: EmbeddedAppliance,
    name: str,
    partitions: int = 1,
    schema: object = None,
    **configs: object,
) -> None:
    """A topic; settings with underscores for dots."""
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic(
                    name, partitions, {k.replace("_", "."): v for k, v in configs.items()}, schema
                )
            ]
        )


def read_all(appliance: EmbeddedAppliance, name: str, count: int) -> list[Record]:
    """The first `count` records of a topic, which has no more."""
    records: list[Record] = []
    with Consumer(name, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(records) < count:
            some = consumer.poll(timeout_ms=60_000, max_records=10_000)
            assert some, f"only {len(records)} of {count} records came"
            records += some
        assert consumer.poll(timeout_ms=0) == []
    return records


def described(topic_id: bytes = TOPIC_ID, partitions: int = 1) -> dict[str, Any]:
    schema = base64.b64encode(DEFAULT_SCHEMA.serialize().to_pybytes()).decode()
    return {
        "name": "t", "topic_id": topic_id.hex(), "version": 1, "typed": False, "schema_id": 1,
        "schema": schema, "settings": {},
        "partitions": [{}] * partitions, "code": 0,
    }  # fmt: skip
