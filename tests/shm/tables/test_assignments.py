"""Assignments: both directions, and what a topic's partitions share in memory."""

from __future__ import annotations

from dataclasses import replace

from shm.messages.lane_messages import Assignment
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.arrow_metadata import read_schema
from tests.kit.log_files.logs import assignment

GIVEN = {"retention.ms": -1, "delay.enabled": True}


def decoded(number: int, **changes: object) -> Assignment:
    item = replace(assignment(number), given=dict(GIVEN), created_us=5, **changes)  # type: ignore[arg-type]
    again = Assignment.decode(item.encode())
    assert again == item
    return again


def test_partitions_of_a_topic_share_schema_layout_and_settings() -> None:
    first, second = decoded(0), decoded(1)
    assert first.schema is second.schema
    assert first.settings is second.settings
    assert first.given is second.given
    assert read_schema(first.schema) is read_schema(bytes(bytearray(second.schema)))


def test_settings_that_are_equal_as_numbers_and_of_other_types_are_not_shared() -> None:
    one, true = decoded(0, settings={"a": 1}), decoded(0, settings={"a": True})
    assert type(one.settings["a"]) is int
    assert type(true.settings["a"]) is bool


def test_partition_files_share_the_schema_of_their_topic() -> None:
    files = [
        PartitionMetadata.decode(
            PartitionMetadata("t", number, bytes(16), {1: b"schema" * 100}).encode()
        )
        for number in range(2)
    ]
    assert files[0] is not None
    assert files[1] is not None
    assert files[0].schemas[1] is files[1].schemas[1]
