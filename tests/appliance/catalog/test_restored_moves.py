"""Topics that moved when the catalog was lost: a topic and its delay log are in one directory."""

from __future__ import annotations

import pytest

from appliance.catalog.log_dir_scan import FoundPartition
from appliance.catalog.moved_partitions import MovedPartition, Stage
from appliance.catalog.restored_topics import restored_topics
from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from appliance.control.moves.moving_partition import taken_up
from tailrace.format.directory.partition_metadata import Decision, PartitionMetadata

TOPIC_ID, LOG_ID = b"t" * 16, b"d" * 16
Place = tuple[int, int, bool]
"""(data directory, version, in the bin)."""


def found(name: str, places: list[Place]) -> list[FoundPartition]:
    is_log = name.endswith("@delay")
    topic_id = LOG_ID if is_log else TOPIC_ID
    schemas = {1: DEFAULT_DELAY_SCHEMA_MESSAGE if is_log else DEFAULT_SCHEMA_MESSAGE}
    owner = TOPIC_ID.hex() if is_log else ""
    given = {} if is_log else {"delay.enabled": True}
    return [
        FoundPartition(
            f"/{data_dir}/{name}-0", name, 0, data_dir,
            PartitionMetadata(
                name, 0, topic_id, schemas,
                decision=Decision(version, 1, 1, False, 1, owner, given),
            ),
            True, is_in_bin,
        )
        for data_dir, version, is_in_bin in places
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "log", "expected"),
    [
        ([(0, 2, False), (1, 2, True)], [(0, 2, False), (1, 2, True)], 0),
        ([(0, 2, False), (1, 3, False)], [(0, 2, False), (1, 2, True)], 0),
        ([(0, 2, False), (1, 2, True)], [(0, 2, False), (1, 3, False)], 0),
        ([(0, 2, False), (1, 3, False)], [(0, 2, False), (1, 3, False)], 1),
        ([(1, 3, False)], [(0, 2, False), (1, 3, False)], 1),
        ([(0, 4, False)], [(0, 4, False), (1, 3, False)], 0),
    ],
    ids=["copied", "topic opened", "log opened", "both opened", "topic left", "gone back"],
)
def test_topic_and_delay_log_are_taken_where_both_were_opened(
    topic: list[Place], log: list[Place], expected: int
) -> None:
    restored = restored_topics([*found("orders", topic), *found("orders@delay", log)], [], 16, 2, 1)
    rows = {each.name: [row.data_dir for row in each.partitions] for each in restored.topics}
    assert rows == {"orders": [expected], "orders@delay": [expected]}


def test_a_successor_takes_a_topic_and_its_delay_log_up_as_one_move() -> None:
    rows = [
        MovedPartition(topic_id, partition, name, 1, slot, Stage.LEFT)
        for slot, (topic_id, name, partition) in enumerate(
            [(TOPIC_ID, "orders", 0), (b"o" * 16, "other", 0), (LOG_ID, "orders@delay", 0)]
        )
    ]
    moves = taken_up(rows, 7)
    assert [[part.name for part in each.parts] for each in moves] == [
        ["orders", "orders@delay"],
        ["other"],
    ]
    assert {(each.state, each.is_opened) for each in moves} == {("arriving", False)}
