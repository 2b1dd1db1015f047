"""Measurements of `tailrace perf`: produce, consume and end-to-end runs at a rate, and their
figures.

Owner: the command line.
Invariants:
- At a rate, a record's latency counts from its scheduled time, so that a stall shows in every
  record that it delays (Gil Tene's "coordinated omission").
- Without a rate, latency counts from the call of `send`.
"""

from __future__ import annotations

import math
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record, RecordMetadata
from tailrace.kernel.reference_arrow import default_rows
from tailrace.producer.producer import Producer

REPORT_S = 5.0
EVERY_RECORD_BELOW = 50_000
"""Records/s up to which each record's latency is taken; above, and without a rate, that of one in
SAMPLE: a callback costs as much as the record.
"""
SAMPLE = 16
LATENCY_PERCENTILES = (50.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    average: float
    most: float
    percentiles: dict[float, float]
    count: int


class Latencies:
    """Collected latencies, in milliseconds."""

    def __init__(self) -> None:
        self._values = array("d")
        self._reported = 0

    def add(self, milliseconds: float) -> None:
        self._values.append(milliseconds)

    def since_last(self) -> tuple[float, float]:
        """(average, maximum) since the last call."""
        window = self._values[self._reported :]
        self._reported += len(window)
        return (sum(window) / len(window), max(window)) if window else (0.0, 0.0)

    def summary(self) -> Latency:
        """Percentiles of the collected latencies, in milliseconds."""
        values = sorted(self._values)
        if not values:
            return Latency(0.0, 0.0, dict.fromkeys(LATENCY_PERCENTILES, 0.0), 0)
        found = {
            share: values[min(len(values) - 1, int(len(values) * share / 100))]
            for share in LATENCY_PERCENTILES
        }
        return Latency(sum(values) / len(values), values[-1], found, len(values))


class Schedule:
    """Scheduled time of record number n at a rate; without a rate, now."""

    def __init__(
        self,
        records_per_s: float,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_ns = 1e9 / records_per_s if records_per_s > 0 else 0.0
        self._now_ns = now_ns
        self._sleep = sleep
        self._started_ns = now_ns()

    def wait_for(self, number: int) -> int:
        """Sleep until the scheduled time; return that time, or the present without a rate."""
        now_ns = self._now_ns()
        if not self._interval_ns:
            return now_ns
        due_ns = self._started_ns + int(number * self._interval_ns)
        if due_ns > now_ns:
            self._sleep((due_ns - now_ns) / 1e9)
        return due_ns


def load_arrow() -> None:
    """Make an Arrow array before the measurement: the first one loads pandas, where installed (0.3
    s).
    """
    default_rows([0], [None], [b""], None)


@dataclass(frozen=True, slots=True)
class Produced:
    """Figures of a produce run."""

    records: int
    payload_bytes: int
    seconds: float
    latency: Latency
    sample: int
    """Latency is taken of one in this many records."""
    failed: int
    commits: Latency | None = None
    """Of `commit_transaction`, with transactions."""


class TimedTransactions:
    """Transactions of a length in time, one after the other."""

    def __init__(self, producer: Producer, length_ms: float) -> None:
        self._producer = producer
        self._length_s = length_ms / 1e3
        self._ends_at = 0.0
        self.latencies = Latencies()
        """Of the commits."""

    def step(self) -> bool:
        """Begin the first transaction, and the next one when it is time. True: one is new."""
        now = time.perf_counter()
        if now < self._ends_at:
            return False
        if self._ends_at:
            self.end()
        self._producer.begin_transaction()
        self._ends_at = time.perf_counter() + self._length_s
        return True

    @property
    def is_due(self) -> bool:
        """True if the open transaction has its length."""
        return self._ends_at > 0 and time.perf_counter() >= self._ends_at

    def end(self) -> None:
        """Commit the open transaction, if there is one."""
        if self._ends_at:
            started = time.perf_counter()
            self._producer.commit_transaction()
            self.latencies.add((time.perf_counter() - started) * 1e3)
            self._ends_at = 0.0


@dataclass(frozen=True, slots=True)
class Transformed:
    """Figures of a transform run."""

    records: int
    payload_bytes: int
    seconds: float
    commits: Latency


def transform(
    consumer: Consumer,
    producer: Producer,
    topic: str,
    requested: int,
    idle_s: float,
    transaction_ms: float,
) -> Transformed:
    """Send each record that is read to `topic`, with the offsets in the transaction, until
    `requested` records have come, or nothing for `idle_s`. Raises TailraceError.
    """
    transactions = TimedTransactions(producer, transaction_ms)
    count = byte_count = 0
    begun = last = time.perf_counter()

    def commit() -> None:
        producer.send_offsets_to_transaction(consumer.positions(), consumer.group_metadata())
        transactions.end()

    is_open = False
    while count < requested:
        records = consumer.poll(timeout_ms=min(100.0, transaction_ms))
        now = time.perf_counter()
        if records:
            last = now
            if not count:
                begun = now
            if not is_open:
                is_open = transactions.step()
            for record in records:
                producer.send(topic, record.value, record.key)
                byte_count += len(record.value or b"")
            count += len(records)
        elif now - last >= idle_s:
            break
        if is_open and transactions.is_due:
            commit()
            is_open = False
    if is_open:
        commit()
    return Transformed(
        count, byte_count, time.perf_counter() - begun, transactions.latencies.summary()
    )


Report = Callable[[int, int, float, float, float], None]
"""Called about every REPORT_S with (records, bytes, seconds, average ms, most ms) since the last
time.
"""


def produce(
    producer: Producer,
    topic: str,
    payloads: Sequence[bytes],
    count: int,
    rate: float,
    report: Report,
    transaction_ms: float | None = None,
) -> Produced:
    """Send `count` records, the payloads in turn, `rate` a second (0 or less: as fast as they are
    taken), until all have ended. `transaction_ms`: length of the transactions that they are in,
    None without. Raises TailraceError.
    """
    sample = 1 if 0 < rate <= EVERY_RECORD_BELOW else SAMPLE
    latencies = Latencies()
    failures: list[TailraceError] = []

    def ended(
        started_ns: int, metadata: RecordMetadata | None, error: TailraceError | None
    ) -> None:
        del metadata
        latencies.add((time.perf_counter_ns() - started_ns) / 1e6)
        if error is not None:
            failures.append(error)

    transactions = None if transaction_ms is None else TimedTransactions(producer, transaction_ms)
    schedule = Schedule(rate)
    begun = reported = time.perf_counter()
    reported_count = byte_count = reported_bytes = 0
    payload_count = len(payloads)
    for number in range(count):
        payload = payloads[number % payload_count]
        due_ns = schedule.wait_for(number)
        if transactions is not None and (rate > 0 or not number & 15):
            transactions.step()
        if number % sample:
            producer.send(topic, payload)
        else:
            producer.send(topic, payload, on_delivery=partial(ended, due_ns))
        byte_count += len(payload)
        if not number & 1023 and time.perf_counter() - reported >= REPORT_S:
            now = time.perf_counter()
            report(
                number - reported_count,
                byte_count - reported_bytes,
                now - reported,
                *latencies.since_last(),
            )
            reported, reported_count, reported_bytes = now, number, byte_count
    if transactions is not None:
        transactions.end()
    producer.flush()
    seconds = time.perf_counter() - begun
    failed = producer.metrics()["errors"]
    if failures and failed == count:
        raise failures[0]
    commits = None if transactions is None else transactions.latencies.summary()
    return Produced(count, byte_count, seconds, latencies.summary(), sample, failed, commits)


@dataclass(frozen=True, slots=True)
class Consumed:
    """Figures of a consume run."""

    records: int
    payload_bytes: int
    seconds: float
    fetch_seconds: float
    """Seconds since the first record, without connecting and finding offsets."""
    began_at: float
    """Seconds since 1970."""


def consume(
    consumer: Consumer,
    requested: int,
    idle_s: float,
    *,
    arrow: bool,
    report: Callable[[Consumed], None],
) -> Consumed:
    """Read until `requested` records have come, or nothing for `idle_s`. `arrow`: whole batches
    instead of records. Raises TailraceError.
    """
    began_at, begun = time.time(), time.perf_counter()
    records = payload_bytes = 0
    first = last = reported = begun
    while records < requested:
        came, came_bytes = (
            _poll_batches(consumer) if arrow else _poll_records(consumer, requested - records)
        )
        now = time.perf_counter()
        if not came:
            if now - last >= idle_s:
                break
            continue
        if not records:
            first = now
        records, payload_bytes, last = records + came, payload_bytes + came_bytes, now
        if now - reported >= REPORT_S:
            reported = now
            report(Consumed(records, payload_bytes, now - begun, now - first, began_at))
    return Consumed(records, payload_bytes, last - begun, last - first, began_at)


def _poll_records(consumer: Consumer, most: int) -> tuple[int, int]:
    found = consumer.poll(100, min(most, 5000))
    return len(found), sum(
        len(record.value or b"") for record in found if not isinstance(record.value, dict)
    )


def _poll_batches(consumer: Consumer) -> tuple[int, int]:
    found = consumer.poll_arrow(100)
    return sum(batch.batch.num_rows for batch in found), sum(batch.batch.nbytes for batch in found)


def round_trips(
    producer: Producer,
    consumer: Consumer,
    topic: str,
    count: int,
    size: int,
    report: Callable[[int, float], None],
) -> Latency:
    """Measure one record at a time, from `send` until a consumer has it. `report`: called for every
    thousandth record. Raises TailraceError.
    """
    latencies = Latencies()
    for number in range(count):
        started_ns = time.perf_counter_ns()
        producer.send(topic, number.to_bytes(8, "big").ljust(size, b"x"))
        producer.flush()
        while not consumer.poll(1000):
            pass
        latencies.add((time.perf_counter_ns() - started_ns) / 1e6)
        if number % 1000 == 0:
            report(number, latencies.since_last()[0])
    return latencies.summary()


def end_to_end(
    producer: Producer, consumer: Consumer, topic: str, count: int, size: int, rate: float
) -> Latency:
    """Measure latency from each record's scheduled time until a consumer has it.

    Raises: TailraceError.
    """
    latencies = Latencies()
    errors: list[BaseException] = []
    filler = b"x" * max(0, size - 8)

    def send() -> None:
        try:
            schedule = Schedule(rate)
            for number in range(count):
                due_ns = schedule.wait_for(number)
                producer.send(topic, due_ns.to_bytes(8, "big") + filler)
            producer.flush()
        except TailraceError as error:
            errors.append(error)

    sender = threading.Thread(target=send, name="perf-sender")
    sender.start()
    received = 0
    try:
        while received < count and not errors:
            received += _take(consumer.poll(1000, 5000), latencies)
    finally:
        sender.join()
    if errors:
        raise errors[0]
    return latencies.summary()


def _take(records: Iterable[Record], latencies: Latencies) -> int:
    now_ns = time.perf_counter_ns()
    count = 0
    for record in records:
        latencies.add((now_ns - int.from_bytes((record.value or b"")[:8], "big")) / 1e6)
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Advice:
    """Bytes of values per second of one partition, and how many partitions reach a target."""

    target: float
    produce: float
    consume: float

    @property
    def by_rule(self) -> int:
        """Tt / max(Tp, Tc): enough when producers and consumers each use as many partitions at once
        as they need.
        """
        return max(1, math.ceil(self.target / max(self.produce, self.consume)))

    @property
    def for_both(self) -> int:
        """max(Tt / Tp, Tt / Tc): enough with one producer and one consumer for each partition (Jun
        Rao's rule for Kafka).
        """
        return max(1, math.ceil(self.target / min(self.produce, self.consume)))


def measure_partition(
    producer: Producer, consumer: Consumer, topic: str, size: int, seconds: float
) -> tuple[float, float]:
    """(Tp, Tc) of a topic with one partition, bytes of values per second: what one producer gets
    acknowledged with `send()`, and what one consumer reads of it as records. Raises TailraceError.
    """
    load_arrow()
    value = bytes(random.Random(0).choices(range(65, 91), k=size))
    begun = time.perf_counter()
    count = 0
    while time.perf_counter() - begun < seconds:
        for _ in range(1000):
            producer.send(topic, value)
        count += 1000
    producer.flush()
    produced = count * size / (time.perf_counter() - begun)
    found = consume(consumer, count, 10.0, arrow=False, report=lambda _: None)
    return produced, found.payload_bytes / max(found.fetch_seconds, 1e-9)
