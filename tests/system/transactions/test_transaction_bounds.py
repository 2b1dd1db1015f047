"""Transactions of real processes at their bounds: commits larger than a message, thousands of
transactions in one partition, a transaction over very many partitions, and one of gigabytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    OffsetAndMetadata,
    Producer,
    TopicPartition,
    TransactionAbortedError,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.protocol.frame import JSON_MAX_BYTES, Api
from tests.kit.appliances.killed_directories import kill_everything, start
from tests.kit.batches import make_batch
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor

OWNERS, BRANCHES = 5, 1_000
GIGABYTES = 2


def committed(address: str, topic: str, count: int) -> list[bytes | None]:
    """The first `count` committed values of a topic, and what comes with them."""
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest") as consumer:
        found = consumer.consume(count, timeout=HANG_LIMIT_S) + consumer.poll(timeout_ms=200)
    return [record.value for record in found]


def test_a_commit_larger_than_a_message_is_refused_and_every_process_lives(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    before = children(appliance)
    metadata = "m" * (2 * JSON_MAX_BYTES)
    with Producer(appliance.address, transactional_id=topic) as producer:
        with pytest.raises(TransactionAbortedError, match="Commit more often"):
            _commit_with(producer, topic, metadata)
        with producer.transaction():
            producer.send(topic, b"kept")
    body = orjson.dumps({"transactional_id": topic, "outcome": "commit", "tag": metadata})
    with RawClient(appliance.address) as client:
        code, _ = client.ask(Api.END_TRANSACTION, body)
        assert code is ErrorCode.REQUEST_TOO_LARGE
        client.send(Api.END_TRANSACTION, body * 5)  # more than a frame may have
    assert committed(appliance.address, topic, 1) == [b"kept"]
    assert children(appliance).items() >= before.items()


def _commit_with(producer: Producer, topic: str, metadata: str) -> None:
    with producer.transaction():
        producer.send(topic, b"too much")
        producer.send_offsets_to_transaction(
            {TopicPartition(topic, 0): OffsetAndMetadata(0, metadata)}, "g"
        )


@pytest.mark.long
def test_five_thousand_transactions_open_in_one_partition_end_by_their_decisions(
    tmp_path: Path,
) -> None:
    """Every process is killed while all are open, then the worker and the flusher among the ends.
    Each owner commits every second branch.
    """
    running = start(tmp_path)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("rows")])
    with RawClient(running.address) as client:
        owners = [_Owner(client, f"job-{number}") for number in range(OWNERS)]
        for owner in owners:
            owner.open()
    with Consumer("rows", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        assert consumer.poll(timeout_ms=200) == []
    kill_everything(running)
    running = start(tmp_path)
    try:
        with RawClient(running.address) as client:
            for number, owner in enumerate(owners):
                owner.commit(client)
                if number == 1:
                    kill_and_wait_for_successor(running, "tr-worker-0")
                if number == 3:
                    kill_and_wait_for_successor(running, "tr-flusher-0")
        count = OWNERS * BRANCHES // 2
        with (
            Consumer("rows", bootstrap=running.address, auto_offset_reset="earliest") as consumer,
            Admin(running.address) as admin,
        ):
            found = [one.offset for one in consumer.consume(count, timeout=HANG_LIMIT_S)]
            assert consumer.poll(timeout_ms=500) == []
            assert admin.find_hanging_transactions() == []
        assert found == sorted(offset for owner in owners for offset in owner.offsets[::2])
    finally:
        assert running.stop() == 0


class _Owner:
    """A transactional id with a branch for each record, all in one partition."""

    def __init__(self, client: RawClient, name: str) -> None:
        self._client = client
        self._name = name
        code, answer = client.ask(
            Api.INIT_TRANSACTIONS, {"transactional_id": name, "timeout_ms": 900_000}
        )
        assert code is ErrorCode.OK, answer
        self._identity = {
            "transactional_id": name,
            **{key: answer[key] for key in ("owner", "producer_id", "producer_epoch")},
        }
        self.branches: list[list[int]] = []
        self.offsets: list[int] = []

    def open(self) -> None:
        """Write a record in each branch."""
        client = self._client
        code, _ = client.ask(Api.CREATE_BRANCHES, {**self._identity, "count": BRANCHES})
        assert code is ErrorCode.OK
        code, answer = client.ask(Api.METADATA, {"topics": ["rows"]})
        topic = answer["topics"][0]
        topic_id = bytes.fromhex(topic["topic_id"])
        for number in range(BRANCHES):
            request = {**self._identity, "attempt": f"{self._name} {number}"}
            code, answer = client.ask(Api.JOIN_TRANSACTION, request)
            assert code is ErrorCode.OK, answer
            self.branches.append([answer["producer_id"], answer["producer_epoch"]])
            batch = make_batch(
                1, seed=checksum_seed(topic_id, 0), schema_id=topic["schema_id"],
                producer_id=answer["producer_id"], epoch=answer["producer_epoch"],
            )  # fmt: skip
            asked = client.produce([(topic_id, 0, batch)], acks=-1)
            code, (entry,) = client.produced(asked)
            assert (code, entry.error) == (ErrorCode.OK, 0)
            self.offsets.append(entry.base_offset)

    def commit(self, client: RawClient) -> None:
        """Commit every second branch, the first one included."""
        request = {**self._identity, "outcome": "commit", "branches": self.branches[::2]}
        code = ErrorCode.NOT_READY
        while code in (ErrorCode.NOT_READY, ErrorCode.TIMED_OUT):
            code, answer = client.ask(Api.END_TRANSACTION, request)
        assert code is ErrorCode.OK, answer


@pytest.mark.long
def test_a_transaction_over_a_thousand_partitions_is_committed_and_aborted_whole(
    tmp_path: Path,
) -> None:
    running = start(tmp_path)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("wide", 1_000)])
    try:
        with Producer(running.address, transactional_id="wide", linger_ms=50) as producer:
            for is_kept in (True, False):
                producer.begin_transaction()
                for partition in range(1_000):
                    producer.send("wide", b"kept" if is_kept else b"aborted", partition=partition)
                producer.flush()
                kill_and_wait_for_successor(running, "tr-worker-0" if is_kept else "tr-groups-0")
                if is_kept:
                    producer.commit_transaction(HANG_LIMIT_S)
                else:
                    producer.abort_transaction(HANG_LIMIT_S)
            with producer.transaction():
                producer.send("wide", b"last", partition=999)
        found = committed(running.address, "wide", 1_001)
        assert (len(found), found.count(b"kept"), found.count(b"last")) == (1_001, 1_000, 1)
    finally:
        assert running.stop() == 0


@pytest.mark.long
def test_transactions_of_gigabytes_are_passed_over_or_read_whole_after_a_kill(
    tmp_path: Path,
) -> None:
    """One is aborted and one committed, over several segments, and every process is killed while
    the second is open.
    """
    rows = 1 << 20
    table = pa.table({"number": np.arange(rows, dtype="int64"), "other": np.arange(rows) * 0.5})
    count = GIGABYTES * (1 << 30) // table.nbytes
    running = start(tmp_path)
    with Admin(running.address) as admin:
        admin.create_topics(
            [NewTopic("large", schema=table.schema, config={"segment.bytes": 1 << 29})]
        )
    with _producer(running) as producer:
        producer.begin_transaction()
        for _ in range(count):
            producer.send_arrow("large", table)
        producer.flush()
        producer.abort_transaction(HANG_LIMIT_S)
        producer.begin_transaction()
        for _ in range(count):
            producer.send_arrow("large", table)
        producer.flush()
        prepared = producer.prepare_transaction()  # it survives its owner
        kill_everything(running)
    running = start(tmp_path)
    try:
        with _producer(running) as producer:
            assert producer.init_transactions(HANG_LIMIT_S, keep_prepared=True) == prepared
            producer.commit_transaction(HANG_LIMIT_S)
        found = 0
        with Consumer("large", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            (end,) = consumer.end_offsets([TopicPartition("large", 0)]).values()
            first = None
            while found < count * rows:
                for one in consumer.poll_arrow(timeout_ms=1_000):
                    first = one.base_offset if first is None else first
                    found += one.batch.num_rows
            assert consumer.poll_arrow(timeout_ms=500) == []
        assert found == count * rows
        assert first is not None
        assert first > count * rows, "the aborted one lies before"
        assert end == first + found + 1, "and a marker behind"
    finally:
        assert running.stop() == 0


def _producer(running: EmbeddedAppliance, **settings: Any) -> Producer:
    return Producer(
        running.address, transactional_id="large", transaction_timeout_ms=900_000,
        delivery_timeout_ms=600_000, max_block_ms=600_000, **settings,
    )  # fmt: skip
