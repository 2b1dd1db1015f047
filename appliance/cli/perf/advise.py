"""`tailrace perf advise`: the number of partitions for a throughput."""

from __future__ import annotations

import math
import os
import random
import re
import time
from dataclasses import dataclass

import click

from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import print_json, print_table
from appliance.cli.perf.common import acks_option
from appliance.cli.perf.consume import consume
from appliance.cli.perf.latencies import (
    load_arrow,
)
from tailrace.admin.admin import NewTopic
from tailrace.consumer.consumer import Consumer
from tailrace.producer.producer import Producer


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


@click.command("advise")
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
@acks_option
@bootstrap_option
@json_option
def command(
    target: float, record_size: int, seconds: float, acks: int | str, bootstrap: str, as_json: bool
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
                Producer(bootstrap, acks=acks) as producer,
                Consumer(topic, bootstrap=bootstrap, auto_offset_reset="earliest") as consumer,
            ):
                advice = Advice(
                    target, *measure_partition(producer, consumer, topic, record_size, seconds)
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
