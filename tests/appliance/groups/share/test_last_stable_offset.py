"""Groups and open transactions: reading, lag and queues end at the last stable offset, commits and
hand-overs reach to the high watermark.
"""

from __future__ import annotations

import pathlib
from typing import Any

from appliance.groups.base.messages import LogExtent
from appliance.groups.base.topic_image import CatalogTopicImage
from shm.memory.layout import SlotState
from shm.tables.partition_table import PartitionState
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, settle
from tests.appliance.groups.share.world import World
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.logs import assignment


def described(bench: Bench) -> dict[str, Any]:
    rows = bench.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"]
    (row,) = [row for row in rows if row["partition"] == 0]
    return dict(row)


def test_lag_ends_at_the_last_stable_offset_and_the_rest_is_shown_only_when_it_differs(
    bench: Bench,
) -> None:
    one = Client(bench)
    settle(one)
    one.commit(["orders", 0, 400])
    assert "high_watermark" not in described(bench)
    key = bench.topics.id_of("orders"), 0
    bench.topics.ends[key], bench.topics.high_watermarks[key] = 600, 1_000
    row = described(bench)
    assert (row["end"], row["high_watermark"], row["lag"]) == (600, 1_000, 200)


def test_a_reader_of_uncommitted_records_may_commit_beyond_the_last_stable_offset(
    bench: Bench,
) -> None:
    one = Client(bench)
    settle(one)
    key = bench.topics.id_of("orders"), 0
    bench.topics.ends[key], bench.topics.high_watermarks[key] = 600, 1_000
    assert one.commit(["orders", 0, 900]) == []
    assert described(bench)["lag"] == 0
    ((_, _, code, _),) = one.commit(["orders", 0, 1_001])
    assert code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_queue_acquires_nothing_of_an_open_transaction_and_keeps_what_it_has(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path)
    topic = world.topics.make("t", end=10)
    world.topics.high_watermarks[topic, 0] = 20
    member = world.join("g", "m", "t", offset_reset="earliest")
    assert member.acquire(100)["acquired"] == [[topic, 0, 0, 9, 1]]
    assert member.acquire(100) == {
        "acquired": [],
        "dead": [],
        "ends": [[topic, 0, 10]],
        "lock_ms": 0,
        "refused": [],
    }
    world.topics.ends[topic, 0] = 20
    assert member.acquire(100)["acquired"] == [[topic, 0, 10, 19, 1]]
    # A start after a loss of power: what is stable may be less for a while, the log is not.
    world.topics.ends[topic, 0] = 15
    world.restart()
    again = world.join("g", "n", "t")
    assert again.acquire(100)["acquired"] == []
    world.close()


def test_a_group_that_begins_at_the_end_begins_before_an_open_transaction(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path)
    topic = world.topics.make("t", end=10)
    world.topics.high_watermarks[topic, 0] = 20
    assert world.join("g", "m", "t").acquire(5)["ends"] == [[topic, 0, 10]]
    world.close()


def test_the_topic_image_reads_both_offsets_of_the_partition_table() -> None:
    class Table:
        def read(self, _slot: int) -> PartitionState:
            state = PartitionState.empty(TOPIC_ID, 0, SlotState.ONLINE, 1)
            return state._replace(
                log_start_offset=3, last_stable_offset=5, high_watermark=9, log_end_offset=11
            )

    image = CatalogTopicImage([Table()])  # type: ignore[list-item]
    image.apply(assignment())
    topic_id = TOPIC_ID.hex()
    assert image.extent(topic_id, 0) == LogExtent(3, 5, 9)
    assert (image.end_offset(topic_id, 0), image.high_watermark(topic_id, 0)) == (5, 9)
    assert image.extent(topic_id, 1) is None
