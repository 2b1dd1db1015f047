"""Transactions of Apache Kafka by confluent-kafka-python: what
`bench.transactional.transactional_work` does with Tailrace. Each function runs in a fresh
interpreter.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from bench.peers.kafka import producer_of
from bench.transactional.transactional_work import PARTITIONS, TRANSACTION_S, WARM_UP, fresh_id

TIMEOUT_S = 60.0
_KEYS = [b"k%d" % number for number in range(64)]


def _transactional(bootstrap: str, **settings: Any) -> Any:
    """A producer that has its id."""
    given = {"transactional.id": fresh_id(), "enable.idempotence": True, **settings}
    producer = producer_of(bootstrap, "all", **given)
    producer.init_transactions(TIMEOUT_S)
    return producer


def _send(producer: Any, topic: str, value: bytes, key: bytes) -> None:
    while True:
        try:
            producer.produce(topic, value, key)
            return
        except BufferError:
            producer.poll(0.01)


def produce(bootstrap: str, topic: str, size: int, seconds: float, is_transactional: bool) -> float:
    """Records a second with a key; in transactions of TRANSACTION_S, or without."""
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    producer = _transactional(bootstrap) if is_transactional else producer_of(bootstrap, "all")
    if is_transactional:
        producer.begin_transaction()
    _send(producer, topic, payload, b"k")
    producer.flush(30)
    begun = time.perf_counter()
    end, commit_at, sent = begun + seconds, begun + TRANSACTION_S, 0
    while (now := time.perf_counter()) < end:
        for key in _KEYS:
            _send(producer, topic, payload, key)
        sent += len(_KEYS)
        producer.poll(0)
        if is_transactional and now >= commit_at:
            producer.commit_transaction(TIMEOUT_S)
            producer.begin_transaction()
            commit_at = now + TRANSACTION_S
    if is_transactional:
        producer.commit_transaction(TIMEOUT_S)
    producer.flush(120)
    return sent / (time.perf_counter() - begun)


def commit_times(bootstrap: str, topic: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of `commit_transaction()`, and from begin to committed, of one record each."""
    producer = _transactional(bootstrap, **{"linger.ms": 0})
    commits, wholes = [], []
    for number in range(rounds + WARM_UP):
        begun = time.perf_counter()
        producer.begin_transaction()
        producer.produce(topic, b"x" * 100, partition=0)
        sent = time.perf_counter()
        producer.commit_transaction(TIMEOUT_S)
        ended = time.perf_counter()
        if number >= WARM_UP:
            commits.append((ended - sent) * 1e3)
            wholes.append((ended - begun) * 1e3)
    return {"commit": commits, "begin to committed": wholes}


def commits_of_threads(bootstrap: str, topic: str, threads: int, seconds: float) -> float:
    """Commits a second of so many producers in threads of this process, one record each."""
    producers = [_transactional(bootstrap, **{"linger.ms": 0}) for _ in range(threads)]
    commits, end_at = [0] * threads, [0.0]
    ready = threading.Barrier(threads + 1)

    def run(number: int) -> None:
        producer = producers[number]
        ready.wait()
        while time.perf_counter() < end_at[0]:
            producer.begin_transaction()
            producer.produce(topic, b"x" * 100, partition=number % PARTITIONS)
            producer.commit_transaction(TIMEOUT_S)
            commits[number] += 1

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    end_at[0] = time.perf_counter() + seconds
    ready.wait()
    for worker in workers:
        worker.join()
    return sum(commits) / seconds


def fill(bootstrap: str, topic: str, size: int, records: int) -> None:
    """Write the input of `transform`."""
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    producer = producer_of(bootstrap, "all")
    for number in range(records):
        _send(producer, topic, payload, _KEYS[number & 63])
        if not number & 1023:
            producer.poll(0)
    if producer.flush(120):
        raise RuntimeError("not every record was acknowledged")


def transform(bootstrap: str, source: str, target: str, records: int) -> float:
    """Records a second that are read from `source` and sent to `target`, with the offsets in
    transactions of TRANSACTION_S.
    """
    from confluent_kafka import Consumer

    producer = _transactional(bootstrap)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": f"group-{fresh_id()}",
            "enable.auto.commit": False, "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    consumer.subscribe([source])
    begun, done, commit_at, is_open = 0.0, 0, 0.0, False
    while done < records:
        found = consumer.consume(5_000, 0.1)
        now = time.perf_counter()
        if not begun and found:  # joining the group is left out
            begun, commit_at = now, now + TRANSACTION_S
        if found and not is_open:
            producer.begin_transaction()
            is_open = True
        for record in found:
            if record.error() is None:
                _send(producer, target, record.value(), record.key())
                done += 1
        if is_open and (now >= commit_at or done >= records):
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(
                positions, consumer.consumer_group_metadata(), TIMEOUT_S
            )
            producer.commit_transaction(TIMEOUT_S)
            commit_at, is_open = time.perf_counter() + TRANSACTION_S, False
    taken = time.perf_counter() - begun
    consumer.close()
    return done / taken
