"""Suggestions for a name that is no setting of the appliance.

In this order: a setting of topics or clients, Kafka's name for a setting, the same name with other
separators, a name that differs by a slip of the keyboard, the same name in another section, a near
name in the same section, a near name anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.config.files.near_names import misspelt, nearest, plain
from appliance.config.settings import TOPIC_DEFAULTS, TOPIC_PREFIX
from appliance.config.topic_settings import TOPIC_SETTINGS

KAFKA_NAMES = {
    "listeners": "listen", "advertised.listeners": "listen", "log.dirs": "data_dirs",
    "log.dir": "data_dirs", "num.network.threads": "fronts",
    "max.connections": "connections.max", "auto.create.topics.enable": "auto_create_topics",
    "transactional.id.timeout.ms": "transactional.id.expiration.ms",
    "group.max.session.timeout.ms": "group.session.timeout.max.ms",
    "group.min.session.timeout.ms": "group.session.timeout.min.ms",
    "group.max.size": "group.members.max",
    "group.consumer.max.size": "group.members.max",
    "log.flush.interval.ms": "flush.linger_ms",
    "log.flush.interval.messages": "flush.batch_size",
    "log.retention.check.interval.ms": "retention.check.interval.ms",
    "log.cleaner.backoff.ms": "cleaner.check.interval.ms",
    "log.cleaner.dedupe.buffer.size": "cleaner.dedupe.buffer.size",
    "log.cleaner.io.max.bytes.per.second": "cleaner.io.max.bytes.per.second",
    "log.retention.ms": "topic.retention.ms", "log.retention.minutes": "topic.retention.ms",
    "log.retention.hours": "topic.retention.ms", "log.retention.bytes": "topic.retention.bytes",
    "log.segment.bytes": "topic.segment.bytes", "log.roll.ms": "topic.segment.ms",
    "log.roll.hours": "topic.segment.ms", "message.max.bytes": "topic.max.message.bytes",
    "log.message.timestamp.type": "topic.message.timestamp.type",
    "compression.type": "topic.compression.type",
    "group.share.record.lock.duration.ms": "topic.group.share.record.lock.duration.ms",
    "group.share.delivery.count.limit": "topic.group.share.delivery.count.limit",
}  # fmt: skip
"""Settings of Kafka's brokers that mean the same as one of ours."""
CLIENT_SETTINGS = (
    "acks", "linger_ms", "batch_size", "compression_type", "buffer_memory", "max_block_ms",
    "delivery_timeout_ms", "request_timeout_ms", "group_id", "auto_offset_reset",
    "enable_auto_commit", "session_timeout_ms", "max_poll_records", "fetch_min_bytes",
    "fetch_max_wait_ms", "isolation_level", "transactional_id", "transaction_timeout_ms",
    "bootstrap_servers", "client_id",
)  # fmt: skip


def advice_for(name: str, known: Iterable[str]) -> str:
    """A half-sentence that says which name was meant; "" if none is near."""
    names = [*known]
    if name in KAFKA_NAMES and KAFKA_NAMES[name] in names:
        return f"Kafka's {name} is {KAFKA_NAMES[name]} here"
    if name in TOPIC_SETTINGS:
        default = (
            f", or {TOPIC_PREFIX}{name} for the default of all" if name in TOPIC_DEFAULTS else ""
        )
        alter = f"tailrace topic alter TOPIC --config {name}=VALUE"
        return f"{name} is a setting of topics: {alter}{default}"
    if plain(name) in {plain(other): other for other in names}:
        return f"write {next(other for other in names if plain(other) == plain(name))}"
    slip = misspelt(name, names)
    if slip:
        return f"did you mean {slip}?"
    ending = [
        other for other in names if other.endswith((f".{name}", f".{name.rpartition('.')[2]}"))
    ]
    if len(ending) == 1 and name.rpartition(".")[2] == ending[0].rpartition(".")[2]:
        return f"did you mean {ending[0]}?"
    near = nearest(name, names)
    if near:
        return f"did you mean {near}?"
    if name.replace(".", "_") in CLIENT_SETTINGS:
        return f"{name} is a setting of clients: give it to the Producer or Consumer"
    return ""
