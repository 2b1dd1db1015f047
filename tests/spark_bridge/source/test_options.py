"""Options of `spark.read`, and how ranges become tasks: pure, without a Spark session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.source.planner import TASK_OFFSETS, divide
from spark_bridge.source.read_options import (
    KAFKA_OPTIONS,
    OWN_OPTIONS,
    ReadOptions,
    check_batch_options,
    parse_options,
)
from tailrace.client.config.settings import DEFAULT_BOOTSTRAP
from tailrace.core.errors import InvalidSettingError
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.scan_plan import PartitionRange

ADDRESS = "tcp://10.0.0.7:7420"
OTHER = "tcp://10.0.0.8:7420"


@pytest.mark.parametrize(
    "name", ["kafka.bootstrap.servers", "Kafka.Bootstrap.Servers", "bootstrap", "BOOTSTRAP"]
)
def test_the_address_is_taken_under_kafkas_name_too(name: str) -> None:
    assert parse_options({name: ADDRESS, "subscribe": "t"}).bootstrap == ADDRESS


def test_without_an_address_it_is_the_usual_one() -> None:
    assert parse_options({"subscribe": "t"}).bootstrap == DEFAULT_BOOTSTRAP


def test_both_names_may_be_given_when_they_agree() -> None:
    assert (
        parse_options(
            {"bootstrap": ADDRESS, "kafka.bootstrap.servers": ADDRESS, "subscribe": "t"}
        ).bootstrap
        == ADDRESS
    )


@pytest.mark.parametrize("bootstrap", [OTHER, ""])
def test_two_addresses_are_refused_with_what_to_do(bootstrap: str) -> None:
    with pytest.raises(
        InvalidSettingError,
        match=r"bootstrap and kafka\.bootstrap\.servers name two appliances; give one of them",
    ):
        parse_options(
            {"bootstrap": bootstrap, "kafka.bootstrap.servers": ADDRESS, "subscribe": "t"}
        )


def test_an_earlier_name_of_an_option_sets_it() -> None:
    options = parse_options(
        {"subscribe": "t", "checkBatches": "false", "maxUnpackedBatchBytes": "1MiB"}
    )
    assert (options.validate_batches, options.max_decompressed_batch_bytes) == (False, 1 << 20)
    with pytest.raises(InvalidSettingError, match="two of its names"):
        parse_options({"subscribe": "t", "checkBatches": "false", "validateBatches": "true"})


@pytest.mark.parametrize(
    "name", ["kafka.group.id", "kafka.security.protocol", "kafka.bootstrap.server"]
)
def test_other_options_of_kafkas_source_are_refused_not_ignored(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"unknown option '{name}'"):
        parse_options({name: "x", "subscribe": "t"})


@pytest.mark.parametrize(
    "name", [name for name in (*KAFKA_OPTIONS, *OWN_OPTIONS) if name != "bootstrap"]
)
def test_a_misspelt_option_is_told_which_is_meant(name: str) -> None:
    misspelt = name[:-3] + name[-2:]
    with pytest.raises(
        InvalidSettingError, match=f"unknown option '{misspelt.lower()}' .*did you mean {name}"
    ):
        parse_options({misspelt: "x", "subscribe": "t"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({}, "name what to read"), ({"subscribe": "a", "assign": "{}"}, "one of the two"),
    ({"subscribe": "a", "startingOffsets": "x"}, "startingOffsets"),
     ({"subscribe": "a", "provider": "tailrace"},
     r"catalog cannot hold topics .*: CREATE TEMPORARY VIEW"),
     ({"subscribe": "a", "startingOfsets": "x"}, "unknown option"),
     ({"assign": "[1]"}, "JSON object"), ({"assign": "{}"}, "no partitions to assign"),
     ({"assign": '{"t": [true]}'}, "option assign names partitions"),
     ({"assign": '{"t": []}'}, "option assign names partitions"),
     ({"assign": "t"}, "option assign is not valid JSON"),
     ({"subscribePattern": "("}, ("subscribePattern is .*not a regular "
                                                                                 "expression")),
     ({"subscribePattern": " "}, "subscribePattern is empty"),
     ({"subscribe": "a", "subscribePattern": "b"}, ("subscribe and subscribePattern were "
                                                                                                             "given")),
     ({"subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "startingOffsets is"),
     ({"subscribe": "a", "endingOffsets": '{"a": {"0": true}}'}, "endingOffsets is"),
     ({"subscribe": "a", "startingTimestamp": "noon"}, ("startingTimestamp is 'noon'; it takes a "
                                                       "time in ms")),
     ({"subscribe": "a", "endingTimestamp": "-1"}, "endingTimestamp is"),
     ({"subscribe": "a", "startingOffsetsByTimestamp": "7"},
     ("startingOffsetsByTimestamp is '7'; it "
                                                             "takes times in ms")),
     ({"subscribe": "a", "startingOffsetsByTimestampStrategy": "last"}, "it takes error or latest"),
     ({"subscribe": "a", "failOnDataLoss": "no"}, "failOnDataLoss is 'no'; it takes true or false"),
     ({"subscribe": "a", "minPartitions": "0"}, ("minPartitions is '0'; it takes a whole number "
                                                "from 1 on")),
     ({"subscribe": "a", "maxRecordsPerPartition": "1.5"}, "maxRecordsPerPartition is '1.5'"),
     ({"subscribe": "a", "columns": "a,,b"}, "option columns is"),
     ({"subscribe": "a", "maxDecompressedBatchBytes": "much"}, "maxDecompressedBatchBytes"),
     ({"subscribe": "a", "maxDecompressedBatchBytes": "5"}, "max_decompressed_batch_bytes"),
     ({"subscribe": " , "}, "names no topic"),
     ({"assign": "[" * 100_000}, "option assign is not valid JSON"),
     ({"assign": "9" * 5_000}, "option assign is not valid JSON"),
     ({"subscribe": "a", "startingOffsets": "[" * 100_000}, "startingOffsets is"),
     ({"subscribe": "a", "endingOffsetsByTimestamp": "[" * 100_000}, "endingOffsetsByTimestamp is"),
     ({"subscribe": "a", "startingOffsets": '{"a": {"0_0": 1}}'}, "startingOffsets is"),
     ({"subscribe": "a", "startingTimestamp": str(2**63)}, "startingTimestamp is"),
     ({"subscribe": "a", "endingOffsetsByTimestamp": f'{{"a": {{"0": {2**63 // 1000 + 1}}}}}'},
     "endingOffsetsByTimestamp is")],
)  # fmt: skip
def test_wrong_options_name_the_option(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        parse_options(options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"startingOffsets": "latest"}, "startingOffsets can't be latest for batch"),
    ({"endingOffsets": "earliest"}, ("endingOffsets can't be earliest for "
                                                                                                                   "batch")),
     ({"startingOffsets": '{"t": {"0": -1}}'}, "startingOffsets for t-0 can't be latest"),
     ({"endingOffsets": '{"t": {"0": -2}}'}, "endingOffsets for t-0 can't be earliest"),
     ({"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger is for streams")],
)  # fmt: skip
def test_what_kafkas_source_refuses_in_a_batch_read_is_refused(
    options: dict[str, str], sentence: str
) -> None:
    given = {"subscribe": "t", **options}
    parsed = parse_options(given)  # a stream may have them
    with pytest.raises(InvalidSettingError, match=sentence):
        check_batch_options(given, parsed)


def test_a_time_comes_before_offsets_and_one_of_all_before_those_of_each() -> None:
    each = '{"t": {"0": 5}}'
    given = {"subscribe": "t", "startingOffsets": "latest", "startingOffsetsByTimestamp": each}
    assert parse_options(given).starting_ms == {TopicPartition("t", 0): 5}
    check_batch_options(given, parse_options(given))
    assert parse_options({**given, "startingTimestamp": "7"}).starting_ms == 7


def test_fail_on_data_loss_also_says_what_happens_to_damage_unless_that_is_said() -> None:
    def parsed(**options: str) -> ReadOptions:
        return parse_options({"subscribe": "t", **options})

    assert not parsed().skip_damaged
    assert parsed(failOnDataLoss="FALSE").skip_damaged
    assert not parsed(failOnDataLoss="false", skipDamaged="false").skip_damaged


# ---- tasks ---------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 3 * TASK_OFFSETS), min_size=1, max_size=12)
COUNT = st.none() | st.integers(1, 40)


def ranges_of(sizes: list[int]) -> list[PartitionRange]:
    return [
        PartitionRange("t", b"", number, 100 * number, 100 * number + size)
        for number, size in enumerate(sizes)
    ]


@given(SIZES, COUNT, st.none() | st.integers(50_000, 10**6), st.integers(1, 8))
def test_tasks_cover_every_offset_once(
    sizes: list[int], least: int | None, most: int | None, cores: int
) -> None:
    ranges = ranges_of(sizes)
    tasks = divide(ranges, least, most, 1.0, cores)
    pieces = [piece for task in tasks for piece in task]
    assert all(task for task in tasks)
    for whole in ranges:
        ends = [(piece.start, piece.end) for piece in pieces if piece.partition == whole.partition]
        assert [ends[0][0], *(end for _, end in ends)] == [*(start for start, _ in ends), whole.end]
        assert all(start < end for start, end in ends)
    if most is not None:
        assert all(piece.end - piece.start <= most for piece in pieces)


def test_min_partitions_divides_in_proportion_as_kafkas_source() -> None:
    tasks = divide(ranges_of([1000, 3000]), 4, None, 1.0, 2)
    assert [piece.end - piece.start for (piece,) in tasks] == [1000, 1000, 1000, 1000]
    assert [
        piece.end - piece.start for (piece,) in divide(ranges_of([10, 10]), None, 4, 1.0, 2)
    ] == [3, 3, 4, 3, 3, 4]


def test_large_ranges_are_divided_for_the_cores_and_small_ones_read_together() -> None:
    assert len(divide(ranges_of([4 * TASK_OFFSETS]), None, None, 1.0, 4)) == 4
    assert len(divide(ranges_of([TASK_OFFSETS]), None, None, 1.0, 4)) == 1
    assert len(divide(ranges_of([10] * 64), None, None, 1.0, 4)) == 4
    assert divide([], 4, None, 1.0, 4) == []
