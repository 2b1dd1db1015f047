"""Decisions of a streaming read, without Spark and without an appliance: options, positions,
limits, tasks, losses.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.stream.data_loss import Losses
from spark_bridge.stream.offsets import Delay, Position, decode, limited
from spark_bridge.stream.options import parse_stream_options
from spark_bridge.stream.progress import behind
from spark_bridge.stream.tasks import TASK_BYTES, divided
from spark_bridge.stream.topic_view import LogExtent, View
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSettingError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.scan_plan import PartitionRange

ID, OTHER_ID = b"\1" * 16, b"\2" * 16
KEYS = [TopicPartition("t", number) for number in range(4)]


class Info:
    """As much of a TopicInfo as is asked for."""

    def __init__(self, topic_id: bytes) -> None:
        self.topic_id = topic_id


def view(topic_id: bytes = ID, **held: tuple[int, int]) -> View:
    """View of topic "t": p0=(beginning, end)."""
    infos: Any = {"t": Info(topic_id)} if held else {}
    return View(
        infos,
        {
            TopicPartition("t", int(name[1:])): LogExtent(*bounds, 100 * (bounds[1] - bounds[0]))
            for name, bounds in held.items()
        },
    )


# ---- options -------------------------------------------------------------------------------------


def test_a_stream_begins_at_the_end_and_fails_on_data_loss_unless_it_is_told_otherwise() -> None:
    options = parse_stream_options({"subscribe": "t"})
    assert (
        options.read.starting,
        options.read.fail_on_data_loss,
        options.max_offsets,
        options.max_bytes,
    ) == ("latest", True, None, None)
    told = parse_stream_options(
        {"subscribe": "t", "STARTINGOFFSETS": "earliest", "failondataloss": "False"}
    )
    assert (told.read.starting, told.read.fail_on_data_loss) == ("earliest", False)


def test_limits_are_read_with_their_units() -> None:
    options = parse_stream_options(
        {
            "subscribe": "t",
            "maxOffsetsPerTrigger": "500",
            "minOffsetsPerTrigger": "50",
            "maxTriggerDelay": "2min",
            "maxBytesPerTrigger": "64MiB",
        }
    )
    assert (
        options.max_offsets,
        options.min_offsets,
        options.max_trigger_delay_ms,
        options.max_bytes,
    ) == (500, 50, 120_000, 64 << 20)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"maxOffsetPerTrigger": "5"}, "'maxoffsetpertrigger'.*did you mean maxOffsetsPerTrigger"),
    ({"failOnDataLos": "true"}, "did you mean failOnDataLoss"),
     ({"startingOfsets": "earliest"}, "did you mean startingOffsets"),
     ({"maxOffsetsPerTrigger": "many"}, "option maxOffsetsPerTrigger is 'many'"),
     ({"maxOffsetsPerTrigger": "0"}, "from 1 on"),
     ({"failOnDataLoss": "maybe"}, "takes true or false"),
     ({"maxTriggerDelay": "soon"}, "option maxTriggerDelay is 'soon'.*15m"),
     ({"maxBytesPerTrigger": "big"}, "option maxBytesPerTrigger.*64MiB"),
     ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, ("minOffsetsPerTrigger is 9 and "
                                                                  "maxOffsetsPerTrigger 8")),
     ({"endingoffsets": "latest"}, "option endingOffsets is for batch reads")],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        parse_stream_options({"subscribe": "t", **options})


# ---- positions -----------------------------------------------------------------------------------


def test_offsets_are_written_as_kafkas_source_writes_them_with_the_topics_id() -> None:
    position = Position(
        {TopicPartition("b", 0): 7, TopicPartition("a", 1): 5, TopicPartition("a", 0): 3},
        {"b": OTHER_ID, "a": ID},
    )
    assert json.dumps(position.encode()) == json.dumps(
        {"a": {"0": 3, "1": 5}, "b": {"0": 7}, "@topicIds": {"a": ID.hex(), "b": OTHER_ID.hex()}}
    )


@pytest.mark.parametrize(
    "position",
    [
        Position({}, {}),
        Position({KEYS[0]: 3}, {"t": ID}, is_first=True),
        Position({KEYS[1]: 9}, {"t": ID}, {KEYS[1]: 4}, {"t": ID}),
    ],
)
def test_a_position_comes_back_from_its_json(position: Position) -> None:
    assert decode(json.loads(json.dumps(position.encode()))) == position


@pytest.mark.parametrize(
    "text",
    [
        '{"t": {"0": 3}}', '{"t": 3, "@topicIds": {}}', '{"offset": 12}',
        '{"@topicIds": {"t": "no hex"}}', "[1]",
        '{"t": {"0": -7}, "@topicIds": {"t": "00"}}', '{"t": {"0": 1.5}, "@topicIds": {"t": "00"}}',
        ('{"other": {"0": 3}, "@topicIds": {"t": '
                                                                                                     '"00"}}'),
    ],
)  # fmt: skip
def test_the_checkpoint_of_another_source_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="the checkpoint belongs to another source"):
        decode(json.loads(text))


# ---- admission control ---------------------------------------------------------------------------

partitions = st.dictionaries(
    st.sampled_from(KEYS), st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)), min_size=1
)


@given(partitions, st.integers(1, 10**6))
def test_a_limit_is_kept_but_for_one_offset_a_partition_and_every_query_gets_on(
    sizes: dict[TopicPartition, tuple[int, int]], offsets_max: int
) -> None:
    begins = {key: begin for key, (begin, _) in sizes.items()}
    ends = {key: begin + size for key, (begin, size) in sizes.items()}
    found = limited(begins, ends, offsets_max)
    taken = {key: found[key] - begins[key] for key in found}
    assert all(0 <= taken[key] <= size for key, (_, size) in sizes.items())
    assert sum(taken.values()) <= offsets_max + len(sizes)
    assert all(taken[key] for key, (_, size) in sizes.items() if size)  # none starves
    if sum(size for _, size in sizes.values()) <= offsets_max:
        assert found == ends


def test_partitions_advance_in_proportion_to_what_they_have_left() -> None:
    begins = dict.fromkeys(KEYS[:3], 100)
    assert limited(begins, {KEYS[0]: 700, KEYS[1]: 400, KEYS[2]: 100}, 90) == {
        KEYS[0]: 160,
        KEYS[1]: 130,
        KEYS[2]: 100,
    }


def test_too_few_offsets_wait_until_the_delay_is_over() -> None:
    delay = Delay(10, 1_000)
    assert not delay.should_wait(3, 0)  # the first batch is let through
    assert delay.should_wait(3, 500)
    assert not delay.should_wait(10, 600)
    assert delay.should_wait(9, 1_599)
    assert not delay.should_wait(9, 1_600)
    assert not delay.should_wait(0, 9_000)
    assert not delay.should_wait(1, 9_000)  # nothing at all did not use the delay up


# ---- tasks ---------------------------------------------------------------------------------------


def ranges_of(*sizes: int) -> list[PartitionRange]:
    return [PartitionRange("t", ID, number, 10, 10 + size) for number, size in enumerate(sizes)]


def test_a_small_batch_of_many_partitions_is_one_task() -> None:
    assert divided(ranges_of(*[100] * 20), {}, 4) == [ranges_of(*[100] * 20)]
    assert divided([], {}, 4) == []


def test_one_large_partition_is_cut_for_all_cores_and_large_records_count() -> None:
    assert [[(r.start, r.end) for r in task] for task in divided(ranges_of(10**6), {}, 2)] == [
        [(10, 500_010)],
        [(500_010, 1_000_010)],
    ]
    assert len(divided(ranges_of(8), {("t", 0): TASK_BYTES}, 4)) == 4


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=12), st.integers(1, 8),
    st.integers(1, 40),
    st.lists(st.floats(0, 10_000), min_size=12, max_size=12),
    st.none() | st.integers(10_000, 50_000),
)  # fmt: skip
def test_tasks_hold_every_offset_once_in_order(
    sizes: list[int], most: int, least: int, averages: list[float], cap: int | None
) -> None:
    ranges = ranges_of(*sizes)
    tasks = divided(
        ranges,
        {("t", number): average for number, average in enumerate(averages)},
        most,
        least,
        cap,
    )
    if cap is None:
        assert len(tasks) <= max(most, least)
    flat = [r for task in tasks for r in task]
    joined: list[PartitionRange] = []
    for r in flat:
        assert r.start < r.end
        assert cap is None or r.end - r.start <= cap
        if joined and joined[-1].partition == r.partition:
            assert joined[-1].end == r.start
            joined[-1] = PartitionRange("t", ID, r.partition, joined[-1].start, r.end)
        else:
            joined.append(r)
    assert joined == ranges


# ---- losses --------------------------------------------------------------------------------------


def test_what_retention_took_is_named_or_counted_once() -> None:
    requested = PartitionRange("t", ID, 0, 5, 20)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"offsets 5 to 11 of t-0 were deleted .* failOnDataLoss=false"
    ):
        Losses(True).without_lost(requested, LogExtent(12, 30, 0))
    losses = Losses(False)
    for _ in range(2):  # a batch may be planned twice
        there = losses.without_lost(requested, LogExtent(12, 30, 0))
        assert (there.start, there.end) == (12, 20)
    assert losses.offsets == 7
    gone = losses.without_lost(PartitionRange("t", ID, 1, 5, 20), LogExtent(25, 30, 0))
    assert gone.start >= gone.end
    assert losses.offsets == 22


def test_a_log_that_ends_before_what_was_read_is_named() -> None:
    with pytest.raises(
        OffsetOutOfRangeError, match="t-0 ends at offset 30, and the query's checkpoint is at 40"
    ):
        Losses(True).without_lost(PartitionRange("t", ID, 0, 40, 40), LogExtent(0, 30, 0))
    there = Losses(False).without_lost(PartitionRange("t", ID, 0, 25, 40), LogExtent(0, 30, 0))
    assert (there.start, there.end) == (25, 30)


def test_another_topic_of_the_same_name_is_separated_from_a_deleted_one() -> None:
    position = Position({KEYS[0]: 3}, {"t": ID})
    with pytest.raises(UnknownTopicError, match="topic 't', which the query reads, was deleted"):
        Losses(True).check_topics(position, view())
    with pytest.raises(
        UnknownTopicError,
        match=r"'t' was deleted and created again .* new checkpointLocation",
    ):
        Losses(True).check_topics(position, view(OTHER_ID, p0=(0, 3)))
    Losses(False).check_topics(position, view(OTHER_ID, p0=(0, 3)))
    Losses(True).check_topics(position, view(p0=(0, 3)))


def test_how_far_a_query_is_behind() -> None:
    told = behind(
        Position({KEYS[0]: 10, KEYS[1]: 2}, {"t": ID}), view(p0=(0, 30), p1=(5, 9), p2=(0, 0)), 3
    )
    assert told == {
        "minOffsetsBehindLatest": 0, "maxOffsetsBehindLatest": 20, "avgOffsetsBehindLatest": 8.0,
        "offsetsBehindLatest": 24,
        "estimatedTotalBytesBehindLatest": 2_400, "offsetsLost": 3,
    }  # fmt: skip
