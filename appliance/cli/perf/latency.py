"""`tailrace perf latency`: from a producer to a consumer, one record at a time or at a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, json_option
from appliance.cli.output import print_json
from appliance.cli.perf.common import (
    acks_option,
    milliseconds_of,
    ready_partitions,
)
from appliance.cli.perf.latencies import (
    Latencies,
    Latency,
    Schedule,
)
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record
from tailrace.producer.producer import Producer


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


@click.command("latency")
@click.option(
    "--topic",
    required=True,
    shell_complete=complete_topics,
    help="Send to and read from this topic.",
)
@click.option(
    "--num-records",
    default=10_000,
    show_default=True,
    type=click.IntRange(1),
    help="How many records.",
)
@click.option(
    "--record-size",
    default=100,
    show_default=True,
    type=click.IntRange(8),
    help="Bytes of each record.",
)
@acks_option
@click.option(
    "--throughput",
    type=float,
    default=0,
    help="Records per second; without it, one record at a time.",
)
@bootstrap_option
@json_option
def command(
    topic: str,
    num_records: int,
    record_size: int,
    acks: int | str,
    throughput: float,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Measure the latency of records from a producer to a consumer.

    \b
    Example:
      tailrace perf latency --topic perf --num-records 1000
      tailrace perf latency --topic perf --num-records 100000 --record-size 1000 --throughput 20000
    """
    keys = ready_partitions(bootstrap, topic)

    def report(number: int, milliseconds: float) -> None:
        if not as_json:
            click.echo(f"{number}\t{milliseconds:.4f}")

    with (
        Producer(bootstrap, acks=acks, linger_ms=1 if throughput > 0 else 0) as producer,
        Consumer(bootstrap=bootstrap, auto_offset_reset="latest") as consumer,
    ):
        consumer.assign(keys)
        for key in keys:
            consumer.position(key)
        consumer.poll(0)
        if throughput > 0:
            found = end_to_end(producer, consumer, topic, num_records, record_size, throughput)
        else:
            found = round_trips(producer, consumer, topic, num_records, record_size, report)
    if as_json:
        print_json({"records": found.count, "latency_ms": milliseconds_of(found)})
        return
    click.echo(f"Avg latency: {found.average:.4f} ms")
    shares = ", ".join(f"{share:g}th = {value:.3f}" for share, value in found.percentiles.items())
    click.echo(f"Percentiles: {shares}")
