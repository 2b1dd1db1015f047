"""Compaction of a real appliance: what every reader sees before, during and after a cleaning, held
against a dictionary of what was written.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import pathlib
import random
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator

import orjson
import pytest

import tailrace
from tailrace import Admin, ConfigResource, Consumer, Producer, Table
from tailrace.core.errors import CorruptBatchError, InvalidSettingError, RequestTimeoutError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances import backups
from tests.kit.appliances.compacted import (
    START_MS,
    Pair,
    Written,
    compact,
    create,
    files,
    read,
    size_of,
    update,
)
from tests.kit.cli import run
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until
from tests.kit.transactional.visibility import await_visible

CLEANER = "tr-cleaner-0"
IOPRIO_GET = 252


@pytest.fixture(scope="module")
def cleaning() -> Iterator[EmbeddedAppliance]:
    """An appliance that looks for something to clean all the time."""
    running = start_embedded(
        auto_create_topics=False,
        settings={"cleaner.check.interval.ms": 100, "http.listen": "127.0.0.1:0"},
    )
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


def test_every_reader_sees_the_latest_of_each_key_at_its_own_offset(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    written = create(cleaning, topic)
    key = written.key
    with Producer(cleaning.address, linger_ms=1, batch_size=2_000) as producer:
        update(producer, written, 1_200, random.Random(1))
        assert read(cleaning.address, key) == written.by_offset
        before = size_of(cleaning, topic)
        (partition,) = compact(cleaning, topic)
        assert (partition["state"], partition["is_done"]) == ("idle", True)
        assert partition["cleaned_below"] == partition["log_end_offset"] == 1_200
        assert size_of(cleaning, topic) < before / 4
        kept = written.kept
        assert read(cleaning.address, key) == kept
        with Consumer(bootstrap=cleaning.address, max_poll_records=1) as consumer:
            consumer.assign([key])
            assert consumer.beginning_offsets([key]) == {key: 0}
            assert consumer.end_offsets([key]) == {key: 1_200}
            for position in range(0, 1_200, 7):
                consumer.seek(key, position)
                following = min((offset for offset in kept if offset >= position), default=1_200)
                if following < 1_200:
                    (record,) = consumer.poll(60_000)
                    assert record.offset == following
                    assert (record.key, record.value) == kept[following]
            found = consumer.offsets_for_times({key: START_MS + 600})[key]
            assert found is not None
            assert found.offset == min(offset for offset in kept if offset >= 600)
        update(producer, written, 100, random.Random(2))
    assert read(cleaning.address, key) == {
        **kept, **{offset: pair for offset, pair in written.by_offset.items() if offset >= 1_200},
    }  # fmt: skip
    rows = tailrace.scan(topic, cleaning.address, latest=True).read_all()
    assert (
        dict(zip(rows.column("key").to_pylist(), rows.column("value").to_pylist(), strict=True))
        == written.table
    )
    with Table(topic, cleaning.address) as table:
        assert dict(table.items()) == written.table


def test_a_slow_consumer_over_many_cleanings_misses_and_repeats_nothing(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    """It fetches a batch at a time, while the log is appended to and cleaned before and behind
    it.
    """
    written, rng = create(cleaning, topic), random.Random(3)
    seen: dict[int, Pair] = {}
    with (
        Producer(cleaning.address, linger_ms=1, batch_size=2_000) as producer,
        Consumer(
            bootstrap=cleaning.address, max_partition_fetch_bytes=1_024, fetch_max_bytes=1_024,
            max_poll_records=20,
        ) as consumer,
    ):  # fmt: skip
        update(producer, written, 600, rng)
        consumer.assign([written.key])
        consumer.seek_to_beginning(written.key)
        for _ in range(6):
            for _ in range(4):
                for record in consumer.poll(1_000):
                    assert record.offset > max(seen, default=-1)
                    assert written.by_offset[record.offset] == (record.key, record.value)
                    seen[record.offset] = record.key, record.value
            update(producer, written, 150, rng)
            compact(cleaning, topic)
        while consumer.position(written.key) < len(written.by_offset):
            for record in consumer.poll(1_000):
                assert record.offset > max(seen)
                seen[record.offset] = record.key, record.value
    assert set(written.kept) <= set(seen)


def test_what_is_committed_stays_and_what_is_aborted_goes(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    written, rng = create(cleaning, topic), random.Random(4)
    address, key = cleaning.address, written.key
    with Producer(address, transactional_id=topic, batch_size=2_000) as producer:
        for number in range(12):
            producer.begin_transaction()
            attempt = Written(topic)
            update(producer, attempt, 60, rng)
            if number % 3:
                producer.commit_transaction()
                written.by_offset.update(attempt.by_offset)
            else:
                producer.abort_transaction()
        producer.begin_transaction()
        open_one = Written(topic)
        update(producer, open_one, 60, rng)
        first_open = min(open_one.by_offset)
        (partition,) = compact(cleaning, topic)
        assert 0 < partition["cleaned_below"] <= first_open, "up to the last stable offset"
        kept = {
            offset: pair for offset, pair in read(address, key).items()
            if offset < partition["cleaned_below"]
        }  # fmt: skip
        assert len({record_key for record_key, _ in kept.values()}) == len(kept)
        kill_and_wait_for_successor(cleaning, "tr-worker-0")
        producer.commit_transaction()
        written.by_offset.update(open_one.by_offset)
        wait_until(
            lambda: compact(cleaning, topic)[0]["cleaned_below"] > max(written.by_offset),
            "the marker is there, and nothing is open",
        )
        assert read(address, key) == written.kept
        assert read(address, key, isolation_level="read_uncommitted") == written.kept
        producer.begin_transaction()
        update(producer, written, 5, rng)
        producer.commit_transaction()
    await_visible(address, topic)
    compact(cleaning, topic)
    assert read(address, key) == written.kept


def test_an_idempotent_producer_goes_on_after_its_batches_were_cleaned_and_all_was_restarted(
    tmp_path: pathlib.Path, topic: str
) -> None:
    def start() -> EmbeddedAppliance:
        return start_embedded(data_dir=str(tmp_path), listen=f"ipc://{tmp_path}/socket")

    running, rng = start(), random.Random(5)
    written = create(running, topic)
    with Producer(running.address, linger_ms=1, batch_size=2_000) as producer:
        for stop in (signal.SIGTERM, signal.SIGKILL):
            update(producer, written, 300, rng)
            compact(running, topic)
            if stop is signal.SIGKILL:
                os.kill(running.pid, signal.SIGKILL)
            running.stop()
            running = start()
            assert read(running.address, written.key) == written.kept
        update(producer, written, 300, rng)
    compact(running, topic)
    assert read(running.address, written.key) == written.kept
    running.stop()
    assert backups.records_in(tmp_path) == len(written.kept)


def test_the_cleaner_is_there_while_it_works_and_its_kills_cost_nothing(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    written, rng = create(cleaning, topic), random.Random(6)
    with Producer(cleaning.address, linger_ms=1) as producer:
        update(producer, written, 1_500, rng)
    wait_until(lambda: CLEANER not in children(cleaning), "nothing is to be cleaned")
    with throttled(cleaning, 200_000):
        done = in_background(lambda: compact(cleaning, topic))
        for _ in range(3):
            wait_until(lambda: kill_if_there(cleaning, CLEANER), "a cleaner works")
        wait_until(lambda: gives_way(cleaning, CLEANER), "a successor works, behind all others")
        assert done.is_alive()
        kill_and_wait_for_successor(cleaning, "tr-flusher-0")
    done.join(120)
    assert not done.is_alive()
    assert read(cleaning.address, written.key) == written.kept
    wait_until(lambda: CLEANER not in children(cleaning), "it has ended")
    assert not [name for name in files(cleaning, topic) if "clean" in name or "swap" in name]


@pytest.mark.parametrize("change", ["delete", "alter", "again"])
def test_a_topic_that_is_deleted_altered_or_made_again_under_the_cleaner(
    cleaning: EmbeddedAppliance, topic: str, change: str
) -> None:
    written, rng = create(cleaning, topic), random.Random(7)
    with (
        Producer(cleaning.address, linger_ms=1) as producer,
        Admin(cleaning.address) as admin,
        throttled(cleaning, 200_000),
    ):
        update(producer, written, 1_500, rng)
        with pytest.raises(RequestTimeoutError, match="the cleaning goes on"):
            admin.compact_topic(topic, timeout_ms=0)
        wait_until(lambda: CLEANER in children(cleaning), "a cleaner works")
        if change == "alter":
            admin.alter_topics({topic: {"cleanup.policy": "delete"}})
            assert read(cleaning.address, written.key) == written.by_offset
        else:
            admin.delete_topics([topic])
        wait_until(lambda: CLEANER not in children(cleaning), "it has no job any more")
        if change == "again":
            written = create(cleaning, topic)
            update(producer, written, 300, rng)
    if change == "again":
        compact(cleaning, topic)
        assert read(cleaning.address, written.key) == written.kept
    if change == "alter":
        wait_until(
            lambda: not [name for name in files(cleaning, topic) if "clean" in name],
            "what the cleaner has written is gone",
        )
        with pytest.raises(InvalidSettingError, match="is not compacted; set cleanup"):
            compact(cleaning, topic)


def test_damage_in_the_middle_stops_compaction_there_and_is_said(
    tmp_path: pathlib.Path, topic: str
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    written = create(running, topic)
    with Producer(running.address, linger_ms=1, batch_size=2_000) as producer:
        update(producer, written, 1_500, random.Random(8))
    running.stop()
    segments = [name for name in files(running, topic) if name.endswith(".arrows")]
    damaged = tmp_path / f"{topic}-0" / segments[2]
    data = bytearray(damaged.read_bytes())
    data[30_000] ^= 0xFF
    damaged.write_bytes(data)
    running = start_embedded(data_dir=str(tmp_path), settings={"http.listen": "127.0.0.1:0"})
    try:
        with pytest.raises(CorruptBatchError, match=f"{topic}-0 has something behind offset"):
            compact(running, topic)
        with urllib.request.urlopen(f"{console_of(running)}/metrics") as response:
            metrics = response.read().decode()
        assert f'tailrace_partition_uncleanable{{partition="0",topic="{topic}"}} 1.0' in metrics
        for command, status in (("status", 0), ("doctor", 1)):
            said = run(running, command, status=status)
            assert f"{topic}-0: something cannot be read".encode() in said.stdout + said.stderr
        shown = run(running, "topic", "compact", topic, "--json", status=1)
        (partition,) = orjson.loads(shown.stdout)["partitions"]
        assert partition["state"] == "stopped"
        assert partition["cleaned_below"] == int(segments[2].partition(".")[0])
        assert b"that cannot be read" in shown.stderr
        found = read(running.address, written.key, partition["cleaned_below"] + 600)
        assert found == {
            offset: pair for offset, pair in written.by_offset.items()
            if offset >= partition["cleaned_below"] + 600
        }  # fmt: skip
    finally:
        running.stop()


def test_the_command_says_what_it_has_done(cleaning: EmbeddedAppliance, topic: str) -> None:
    written = create(cleaning, topic, min_compaction_lag_ms="1h")
    with Producer(cleaning.address, linger_ms=1) as producer:
        update(producer, written, 500, random.Random(9))
    shown = run(cleaning, "topic", "compact", topic)
    assert b"the newest records of 1 partition wait (min.compaction.lag.ms" in shown.stderr
    assert read(cleaning.address, written.key) == written.by_offset, "too young"
    with Admin(cleaning.address) as admin:
        admin.alter_topics({topic: {"min.compaction.lag.ms": 0}})
    shown = run(cleaning, "topic", "compact", topic, "--json")
    answer = orjson.loads(shown.stdout)
    assert answer["bytes_after"] < answer["bytes_before"]
    assert answer["partitions"][0]["cleaned_below"] == 500
    described = run(cleaning, "topic", "describe", topic).stdout.decode()
    assert re.search(r"0 +idle +500 ", described)
    with urllib.request.urlopen(f"{console_of(cleaning)}/metrics") as response:
        metrics = response.read().decode()
    assert f'tailrace_partition_dirty_ratio{{partition="0",topic="{topic}"}} 0.0' in metrics
    assert f'tailrace_partition_uncleanable{{partition="0",topic="{topic}"}} 0.0' in metrics
    passes = re.search(r'tailrace_cleaner_passes_total{process="cleaner-0"} (\d+)', metrics)
    assert passes is not None
    assert int(passes[1]) > 0
    assert read(cleaning.address, written.key) == written.kept


def test_the_dirty_ratio_the_lag_and_the_age_begin_a_cleaning(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    written = create(cleaning, topic, min_cleanable_dirty_ratio=0.5)
    lagging = create(cleaning, f"{topic}-lag", max_compaction_lag_ms=300)
    with Producer(cleaning.address, linger_ms=1) as producer:
        update(producer, written, 1_500, random.Random(10))
        update(producer, lagging, 50, random.Random(11))
    wait_until(
        lambda: read(cleaning.address, lagging.key) == lagging.kept,
        "an active segment is sealed and cleaned after max.compaction.lag.ms",
    )
    wait_until(
        lambda: len(read(cleaning.address, written.key)) < 400, "its sealed segments are cleaned"
    )
    latest = dict(read(cleaning.address, written.key).values())
    assert {k: v for k, v in latest.items() if v is not None} == written.table


def test_tombstones_go_after_delete_retention_and_retention_works_beside_compaction(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    written = create(cleaning, topic, delete_retention_ms=0)
    both = create(cleaning, f"{topic}-both", cleanup_policy="compact,delete", retention_ms="1h")
    with Producer(cleaning.address, linger_ms=1) as producer:
        update(producer, written, 300, random.Random(12))
        producer.send(both.key.topic, b"old", b"a", timestamp=START_MS).result(60)
        now_ms = int(dt.datetime.now(dt.UTC).timestamp() * 1000)
        producer.send(both.key.topic, b"new", b"b", timestamp=now_ms).result(60)
    compact(cleaning, topic)
    assert read(cleaning.address, written.key) == {
        offset: pair for offset, pair in written.kept.items() if pair[1] is not None
    }
    compact(cleaning, both.key.topic)
    assert read(cleaning.address, both.key) == {0: (b"a", b"old"), 1: (b"b", b"new")}
    with Producer(cleaning.address) as producer, Admin(cleaning.address) as admin:
        admin.alter_topics({both.key.topic: {"retention.ms": 0}})
        wait_until(lambda: not read(cleaning.address, both.key), "retention removes them")


def test_keys_keep_their_order_over_cleanings_and_new_partitions(
    cleaning: EmbeddedAppliance, topic: str
) -> None:
    """Hash slots move with the partitions: a reader waits for the end of the former one, which may
    lie in a gap.
    """
    create(
        cleaning, topic, partitioner="hash_slots", segment_bytes=64 << 10,
        min_cleanable_dirty_ratio=0.1,
    )  # fmt: skip
    rng, latest, count = random.Random(13), dict[bytes, int](), 0
    with Producer(cleaning.address, linger_ms=1, batch_size=2_000) as producer:
        for partitions in (1, 2, 5):
            with Admin(cleaning.address) as admin:
                if partitions > 1:
                    admin.create_partitions({topic: partitions})
                for _ in range(800):
                    key = b"k%d" % rng.randrange(30)
                    producer.send(topic, b"%d %s" % (count, bytes(60)), key)
                    latest[key] = count
                    count += 1
                producer.flush(60)
                admin.compact_topic(topic)
    seen: dict[bytes, int] = {}
    with Consumer(bootstrap=cleaning.address, auto_offset_reset="earliest") as consumer:
        keys = [tailrace.TopicPartition(topic, number) for number in range(5)]
        consumer.assign(keys)
        consumer.seek_to_beginning(*keys)
        ends = consumer.end_offsets(keys)
        while any(consumer.position(key) < end for key, end in ends.items()):
            for record in consumer.poll(1_000):
                assert record.key is not None
                assert record.value is not None
                number = int(record.value.split()[0])
                assert number > seen.get(record.key, -1)
                seen[record.key] = number
    assert seen == latest
    with Table(topic, cleaning.address) as table:
        assert {key: int(value.split()[0]) for key, value in table.items()} == latest


def kill_if_there(appliance: EmbeddedAppliance, name: str) -> bool:
    """Kill a child that has just been started, perhaps."""
    pid = children(appliance).get(name)
    if pid is None:
        return False
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: children(appliance).get(name) != pid, "it is gone")
    return True


def gives_way(appliance: EmbeddedAppliance, name: str) -> bool:
    """True if a child is there, with the lowest priority of processor and disk."""
    pid = children(appliance).get(name)
    if pid is None:
        return False
    idle_class, of_process, shift = 3, 1, 13
    disk = ctypes.CDLL(None).syscall(IOPRIO_GET, of_process, pid)
    return os.getpriority(os.PRIO_PROCESS, pid) == 19 and disk >> shift == idle_class


def console_of(appliance: EmbeddedAppliance) -> str:
    with Admin(appliance.address) as admin:
        return str(admin.describe_cluster()["console"])


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


class throttled:  # noqa: N801
    """The cleaner reads and writes so many bytes a second, within the block."""

    def __init__(self, appliance: EmbeddedAppliance, rate: int) -> None:
        self._appliance = appliance
        self._rate = rate

    def _set(self, rate: int) -> None:
        with Admin(self._appliance.address) as admin:
            admin.alter_configs(
                {ConfigResource("broker"): {"cleaner.io.max.bytes.per.second": rate}}
            )

    def __enter__(self) -> None:
        self._set(self._rate)

    def __exit__(self, *_: object) -> None:
        self._set(0)
