"""Cleaned segments against a real appliance: every reader shows the rows that are left, with their
own offsets, as a dictionary has them.

The segments of a stopped appliance are replaced by cleaned ones, so that nothing but readers is
tested here.
"""

from __future__ import annotations

import ast
import asyncio
import datetime as dt
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, Table, TopicPartition
from tailrace.aio import AsyncConsumer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances import backups
from tests.kit.appliances.cleaned_segments import clean_partition
from tests.kit.cli import run
from tests.kit.lakes import exports
from tests.kit.members.queues import share, start_offset
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.kit.transactional.visibility import await_visible

ROWS = 2_400
KEYS = 300
TOPICS = ("plain", "packed", "stamped", "typed", "moved")
UNTYPED = ("plain", "packed", "stamped", "moved")
START_MS = 1_700_000_000_000


class Row(NamedTuple):
    key: bytes | None
    value: Any
    timestamp_us: int
    headers: Any


class Cleaned(NamedTuple):
    """Rest of each topic's partition 0, by offset, and the log's end."""

    appliance: EmbeddedAppliance
    data_dir: pathlib.Path
    rows: dict[str, dict[int, Row]]
    ends: dict[str, int]
    cleaned_ends: dict[str, int]
    """The offset behind the last cleaned segment."""


def read(address: str, topic: str, position: int | None = None) -> dict[int, Row]:
    """All records from `position` on, by their offsets."""
    found: dict[int, Row] = {}
    key = TopicPartition(topic, 0)
    with Consumer(bootstrap=address) as consumer:
        consumer.assign([key])
        if position is None:
            consumer.seek_to_beginning(key)
        else:
            consumer.seek(key, position)
        end = consumer.end_offsets([key])[key]
        while consumer.position(key) < end:
            for record in consumer.poll(1_000):
                assert record.offset not in found, "a record came twice"
                found[record.offset] = Row(
                    record.key, record.value, record.timestamp_us, record.headers
                )
        assert consumer.position(key) == end
        assert consumer.lag(key) == 0
    return found


def fill(address: str) -> None:
    """Make the topics, with small batches."""
    frame = pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()),
            "offset": [f"word-{n % KEYS}" * 6 for n in range(ROWS)],
            "timestamp": pa.array(
                [(START_MS + n) * 1_000 for n in range(ROWS)], pa.timestamp("us", "UTC")
            ),
        }
    )
    configs: dict[str, Any] = {"segment.bytes": 64 << 10, "retention.ms": -1}
    with Admin(address) as admin:
        admin.create_topics(
            [
                NewTopic("plain", 1, configs),
                NewTopic("packed", 1, {**configs, "compression.type": "zstd"}),
                NewTopic("stamped", 1, {**configs, "message.timestamp.type": "LogAppendTime"}),
                NewTopic("typed", 1, configs, schema=frame),
                NewTopic("moved", 1, configs),
            ]
        )
    with Producer(address, batch_size=4_096, linger_ms=100) as producer:
        for topic in ("plain", "packed", "stamped"):
            for n in range(ROWS):
                producer.send(
                    topic,
                    b"v%d-" % n + random.Random(n).randbytes(60),
                    b"k%d" % (n % KEYS) if n % 11 else None,
                    [("h", b"%d" % n)] if n % 3 == 0 else None,
                    timestamp=START_MS + n // 2,
                )
        for first in range(0, ROWS, 40):
            producer.send_arrow("typed", frame.slice(first, 40)).result(60)
    with Producer(address, transactional_id="mover", batch_size=4_096) as producer:
        producer.init_transactions()
        for first in range(0, ROWS, 60):
            producer.begin_transaction()
            for n in range(first, first + 60):
                producer.send("moved", b"v%d" % n * 10, b"k%d" % (n % KEYS), timestamp=START_MS + n)
            if first % 180 == 0:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    await_visible(address, "moved")


def clean(
    data_dir: pathlib.Path, before: dict[str, dict[int, Row]], ends: dict[str, int]
) -> tuple[dict[str, dict[int, Row]], dict[str, int]]:
    """Clean the partitions of a stopped appliance. Returns the rows that are left of each, and
    where what is cleaned ends.
    """
    rows, cleaned_ends = {}, {}
    for topic in TOPICS:
        chosen = random.Random(topic)
        kept = {offset for offset in range(ends[topic]) if chosen.random() < 0.2}
        # Whole batches, and a whole segment's worth of them, lose all of their rows.
        kept -= set(range(300, 700))
        left, cleaned_end = clean_partition(
            data_dir / f"{topic}-0", kept.__contains__, typed=topic == "typed",
            compression="lz4" if topic == "packed" else "none", with_index=topic != "packed",
        )  # fmt: skip
        assert len(left) >= 2, f"{topic} has {left.keys()}"
        cleaned_ends[topic] = cleaned_end
        stays = {offset for offsets in left.values() for offset in offsets}
        rows[topic] = {
            offset: row
            for offset, row in before[topic].items()
            if offset in stays or offset >= cleaned_end
        }
        assert len(rows[topic]) < len(before[topic]) - 100
    return rows, cleaned_ends


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cleaned]:
    """plain: small batches; packed: compressed, without indexes; stamped: LogAppendTime; typed: it
    has a column `offset` of its own; moved: transactions, some aborted.
    """
    data_dir = tmp_path_factory.mktemp("cleaned")
    running = start_embedded(data_dir=str(data_dir))
    fill(running.address)
    before = {topic: read(running.address, topic) for topic in TOPICS}
    with Admin(running.address) as admin:
        requested = {TopicPartition(topic, 0): "latest" for topic in TOPICS}
        ends = {key.topic: item["offset"] for key, item in admin.offsets(requested).items()}
    assert running.stop() == 0
    rows, cleaned_ends = clean(data_dir, before, ends)
    running = start_embedded(data_dir=str(data_dir))
    yield Cleaned(running, data_dir, rows, ends, cleaned_ends)
    assert running.stop() == 0


@pytest.mark.parametrize("topic", TOPICS)
def test_a_consumer_gets_the_rows_that_are_left_with_their_offsets(
    cleaned: Cleaned, topic: str
) -> None:
    assert read(cleaned.appliance.address, topic) == cleaned.rows[topic]


@pytest.mark.parametrize("topic", TOPICS)
def test_a_seek_into_a_gap_goes_on_at_the_next_row(cleaned: Cleaned, topic: str) -> None:
    rows = cleaned.rows[topic]
    chosen = random.Random(1).sample(range(cleaned.cleaned_ends[topic]), 8)
    for position in (*chosen, 300, 500, 699, cleaned.cleaned_ends[topic] - 1):
        found = read(cleaned.appliance.address, topic, position)
        assert list(found) == [offset for offset in rows if offset >= position], position


@pytest.mark.parametrize("topic", TOPICS)
def test_arrow_batches_have_the_topics_columns_and_exact_offsets(
    cleaned: Cleaned, topic: str
) -> None:
    key = TopicPartition(topic, 0)
    found: dict[int, Any] = {}
    with Consumer(bootstrap=cleaned.appliance.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([key])
        while consumer.position(key) < cleaned.ends[topic]:
            for batch in consumer.poll_arrow(1_000):
                assert len(batch), "an empty batch came"
                names = ["n", "offset", "timestamp"] if topic == "typed" else None
                assert batch.batch.schema.names == names or names is None
                assert batch.offsets[0].as_py() == batch.base_offset
                values = batch.batch.column("n" if topic == "typed" else "value").to_pylist()
                found.update(zip(batch.offsets.to_pylist(), values, strict=True))
    assert found == {
        offset: row.value["n"] if topic == "typed" else row.value
        for offset, row in cleaned.rows[topic].items()
    }


def test_an_async_consumer_gets_them_too(cleaned: Cleaned) -> None:
    async def consumed() -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        async with AsyncConsumer(
            "plain", bootstrap=cleaned.appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            async for record in consumer:
                found[record.offset] = record.value
                if len(found) == len(cleaned.rows["plain"]):
                    return found
        raise AssertionError

    assert asyncio.run(consumed()) == {
        offset: row.value for offset, row in cleaned.rows["plain"].items()
    }


@pytest.mark.parametrize("topic", TOPICS)
def test_times_lead_to_the_first_row_that_is_left(cleaned: Cleaned, topic: str) -> None:
    rows, key = cleaned.rows[topic], TopicPartition(topic, 0)
    times = sorted({row.timestamp_us for row in rows.values()})
    with Consumer(bootstrap=cleaned.appliance.address) as consumer:
        assert consumer.beginning_offsets([key]) == {key: 0}
        assert consumer.end_offsets([key]) == {key: cleaned.ends[topic]}
        for time_us in [*random.Random(2).sample(times, 10), times[0], times[-1], 0]:
            when_ms = time_us // 1_000
            expected = next(
                (
                    (offset, row.timestamp_us // 1_000)
                    for offset, row in rows.items()
                    if row.timestamp_us >= when_ms * 1_000
                ),
                None,
            )
            found = consumer.offsets_for_times({key: when_ms})[key]
            assert (found and (found.offset, found.timestamp)) == expected
        assert consumer.offsets_for_times({key: times[-1] // 1_000 + 10}) == {key: None}


def test_a_group_commits_and_has_no_lag_behind_the_last_row(cleaned: Cleaned) -> None:
    key = TopicPartition("plain", 0)
    settings: dict[str, Any] = {
        "bootstrap": cleaned.appliance.address, "group_id": "readers",
        "auto_offset_reset": "earliest",
    }  # fmt: skip
    found: list[int] = []
    while True:
        with Consumer("plain", **settings) as consumer:
            records = consumer.poll(1_000, max_records=250)
            while not consumer.assignment():
                records = consumer.poll(1_000, max_records=250)
            found += [record.offset for record in records]
            consumer.commit()
            if consumer.position(key) == cleaned.ends["plain"]:
                assert consumer.lag(key) == 0
                break
    assert found == list(cleaned.rows["plain"])


@pytest.mark.parametrize("topic", UNTYPED)
@pytest.mark.parametrize("from_files", [True, False])
def test_a_scan_has_the_rows_their_offsets_and_their_times(
    cleaned: Cleaned, topic: str, from_files: bool
) -> None:
    address, rows = cleaned.appliance.address, cleaned.rows[topic]
    columns = ["offset", "key", "value", "timestamp"]
    table = tailrace.scan(topic, address, columns, from_files=from_files).read_all()
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    found = zip(
        table.column("offset").to_pylist(), table.column("key").to_pylist(),
        table.column("value").to_pylist(), times, strict=True,
    )  # fmt: skip
    assert list(found) == [
        (offset, row.key, row.value, row.timestamp_us) for offset, row in rows.items()
    ]
    for start, end in ((310, 690), (301, 1_000), (100, 1_234)):
        part = tailrace.scan(
            topic, address, ["offset"], start=start, end=end, from_files=from_files
        ).read_all()
        assert part.column(0).to_pylist() == [n for n in rows if start <= n < end]
    when_us = sorted(row.timestamp_us for row in rows.values())[len(rows) // 2]
    when = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=when_us)
    first = next(offset for offset, row in rows.items() if row.timestamp_us >= when_us)
    late = tailrace.scan(topic, address, ["offset"], start=when, from_files=from_files)
    assert late.read_all().column(0).to_pylist() == [n for n in rows if n >= first]


@pytest.mark.parametrize("from_files", [True, False])
def test_a_scan_of_a_typed_topic_tells_its_column_offset_from_the_offsets(
    cleaned: Cleaned, from_files: bool
) -> None:
    table = tailrace.scan(
        "typed", cleaned.appliance.address, ["_offset", "offset", "n"], from_files=from_files
    ).read_all()
    assert table.to_pylist() == [
        {"_offset": offset, "offset": row.value["offset"], "n": row.value["n"]}
        for offset, row in cleaned.rows["typed"].items()
    ]


def test_sql_counts_the_rows_and_the_latest_are_those_of_the_dictionary(cleaned: Cleaned) -> None:
    rows = cleaned.rows["plain"]
    done = run(cleaned.appliance, "sql", "select count(*) c from plain", "--json")
    assert orjson.loads(done.stdout) == [{"c": len(rows)}]
    latest = {row.key: row.value for row in rows.values() if row.key is not None}
    for from_files in (True, False):
        table = tailrace.scan(
            "plain", cleaned.appliance.address, ["key", "value"], latest=True, from_files=from_files
        ).read_all()
        assert {row["key"]: row["value"] for row in table.to_pylist()} == latest
    with Table("plain", bootstrap=cleaned.appliance.address) as live:
        assert dict(live.items()) == latest


@pytest.mark.parametrize("topic", ["plain", "typed", "moved"])
def test_a_share_group_gets_each_row_once_and_completes_the_offsets_between(
    cleaned: Cleaned, topic: str
) -> None:
    rows = cleaned.rows[topic]
    found: dict[int, Any] = {}
    with share(cleaned.appliance, topic, max_poll_records=97) as consumer:
        while len(found) < len(rows):
            for record in consumer.poll(1_000):
                assert record.offset not in found
                assert record.delivery_count == 1
                found[record.offset] = record.value
        assert found == {offset: row.value for offset, row in rows.items()}

        def is_complete() -> bool:
            assert not consumer.poll(20)  # the records of the poll before are processed
            return start_offset(cleaned.appliance, f"g-{topic}") == cleaned.ends[topic]

        wait_until(is_complete, "the offsets without a record are completed")


def test_an_export_has_the_rows_that_are_left(cleaned: Cleaned, tmp_path: pathlib.Path) -> None:
    for topic in ("plain", "moved"):
        exports.run(cleaned.appliance, topic, tmp_path / topic)
        table = exports.rows(tmp_path / topic)
        found = zip(
            table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True
        )
        assert dict(found) == {offset: row.value for offset, row in cleaned.rows[topic].items()}


def test_a_backup_of_cleaned_segments_is_restored_as_it_was(
    cleaned: Cleaned, tmp_path: pathlib.Path
) -> None:
    backups.back_up(cleaned.data_dir, tmp_path / "backup")
    assert backups.verify(tmp_path / "backup") == []
    backups.restore(tmp_path / "backup", tmp_path / "restored")
    assert backups.records_in(tmp_path / "restored") > 0
    running = start_embedded(data_dir=str(tmp_path / "restored"))
    for topic in TOPICS:
        assert read(running.address, topic) == cleaned.rows[topic]
    assert running.stop() == 0


def test_the_example_of_a_client_without_the_sdk_reads_sparse_batches(cleaned: Cleaned) -> None:
    rows = cleaned.rows["plain"]
    example = pathlib.Path(__file__).parents[3] / "examples/clients/python/group_member.py"
    member = subprocess.Popen(
        [sys.executable, str(example), cleaned.appliance.address, "plain", "raw"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert member.stdout is not None
    found = [next(member.stdout).split(maxsplit=2) for _ in rows]
    member.terminate()
    member.communicate(timeout=HANG_LIMIT_S)
    assert [int(offset) for _, offset, _ in found] == list(rows)
    assert [ast.literal_eval(value) for *_, value in found] == [row.value for row in rows.values()]


def test_log_verify_and_dump_know_cleaned_segments(
    cleaned: Cleaned, tmp_path: pathlib.Path
) -> None:
    for topic in TOPICS:
        directory = cleaned.data_dir / f"{topic}-0"
        run(None, "log", "verify", str(directory))
        path = min(directory.glob("*.arrows"))
        done = run(None, "log", "dump", "--records", "--json", str(path))
        lines = [orjson.loads(line) for line in done.stdout.splitlines()]
        kinds = {line["kind"] for line in lines if "kind" in line}
        assert kinds == {"sparse"}
        if topic != "typed":
            offsets = [line["offset"] for line in lines if "offset" in line]
            rows = cleaned.rows[topic]
            assert offsets == [offset for offset in rows if offset <= max(offsets)]


def test_a_directory_is_scanned_without_an_appliance(
    cleaned: Cleaned, tmp_path: pathlib.Path
) -> None:
    import shutil

    copy = tmp_path / "data"
    for topic in ("plain", "moved"):
        shutil.copytree(cleaned.data_dir / f"{topic}-0", copy / f"{topic}-0")
        table = tailrace.scan(str(copy / topic), columns=["offset", "value"]).read_all()
        assert table.to_pylist() == [
            {"offset": offset, "value": row.value} for offset, row in cleaned.rows[topic].items()
        ]


@pytest.mark.spark
def test_spark_reads_and_streams_the_rows_that_are_left(cleaned: Cleaned) -> None:
    from tests.kit.lakes.spark_reads import Query, Read

    for topic in ("plain", "moved"):
        rows = cleaned.rows[topic]
        made = Read(cleaned.appliance.address, subscribe=topic)
        read_rows = [row for batch in made.batches() for row in batch.to_pylist()]
        assert {row["offset"]: row["value"] for row in read_rows} == {
            offset: row.value for offset, row in rows.items()
        }
        assert len(read_rows) == len(rows)
        limits: tuple[dict[str, Any], ...] = (
            {"maxOffsetsPerTrigger": "350"},
            {"maxBytesPerTrigger": "20000"},
        )
        for limit in limits:
            query = Query(cleaned.appliance, topic, **limit)
            found: list[int] = []
            while query.plan() is not None:
                found += [offset for _, offset in query.run()]
            query.reader.stop()
            assert found == list(rows), limit
