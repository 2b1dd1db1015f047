"""`tailrace perf transform`: the rate of read, transform and send with transactions."""

from __future__ import annotations

import time
from dataclasses import dataclass

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, json_option
from appliance.cli.output import echo, print_json
from appliance.cli.perf.common import (
    MB,
    TRANSACTION_MS,
    commits_json,
    print_commits,
    ready_partitions,
)
from appliance.cli.perf.latencies import (
    Latency,
)
from appliance.cli.perf.timed_transactions import TimedTransactions
from tailrace.consumer.consumer import Consumer
from tailrace.producer.producer import Producer


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


@click.command("transform")
@click.option("--topic", required=True, shell_complete=complete_topics, help="Read this topic.")
@click.option("--to", "target", required=True, shell_complete=complete_topics, help="Send to it.")
@click.option("--messages", required=True, type=click.IntRange(1), help="How many records to read.")
@click.option("--group", default="perf-transform", show_default=True, help="The consumer group.")
@click.option(
    "--transactional-id",
    metavar="ID",
    default="perf-transform",
    show_default=True,
    help="The producer's id.",
)
@click.option(
    "--transaction-ms",
    type=click.FloatRange(1),
    default=TRANSACTION_MS,
    show_default=True,
    help="Length of a transaction, ms.",
)
@click.option(
    "--timeout",
    "timeout_ms",
    default=10_000,
    show_default=True,
    help="Give up when no record came for this long, ms.",
)
@bootstrap_option
@json_option
def command(
    topic: str,
    target: str,
    messages: int,
    group: str,
    transactional_id: str,
    transaction_ms: float,
    timeout_ms: int,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Read records and send them to another topic, exactly once: records and offsets go in
    transactions. Report the throughput and the latency of commits.

    \b
    Example:
      tailrace perf transform --topic perf --to perf-out --messages 1000000
    """
    for name in (topic, target):
        ready_partitions(bootstrap, name)
    with (
        Producer(bootstrap, transactional_id=transactional_id) as producer,
        Consumer(
            topic,
            bootstrap=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=5_000,
        ) as consumer,
    ):
        found = transform(consumer, producer, target, messages, timeout_ms / 1000, transaction_ms)
    seconds = max(found.seconds, 1e-9)
    megabytes = found.payload_bytes / MB
    if as_json:
        print_json(
            {"records": found.records, "seconds": round(found.seconds, 3),
             "records_per_s": round(found.records / seconds, 1),
             "mb_per_s": round(megabytes / seconds, 2), **commits_json(found.commits)}
        )  # fmt: skip
    else:
        click.echo(
            f"{found.records} records transformed, {found.records / seconds:.1f} records/sec "
            f"({megabytes / seconds:.2f} MB/sec)."
        )
        print_commits(found.commits)
    if found.records < messages:
        echo(
            f"tailrace: only {found.records} of {messages} records came within the timeout. The "
            f"group {group!r} reads on from where it has committed: to read from the beginning, "
            "name another --group"
        )
