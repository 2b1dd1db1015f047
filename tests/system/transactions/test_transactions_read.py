"""Committed reads of a running appliance: nothing that was not committed is shown, by any way of
reading.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
from concurrent.futures import ThreadPoolExecutor, wait

import pyarrow.parquet as pq
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.aio import AsyncConsumer
from tailrace.client.topics import list_offsets
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.killed_directories import kill_everything
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S, children
from tests.kit.transactional.committed_topics import ROUNDS, fill


def test_consumers_scans_and_queues_show_what_was_committed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    model, key = fill(appliance.address, topic), TopicPartition(topic, 0)
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", group_id="g"
    ) as consumer:
        seen: list[bytes] = []
        while len(seen) < len(model):
            seen += [record.value for record in consumer.poll(1_000)]
        assert seen == model
        end = consumer.end_offsets([key])[key]
        while consumer.position(key) < end:
            assert consumer.poll(100) == []
        assert consumer.lag(key) == 0
    with Consumer(
        bootstrap=appliance.address,
        auto_offset_reset="earliest",
        isolation_level="read_uncommitted",
    ) as consumer:
        consumer.assign([key])
        everything = 0
        while everything < 4 * ROUNDS:
            everything += len(consumer.poll(1_000))
        assert everything == 4 * ROUNDS
    for from_files in (True, False):
        table = tailrace.scan(
            topic, appliance.address, columns=["value"], from_files=from_files
        ).read_all()
        assert table["value"].to_pylist() == model
    with tailrace.ShareConsumer(
        topic, bootstrap=appliance.address, group_id="queue", auto_offset_reset="earliest"
    ) as queue:
        delivered: list[bytes] = []
        while len(delivered) < len(model):
            delivered += [record.value for record in queue.poll(1_000)]
        assert delivered == model


def test_exports_sql_and_the_command_line_show_what_was_committed(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    model = fill(appliance.address, topic)
    with Producer(appliance.address, transactional_id=topic) as producer:
        producer.begin_transaction()
        producer.send(topic, b"open")
        producer.flush()
        for _ in range(2):  # the second export goes on where the first ended
            run(appliance, "export", topic, "--to", str(tmp_path / "lake"))
        found = pq.read_table(tmp_path / "lake")["value"].to_pylist()
        assert found == model
        rows = run(appliance, "sql", f'select value from "{topic}" order by "offset"', "--json")
        assert rows.stdout.count(b"plain-") == ROUNDS
        assert b"open" not in rows.stdout
        shown = run(appliance, "consume", topic, "--from-beginning").stdout
        assert shown.split() == model
        everything = run(
            appliance, "consume", topic, "--from-beginning",
            "--isolation", "read_uncommitted",
        ).stdout.split()  # fmt: skip
        assert len(everything) == 4 * ROUNDS + 1
        producer.commit_transaction()
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", group_id="g"
    ) as consumer:  # readers show a commit when its marker is durable
        seen: list[bytes] = []
        while seen[-1:] != [b"open"]:
            seen += [record.value for record in consumer.poll(1_000)]
    run(appliance, "export", topic, "--to", str(tmp_path / "lake"))
    assert sorted(pq.read_table(tmp_path / "lake")["value"].to_pylist()) == sorted(
        [*model, b"open"]
    )


def test_perf_transform_copies_committed_records_once_and_goes_on_where_it_has_committed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    model, copy = fill(appliance.address, topic), f"{topic}-copy"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(copy)])

    def transform(count: int, timeout_ms: int) -> tuple[int, bytes]:
        done = run(
            appliance, "perf", "transform", "--topic", topic, "--to", copy, "--messages",
            str(count), "--group", topic, "--transactional-id", copy, "--timeout", str(timeout_ms),
            "--json",
        )  # fmt: skip
        return json.loads(done.stdout)["records"], done.stderr

    assert transform(len(model), int(HANG_LIMIT_S * 1_000))[0] == len(model)
    count, said = transform(1, 1)
    assert not count
    assert b"name another --group" in said
    with Consumer(copy, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        copied: list[bytes] = []
        while len(copied) < len(model):
            copied += [record.value for record in consumer.poll(1_000)]
    assert copied == model


def test_an_asyncio_consumer_has_both_isolation_levels(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    model, key = fill(appliance.address, topic), TopicPartition(topic, 0)

    async def read(level: str, count: int) -> list[bytes]:
        consumer = AsyncConsumer(
            bootstrap=appliance.address, auto_offset_reset="earliest", isolation_level=level
        )
        async with consumer:
            await consumer.assign([key])
            found: list[bytes] = []
            while len(found) < count:
                found += [record.value for record in await consumer.poll(1_000)]
            end = (await consumer.end_offsets([key]))[key]
            while await consumer.position(key) < end:
                assert await consumer.poll(100) == []
            return found

    assert asyncio.run(read("read_committed", len(model))) == model
    everything = asyncio.run(read("read_uncommitted", 4 * ROUNDS))
    assert len(everything) == 4 * ROUNDS
    assert [value for value in everything if value in model] == model


def test_a_reader_that_reads_once_sees_all_that_was_committed_before_it_began(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is durable, and its marker is not: the flusher stands still."""
    monkeypatch.setattr(list_offsets, "CARRIED_OUT_MAX_NS", HANG_LIMIT_S * 1_000_000_000)
    key = TopicPartition(topic, 0)
    with (
        tailrace.embedded() as running,
        Producer(running.address, transactional_id=topic) as producer,
        ThreadPoolExecutor() as pool,
        Consumer(bootstrap=running.address) as consumer,
    ):
        for value in (b"first", b"second"):
            with producer.transaction():
                producer.send(topic, value, partition=0).result(HANG_LIMIT_S)
                if value == b"second":
                    flusher = children(running)["tr-flusher-0"]
                    os.kill(flusher, signal.SIGSTOP)
        try:
            ends = pool.submit(consumer.end_offsets, [key])
            scanned = pool.submit(lambda: tailrace.scan(topic, running.address).read_all())
            wait([ends, scanned], timeout=0.3)  # so long it may go wrong
            assert not ends.done()
            assert not scanned.done()
        finally:
            os.kill(flusher, signal.SIGCONT)
        assert scanned.result(HANG_LIMIT_S)["value"].to_pylist() == [b"first", b"second"]
        assert ends.result(HANG_LIMIT_S)[key] > 3, "each transaction has a marker"


def test_a_reader_right_after_a_start_sees_what_was_committed_before_everything_was_killed(
    topic: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The markers of the commit were lost with shared memory's last part. The coordinator that is
    to write them starts behind the front.
    """
    monkeypatch.setattr(list_offsets, "CARRIED_OUT_MAX_NS", HANG_LIMIT_S * 1_000_000_000)
    running = start_embedded(data_dir=str(tmp_path))
    with Producer(running.address, transactional_id=topic) as producer:
        with producer.transaction():
            producer.send(topic, b"first", partition=0).result(HANG_LIMIT_S)
            os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
        kill_everything(running)
    running = start_embedded(data_dir=str(tmp_path))
    try:
        assert tailrace.scan(topic, running.address).read_all()["value"].to_pylist() == [b"first"]
    finally:
        running.stop()
