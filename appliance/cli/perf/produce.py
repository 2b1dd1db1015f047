"""`tailrace perf produce`: the rate of a producer and the latency of acknowledgements, with the
options and output lines of kafka-producer-perf-test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, json_option
from appliance.cli.output import print_json
from appliance.cli.perf.common import (
    MB,
    TRANSACTION_MS,
    commits_json,
    milliseconds_of,
    print_commits,
    ready_partitions,
    settings_of,
)
from appliance.cli.perf.latencies import (
    EVERY_RECORD_BELOW,
    REPORT_S,
    SAMPLE,
    Latencies,
    Latency,
    Schedule,
)
from appliance.cli.perf.timed_transactions import TimedTransactions
from tailrace.client.config.settings import ProducerSettings
from tailrace.core.errors import TailraceError
from tailrace.core.records import RecordMetadata
from tailrace.producer.producer import Producer

PAYLOADS = 1000
"""Payloads of --record-size that are made."""


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
    """Latency of `commit_transaction`, with transactions."""


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


@click.command("produce")
@click.option("--topic", required=True, shell_complete=complete_topics, help="Send to this topic.")
@click.option(
    "--num-records", required=True, type=click.IntRange(1), help="How many records to send."
)
@click.option("--record-size", type=click.IntRange(1), help="Bytes of each record; random letters.")
@click.option(
    "--payload-file",
    type=click.File("rb"),
    help="Instead of --record-size: each line is a record's value.",
)
@click.option(
    "--throughput",
    type=float,
    default=-1,
    show_default=True,
    help="Records per second; -1: no limit.",
)
@click.option(
    "--producer-props",
    multiple=True,
    metavar="NAME=VALUE",
    help='Settings such as acks=1 or "linger.ms=5 batch.size=65536"; repeatable.',
)
@click.option("--print-metrics", is_flag=True, help="Print the producer's counters at the end.")
@click.option("--transactional-id", metavar="ID", help="Send in transactions of this id.")
@click.option(
    "--transaction-ms",
    type=click.FloatRange(1),
    help="With --transactional-id: length of a transaction, ms; default: 100.",
)
@bootstrap_option
@json_option
def command(
    topic: str,
    num_records: int,
    record_size: int | None,
    payload_file: Any,
    throughput: float,
    producer_props: tuple[str, ...],
    print_metrics: bool,
    transactional_id: str | None,
    transaction_ms: float | None,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Send records and report the throughput and the latency of acknowledgements.

    At a fixed --throughput latency counts from when a record should have been sent. Without one,
    and above 50,000 records/s, the latency of every 16th record is taken.

    \b
    Example:
      tailrace perf produce --topic perf --num-records 1000000 --record-size 100 \\
        --throughput -1 --producer-props acks=1
    """
    if (record_size is None) == (payload_file is None):
        raise click.UsageError("no payload is given: give --record-size or --payload-file")
    settings = {"bootstrap": bootstrap, **settings_of(producer_props, ProducerSettings)}
    if transactional_id is not None:
        settings["transactional_id"] = transactional_id
    elif transaction_ms is not None:
        raise click.UsageError("--transaction-ms needs --transactional-id")
    length_ms = (transaction_ms or TRANSACTION_MS) if "transactional_id" in settings else None
    ready_partitions(settings["bootstrap"], topic)
    payloads = _payloads(payload_file, record_size or 1, num_records)

    def report(records: int, size: int, seconds: float, average_ms: float, most_ms: float) -> None:
        if not as_json:
            click.echo(
                f"{records} records sent, {records / seconds:.1f} records/sec "
                f"({size / MB / seconds:.2f} MB/sec), "
                f"{average_ms:.1f} ms avg latency, {most_ms:.1f} ms max latency."
            )

    with Producer(**settings) as producer:
        found = produce(producer, topic, payloads, num_records, throughput, report, length_ms)
        metrics = producer.metrics()
    _print_result(found, metrics if print_metrics else {}, as_json=as_json)
    if found.failed and not as_json:
        raise click.ClickException(
            f"{found.failed} of {found.records} records were not delivered; see the appliance's log"
        )


def _payloads(payload_file: Any, record_size: int, count: int) -> list[bytes]:
    """The lines of a file, or random letters. Raises UsageError for an empty file."""
    if payload_file is None:
        letters = random.Random(0)
        return [
            bytes(letters.choices(range(65, 91), k=record_size))
            for _ in range(min(PAYLOADS, count))
        ]
    payloads: list[bytes] = payload_file.read().splitlines()
    if not payloads:
        raise click.UsageError("--payload-file is empty: it needs at least one line")
    return payloads


def _print_result(found: Produced, metrics: dict[str, Any], *, as_json: bool) -> None:
    """Print the throughput, the latencies and the counters, if there are any."""
    rate, latency = found.records / found.seconds, found.latency
    if as_json:
        print_json(
            {"records": found.records, "failed": found.failed, "seconds": round(found.seconds, 3),
            "records_per_s": round(rate, 1),
             "mb_per_s": round(found.payload_bytes / MB / found.seconds, 2),
             "latency_ms": milliseconds_of(latency), "latency_sample": found.sample,
             **commits_json(found.commits),
             **({"metrics": metrics} if metrics else {})}
        )  # fmt: skip
        return
    shares = ", ".join(
        f"{value:.2f} ms {share:g}th" for share, value in latency.percentiles.items()
    )
    click.echo(
        f"{found.records} records sent, {rate:.1f} records/sec "
        f"({found.payload_bytes / MB / found.seconds:.2f} MB/sec), "
        f"{latency.average:.2f} ms avg latency, {latency.most:.2f} ms max latency, {shares}."
    )
    print_commits(found.commits)
    for name, value in metrics.items():
        click.echo(f"{name:<20} : {value}")
