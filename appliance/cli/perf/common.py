"""Options and output that the measurements of `tailrace perf` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from appliance.cli.options.shared import connect
from appliance.cli.perf.latencies import Latency, load_arrow
from tailrace.client.config.settings import ConsumerSettings, ProducerSettings
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.units import digits_in

MB = 1024 * 1024
"""Bytes of a megabyte, as Kafka's tools count."""
TRANSACTION_MS = 100.0
"""Length of a transaction, if none is given."""
Function = TypeVar("Function", bound=Callable[..., Any])


def acks_option(function: Function) -> Function:
    """Add the option --acks, 1 or "all"."""
    return click.option(
        "--acks",
        type=click.Choice(["1", "all"]),
        default="all",
        show_default=True,
        callback=lambda _context, _parameter, value: 1 if value == "1" else value,
        help="Acknowledgement that the producer waits for.",
    )(function)


def settings_of(
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
            number = digits_in(value.removeprefix("-"))
            found[name] = value if number is None else int(value)
    return found


def ready_partitions(bootstrap: str, topic: str) -> list[TopicPartition]:
    """Create the topic's partitions and warm up, so that the first figures are not disturbed."""
    with connect(bootstrap) as admin:
        count = len(admin.topic_info([topic])[topic].partitions)
    load_arrow()
    return [TopicPartition(topic, partition) for partition in range(count)]


def milliseconds_of(latency: Latency) -> dict[str, float]:
    return {
        "avg": round(latency.average, 3), "max": round(latency.most, 3),
        **{f"p{share:g}": round(value, 3) for share, value in latency.percentiles.items()},
    }  # fmt: skip


def commits_json(commits: Latency | None) -> dict[str, Any]:
    if commits is None:
        return {}
    return {"transactions": commits.count, "commit_ms": milliseconds_of(commits)}


def print_commits(commits: Latency | None) -> None:
    if commits is not None:
        shares = ", ".join(
            f"{value:.2f} ms {share:g}th" for share, value in commits.percentiles.items()
        )
        click.echo(
            f"{commits.count} transactions committed, {commits.average:.2f} ms avg commit latency, "
            f"{commits.most:.2f} ms max commit latency, {shares}."
        )
