"""Damage on the disk, whatever part of a batch it hits: readers get its range, and go on behind it."""

from __future__ import annotations

import pathlib
import struct
from typing import Any

import pyarrow as pa
import pytest

from appliance.cli.consume import EXIT_SKIPPED
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.errors import CorruptBatchError
from tailrace.formats.batch_header import frame_at, header_position
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.appliance.test_cli import run

BATCHES = 12
PER_BATCH = 5
TOTAL = BATCHES * PER_BATCH


def fill(data_dir: pathlib.Path, topic: str) -> None:
    """One segment of BATCHES batches, of a stopped appliance."""
    running = start_embedded(data_dir=str(data_dir), auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic)])
        with Producer(running.address, linger_ms=60_000) as producer:
            for number in range(TOTAL):
                producer.send(topic, b"%04d:" % number + b"x" * 300)
                if number % PER_BATCH == PER_BATCH - 1:
                    producer.flush(20)
    finally:
        assert running.stop() == 0


def places(data: bytes) -> list[tuple[int, int]]:
    """(where it begins, how long it is) of each batch in a segment."""
    found = []
    at = 8 + struct.unpack_from("<I", data, 4)[0]  # behind the schema
    while (frame := frame_at(data, at, len(data))) is not None and frame[0]:
        found.append((at, frame[0]))
        at += frame[0]
    assert len(found) == BATCHES
    return found


def damage(data_dir: pathlib.Path, topic: str, numbers: list[int], where: str) -> None:
    (path,) = (data_dir / f"{topic}-0").glob("*.arrows")
    data = bytearray(path.read_bytes())
    batches = places(bytes(data))
    for number in numbers:
        at, length = batches[number]
        position = header_position(data, at)
        flip = {"body": at + length - 40, "metadata": at + 60, "header": position + 40, "magic": position + 133, "length": position + 12}[
            where
        ]
        data[flip] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["body", "metadata", "header", "magic"])
def test_consume_skip_damaged_prints_everything_else_and_says_what_is_missing(tmp_path: pathlib.Path, topic: str, where: str) -> None:
    fill(tmp_path, topic)
    damaged = [3, 4, 7, BATCHES - 1]
    damage(tmp_path, topic, damaged, where)
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        expected = [n for n in range(TOTAL) if n // PER_BATCH not in damaged]
        if not intact_end(running, topic):  # damage to the last batch after a clean stop looks like a torn tail: it is cut, with a report
            damaged = damaged[:-1]
        done = run(running, "consume", topic, "--from-beginning", "--skip-damaged", status=EXIT_SKIPPED)
        assert [int(line[:4]) for line in done.stdout.splitlines()] == expected
        said = done.stderr.decode()
        assert f"offsets {3 * PER_BATCH} to " in said
        assert f"skipped {len(damaged) * PER_BATCH} damaged offsets in " in said
        if where == "body":
            arrow = run(running, "consume", topic, "--from-beginning", "--skip-damaged", "--format", "arrow", status=EXIT_SKIPPED)
            values = pa.ipc.open_stream(arrow.stdout).read_all().column("value").to_pylist()
            assert [int(value[:4]) for value in values] == expected
            run(running, "consume", topic, "--from-beginning", status=1)  # not asked to skip: it ends there, and says so
    finally:
        assert running.stop() == 0


def test_a_damaged_length_hides_what_follows_up_to_the_next_index_entry_and_no_more(tmp_path: pathlib.Path, topic: str) -> None:
    fill(tmp_path, topic)
    damage(tmp_path, topic, [3], "length")
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        done = run(running, "consume", topic, "--from-beginning", "--skip-damaged", status=EXIT_SKIPPED)
        found = [int(line[:4]) for line in done.stdout.splitlines()]
        missing = set(range(TOTAL)) - set(found)
        assert found == sorted(set(found))
        assert set(range(3 * PER_BATCH, 4 * PER_BATCH)) <= missing
        assert len(missing) <= 3 * PER_BATCH
        assert f"skipped {len(missing)} damaged offsets in " in done.stderr.decode()
    finally:
        assert running.stop() == 0


def read_on(consumer: Consumer, arrow: bool, offsets: list[int]) -> None:
    """Read until something raises, adding what came to `offsets`."""
    while True:
        if arrow:
            offsets += [n for batch in consumer.poll_arrow(60_000) for n in batch.offsets.to_pylist()]
        else:
            offsets += [record.offset for record in consumer.poll(60_000)]


@pytest.mark.parametrize("arrow", [False, True])
def test_what_was_asked_for_ahead_does_not_carry_a_reader_over_damage(tmp_path: pathlib.Path, topic: str, arrow: bool) -> None:
    fill(tmp_path, topic)
    damage(tmp_path, topic, [5], "body")
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        for _ in range(5):
            offsets: list[int] = []
            with Consumer(
                topic, bootstrap=running.address, auto_offset_reset="earliest", max_partition_fetch_bytes=1024, max_poll_records=1
            ) as consumer:
                with pytest.raises(CorruptBatchError) as caught:
                    read_on(consumer, arrow, offsets)
                assert offsets == list(range(5 * PER_BATCH))
                assert (caught.value.first_offset, caught.value.next_offset) == (5 * PER_BATCH, 6 * PER_BATCH)
                with pytest.raises(CorruptBatchError):
                    consumer.poll(60_000)  # it stays there until it is told to go on
    finally:
        assert running.stop() == 0


def intact_end(running: EmbeddedAppliance, topic: str) -> bool:
    key = TopicPartition(topic, 0)
    with Consumer(bootstrap=running.address) as consumer:
        return consumer.end_offsets([key])[key] == TOTAL


@pytest.mark.parametrize("arrow", [False, True])
def test_a_consumer_goes_on_behind_the_range_that_the_error_names(tmp_path: pathlib.Path, topic: str, arrow: bool) -> None:
    fill(tmp_path, topic)
    damage(tmp_path, topic, [5], "body")
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    found: list[int] = []
    ranges: list[Any] = []
    key = TopicPartition(topic, 0)
    try:
        with Consumer(topic, bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            while consumer.position(key) < TOTAL:
                try:
                    if arrow:
                        found += [offset for taken in consumer.poll_arrow(60_000) for offset in taken.offsets.to_pylist()]
                    else:
                        found += [record.offset for record in consumer.poll(60_000)]
                except CorruptBatchError as error:
                    # The position stays before what is damaged.
                    ranges.append((error.key, error.first_offset, error.next_offset, consumer.position(key)))
                    consumer.seek(key, error.next_offset or 0)
        assert ranges == [(key, 5 * PER_BATCH, 6 * PER_BATCH, 5 * PER_BATCH)]
        assert found == [n for n in range(TOTAL) if n // PER_BATCH != 5]
    finally:
        assert running.stop() == 0
