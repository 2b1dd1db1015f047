"""`tailrace perf`: measures the appliance, with the options and output lines of Kafka's tools."""

from __future__ import annotations

import click

from appliance.cli.perf import advise, consume, latency, produce, transform


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


for _measurement in (produce, consume, latency, transform, advise):
    command.add_command(_measurement.command)
