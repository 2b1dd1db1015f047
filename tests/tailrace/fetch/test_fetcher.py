"""Fetch requests of a consumer: at most what it may buffer, and every partition in its turn. An
appliance of a dozen lines responds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.config.settings import ConsumerSettings
from tailrace.core.error_codes import ErrorCode
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import Fetcher
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import FetchedEntry, FetchRequest
from tailrace.protocol.session import Response
from tests.kit.batches import SEED, TOPIC_ID, make_batch, stamped

BATCH_BYTES = len(make_batch(1))
INFO: Any = SimpleNamespace(topic_id=TOPIC_ID, seeds=[0] * 64)


class Appliance:
    """Every partition has records without end, a batch for each; an answer is filled from its first
    partition on, as a front's is.
    """

    is_ready = True
    session = SimpleNamespace(generation=1)

    def __init__(self) -> None:
        self.asked: list[tuple[FetchRequest, Any]] = []

    def version(self, _api: object) -> int:
        return fetch_messages.FETCH_VERSION

    def request(self, _api: object, body: list[bytes], on_response: Any) -> bool:
        self.asked.append((fetch_messages.decode_fetch(body[0]), on_response))
        return True

    def answer(self) -> None:
        """The oldest request."""
        request, on_response = self.asked.pop(0)
        entries, data = [], b""
        for requested in request.entries:
            given = b""
            while (
                len(data) + len(given) + BATCH_BYTES <= request.max_bytes
                and len(given) + BATCH_BYTES <= requested.max_bytes
            ):
                given += stamped(make_batch(1), requested.offset + len(given) // BATCH_BYTES)
            entries.append(
                FetchedEntry(
                    requested.topic_id, requested.partition, 0, 0, len(given), 1 << 40, 0, -1
                )
            )
            data += given
        on_response(Response(1, 1, ErrorCode.OK, [fetch_messages.encode_fetched(entries), data]))


def reader(
    partition_count: int, **settings: Any
) -> tuple[Appliance, Fetcher, list[PartitionPosition], ConsumerSettings]:
    appliance = Appliance()
    made = ConsumerSettings(bootstrap_servers="tcp://127.0.0.1:1", **settings)
    cursors = [
        PartitionPosition(TopicPartition("t", number), INFO) for number in range(partition_count)
    ]
    for cursor in cursors:
        cursor.seek(0)
    connection: Any = appliance
    return appliance, Fetcher(connection, made, lambda: 0), cursors, made


def test_an_answer_that_has_room_for_few_partitions_is_for_each_in_its_turn() -> None:
    appliance, fetcher, cursors, _ = reader(
        7, fetch_max_bytes=2 * BATCH_BYTES + 500, max_partition_fetch_bytes=BATCH_BYTES + 500
    )
    fed: list[set[int]] = []
    for _ in range(7):
        assert fetcher.begin(cursors)
        appliance.answer()
        fed.append({cursor.key.partition for cursor in cursors if cursor.buffered})
        for cursor in cursors:
            cursor.buffered.clear()
            cursor.buffered_bytes = 0
    assert fed == [{0, 1}, {2, 3}, {4, 5}, {6, 0}, {1, 2}, {3, 4}, {5, 6}]


def test_a_partition_that_is_paused_with_much_buffered_keeps_none_from_being_read() -> None:
    appliance, fetcher, cursors, _ = reader(
        2, fetch_max_bytes=4 * BATCH_BYTES, max_partition_fetch_bytes=4 * BATCH_BYTES
    )
    cursors[1].pause(by_user=True)
    assert fetcher.begin(cursors)
    appliance.answer()
    assert not fetcher.begin(cursors), "there is as much as may be kept"
    cursors[0].pause(by_user=True)
    cursors[1].pause(by_user=False)
    assert fetcher.begin(cursors)


@given(
    st.integers(1, 9),
    st.integers(2, 8),
    st.integers(2, 8),
    st.lists(st.integers(0, 8), max_size=60),
)
def test_with_one_request_at_a_time_less_than_twice_fetch_max_bytes_is_kept(
    partition_count: int, most: int, most_of_one: int, taken: list[int]
) -> None:
    appliance, fetcher, cursors, settings = reader(
        partition_count,
        fetch_max_bytes=most * BATCH_BYTES + 300,
        max_partition_fetch_bytes=most_of_one * BATCH_BYTES + 300,
    )
    for number in taken:
        if fetcher.begin(cursors):
            assert not fetcher.begin(cursors), "each partition is asked for once"
            appliance.answer()
        assert 0 < sum(cursor.buffered_bytes for cursor in cursors) < 2 * settings.fetch_max_bytes
        cursor = cursors[number % partition_count]
        if cursor.buffered:
            data, cursor.position = cursor.buffered.popleft()
            cursor.buffered_bytes -= len(data)


@pytest.mark.parametrize("is_buffered", [False, True])
def test_what_was_left_out_is_asked_for_and_committed_in_the_epoch_in_which_it_was_read(
    is_buffered: bool,
) -> None:
    """Aborted records behind a crash are of a later epoch than the last batch before them. With
    that one's epoch, the front would call what lies behind them lost.
    """
    appliance, fetcher, (cursor,), settings = reader(1)
    info: Any = SimpleNamespace(topic_id=TOPIC_ID, seeds=[SEED], schema=DEFAULT_SCHEMA, typed=False)
    cursor.info = info
    given = stamped(make_batch(1), 0, leader_epoch=2) if is_buffered else b""
    assert fetcher.begin([cursor])
    _, on_response = appliance.asked.pop()
    entry = FetchedEntry(TOPIC_ID, 0, 0, 5, len(given), 9, 0, 7, 9, fetch_messages.FETCHED_GAPS)
    on_response(Response(1, 1, ErrorCode.OK, [fetch_messages.encode_fetched([entry]), given]))
    if is_buffered:
        assert cursor.take(settings) is not None
    assert (cursor.position, cursor.taken_epoch) == (7, 5)
    assert fetcher.begin([cursor])
    (asked,) = appliance.asked[0][0].entries
    assert (asked.offset, asked.leader_epoch) == (7, 5)
