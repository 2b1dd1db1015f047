"""The main job through the real processes: what is sent comes back, equal and in order."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.records.partitioners import partition_for_key
from tailrace.core.errors import (
    InvalidRecordError,
    InvalidSchemaError,
    RequestTimeoutError,
    SchemaMismatchError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.topics import create, read_all
from tests.kit.processes import HANG_LIMIT_S, stopped


@pytest.mark.parametrize("acks", [0, 1, "all"])
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_records_come_back_equal_and_in_order(
    appliance: EmbeddedAppliance, topic: str, acks: int | str, compression: str
) -> None:
    create(appliance, topic, 3)
    sent: dict[int, list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
    with Producer(
        appliance.address, acks=acks, compression_type=compression, batch_size=4096
    ) as producer:
        for number in range(3000):
            key, value = b"k%d" % (number % 7), b"v%d" % number if number % 11 else None
            producer.send(topic, value, key)
            sent[partition_for_key(key, 3)].append((key, value))
        producer.flush()
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
    for record in read_all(appliance, topic, 3000):
        assert record.offset == len(found[record.partition])
        found[record.partition].append((record.key, record.value))
    assert found == sent


def test_metadata_headers_and_timestamps(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic)
    moment = dt.datetime(2013, 1, 1, 12, 0, 0, 123456, tzinfo=dt.UTC)
    with Producer(appliance.address) as producer:
        first = producer.send(topic, b"a", b"k", [("h", b"1"), ("h", b"2")], timestamp=moment)
        second = producer.send(topic, "text", timestamp=1234)
        assert (first.result(60).offset, second.result(60).offset) == (0, 1)
        assert first.done()
        assert first.exception() is None
        assert first.result().timestamp == 1_357_041_600_123
    one, two = read_all(appliance, topic, 2)
    assert (one.headers, one.datetime, one.timestamp_type) == (
        [("h", b"1"), ("h", b"2")],
        moment,
        0,
    )
    assert (two.value, two.key, two.headers, two.timestamp) == (b"text", None, [], 1234)


def test_log_append_time_is_the_appliances(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic, message_timestamp_type="LogAppendTime")
    with Producer(appliance.address) as producer:
        metadata = producer.send(topic, b"a", timestamp=5).result(60)
    (record,) = read_all(appliance, topic, 1)
    assert record.timestamp_type == 1
    assert record.timestamp == metadata.timestamp > 1_600_000_000_000


def test_callbacks_see_every_record_once(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic)
    offsets: list[int | None] = []
    with Producer(appliance.address) as producer:
        for number in range(500):
            producer.send(
                topic,
                b"%d" % number,
                on_delivery=lambda metadata, error: offsets.append(
                    metadata.offset if metadata and not error else -1
                ),
            )
    assert offsets == list(range(500))


FRAMES: dict[str, Callable[[], Any]] = {
    "pandas": lambda: pd.DataFrame({"n": range(1000), "word": [f"w{i % 5}" for i in range(1000)]}),
    "polars": lambda: pl.DataFrame({"n": range(1000), "word": [f"w{i % 5}" for i in range(1000)]}),
    "lazy polars": lambda: pl.LazyFrame(
        {"n": range(1000), "word": [f"w{i % 5}" for i in range(1000)]}
    ),
    "duckdb": lambda: duckdb.sql("select range as n, 'w' || (range % 5) as word from range(1000)"),
    "reader": lambda: pa.table(
        {"n": range(1000), "word": [f"w{i % 5}" for i in range(1000)]}
    ).to_reader(300),
    "table": lambda: pa.table(
        {"n": range(1000), "word": pa.array([f"w{i % 5}" for i in range(1000)]).dictionary_encode()}
    ),
}


@pytest.mark.parametrize(
    ("kind", "compression"),
    [*((kind, "none") for kind in FRAMES), ("table", "lz4"), ("table", "zstd")],
)
def test_frames_come_back_as_columns(
    appliance: EmbeddedAppliance, topic: str, kind: str, compression: str
) -> None:
    frame = FRAMES[kind]()
    create(
        appliance,
        topic,
        2,
        schema=FRAMES["table"]() if kind == "reader" else frame,
        compression_type=compression,
    )
    with Producer(appliance.address, batch_size=4096) as producer:
        metadata = producer.send_arrow(topic, frame, key_column="word").result(60)
    assert sum(m.record_count for m in metadata) == 1000
    rows: list[dict[str, object]] = []
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(rows) < 1000:
            for batch in consumer.poll_arrow(timeout_ms=60_000):
                assert batch.offsets.to_pylist() == list(
                    range(batch.base_offset, batch.base_offset + len(batch))
                )
                part = batch.batch.to_pylist()
                assert {partition_for_key(str(row["word"]).encode(), 2) for row in part} == {
                    batch.partition
                }
                rows += part
    assert sorted(rows, key=lambda row: int(str(row["n"]))) == [
        {"n": i, "word": f"w{i % 5}"} for i in range(1000)
    ]


def test_a_batch_as_read_is_a_frame_of_whatever_library(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, schema=pa.schema([("n", pa.int64()), ("word", pa.string())]))
    with Producer(appliance.address) as producer:
        producer.send_arrow(topic, pa.table({"n": [1, 2], "word": ["a", "b"]})).result(60)
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        (batch,) = consumer.poll_arrow(timeout_ms=60_000)
    assert batch.to_pandas()["n"].tolist() == [1, 2]
    assert batch.to_polars()["word"].to_list() == ["a", "b"]
    assert pa.record_batch(batch).equals(batch.batch), "by __arrow_c_array__"
    assert pa.record_batch(batch).num_rows == 2


def test_rows_of_a_typed_topic_go_in_and_out_as_dicts(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(
        appliance, topic, schema=pa.schema([("a", pa.int32()), ("when", pa.timestamp("us", "UTC"))])
    )
    moment = dt.datetime(2020, 5, 5, tzinfo=dt.UTC)
    with Producer(appliance.address) as producer:
        producer.send(topic, {"a": 1, "when": moment}).result(60)
        producer.send(topic, {"a": None}).result(60)
    assert [r.value for r in read_all(appliance, topic, 2)] == [
        {"a": 1, "when": moment},
        {"a": None, "when": None},
    ]


def test_a_row_of_a_typed_topic_has_the_time_in_its_timestamp_column_by_which_it_is_found(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(
        appliance,
        topic,
        schema=pa.schema([("timestamp", pa.timestamp("us", "UTC")), ("a", pa.int32())]),
    )
    stamps = [3_000, None, 1_000, 2_000]
    with Producer(appliance.address) as producer:
        producer.send_arrow(
            topic,
            pa.table(
                {
                    "timestamp": pa.array(
                        [s and s * 1000 for s in stamps], pa.timestamp("us", "UTC")
                    ),
                    "a": range(4),
                }
            ),
        ).result(60)
    assert [r.timestamp for r in read_all(appliance, topic, 4)] == [3_000, 3_000, 1_000, 2_000], (
        "without one, the largest of its batch"
    )
    with Consumer(topic, bootstrap=appliance.address) as consumer:
        key = consumer.assignment()[0]
        consumer.seek(key, 2)
        assert consumer.poll(60_000)[0].timestamp == 1_000
        assert consumer.offsets_for_times({key: 1_000})[key] == (0, 3_000)


def test_a_row_that_does_not_fit_names_its_column(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic, schema=pa.schema([("a", pa.int32()), ("name", pa.string())]))
    with (
        Producer(appliance.address) as producer,
        pytest.raises(InvalidRecordError, match="column 'name' takes string"),
    ):
        producer.send(topic, {"a": 1, "name": 5}).result(60)


def test_a_polars_schema_makes_a_topic_and_what_is_no_frame_is_refused(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    frame = pl.DataFrame({"a": [1], "name": ["x"]})
    create(appliance, topic, schema=frame.schema)
    with Producer(appliance.address) as producer:
        producer.send_arrow(topic, frame).result(60)
        for no_frame in (frame.schema, frame["a"]):
            with pytest.raises(SchemaMismatchError, match="has no columns"):
                producer.send_arrow(topic, no_frame)
    for no_schema in (pa.int64(), frame["a"]):
        with pytest.raises(InvalidSchemaError, match="has no columns"):
            create(appliance, f"{topic}-2", schema=no_schema)


def test_frames_of_the_default_schema_need_only_a_value(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic)
    with Producer(appliance.address) as producer:
        producer.send_arrow(
            topic, pa.table({"value": [b"a", b"b"], "key": [b"k", None]}), timestamp=7
        ).result(60)
    assert [(r.key, r.value, r.timestamp) for r in read_all(appliance, topic, 2)] == [
        (b"k", b"a", 7),
        (None, b"b", 7),
    ]


def test_a_pluggable_partitioner_and_an_explicit_partition(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, 4)
    with Producer(
        appliance.address, partitioner=lambda _topic, key, count: len(key or b"") % count
    ) as producer:
        assert producer.send(topic, b"x", b"abc").result(60).partition == 3
        assert producer.send(topic, b"x", b"abc", partition=1).result(60).partition == 1
        assert producer.partitions_for(topic) == [0, 1, 2, 3]


def test_many_threads_share_a_producer(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic, 2)
    with Producer(appliance.address, batch_size=2048) as producer:

        def work(name: int) -> None:
            for number in range(500):
                handle = producer.send(topic, b"%d-%d" % (name, number), b"%d" % name)
                if number % 100 == 0:
                    handle.result(60)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    by_key: dict[bytes | None, list[bytes]] = defaultdict(list)
    for record in read_all(appliance, topic, 2000):
        by_key[record.key].append(record.value)
    assert by_key == {b"%d" % n: [b"%d-%d" % (n, i) for i in range(500)] for n in range(4)}


@pytest.mark.parametrize("count", [1, 1000])
def test_a_program_that_ends_without_close_still_delivers(
    appliance: EmbeddedAppliance, topic: str, count: int
) -> None:
    create(appliance, topic)
    code = (
        f"import tailrace; p = tailrace.Producer({appliance.address!r}); [p.send({topic!r}, "
        f"b'%d' % i) for i in range({count})]"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=True,
    )
    assert done.stderr == ""
    assert [record.value for record in read_all(appliance, topic, count)] == [
        b"%d" % n for n in range(count)
    ]


def test_a_unix_socket_serves_and_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    running = start_embedded(listen=f"ipc://{path}")
    with Producer(running.address) as producer:
        assert producer.send("t", b"x").result(60).offset == 0
    assert path.exists()
    assert running.stop() == 0
    assert not path.exists()


def test_a_producer_in_a_forked_child_says_so(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic)
    with Producer(appliance.address) as producer:
        producer.send(topic, b"parent").result(60)
        pid = os.fork()
        if pid == 0:
            try:
                producer.send(topic, b"child")
            except Exception as error:
                os._exit(7 if "fork()" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        producer.send(topic, b"parent again").result(60)


def test_waiting_for_a_record_can_time_out_and_go_on(
    appliance: EmbeddedAppliance, topic: str
) -> None:

    from tests.kit.processes import children

    create(appliance, topic)
    flusher = children(appliance)["tr-flusher-0"]
    with Producer(appliance.address, acks="all") as producer:
        producer.send(topic, b"first").result(60)
        with stopped(flusher):
            handle = producer.send(topic, b"second")
            with pytest.raises(RequestTimeoutError):
                handle.result(0.2)
            assert not handle.done()
        assert handle.result(60).offset == 1


def test_a_request_that_times_out_is_sent_again_and_stored_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:

    from tests.kit.processes import children, wait_until

    create(appliance, topic)
    flusher = children(appliance)["tr-flusher-0"]
    with Producer(
        appliance.address, acks="all", request_timeout_ms=100, retry_backoff_ms=20
    ) as producer:
        with stopped(flusher):
            handles = [producer.send(topic, b"%d" % n) for n in range(10)]
            wait_until(lambda: producer.metrics()["retries"] >= 3, "the request is sent again")
            assert not handles[0].done()
        assert [handle.result(60).offset for handle in handles] == list(range(10))
    assert [record.value for record in read_all(appliance, topic, 10)] == [
        b"%d" % n for n in range(10)
    ]


def test_many_topics_and_partitions(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        names = [f"{topic}-{n}" for n in range(20)]
        admin.create_topics([NewTopic(name, 4) for name in names])
        with Producer(appliance.address) as producer:
            handles = [
                producer.send(name, b"%d" % n, partition=p)
                for n, name in enumerate(names)
                for p in range(4)
            ]
            for handle in handles:
                handle.result(60)
        assert set(names) <= set(admin.list_topics())
        described = admin.describe_topics(names)
        assert all(
            p["end_offset"] == 1 and p["state"] == "ONLINE"
            for t in described.values()
            for p in t["partitions"]
        )
        admin.delete_topics(names)
        assert not set(names) & set(admin.list_topics())
    assert not [entry for entry in os.listdir(appliance.data_dir) if entry.startswith(topic)]


def test_partitions_and_settings_can_be_changed_while_records_flow(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic)
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        producer.send(topic, b"before").result(60)
        admin.create_partitions({topic: 3})
        admin.alter_topics({topic: {"segment.bytes": 65536}})
        assert admin.describe_configs([topic])[topic]["segment.bytes"] == 65536
        producer.send(topic, b"same", partition=0).result(60)
    with Producer(appliance.address) as producer:
        assert producer.send(topic, b"new", partition=2).result(60).offset == 0
    assert {r.value for r in read_all(appliance, topic, 3)} == {b"before", b"same", b"new"}


def test_first_records_come_without_pandas_being_loaded(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        producer.send(topic, b"v", b"k", headers=[("h", b"x")])
    code = (
        "import importlib.util, sys, tailrace\nassert importlib.util.find_spec('pandas')\n"
        f"with tailrace.Consumer({topic!r}, bootstrap={appliance.address!r}, group_id={topic!r}, "
        "auto_offset_reset='earliest') as consumer:\n"
        "    while not consumer.poll(1000): pass\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, timeout=HANG_LIMIT_S, check=False
    )
    assert (done.stdout, done.stderr) == (
        b"False\n",
        b"",
    )  # members that load it hold partitions meanwhile which they do not read


def test_producers_that_make_one_topic_at_once_all_send_to_it() -> None:
    """All but one are told that it exists already, perhaps before their front shows it."""
    count, rounds = 6, 8
    running = start_embedded()
    try:
        producers = [Producer(running.address, linger_ms=0) for _ in range(count)]
        together = threading.Barrier(count)
        errors: list[BaseException] = []

        def send(producer: Producer) -> None:
            try:
                for number in range(rounds):
                    together.wait(HANG_LIMIT_S)
                    producer.send(f"t{number}", b"x").result(60)
            except BaseException as error:
                errors.append(error)
                together.abort()

        threads = [threading.Thread(target=send, args=(producer,)) for producer in producers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_LIMIT_S)
        for producer in producers:
            producer.close()
        assert errors == []
        with Consumer(bootstrap=running.address) as consumer:
            for number in range(rounds):
                assert consumer.highwater(TopicPartition(f"t{number}", 0)) == count
    finally:
        assert running.stop() == 0
