"""Transactions of real processes against zombies, full disks, lost and damaged files, clients that
never end, and rebalances between a poll and its commit.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.core.errors import (
    CorruptBatchError,
    ProducerFencedError,
    RequestTimeoutError,
    TransactionAbortedError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.killed_directories import kill_everything
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.log_files.transaction_files import flip_bit_in, markers_in
from tests.kit.processes import HANG_LIMIT_S, children, stopped, wait_until

SMALL = {"journal_bytes": 1 << 20, "ring_bytes": 4 << 20}


@pytest.fixture
def topics(appliance: EmbeddedAppliance, topic: str) -> tuple[str, str]:
    names = f"{topic}-in", f"{topic}-out"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(names[0], 2), NewTopic(names[1], 1)])
    return names


def values(address: str, topic: str, count: int, **settings: Any) -> list[bytes]:
    """The first `count` records, and what comes with them."""
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest", **settings) as consumer:
        found = [record.value for record in consumer.consume(count, timeout=HANG_LIMIT_S)]
        return found + [record.value for record in consumer.poll(timeout_ms=200)]


# ---- zombies -------------------------------------------------------------------------------------


def test_batches_of_an_old_owner_in_the_lane_and_in_its_buffers_are_never_read(
    appliance: EmbeddedAppliance, topics: tuple[str, str], topic: str
) -> None:
    old = Producer(appliance.address, transactional_id=topic, linger_ms=60_000)
    old.begin_transaction()
    old.send(topics[1], b"acknowledged")
    old.flush()
    workers = [pid for name, pid in children(appliance).items() if name.startswith("tr-worker")]
    with ExitStack() as stack:
        for pid in workers:
            stack.enter_context(stopped(pid))
        in_lane = [old.send(topics[1], b"in the lane") for _ in range(20)]
        old._sender_thread.close_all()  # sent, and not taken by the worker
        buffered = old.send(topics[1], b"in the buffer")
        with Producer(appliance.address, transactional_id=topic) as new:
            with pytest.raises(RequestTimeoutError):
                new.init_transactions(1.0)  # waits for the worker
            stack.close()
            new.init_transactions(HANG_LIMIT_S)
            with new.transaction():
                new.send(topics[1], b"new")
            old._sender_thread.close_all()
            for future in [*in_lane, buffered]:
                future.exception(HANG_LIMIT_S)
            with pytest.raises((ProducerFencedError, TransactionAbortedError)):
                old.commit_transaction(HANG_LIMIT_S)
            with new.transaction():
                new.send(topics[1], b"newer")
    old.close(0)
    assert values(appliance.address, topics[1], 2) == [b"new", b"newer"]


def test_two_owners_that_alternate_are_each_fenced_by_the_other(
    appliance: EmbeddedAppliance, topics: tuple[str, str], topic: str
) -> None:
    committed = []
    owners = [Producer(appliance.address, transactional_id=topic)]
    for number in range(6):
        owner = owners[-1]
        with owner.transaction():
            owner.send(topics[1], b"%d" % number)
        committed.append(b"%d" % number)
        owner.begin_transaction()
        owner.send(topics[1], b"open")
        successor = Producer(appliance.address, transactional_id=topic)
        successor.init_transactions()
        with pytest.raises(ProducerFencedError):
            owner.commit_transaction()
        owners.append(successor)
    for owner in owners:
        owner.close(0)
    assert values(appliance.address, topics[1], len(committed)) == committed


def test_a_client_that_opens_and_never_ends_holds_readers_for_its_timeout_and_no_longer(
    appliance: EmbeddedAppliance, topics: tuple[str, str], topic: str
) -> None:
    with Producer(appliance.address) as plain:
        silent = Producer(appliance.address, transactional_id=topic, transaction_timeout_ms=5_000)
        silent.begin_transaction()
        silent.send(topics[1], b"never committed")
        silent.flush()
        plain.send(topics[1], b"behind it").result(HANG_LIMIT_S)
        assert values(appliance.address, topics[1], 1) == [b"behind it"]
        with pytest.raises(TransactionAbortedError, match="timeout"):
            silent.commit_transaction()
        silent.close(0)


# ---- disks and files -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with small_file_system(tmp_path, 48) as path:
        yield path


def _fill(disk: pathlib.Path) -> pathlib.Path:
    """A file of another program that leaves no room."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast


@pytest.mark.root
def test_a_commit_whose_decision_meets_a_full_disk_is_repeated_when_there_is_room(
    small_disk: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(small_disk / "data"), settings=SMALL)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("out", 2)])
        with Producer(running.address, transactional_id="full") as producer:
            with producer.transaction():
                producer.send("out", b"before", partition=0)
            producer.begin_transaction()
            for partition in range(2):
                producer.send("out", b"kept", partition=partition).result(HANG_LIMIT_S)
            ballast = _fill(small_disk)
            # groups.db may have room left in its write-ahead log: then the commit is decided
            with suppress(RequestTimeoutError):
                producer.commit_transaction(3.0)
            ballast.unlink()
            producer.commit_transaction(HANG_LIMIT_S)
            with producer.transaction():
                producer.send("out", b"after", partition=1)
        assert sorted(values(running.address, "out", 4)) == [b"after", b"before", b"kept", b"kept"]
    finally:
        assert running.stop() == 0


@pytest.mark.root
def test_markers_and_indexes_that_meet_a_full_disk_are_written_when_there_is_room(
    tmp_path: pathlib.Path, small_disk: pathlib.Path
) -> None:
    """groups.db has room, on the first data directory; the partitions' disk has none."""
    settings = {**SMALL, "data_dirs": f"{tmp_path / 'roomy'},{small_disk / 'data'}"}
    running = start_embedded(data_dir=str(tmp_path / "roomy"), settings=settings)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("out", 4)])
        with Producer(running.address, transactional_id="full") as producer:
            producer.begin_transaction()
            for partition in range(4):
                producer.send("out", b"kept", partition=partition).result(HANG_LIMIT_S)
            ballast = _fill(small_disk)
            producer.commit_transaction(HANG_LIMIT_S)
            producer.begin_transaction()
            # larger than the room that is left in the last page of a segment
            sent = [producer.send("out", bytes(200_000), partition=n) for n in range(4)]
            producer._sender_thread.close_all()
            assert not all(each.done() for each in sent), "a batch finds no room"
            producer.abort_transaction(HANG_LIMIT_S)
            ballast.unlink()
            wait_until(lambda: _is_roomy(running), "the disk counts as roomy")
            with producer.transaction():
                for partition in range(4):
                    producer.send("out", b"after", partition=partition)
        assert sorted(values(running.address, "out", 8)) == [b"after"] * 4 + [b"kept"] * 4
    finally:
        assert running.stop() == 0


def _is_roomy(running: EmbeddedAppliance) -> bool:
    with Admin(running.address) as admin:
        return all(each["state"] != "FULL" for each in admin.describe_cluster()["data_dirs"])


def test_without_groups_db_markers_decide_what_is_open_is_aborted_and_ids_go_on(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("out", 2)])
        with Producer(running.address, transactional_id="kept") as producer:
            with producer.transaction():
                producer.send("out", b"committed", partition=0)
            opened = Producer(running.address, transactional_id="open")
            opened.begin_transaction()
            opened.send("out", b"open", partition=0).result(HANG_LIMIT_S)
            wait_until(lambda: markers_in(tmp_path / "out-0") == 1, "the marker is in the file")
    finally:
        kill_everything(running)
    for name in ("groups.db", "groups.db-wal", "groups.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    running = start_embedded(data_dir=str(tmp_path))
    try:
        with Producer(running.address, transactional_id="open") as producer:
            producer.begin_transaction()
            producer.send("out", b"after", partition=0)
            producer.commit_transaction()
        assert values(running.address, "out", 2) == [b"committed", b"after"]
        opened.close(0)
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize("suffix", [".arrows", ".txnindex"])
def test_a_flipped_bit_in_a_marker_or_an_index_shows_no_aborted_record(
    tmp_path: pathlib.Path, suffix: str
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("out")])
        with Producer(running.address, transactional_id="flipped") as producer:
            for number in range(6):
                producer.begin_transaction()
                producer.send("out", b"kept" if number % 2 else b"aborted")
                if number % 2:
                    producer.commit_transaction()
                else:
                    producer.flush()
                    producer.abort_transaction()
            producer.init_transactions()
        wait_until(lambda: markers_in(tmp_path / "out-0") == 6, "the markers are in the file")
    finally:
        assert running.stop() == 0
    flip_bit_in(tmp_path / "out-0", suffix)
    running = start_embedded(data_dir=str(tmp_path))
    try:
        found, place = [], TopicPartition("out", 0)
        with (
            Consumer(bootstrap=running.address, auto_offset_reset="earliest") as consumer,
            suppress(CorruptBatchError),
        ):
            consumer.assign([place])
            (end,) = consumer.end_offsets([place]).values()
            while consumer.position(place) < end:
                found += [record.value for record in consumer.poll(timeout_ms=1_000)]
        assert b"aborted" not in found
        if suffix == ".txnindex":
            assert found == [b"kept"] * 3, "the index is made again at the start"
        with Producer(running.address, transactional_id="flipped") as producer:
            producer.begin_transaction()
            producer.send("out", b"after")
            producer.commit_transaction()
            producer.init_transactions()
        with Admin(running.address) as admin:
            assert admin.find_hanging_transactions() == []
        with (
            Consumer(bootstrap=running.address) as stable,
            Consumer(bootstrap=running.address, isolation_level="read_uncommitted") as all_,
        ):
            wait_until(
                lambda: stable.end_offsets([place]) == all_.end_offsets([place]), "nothing is open"
            )
    finally:
        assert running.stop() == 0


# ---- rebalances ----------------------------------------------------------------------------------


def test_a_rebalance_between_poll_and_commit_aborts_and_the_new_owner_has_the_records_once(
    appliance: EmbeddedAppliance, topics: tuple[str, str], topic: str
) -> None:
    settings: dict[str, Any] = {
        "bootstrap": appliance.address, "group_id": topic, "enable_auto_commit": False,
        "auto_offset_reset": "earliest", "heartbeat_interval_ms": 100,
    }  # fmt: skip
    with Producer(appliance.address) as plain:
        for number in range(20):
            plain.send(topics[0], b"%02d" % number, partition=number % 2)
    with (
        Producer(appliance.address, transactional_id=topic) as producer,
        Producer(appliance.address, transactional_id=topic + "-2") as other,
        Consumer(topics[0], **settings) as first,
    ):
        polled = first.consume(20, timeout=HANG_LIMIT_S)
        positions, metadata = first.positions(), first.group_metadata()
        producer.begin_transaction()
        for record in polled:
            producer.send(topics[1], record.value)
        producer.send_offsets_to_transaction(positions, metadata)
        with Consumer(topics[0], **settings) as second:
            taken: set[TopicPartition] = set()

            def is_moved() -> bool:
                first.poll(0)
                second.poll(0)
                taken.update(second.assignment())
                return len(first.assignment()) == 1 and len(second.assignment()) == 1

            wait_until(is_moved, "a partition has moved")
            for place in second.assignment():
                second.seek(place, second.committed(place) or 0)
            with pytest.raises(TransactionAbortedError):
                producer.commit_transaction()
            producer.abort_transaction()
            for place in first.assignment():
                first.seek(place, first.committed(place) or 0)
            for member, writer in ((first, producer), (second, other)):
                records = member.consume(10, timeout=HANG_LIMIT_S)
                with writer.transaction():
                    for record in records:
                        writer.send(topics[1], record.value)
                    writer.send_offsets_to_transaction(member.positions(), member.group_metadata())
    assert sorted(values(appliance.address, topics[1], 20)) == [b"%02d" % n for n in range(20)]


def test_a_share_member_that_was_replaced_cannot_commit_and_the_other_one_makes_the_outputs(
    appliance: EmbeddedAppliance, topics: tuple[str, str], topic: str
) -> None:
    with Producer(appliance.address) as plain:
        for number in range(6):
            plain.send(topics[0], b"%d" % number)
    settings: dict[str, Any] = {
        "bootstrap": appliance.address, "group_id": topic, "auto_offset_reset": "earliest",
    }  # fmt: skip
    with (
        Producer(appliance.address, transactional_id=topic) as producer,
        Producer(appliance.address, transactional_id=topic + "-2") as other,
    ):
        first = ShareConsumer(topics[0], **settings)
        records = first.poll(timeout_ms=int(HANG_LIMIT_S * 1e3))
        assert records
        producer.begin_transaction()
        for record in records:
            producer.send(topics[1], record.value)
        producer.send_acknowledgements_to_transaction(first, records)
        first.close()  # its locks go to others
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()
        producer.abort_transaction()
        done = 0
        with ShareConsumer(topics[0], **settings) as second:
            while done < 6:
                again = second.poll(timeout_ms=1_000)
                with other.transaction():
                    for record in again:
                        other.send(topics[1], record.value)
                    other.send_acknowledgements_to_transaction(second, again)
                done += len(again)
    assert sorted(values(appliance.address, topics[1], 6)) == [b"%d" % n for n in range(6)]
