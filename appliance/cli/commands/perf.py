"""`tailrace perf`: measures the appliance, with the options and output lines of Kafka's tools."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
from typing import Any

import click

from appliance.cli import perf_runner as perf
from appliance.cli.options import bootstrap_option, complete_topics, connect, json_option
from appliance.cli.output import echo, print_json, print_table
from tailrace.admin.admin import NewTopic
from tailrace.client.settings import ConsumerSettings, ProducerSettings
from tailrace.consumer.consumer import Consumer
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.producer import Producer

MB = 1024 * 1024
"""Bytes of a megabyte, as Kafka's tools count."""
PAYLOADS = 1000
TRANSACTION_MS = 100.0
"""Length of a transaction, if none is given."""


@click.group()
def command() -> None:
    """Measure throughput and latency, as kafka-producer-perf-test, kafka-consumer-perf-test and the
    end-to-end latency tool do.

    \b
    Example:
      tailrace topic create perf
      tailrace perf produce --topic perf --num-records 1000000 --record-size 100 --throughput -1
      tailrace perf consume --topic perf --messages 1000000
      tailrace perf latency --topic perf --num-records 1000
      tailrace perf transform --topic perf --to perf-out --messages 1000000
      tailrace perf advise --target 500MB/s
    """


def _settings(
    given: tuple[str, ...], kind: type[ProducerSettings] | type[ConsumerSettings]
) -> dict[str, Any]:
    """`name=value` pairs, names in Kafka's spelling or ours. Raises click.UsageError."""
    found: dict[str, Any] = {}
    for item in " ".join(given).split():
        name, separator, value = item.partition("=")
        if not separator:
            raise click.UsageError(f"{item!r} has no value; write name=value")
        name = name.replace(".", "_").replace("bootstrap_servers", "bootstrap")
        known = getattr(kind, "__dataclass_fields__", {}).get(name)
        if known is not None and known.type == "bool":
            found[name] = value.lower() == "true"
        else:
            found[name] = int(value) if value.lstrip("-").isdigit() else value
    return found


def _ready(bootstrap: str, topic: str) -> list[TopicPartition]:
    """Create the topic's partitions and warm up, so that the first figures are not disturbed."""
    with connect(bootstrap) as admin:
        count = len(admin.topic_info([topic])[topic].partitions)
    perf.load_arrow()
    return [TopicPartition(topic, partition) for partition in range(count)]


def _milliseconds(latency: perf.Latency) -> dict[str, float]:
    return {
        "avg": round(latency.average, 3), "max": round(latency.most, 3),
        **{f"p{share:g}": round(value, 3) for share, value in latency.percentiles.items()},
    }  # fmt: skip


@command.command("produce")
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
def produce(
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
      tailrace perf produce --topic perf --num-records 1000000 --record-size 100 --throughput -1
      --producer-props acks=1
    """
    if (record_size is None) == (payload_file is None):
        raise click.UsageError("no payload is given: give --record-size or --payload-file")
    settings = {"bootstrap": bootstrap, **_settings(producer_props, ProducerSettings)}
    if transactional_id is not None:
        settings["transactional_id"] = transactional_id
    elif transaction_ms is not None:
        raise click.UsageError("--transaction-ms needs --transactional-id")
    length_ms = (transaction_ms or TRANSACTION_MS) if "transactional_id" in settings else None
    _ready(settings["bootstrap"], topic)
    if payload_file is not None:
        payloads = payload_file.read().splitlines()
        if not payloads:
            raise click.UsageError("--payload-file is empty: it needs at least one line")
    else:
        letters = random.Random(0)
        payloads = [
            bytes(letters.choices(range(65, 91), k=record_size or 1))
            for _ in range(min(PAYLOADS, num_records))
        ]

    def report(records: int, size: int, seconds: float, average_ms: float, most_ms: float) -> None:
        if not as_json:
            click.echo(
                f"{records} records sent, {records / seconds:.1f} records/sec "
                f"({size / MB / seconds:.2f} MB/sec), "
                f"{average_ms:.1f} ms avg latency, {most_ms:.1f} ms max latency."
            )

    with Producer(**settings) as producer:
        found = perf.produce(producer, topic, payloads, num_records, throughput, report, length_ms)
        metrics = producer.metrics()
    rate, latency = found.records / found.seconds, found.latency
    if as_json:
        print_json(
            {"records": found.records, "failed": found.failed, "seconds": round(found.seconds, 3),
            "records_per_s": round(rate, 1),
             "mb_per_s": round(found.payload_bytes / MB / found.seconds, 2),
             "latency_ms": _milliseconds(latency), "latency_sample": found.sample,
             **_commits_json(found.commits),
             **({"metrics": metrics} if print_metrics else {})}
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
    _print_commits(found.commits)
    if print_metrics:
        for name, value in metrics.items():
            click.echo(f"{name:<20} : {value}")
    if found.failed:
        raise click.ClickException(
            f"{found.failed} of {found.records} records were not delivered; see the appliance's log"
        )


@command.command("consume")
@click.option(
    "--topic",
    required=True,
    shell_complete=complete_topics,
    help="Read this topic, from its beginning.",
)
@click.option("--messages", required=True, type=click.IntRange(1), help="How many records to read.")
@click.option(
    "--timeout",
    "timeout_ms",
    default=10_000,
    show_default=True,
    help="Give up when no record came for this long, ms.",
)
@click.option("--from-latest", is_flag=True, help="Read new records only.")
@click.option("--arrow", is_flag=True, help="Read Arrow batches instead of records.")
@click.option("--show-detailed-stats", is_flag=True, help="Print a line every five seconds.")
@click.option("--hide-header", is_flag=True, help="Do not print the column names.")
@click.option(
    "--consumer-props",
    multiple=True,
    metavar="NAME=VALUE",
    help="Settings such as fetch.max.bytes=8388608; repeatable.",
)
@bootstrap_option
@json_option
def consume(
    topic: str,
    messages: int,
    timeout_ms: int,
    from_latest: bool,
    arrow: bool,
    show_detailed_stats: bool,
    hide_header: bool,
    consumer_props: tuple[str, ...],
    bootstrap: str,
    as_json: bool,
) -> None:
    """Read records and report the throughput.

    \b
    Example:
      tailrace perf consume --topic perf --messages 1000000
    """
    settings = {
        "bootstrap": bootstrap,
        "auto_offset_reset": "latest" if from_latest else "earliest",
        **_settings(consumer_props, ConsumerSettings),
    }
    keys = _ready(settings["bootstrap"], topic)
    if not as_json and not hide_header:
        click.echo(
            "start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, "
            "rebalance.time.ms, fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec"
        )
    with Consumer(**settings) as consumer:
        consumer.assign(keys)
        found = perf.consume(
            consumer,
            messages,
            timeout_ms / 1000,
            arrow=arrow,
            report=_print_line if show_detailed_stats else lambda _: None,
        )
    if as_json:
        print_json(
            {"records": found.records, "seconds": round(found.seconds, 3),
            "records_per_s": round(found.records / max(found.seconds, 1e-9), 1),
             "mb_per_s": round(found.payload_bytes / MB / max(found.seconds, 1e-9), 2)}
        )  # fmt: skip
    else:
        _print_line(found)
    if found.records < messages:
        echo(f"tailrace: only {found.records} of {messages} records came within the timeout")


def _print_line(found: perf.Consumed) -> None:
    seconds, fetching = max(found.seconds, 1e-9), max(found.fetch_seconds, 1e-9)
    megabytes = found.payload_bytes / MB

    def moment(seconds_since_1970: float) -> str:
        return dt.datetime.fromtimestamp(seconds_since_1970).strftime("%Y-%m-%d %H:%M:%S:%f")[:-3]

    click.echo(
        f"{moment(found.began_at)}, {moment(found.began_at + seconds)}, {megabytes:.4f}, "
        f"{megabytes / seconds:.4f}, {found.records}, "
        f"{found.records / seconds:.4f}, 0, {fetching * 1000:.0f}, {megabytes / fetching:.4f}, "
        f"{found.records / fetching:.4f}"
    )


def _commits_json(commits: perf.Latency | None) -> dict[str, Any]:
    if commits is None:
        return {}
    return {"transactions": commits.count, "commit_ms": _milliseconds(commits)}


def _print_commits(commits: perf.Latency | None) -> None:
    if commits is not None:
        shares = ", ".join(
            f"{value:.2f} ms {share:g}th" for share, value in commits.percentiles.items()
        )
        click.echo(
            f"{commits.count} transactions committed, {commits.average:.2f} ms avg commit latency, "
            f"{commits.most:.2f} ms max commit latency, {shares}."
        )


@command.command("transform")
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
def transform(
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
        _ready(bootstrap, name)
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
        found = perf.transform(
            consumer, producer, target, messages, timeout_ms / 1000, transaction_ms
        )
    seconds = max(found.seconds, 1e-9)
    megabytes = found.payload_bytes / MB
    if as_json:
        print_json(
            {"records": found.records, "seconds": round(found.seconds, 3),
             "records_per_s": round(found.records / seconds, 1),
             "mb_per_s": round(megabytes / seconds, 2), **_commits_json(found.commits)}
        )  # fmt: skip
    else:
        click.echo(
            f"{found.records} records transformed, {found.records / seconds:.1f} records/sec "
            f"({megabytes / seconds:.2f} MB/sec)."
        )
        _print_commits(found.commits)
    if found.records < messages:
        echo(f"tailrace: only {found.records} of {messages} records came within the timeout")


@command.command("latency")
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
@click.option(
    "--acks",
    type=click.Choice(["1", "all"]),
    default="all",
    show_default=True,
    help="Acknowledgement that the producer waits for.",
)
@click.option(
    "--throughput",
    type=float,
    default=0,
    help="Records per second; without it, one record at a time.",
)
@bootstrap_option
@json_option
def latency(
    topic: str,
    num_records: int,
    record_size: int,
    acks: str,
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
    keys = _ready(bootstrap, topic)

    def report(number: int, milliseconds: float) -> None:
        if not as_json:
            click.echo(f"{number}\t{milliseconds:.4f}")

    with (
        Producer(
            bootstrap, acks=1 if acks == "1" else acks, linger_ms=1 if throughput > 0 else 0
        ) as producer,
        Consumer(bootstrap=bootstrap, auto_offset_reset="latest") as consumer,
    ):
        consumer.assign(keys)
        for key in keys:
            consumer.position(key)
        consumer.poll(0)
        if throughput > 0:
            found = perf.end_to_end(producer, consumer, topic, num_records, record_size, throughput)
        else:
            found = perf.round_trips(producer, consumer, topic, num_records, record_size, report)
    if as_json:
        print_json({"records": found.count, "latency_ms": _milliseconds(found)})
        return
    click.echo(f"Avg latency: {found.average:.4f} ms")
    shares = ", ".join(f"{share:g}th = {value:.3f}" for share, value in found.percentiles.items())
    click.echo(f"Percentiles: {shares}")


_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def _rate(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """ "500MB/s" -> 500e6."""
    found = re.fullmatch(r"([0-9.]+)\s*([kmg])b?(/s)?", value.strip().lower())
    try:
        rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise click.BadParameter(f"{value!r} is not a rate; write 500MB/s")
    return rate


@command.command("advise")
@click.option(
    "--target",
    required=True,
    callback=_rate,
    metavar="RATE",
    help="What the topic is to carry, such as 500MB/s.",
)
@click.option(
    "--record-size",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="Bytes of a record's value.",
)
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="How long to measure.",
)
@click.option(
    "--acks",
    type=click.Choice(["1", "all"]),
    default="all",
    show_default=True,
    help="Acknowledgement that the producer waits for.",
)
@bootstrap_option
@json_option
def advise(
    target: float, record_size: int, seconds: float, acks: str, bootstrap: str, as_json: bool
) -> None:
    """Recommend a number of partitions for a throughput, from a measurement of one partition on
    this host.

    A topic is created for the measurement and deleted after it.

    \b
    Example:
      tailrace perf advise --target 500MB/s --record-size 200
    """
    topic = f"perf-advise-{os.urandom(4).hex()}"
    with connect(bootstrap) as admin:
        admin.create_topics([NewTopic(topic)])
        try:
            with (
                Producer(bootstrap, acks=1 if acks == "1" else acks) as producer,
                Consumer(topic, bootstrap=bootstrap, auto_offset_reset="earliest") as consumer,
            ):
                advice = perf.Advice(
                    target, *perf.measure_partition(producer, consumer, topic, record_size, seconds)
                )
        finally:
            admin.delete_topics([topic])
    if as_json:
        print_json(
            {"target_bytes_per_s": advice.target, "produce_bytes_per_s": round(advice.produce),
            "consume_bytes_per_s": round(advice.consume),
             "partitions": advice.by_rule, "partitions_one_client_each": advice.for_both}
        )  # fmt: skip
        return
    print_table(
        ["", "MB/s"],
        [["target (Tt)", round(advice.target / 1e6, 1)],
        ["one partition, produced (Tp)", round(advice.produce / 1e6, 1)],
         ["one partition, consumed (Tc)", round(advice.consume / 1e6, 1)]],
    )  # fmt: skip
    click.echo(f"partitions, Tt / max(Tp, Tc): {advice.by_rule}")
    click.echo(
        f"with one producer and one consumer for each, max(Tt / Tp, Tt / Tc): {advice.for_both}"
    )
