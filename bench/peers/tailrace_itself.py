"""Tailrace, measured as its peers are: every client in a fresh interpreter, `count` records, the
same payloads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from bench.measure import end_to_end
from bench.peers.servers import in_child
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

RING_BYTES = 64 << 20


class Tailrace:
    """A running appliance on `directory`, over TCP and a Unix socket; topics are on `disk` or
    `memory` durability.
    """

    def __init__(self, directory: str) -> None:
        self.ipc = f"ipc://{directory}/tailrace.sock"
        self.server = start_embedded(
            data_dir=f"{directory}/data",
            listen=("tcp://127.0.0.1:0", self.ipc),
            settings={"ring_bytes": RING_BYTES},
            auto_create_topics=False,
        )
        self.address = self.server.address
        self._made = 0

    def topic(self, durability: str = "disk", partitions: int = 1) -> str:
        self._made += 1
        name = f"t{self._made}"
        with Admin(self.address) as admin:
            admin.create_topics([NewTopic(name, partitions, {"durability": durability})])
        return name

    @contextmanager
    def throwaway(self, durability: str, partitions: int = 1) -> Iterator[str]:
        """A topic for one run: what five rounds write would fill a tmpfs."""
        name = self.topic(durability, partitions)
        try:
            yield name
        finally:
            with Admin(self.address) as admin:
                admin.delete_topics([name])

    def produce(
        self,
        size: int,
        count: int,
        acks: int | str,
        durability: str,
        topic: str | None = None,
        partition: int | None = None,
    ) -> float:
        """Records a second of `send()` with a key; `partition`: given with each."""
        if topic is not None:
            return float(in_child(_produce, self.address, topic, size, count, acks, partition))
        with self.throwaway(durability) as name:
            return float(in_child(_produce, self.address, name, size, count, acks, partition))

    def produce_arrow(self, size: int, rows: int, count: int, durability: str) -> float:
        """Records a second of prebuilt batches, acks=1."""
        with self.throwaway(durability) as name:
            return float(in_child(_produce_arrow, self.address, name, size, rows, count))

    def consume(self, topic: str, count: int, *, arrow: bool) -> float:
        return float(in_child(_consume, self.address, topic, count, arrow))

    def latency(
        self, count: int, acks: int | str, durability: str, address: str | None = None
    ) -> list[float]:
        with self.throwaway(durability) as name:
            found: list[float] = in_child(_latency, address or self.address, name, count, acks)
            return found

    def end_to_end(self, rate: int, seconds: float, size: int) -> list[float]:
        self._made += 1
        return end_to_end(self.address, f"e{self._made}", rate, seconds, size)

    def stop(self) -> None:
        self.server.stop()


def _produce(
    address: str, topic: str, size: int, count: int, acks: int | str, partition: int | None
) -> float:
    payload = os.urandom(size // 2) + bytes(size - size // 2)
    keys = [b"k%d" % number for number in range(64)]
    with Producer(address, acks=acks, batch_size=256 << 10) as producer:
        producer.send(topic, payload, b"k").result(30)
        begun = time.perf_counter()
        if partition is None:
            for number in range(count):
                producer.send(topic, payload, keys[number & 63])
        else:
            for number in range(count):
                producer.send(topic, payload, keys[number & 63], partition=partition)
        producer.flush()
        seconds = time.perf_counter() - begun
        if errors := producer.metrics()["errors"]:
            raise RuntimeError(f"{errors} of {count} records were not acknowledged")
        return count / seconds


def _produce_arrow(address: str, topic: str, size: int, rows: int, count: int) -> float:
    batch = pa.record_batch({"value": pa.array([os.urandom(size)] * rows, pa.binary())})
    with Producer(address, acks=1, batch_size=max(256 << 10, 2 * size * rows)) as producer:
        producer.send_arrow(topic, batch).result(30)
        begun = time.perf_counter()
        for _ in range(count // rows):
            producer.send_arrow(topic, batch)
        producer.flush()
        seconds = time.perf_counter() - begun
        if errors := producer.metrics()["errors"]:
            raise RuntimeError(f"{errors} batches were not acknowledged")
        return count // rows * rows / seconds


def _consume(address: str, topic: str, count: int, arrow: bool) -> float:
    pa.array([b"x"])  # loads what the first array loads
    with Consumer(
        topic, bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000
    ) as consumer:
        begun, seen = 0.0, 0
        while seen < count:
            found = (
                sum(len(batch) for batch in consumer.poll_arrow(10_000))
                if arrow
                else len(consumer.poll(10_000))
            )
            if not begun:  # connecting is left out, as it is of the others
                begun, count = time.perf_counter(), count - found
                continue
            seen += found
        return count / (time.perf_counter() - begun)


def _latency(address: str, topic: str, count: int, acks: int | str) -> list[float]:
    payload = os.urandom(100)
    found = []
    with Producer(address, acks=acks, linger_ms=0) as producer:
        for number in range(count + 200):
            begun = time.perf_counter()
            producer.send(topic, payload).result(30)
            if number >= 200:
                found.append((time.perf_counter() - begun) * 1e6)
    return found
