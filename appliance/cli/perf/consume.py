"""`tailrace perf consume`: the rate of a consumer, with the options and output lines of
kafka-consumer-perf-test.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, json_option
from appliance.cli.output import echo, print_json
from appliance.cli.perf.common import (
    MB,
    ready_partitions,
    settings_of,
)
from appliance.cli.perf.latencies import (
    REPORT_S,
)
from tailrace.client.config.settings import ConsumerSettings
from tailrace.consumer.consumer import Consumer


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


@click.command("consume")
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
def command(
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
        **settings_of(consumer_props, ConsumerSettings),
    }
    keys = ready_partitions(settings["bootstrap"], topic)
    if not as_json and not hide_header:
        click.echo(
            "start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, "
            "rebalance.time.ms, fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec"
        )
    with Consumer(**settings) as consumer:
        consumer.assign(keys)
        found = consume(
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


def _print_line(found: Consumed) -> None:
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
