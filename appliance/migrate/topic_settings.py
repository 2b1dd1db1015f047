"""Settings of Kafka's topics as ours, and the other way round.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from shm.messages.kafka_topic_settings import FIXED, kafka_value, our_value

OURS = frozenset(
    {
        "segment.bytes", "segment.ms", "max.message.bytes", "compression.type",
        "message.timestamp.type", "cleanup.policy", "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms", "max.compaction.lag.ms", "delete.retention.ms", "retention.ms",
        "retention.bytes",
    }
)  # fmt: skip
"""Settings that both sides have."""
CODECS = {"gzip": "zstd", "snappy": "lz4"}
"""Kafka's codecs that do not exist here -> what is used instead."""
TIME_TYPE = "message.timestamp.type"


class Mapped(NamedTuple):
    """The settings of a topic in the target."""

    configs: dict[str, str]
    at_switch: dict[str, str]
    """Settings that are made at the switch: before, records keep their own times."""
    notes: list[str]
    """Sentences about what is changed or left out."""


def to_ours(configs: Mapping[str, str], left_out: Collection[str] = ()) -> Mapped:
    """A Kafka topic's settings for a topic of the appliance."""
    found = Mapped({}, {}, [])
    for name, value in sorted(configs.items()):
        if name in left_out:
            found.notes.append(f"{name} is left out, as --leave-out says")
        elif FIXED.get(name) == value:
            continue
        elif name not in OURS:
            found.notes.append(f"{name}={value} is not moved")
        elif name == TIME_TYPE:
            if value == "LogAppendTime":
                found.at_switch[name] = value
        elif name == "compression.type" and value in CODECS:
            found.configs[name] = CODECS[value]
            found.notes.append(f"compression.type={value} becomes {CODECS[value]}")
        else:
            found.configs[name] = our_value(name, value)
    return found


def to_kafka(configs: Mapping[str, str], left_out: Collection[str] = ()) -> Mapped:
    """Settings of a topic of the appliance, those that were set, for a Kafka topic."""
    found = Mapped({}, {}, [])
    for name, value in sorted(configs.items()):
        if name in left_out:
            found.notes.append(f"{name} is left out, as --leave-out says")
        elif name not in OURS:
            found.notes.append(f"{name}={value} is not moved; Kafka does not have it")
        elif name == TIME_TYPE:
            if value == "LogAppendTime":
                found.at_switch[name] = value
        else:
            found.configs[name] = kafka_value(name, value)
    return found
