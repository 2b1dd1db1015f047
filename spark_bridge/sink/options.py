"""Options of `df.write` and `df.writeStream`, checked. Pure.

Options of Spark's Kafka sink: kafka.bootstrap.servers, topic (it overrides the column `topic`).
Tailrace's own:
- bootstrap: the same as kafka.bootstrap.servers.
- keyColumn: the column of a typed topic that routes rows to partitions.
- queryId: the query's name, for a Spark that does not tell a task its query.
- txnAppId and txnVersion: make a repeated batch write harmless (Delta Lake's names,
  https://docs.delta.io/latest/delta-streaming.html#idempotent-table-writes-in-foreachbatch).
- publishTimeoutMs: longest wait for an appliance that accepts nothing.
- transactionTimeoutMs: longest time of a batch, from its first row to its commit.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.core.errors import InvalidSettingError

CLIENT_ID = "spark-sink"
NAMES = (
    "bootstrap",
    "kafka.bootstrap.servers",
    "topic",
    "keyColumn",
    "queryId",
    "txnAppId",
    "txnVersion",
    "publishTimeoutMs",
    "transactionTimeoutMs",
)
_OF_SPARK = ("path", "checkpointlocation", "queryname", "outputmode")
"""Options that Spark itself adds to a sink's, or has read before."""
PUBLISH_TIMEOUT_MS = 120_000
TRANSACTION_TIMEOUT_MS = 900_000
"""The most that an appliance allows by default (transaction.max.timeout.ms)."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write."""

    bootstrap: str
    topic: str | None
    """Topic of all rows; None: each row names it."""
    key_column: str | None
    query_id: str | None
    app_id: str | None
    version: int
    publish_timeout_ms: int
    """Longest wait for an appliance that accepts nothing, ms."""
    transaction_timeout_ms: int
    """Longest time of a batch, from its first row to its commit, ms."""


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Check the options of a write. Raises InvalidSettingError, which names the option."""
    known = {name.lower(): name for name in NAMES}
    options = {name.lower(): value for name, value in given.items() if value is not None}
    for name in options:
        if name not in known and name not in _OF_SPARK:
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(NAMES)}"
            raise InvalidSettingError(f"unknown option {name!r} of the tailrace sink; {hint}")
    servers = options.get("kafka.bootstrap.servers")
    bootstrap = options.get("bootstrap", servers)
    if servers is not None and bootstrap != servers:
        raise InvalidSettingError(
            "the options bootstrap and kafka.bootstrap.servers name two appliances; give one "
            "of them"
        )
    topic = options.get("topic", options.get("path"))
    if topic is not None and not topic.strip():
        raise InvalidSettingError(
            "the option topic is empty; name a topic, or leave it out and have a column `topic`"
        )
    app_id, version = options.get("txnappid"), options.get("txnversion")
    if (app_id is None) != (version is None):
        raise InvalidSettingError(
            "txnAppId and txnVersion belong together, and one is missing: give both options, "
            "or neither"
        )
    return SinkOptions(
        bootstrap or _default_bootstrap(),
        topic,
        options.get("keycolumn"),
        options.get("queryid") or None,
        app_id,
        _whole("txnVersion", version or "0", 0),
        _whole("publishTimeoutMs", options.get("publishtimeoutms", str(PUBLISH_TIMEOUT_MS)), 1),
        _whole(
            "transactionTimeoutMs",
            options.get("transactiontimeoutms", str(TRANSACTION_TIMEOUT_MS)),
            1,
        ),
    )


def _default_bootstrap() -> str:
    from tailrace.client.config.settings import (
        DEFAULT_BOOTSTRAP,  # a process that has one needs no client
    )

    return DEFAULT_BOOTSTRAP


def _whole(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InvalidSettingError(
            f"option {name} is {text!r}; it takes a whole number from {least} up"
        )
    return number
