"""`tailrace.scan`: the same rows from files and over ZeroMQ, whatever is asked for; and what it
says when something is wrong.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import pickle
import signal
import struct
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, Record, TopicPartition
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    InvalidSettingError,
    NotReachableError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    RequestTimeoutError,
    StorageError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, embedded, start_embedded
from tailrace.format.record_batch.batch_header import header_position
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.schema import HEADER_TYPE
from tailrace.scanning import reader
from tailrace.scanning.batch_decoder import BATCH_ROWS
from tailrace.scanning.options import Bounds, build_settings
from tailrace.scanning.planner import plan
from tailrace.scanning.sources import data_dirs
from tailrace.scanning.sources import local_source as segment_files
from tailrace.scanning.sources.remote_source import RemoteSource
from tests.kit.appliances.running_directories import copy_of_running

ROWS = 1_200
LEASES = "SELECT count(*) FROM leases WHERE ends_us > 0"


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    """plain: 2 partitions, small batches, several segments; packed: compressed; stamped:
    LogAppendTime; typed: with a column `timestamp`.
    """
    frame = pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()), "word": [f"w{n % 7}" for n in range(ROWS)],
            "timestamp": pa.array([None if n % 5 == 0 else n * 1000 for n in range(ROWS)],
            pa.timestamp("us", "UTC")),
        }
    )  # fmt: skip
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic("plain", 2, {"segment.bytes": 64 << 10}),
                NewTopic("packed", 1, {"compression.type": "zstd"}),
                NewTopic("stamped", 1, {"message.timestamp.type": "LogAppendTime"}),
                NewTopic("typed", schema=frame), NewTopic("empty"),
                NewTopic("delayed", 1, {"delay.enabled": True}),
            ]
        )  # fmt: skip
    with Producer(appliance.address, batch_size=4096) as producer:
        for topic in ("plain", "packed", "stamped"):
            for n in range(ROWS):
                headers = [("h", b"%d" % n)] if n % 3 else None
                key = None if n % 4 == 0 else b"k%d" % n
                producer.send(
                    topic,
                    b"v%d" % n * 20,
                    key,
                    headers,
                    partition=n % 2 if topic == "plain" else 0,
                    timestamp=1_000 + n,
                )
        producer.send_arrow("typed", frame).result(60)
    return appliance


def both(appliance: EmbeddedAppliance, topic: str, **asked: Any) -> pa.Table:
    """Scan files, and check that ZeroMQ brings the same."""
    here = tailrace.scan(topic, appliance.address, from_files=True, **asked).read_all()
    assert here.equals(
        tailrace.scan(topic, appliance.address, from_files=False, **asked).read_all()
    )
    here.validate(full=True)
    return here


@pytest.mark.parametrize("topic", ["plain", "packed", "stamped"])
def test_a_topic_without_a_schema_has_kafkas_columns_and_every_record_once(
    filled: EmbeddedAppliance, topic: str
) -> None:
    table = both(filled, topic)
    assert table.schema.names == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
        "headers",
    ]
    with Consumer(topic, bootstrap=filled.address, auto_offset_reset="earliest") as consumer:
        records: list[Record] = []
        while len(records) < ROWS:
            records += consumer.poll(10_000)
    records.sort(key=lambda record: (record.partition, record.offset))
    rows = table.to_pylist()
    assert [
        (r["key"], r["value"], r["topic"], r["partition"], r["offset"], r["timestampType"])
        for r in rows
    ] == [(r.key, r.value, r.topic, r.partition, r.offset, r.timestamp_type) for r in records]
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [
        record.timestamp_us for record in records
    ]
    assert [[(h["key"], h["value"]) for h in row["headers"] or []] for row in rows] == [
        record.headers for record in records
    ]


def test_a_typed_topic_has_its_own_columns_and_the_logs_on_request(
    filled: EmbeddedAppliance,
) -> None:
    assert both(filled, "typed").schema.names == ["n", "word", "timestamp"]
    table = both(filled, "typed", columns=["_offset", "_topic", "_partition", "_timestamp", "word"])
    with Consumer("typed", bootstrap=filled.address, auto_offset_reset="earliest") as consumer:
        records: list[Record] = []
        while len(records) < ROWS:
            records += consumer.poll(10_000)
    assert table.column("_timestamp").cast(pa.int64()).to_pylist() == [
        record.timestamp_us for record in records
    ]
    assert table.column("_offset").to_pylist() == list(range(ROWS))
    assert set(table.column("_topic").to_pylist()) == {"typed"}


COLUMNS = [
    ["offset"],
    ["_offset", "_partition"],
    ["value"],
    ["key", "timestamp"],
    ["headers"],
    ["timestampType"],
    ["_timestamp"],
    ["topic"],
]


@pytest.mark.parametrize("columns", COLUMNS, ids="-".join)
@pytest.mark.parametrize("topic", ["plain", "packed", "stamped"])
def test_columns_that_are_asked_for_are_those_of_the_whole(
    filled: EmbeddedAppliance, topic: str, columns: list[str]
) -> None:
    whole = both(filled, topic, columns=[name.lstrip("_") for name in columns]).rename_columns(
        columns
    )
    assert both(filled, topic, columns=columns).equals(whole)
    assert both(filled, topic, columns=columns, start=101, end={0: 333}, partitions=0).equals(
        whole.slice(101, 232)
    )


def at(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


@pytest.mark.parametrize(
    ("asked", "offsets"),
    [({}, [range(600), range(600)]), ({"start": 590}, [range(590, 600)] * 2),
    ({"end": {0: 3, 1: 0}}, [range(3), range(0)]),
     ({"start": {TopicPartition("plain", 1): 598}, "end": {0: "earliest"}},
     [range(0), range(598, 600)]),
     ({"start": "latest"}, [range(0)] * 2),
     ({"start": at(1_100), "end": at(1_200)}, [range(50, 100)] * 2),
     ({"start": at(9_999_999)}, [range(0)] * 2),
     ({"start": at(1_101), "partitions": [1]}, [range(0), range(50, 600)]),
     ({"start": 600, "end": 600}, [range(0)] * 2)],
)  # fmt: skip
def test_a_scan_begins_and_ends_where_it_is_told(
    filled: EmbeddedAppliance, asked: dict[str, Any], offsets: list[range]
) -> None:
    table = both(filled, "plain", columns=["partition", "offset"], **asked)
    assert [(r["partition"], r["offset"]) for r in table.to_pylist()] == [
        (p, o) for p in (0, 1) for o in offsets[p]
    ]


def test_small_batches_become_large_ones(filled: EmbeddedAppliance) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic("many")])
        piece = pa.table({"timestamp": pa.array([1] * 700, pa.timestamp("us", "UTC")),
        "key": pa.nulls(700, pa.binary()),
                          "value": pa.array([b"x"] * 700, pa.binary()),
                          "headers": pa.nulls(700, HEADER_TYPE)})  # fmt: skip
        for _ in range(40):
            producer.send_arrow("many", piece)
        producer.flush(60)
    sizes = [batch.num_rows for batch in tailrace.scan("many", filled.address, columns=["value"])]
    assert sum(sizes) == 28_000
    assert all(size >= BATCH_ROWS for size in sizes[:-1])


def test_an_empty_topic_has_its_columns_and_no_rows(filled: EmbeddedAppliance) -> None:
    assert (both(filled, "empty").num_rows, len(both(filled, "empty").schema)) == (0, 8)


def test_delayed_records_come_with_the_others_and_marks_do_not(filled: EmbeddedAppliance) -> None:
    with Producer(filled.address) as producer:
        producer.send("delayed", b"later", deliver_after=dt.timedelta(milliseconds=1)).result(60)
        producer.send("delayed", b"now").result(60)
    with Consumer("delayed", bootstrap=filled.address, auto_offset_reset="earliest") as consumer:
        seen = 0
        while seen < 2:
            seen += len(consumer.poll(60_000))
    assert sorted(both(filled, "delayed", columns=["value"]).column(0).to_pylist()) == [
        b"later",
        b"now",
    ]


def test_polars_pandas_and_duckdb_take_it_as_it_is(filled: EmbeddedAppliance) -> None:
    import duckdb
    import polars

    assert polars.DataFrame(tailrace.scan("typed", filled.address))["n"].sum() == sum(range(ROWS))
    assert tailrace.scan("typed", filled.address).read_pandas()["n"].sum() == sum(range(ROWS))
    rows = tailrace.scan("typed", filled.address)
    with duckdb.connect() as database:
        assert database.execute("select sum(n) from rows").fetchone() == (sum(range(ROWS)),)
    del rows


def test_a_plan_can_be_pickled_and_divided(filled: EmbeddedAppliance) -> None:
    made = plan(
        "plain",
        filled.address,
        ["value"],
        Bounds("start", None),
        Bounds("end", None),
        build_settings({}),
        with_lease=False,
    )
    pieces = [pickle.loads(pickle.dumps(piece)) for piece in made.split(250)]
    assert [(p.ranges[0].partition, p.ranges[0].start, p.ranges[0].end) for p in pieces] == [
        (n, *bounds) for n in (0, 1) for bounds in ((0, 250), (250, 500), (500, 600))
    ]
    assert pa.Table.from_batches([b for p in pieces for b in reader.read(p)]).equals(
        both(filled, "plain", columns=["value"])
    )


@pytest.mark.parametrize("columns", [["value"], ["offset"]])
def test_without_mapping_the_rows_are_the_same(
    filled: EmbeddedAppliance, columns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = both(filled, "plain", columns=columns)
    monkeypatch.setattr(segment_files, "_MADV_POPULATE_READ", 9_999)  # as Linux before 5.14 answers
    assert both(filled, "plain", columns=columns).equals(whole)


def test_the_index_is_not_needed(filled: EmbeddedAppliance, tmp_path: pathlib.Path) -> None:
    copy_of_running(filled.data_dir, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.index"):
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    assert (
        tailrace.scan(tmp_path / "copy/plain", start=333, columns=["value"])
        .read_all()
        .equals(both(filled, "plain", columns=["value"], start=333))
    )


def test_where_the_files_cannot_be_opened_the_appliance_is_asked(
    filled: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = both(filled, "plain")
    monkeypatch.setattr(
        data_dirs, "opens_here", lambda _directory, _topic_id: False
    )  # another user's, as root cannot show
    asked: list[str] = []

    def ask(bootstrap: str, topic: str, *more: Any) -> RemoteSource:
        asked.append(topic)
        return RemoteSource(bootstrap, topic, *more)

    monkeypatch.setattr(reader, "RemoteSource", ask)
    assert tailrace.scan("plain", filled.address).read_all().equals(whole)
    assert asked == ["plain", "plain"]
    with pytest.raises(StorageError, match="plain-0 cannot be opened here"):
        tailrace.scan("plain", filled.address, from_files=True)


def test_a_copy_under_the_path_that_a_plan_names_is_not_read(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    """As an executor on another host may have it, which was restored from a backup."""
    copy_of_running(filled.data_dir, tmp_path / "copy")
    for segment in (tmp_path / "copy").rglob("*.arrows"):
        segment.write_bytes(b"")
    made = plan(
        "plain",
        filled.address,
        ["value"],
        Bounds("start", None),
        Bounds("end", None),
        build_settings({}),
        with_lease=False,
    )
    elsewhere = replace(
        made,
        ranges=tuple(
            replace(r, directory=f"{tmp_path}/copy/plain-{r.partition}") for r in made.ranges
        ),
    )
    assert pa.Table.from_batches(reader.read(elsewhere)).num_rows == ROWS


def test_files_are_read_without_asking_for_a_single_batch(
    filled: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RemoteSource", None)
    assert tailrace.scan("plain", filled.address).read_all().num_rows == ROWS


# ---- directories ---------------------------------------------------------------------------------


def test_a_copy_of_the_directory_has_the_same_rows_also_by_time(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    copy_of_running(filled.data_dir, tmp_path / "copy")
    for topic in ("plain", "packed", "typed"):
        assert tailrace.scan(tmp_path / "copy" / topic).read_all().equals(both(filled, topic))
    asked: dict[str, Any] = {"start": at(1_100), "end": at(1_201)}
    assert (
        tailrace.scan(f"{tmp_path}/copy/plain", **asked)
        .read_all()
        .equals(both(filled, "plain", **asked))
    )
    assert (
        tailrace.scan(tmp_path / "copy/plain-1")
        .read_all()
        .equals(both(filled, "plain", partitions=1))
    )


def test_a_directory_in_use_is_read_up_to_what_its_appliance_says(
    filled: EmbeddedAppliance,
) -> None:
    for bootstrap in (filled.address, None):  # None: its lock's file has the address
        assert (
            tailrace.scan(f"{filled.data_dir}/plain", bootstrap)
            .read_all()
            .equals(both(filled, "plain"))
        )
    with embedded() as other:
        for address in (other.address, "tcp://127.0.0.1:9"):
            with pytest.raises(
                InvalidRequestError,
                match=r"an appliance runs on .*give its address with bootstrap=",
            ):
                tailrace.scan(f"{filled.data_dir}/plain", address, request_timeout_ms=500)


def test_a_copy_that_another_appliance_serves_is_not_taken_for_the_original(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    """`same_directory` looks at more than ids, which a copy has too."""
    from tailrace.scanning.sources.data_dirs import same_directory

    copy_of_running(filled.data_dir, tmp_path / "copy")
    assert same_directory(filled.data_dir, None)
    assert not same_directory(str(tmp_path / "copy"), None)
    assert not same_directory(filled.data_dir, "0" * 32)
    assert not same_directory(str(tmp_path), None)


def batches_in(path: pathlib.Path) -> list[tuple[int, int]]:
    data, found = path.read_bytes(), []
    position = 8 + struct.unpack_from("<I", data, 4)[0]
    while (frame := frame_at(data, position, len(data))) is not None and frame[0]:
        found.append((position, frame[0]))
        position += frame[0]
    return found


def stopped_log(tmp_path: pathlib.Path, batches: int = 10, **configs: Any) -> pathlib.Path:
    """The directory of a topic `t`: one record in each batch."""
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("t", 1, configs)])
        with Producer(running.address) as producer:
            for n in range(batches):
                producer.send("t", b"%d" % n, timestamp=n + 1).result(60)
    finally:
        assert running.stop() == 0
    return tmp_path / "data" / "t"


def offsets(source: Any, *arguments: Any, **asked: Any) -> list[int]:
    found: list[int] = (
        tailrace.scan(source, *arguments, **{"columns": ["offset", "value"], **asked})
        .read_all()
        .column(0)
        .to_pylist()
    )
    return found


def test_a_torn_tail_of_a_stopped_log_is_left_out(tmp_path: pathlib.Path) -> None:
    log = stopped_log(tmp_path)
    (segment,) = log.with_name("t-0").glob("*.arrows")
    for name in ("checkpoint.0", "checkpoint.1"):
        (log.with_name("t-0") / name).unlink(missing_ok=True)  # they say that all of it was durable
    whole, last = segment.read_bytes(), batches_in(segment)[-1]
    for cut in (1, last[1] // 2, last[1] - 1):
        segment.write_bytes(whole[: last[0] + last[1]][:-cut])
        assert offsets(log) == offsets(log, columns=["offset"]) == list(range(9))
    segment.write_bytes(whole[: last[0] + last[1]] + b"\xff\xff\xff\xff garbage")
    assert offsets(log) == list(range(10))


def test_bodies_are_read_only_when_something_in_them_is_asked_for(tmp_path: pathlib.Path) -> None:
    log = stopped_log(tmp_path)
    (segment,) = log.with_name("t-0").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    position, length = batches_in(segment)[4]
    data[position + length - 40] ^= 1
    segment.write_bytes(data)
    assert offsets(log, columns=["offset", "partition", "timestampType"]) == list(range(10))
    with pytest.raises(CorruptBatchError):
        offsets(log, columns=["offset", "timestamp"])


def test_a_damaged_length_costs_its_own_batch_alone(tmp_path: pathlib.Path) -> None:
    log = stopped_log(tmp_path)
    (segment,) = log.with_name("t-0").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    data[header_position(data, batches_in(segment)[4][0]) + 12] ^= 0x10
    segment.write_bytes(data)
    assert (
        offsets(log, skip_damaged=True)
        == offsets(log, skip_damaged=True, columns=["offset"])
        == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    )


def test_what_was_durable_and_is_cut_off_is_damage(tmp_path: pathlib.Path) -> None:
    log = stopped_log(tmp_path)
    (segment,) = log.with_name("t-0").glob("*.arrows")
    segment.write_bytes(segment.read_bytes()[: batches_in(segment)[7][0]])
    with pytest.raises(CorruptBatchError, match="t-0: offsets 7 to 9 are damaged"):
        offsets(log)
    assert offsets(log, skip_damaged=True) == list(range(7))


@pytest.mark.parametrize("where", ["body", "header", "metadata"])
def test_a_damaged_batch_is_named_or_skipped_and_counted_the_same_both_ways(
    tmp_path: pathlib.Path, where: str
) -> None:
    log = stopped_log(tmp_path)
    (segment,) = log.with_name("t-0").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    position, length = batches_in(segment)[4]
    header = header_position(data, position)
    data[
        {"body": position + length - 40, "header": header + 40, "metadata": position + 60}[where]
    ] ^= 0x10
    segment.write_bytes(data)
    with embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False) as running:
        for from_files in (True, False):
            asked: dict[str, Any] = {"from_files": from_files}
            with pytest.raises(
                CorruptBatchError,
                match=r"t-0: offsets 4 to 4 are damaged .*skip_damaged=True skips them",
            ) as caught:
                offsets("t", running.address, **asked)
            assert (caught.value.key, caught.value.first_offset, caught.value.next_offset) == (
                TopicPartition("t", 0),
                4,
                5,
            )
            skipped: list[CorruptBatchError] = []
            assert offsets(
                "t", running.address, skip_damaged=True, on_damage=skipped.append, **asked
            ) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
            assert [(e.first_offset, e.next_offset) for e in skipped] == [(4, 5)]
            good = tailrace.scan("t", running.address, columns=["offset"], end=4, **asked)
            assert good.read_all().num_rows == 4


# ---- what goes on meanwhile ----------------------------------------------------------------------


def test_a_topic_deleted_while_it_is_scanned_is_said(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    for from_files in (True, False):
        with (
            Admin(appliance.address) as admin,
            Producer(appliance.address, batch_size=1024) as producer,
        ):
            admin.create_topics([NewTopic(topic, 2)])
            for n in range(40):
                producer.send(topic, b"x" * 200, partition=n % 2)
            producer.flush(60)
            rows = tailrace.scan(topic, appliance.address, columns=["value"], from_files=from_files)
            assert rows.read_next_batch().num_rows == 20  # partition 0
            admin.delete_topics([topic])
            with pytest.raises(UnknownTopicError, match=topic):
                rows.read_all()


def test_what_is_scanned_is_kept_from_retention_and_given_free_again(
    tmp_path: pathlib.Path,
) -> None:
    import sqlite3

    with embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False) as running:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("t", 2, {"segment.bytes": 64 << 10})])
        with Producer(running.address, batch_size=1024) as producer:
            for n in range(400):
                producer.send("t", b"x" * 400, partition=n % 2)

        def leases() -> int:
            with sqlite3.connect(
                f"file:{running.data_dir}/coordinator.db?mode=ro", uri=True
            ) as catalog:
                return int(catalog.execute(LEASES).fetchone()[0])

        for end in ("read", "close", "forget"):
            rows = tailrace.scan("t", running.address)
            assert leases() == 2
            if end == "read":
                rows.read_all()
            elif end == "close":
                rows.read_next_batch()
                rows.close()
            del rows
            assert leases() == 0, end


def test_what_retention_has_removed_meanwhile_is_said(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=1024) as producer,
    ):
        admin.create_topics([NewTopic(topic, 2)])
        for n in range(40):
            producer.send(topic, b"x" * 200, partition=n % 2)
        producer.flush(60)
        for from_files in (True, False):
            rows = tailrace.scan(topic, appliance.address, columns=["value"], from_files=from_files)
            rows.read_next_batch()
            admin.delete_records({TopicPartition(topic, 1): 5 if from_files else 9})
            with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-1"):
                rows.read_all()


def test_an_appliance_that_stops_is_named_after_a_bounded_wait_and_files_are_read_on(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    with Admin(running.address) as admin, Producer(running.address, batch_size=1024) as producer:
        admin.create_topics([NewTopic("t", 2)])
        for n in range(40):
            producer.send("t", b"%d" % n, partition=n % 2)
        producer.flush(60)
    remote = tailrace.scan(
        "t", running.address, columns=["value"], from_files=False, request_timeout_ms=600
    )
    local = tailrace.scan("t", running.address, columns=["value"], from_files=True)
    for rows in (remote, local):
        assert rows.read_next_batch().num_rows == 20
    address = running.address
    os.kill(running.pid, signal.SIGKILL)
    running.stop()
    assert local.read_all().num_rows == 20
    with pytest.raises((NotReachableError, RequestTimeoutError), match=address):
        remote.read_all()


def test_a_restarted_appliance_is_asked_for_the_rest(tmp_path: pathlib.Path) -> None:
    address = f"ipc://{tmp_path}/front"
    for part in (0, 1):
        with embedded(data_dir=str(tmp_path / "data"), listen=address, auto_create_topics=False):
            if part == 0:
                with Admin(address) as admin, Producer(address, batch_size=1024) as producer:
                    admin.create_topics([NewTopic("t", 2)])
                    for n in range(40):
                        producer.send("t", b"%d" % n, partition=n % 2)
                    producer.flush(60)
                rows = tailrace.scan("t", address, columns=["value"], from_files=False)
                assert rows.read_next_batch().num_rows == 20
            else:
                assert rows.read_all().num_rows == 20
                rows.close()


# ---- what is asked for wrongly -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error", "sentence"),
    [({"colums": ["key"]}, InvalidSettingError, "did you mean columns"),
    ({"skip_damagd": True}, InvalidSettingError, "did you mean skip_damaged"),
     ({"columns": ["vaule"]}, InvalidSettingError, "did you mean 'value'"),
     ({"columns": []}, InvalidSettingError, "a list of names"),
     ({"columns": ["key", "key"]}, InvalidSettingError, "twice"),
     ({"columns": 7}, InvalidSettingError, "a list of names"),
     ({"start": 9_999}, OffsetOutOfRangeError, ("start is offset 9999 of plain-0, which "
                                               "has 0 to 600")),
     ({"end": {1: 601}}, OffsetOutOfRangeError, "end is offset 601 of plain-1"),
     ({"start": "erliest"}, InvalidSettingError, "start is"),
     ({"start": -2}, InvalidSettingError, "start is -2"),
     ({"start": True}, InvalidSettingError, "start is True"),
     ({"start": 9, "end": 3}, InvalidRequestError, "give an end at or above start"),
     ({"start": {7: 1}}, InvalidSettingError, "start names plain-7"),
     ({"start": {"0": 1}}, InvalidSettingError, "start names partition '0'"),
     ({"partitions": 2}, PartitionOutOfRangeError, "0 to 1, not 2"),
     ({"partitions": "all"}, InvalidSettingError, "a partition number"),
     ({"from_files": "yes"}, InvalidSettingError, "from_files"),
     ({"on_damage": 3}, InvalidSettingError, "give a function"),
     ({"validate_batches": "perhaps"}, InvalidSettingError, "validate_batches")],
)  # fmt: skip
def test_what_is_wrong_is_named(
    filled: EmbeddedAppliance, asked: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        tailrace.scan("plain", filled.address, **asked)


def test_a_misspelt_topic_or_directory_is_told_what_is_near(filled: EmbeddedAppliance) -> None:
    for source, sentence in (
        ("plian", "did you mean 'plain'"), (f"{filled.data_dir}/plian", "did you mean .*/plain"),
        (filled.data_dir, "is a data directory; name a topic"),
        ("/nonexistent/topic", "/nonexistent has no topics"),
    ):  # fmt: skip
        with pytest.raises(UnknownTopicError, match=sentence):
            tailrace.scan(source, filled.address)
    for nothing in ("", None, 7):
        with pytest.raises(InvalidRequestError, match="scan takes a topic's name"):
            tailrace.scan(nothing, filled.address)  # type: ignore[arg-type]


def test_a_connection_that_is_refused_is_not_reachable() -> None:
    with pytest.raises(NotReachableError):
        tailrace.scan("t", "tcp://127.0.0.1:9", request_timeout_ms=300)
