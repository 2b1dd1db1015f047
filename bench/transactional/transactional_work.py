"""Work of transactional clients of Tailrace, for `make bench-transactions` and `make bench-peers`.

Each function runs in a fresh interpreter (`bench.peers.servers.in_child`), and is given an address
and the names of its topics.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from bench.at_rest.footprint import cpu_seconds
from tailrace import Consumer, Producer, TopicPartition

PARTITIONS = 8
TRANSACTION_S = 0.1
WARM_UP = 50
READS = 5
_KEYS = [b"k%d" % number for number in range(64)]
_ids = count()


def fresh_id() -> str:
    """A transactional id that nobody else has."""
    return f"bench-{os.getpid()}-{next(_ids)}"


def produce(address: str, topic: str, size: int, seconds: float, is_transactional: bool) -> float:
    """Records a second of `send()` with a key; in transactions of TRANSACTION_S, or without."""
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    own_id = fresh_id() if is_transactional else None
    with Producer(address, acks="all", batch_size=256 << 10, transactional_id=own_id) as producer:
        if is_transactional:
            producer.begin_transaction()
        producer.send(topic, payload, b"k").result(30)
        begun = time.perf_counter()
        end, commit_at, sent = begun + seconds, begun + TRANSACTION_S, 0
        while (now := time.perf_counter()) < end:
            for key in _KEYS:
                producer.send(topic, payload, key)
            sent += len(_KEYS)
            if is_transactional and now >= commit_at:
                producer.commit_transaction()
                producer.begin_transaction()
                commit_at = now + TRANSACTION_S
        if is_transactional:
            producer.commit_transaction()
        producer.flush()
        taken = time.perf_counter() - begun
        if errors := producer.metrics()["errors"]:
            raise RuntimeError(f"{errors} of {sent} records were not acknowledged")
    return sent / taken


def commit_times(address: str, topic: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of `commit_transaction()`, and from begin to committed, of one record each."""
    commits, wholes = [], []
    with Producer(address, transactional_id=fresh_id()) as producer:
        for number in range(rounds + WARM_UP):
            begun = time.perf_counter()
            producer.begin_transaction()
            producer.send(topic, b"x" * 100, partition=0)
            sent = time.perf_counter()
            producer.commit_transaction()
            ended = time.perf_counter()
            if number >= WARM_UP:
                commits.append((ended - sent) * 1e3)
                wholes.append((ended - begun) * 1e3)
    return {"commit": commits, "begin to committed": wholes}


def visible_times(address: str, topic: str, rounds: int) -> list[float]:
    """Milliseconds from begin until a waiting consumer of committed records has the record."""
    times: list[float] = []
    with (
        Producer(address, transactional_id=fresh_id()) as producer,
        Consumer(bootstrap=address, auto_offset_reset="latest") as consumer,
    ):
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek_to_end(partition)
        consumer.position(partition)
        with ThreadPoolExecutor(1) as pool:
            for number in range(rounds + WARM_UP):
                coming = pool.submit(_received, consumer)
                begun = time.perf_counter()
                producer.begin_transaction()
                producer.send(topic, b"x" * 100, partition=0)
                producer.commit_transaction()
                came = coming.result(60)
                if number >= WARM_UP:
                    times.append((came - begun) * 1e3)
    return times


def _received(consumer: Consumer) -> float:
    while not consumer.poll(1_000):
        pass
    return time.perf_counter()


def commits_of_threads(
    address: str, topic: str, threads: int, seconds: float, start_at: float
) -> tuple[int, float]:
    """Commits of so many producers in threads of this process, one record each, from `start_at`, of
    the clock of `time.time`, for `seconds`; and the CPU seconds of this process meanwhile. (-1, 0)
    if it was not ready by then.
    """
    producers = [Producer(address, transactional_id=fresh_id()) for _ in range(threads)]
    commits = [0] * threads

    def run(number: int) -> None:
        producer, end_at = producers[number], start_at + seconds
        while (now := time.time()) < end_at:
            producer.begin_transaction()
            producer.send(topic, b"x" * 100, partition=number % PARTITIONS)
            producer.commit_transaction()
            commits[number] += now >= start_at

    for producer in producers:
        producer.init_transactions()
        producer.partitions_for(topic)
    if time.time() > start_at:
        return -1, 0.0
    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    time.sleep(max(0.0, start_at - time.time()))
    used = time.process_time()
    for worker in workers:
        worker.join()
    used = time.process_time() - used
    for producer in producers:
        producer.close()
    return sum(commits), used


def fill(address: str, topic: str, size: int, records: int) -> None:
    """Write the input of `transform`."""
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    with Producer(address, acks="all", batch_size=256 << 10) as producer:
        for number in range(records):
            producer.send(topic, payload, _KEYS[number & 63])
        producer.flush()
        if errors := producer.metrics()["errors"]:
            raise RuntimeError(f"{errors} of {records} records were not acknowledged")


def transform(address: str, source: str, target: str, records: int, is_exact: bool) -> float:
    """Records a second that are read from `source` and sent to `target`. Offsets are committed each
    TRANSACTION_S: in the transaction, or after a flush (at least once).
    """
    own_id = fresh_id() if is_exact else None
    with (
        Producer(address, acks="all", batch_size=256 << 10, transactional_id=own_id) as producer,
        Consumer(
            source, bootstrap=address, group_id=f"group-{fresh_id()}", enable_auto_commit=False,
            auto_offset_reset="earliest", max_poll_records=5_000,
        ) as consumer,
    ):  # fmt: skip
        commit = _exactly if is_exact else _at_least_once
        begun, done, commit_at, is_open = 0.0, 0, 0.0, False
        while done < records:
            found = consumer.poll(1_000)
            now = time.perf_counter()
            if not begun and found:  # joining the group is left out
                begun, commit_at = now, now + TRANSACTION_S
            if found and is_exact and not is_open:
                producer.begin_transaction()
                is_open = True
            for record in found:
                producer.send(target, record.value, record.key)
            done += len(found)
            if found and (now >= commit_at or done >= records):
                commit(producer, consumer)
                commit_at, is_open = time.perf_counter() + TRANSACTION_S, False
        return done / (time.perf_counter() - begun)


def _exactly(producer: Producer, consumer: Consumer) -> None:
    producer.send_offsets_to_transaction(consumer.positions(), consumer.group_metadata())
    producer.commit_transaction()


def _at_least_once(producer: Producer, consumer: Consumer) -> None:
    producer.flush()
    consumer.commit()


def write_with_aborts(address: str, topic: str, batches: int, rows: int, aborted_each: int) -> int:
    """Transactions of one batch of `rows` records of 100 bytes each; each `aborted_each`th is
    aborted. Returns the number of committed records.
    """
    committed = 0
    with Producer(address, transactional_id=fresh_id(), batch_size=256 << 10) as producer:
        for number in range(batches):
            producer.begin_transaction()
            for _ in range(rows):
                producer.send(topic, b"x" * 100, partition=0)
            producer.flush()
            if number % aborted_each == aborted_each - 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                committed += rows
    return committed


def read_all(
    address: str, topic: str, isolation: str, records: int, pids: list[int]
) -> dict[str, float]:
    """Read the partition READS times: delivered records a second, and CPU nanoseconds for each, of
    this process and of the servers `pids`. A single read takes 60 ms, and says little.
    """
    with Consumer(
        bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000,
        isolation_level=isolation,
    ) as consumer:  # fmt: skip
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.poll(10_000, max_records=1)
        client, servers = time.process_time(), cpu_seconds(pids)
        begun, seen = time.perf_counter(), 0
        for number in range(1, READS + 1):
            consumer.seek(partition, 0)
            while seen < number * records:
                seen += len(consumer.poll(10_000))
        taken = time.perf_counter() - begun
        client, servers = time.process_time() - client, cpu_seconds(pids) - servers
    return {
        "records/s": seen / taken, "client ns": client / seen * 1e9,
        "front ns": servers / seen * 1e9, "both ns": (client + servers) / seen * 1e9,
    }  # fmt: skip
