"""Damage on the disk, whatever part of a batch it hits: readers get its range, and go on
behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from appliance.cli.commands.records.consume import EXIT_SKIPPED
from tailrace import Consumer, TopicPartition
from tailrace.core.errors import CorruptBatchError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.damaged_topics import BATCHES, PER_BATCH, TOTAL, damage, fill
from tests.kit.cli import run

PLACES = ("body", "metadata", "header", "magic")
DAMAGED = (3, 4, 7, BATCHES - 1)
TOPICS: dict[str, tuple[list[int], str]] = {
    **{place: ([*DAMAGED], place) for place in PLACES},
    "length": ([3], "length"),
    "one": ([5], "body"),
}
"""Topic -> which of its batches are damaged, and where in them."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAppliance]:
    """An appliance that was started behind the damage of all topics, which nobody writes to."""
    data_dir = tmp_path_factory.mktemp("damaged")
    fill(data_dir, *TOPICS)
    for topic, (numbers, where) in TOPICS.items():
        damage(data_dir, topic, numbers, where)
    appliance = start_embedded(data_dir=str(data_dir), auto_create_topics=False)
    try:
        yield appliance
    finally:
        assert appliance.stop() == 0


@pytest.mark.parametrize("where", PLACES)
def test_consume_skip_damaged_prints_everything_else_and_says_what_is_missing(
    running: EmbeddedAppliance, where: str
) -> None:
    damaged = [*DAMAGED]
    expected = [n for n in range(TOTAL) if n // PER_BATCH not in damaged]
    if not intact_end(
        running, where
    ):  # damage to the last batch after a clean stop looks like a torn tail: it is cut, with a report  # noqa: E501
        damaged = damaged[:-1]
    done = run(running, "consume", where, "--from-beginning", "--skip-damaged", status=EXIT_SKIPPED)
    assert [int(line[:4]) for line in done.stdout.splitlines()] == expected
    said = done.stderr.decode()
    assert f"offsets {3 * PER_BATCH} to " in said
    assert f"skipped {len(damaged) * PER_BATCH} damaged offsets in " in said
    if where == "body":
        arrow = run(
            running,
            "consume",
            where,
            "--from-beginning",
            "--skip-damaged",
            "--format",
            "arrow",
            status=EXIT_SKIPPED,
        )
        values = pa.ipc.open_stream(arrow.stdout).read_all().column("value").to_pylist()
        assert [int(value[:4]) for value in values] == expected
        run(
            running, "consume", where, "--from-beginning", status=1
        )  # not asked to skip: it ends there, and says so


def test_a_damaged_length_hides_what_follows_up_to_the_next_index_entry_and_no_more(
    running: EmbeddedAppliance,
) -> None:
    done = run(
        running, "consume", "length", "--from-beginning", "--skip-damaged", status=EXIT_SKIPPED
    )
    found = [int(line[:4]) for line in done.stdout.splitlines()]
    missing = set(range(TOTAL)) - set(found)
    assert found == sorted(set(found))
    assert set(range(3 * PER_BATCH, 4 * PER_BATCH)) <= missing
    assert len(missing) <= 3 * PER_BATCH
    assert f"skipped {len(missing)} damaged offsets in " in done.stderr.decode()


def read_on(consumer: Consumer, arrow: bool, offsets: list[int]) -> None:
    """Read until something raises, adding what came to `offsets`."""
    while True:
        if arrow:
            offsets += [
                n for batch in consumer.poll_arrow(60_000) for n in batch.offsets.to_pylist()
            ]
        else:
            offsets += [record.offset for record in consumer.poll(60_000)]


@pytest.mark.parametrize("arrow", [False, True])
def test_what_was_asked_for_ahead_does_not_carry_a_reader_over_damage(
    running: EmbeddedAppliance, arrow: bool
) -> None:
    for _ in range(5):
        offsets: list[int] = []
        with Consumer(
            "one",
            bootstrap=running.address,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=1024,
            max_poll_records=1,
        ) as consumer:
            with pytest.raises(CorruptBatchError) as caught:
                read_on(consumer, arrow, offsets)
            assert offsets == list(range(5 * PER_BATCH))
            assert (caught.value.first_offset, caught.value.next_offset) == (
                5 * PER_BATCH,
                6 * PER_BATCH,
            )
            with pytest.raises(CorruptBatchError):
                consumer.poll(60_000)  # it stays there until it is told to go on


def intact_end(running: EmbeddedAppliance, topic: str) -> bool:
    key = TopicPartition(topic, 0)
    with Consumer(bootstrap=running.address) as consumer:
        return consumer.end_offsets([key])[key] == TOTAL


@pytest.mark.parametrize("arrow", [False, True])
def test_a_consumer_goes_on_behind_the_range_that_the_error_names(
    running: EmbeddedAppliance, arrow: bool
) -> None:
    found: list[int] = []
    ranges: list[Any] = []
    key = TopicPartition("one", 0)
    with Consumer("one", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        while consumer.position(key) < TOTAL:
            try:
                if arrow:
                    found += [
                        offset
                        for taken in consumer.poll_arrow(60_000)
                        for offset in taken.offsets.to_pylist()
                    ]
                else:
                    found += [record.offset for record in consumer.poll(60_000)]
            except CorruptBatchError as error:
                # The position stays before what is damaged.
                ranges.append(
                    (error.key, error.first_offset, error.next_offset, consumer.position(key))
                )
                consumer.seek(key, error.next_offset or 0)
    assert ranges == [(key, 5 * PER_BATCH, 6 * PER_BATCH, 5 * PER_BATCH)]
    assert found == [n for n in range(TOTAL) if n // PER_BATCH != 5]
