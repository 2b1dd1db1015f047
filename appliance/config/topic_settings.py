"""Settings of a topic: names (Kafka's), types, defaults and bounds, each documented beside its
definition.

Owner: pure, a table.
Invariants: a name without a row is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tailrace.core.hash_slots import HASH_SLOTS

COMPACT = "compact"
POLICIES = ("delete", COMPACT, "compact,delete")
"""The values of cleanup.policy."""
_NEVER = 2**62


class TopicSetting(NamedTuple):
    """A setting of topics: its type, default, and allowed values."""

    name: str
    kind: type
    default: Any
    doc: str
    allowed: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = _NEVER


_TABLE = (
    TopicSetting(
        "segment.bytes",
        int,
        256 << 20,
        "Largest size of a segment; a batch that would exceed it begins a new one.",
        minimum=64 << 10,
        maximum=1 << 40,
    ),
    TopicSetting(
        "segment.ms",
        int,
        7 * 86_400_000,
        "A segment is sealed this long after its first batch, also when nothing follows.",
        minimum=100,
    ),
    TopicSetting(
        "max.message.bytes",
        int,
        1 << 20,
        "Largest batch accepted; at most a quarter of ring_bytes and less than half of lane_bytes. "
        "Producers keep 2048 bytes of it for what a batch has beside its records.",
        minimum=1024,
        maximum=64 << 20,
    ),
    TopicSetting(
        "compression.type",
        str,
        "producer",
        "Compression of batches; producer: as each producer chooses, else none.",
        allowed=("producer", "none", "lz4", "zstd"),
    ),
    TopicSetting(
        "message.timestamp.type",
        str,
        "CreateTime",
        "Clock of a record's timestamp: the producer's, or the appliance's at the append.",
        allowed=("CreateTime", "LogAppendTime"),
    ),
    TopicSetting(
        "cleanup.policy",
        str,
        "delete",
        "Treatment of old records: delete removes segments by retention.ms and "
        "retention.bytes; compact keeps the latest record of each key, and a record needs a key; "
        "compact,delete does both.",
        allowed=POLICIES,
    ),
    TopicSetting(
        "min.cleanable.dirty.ratio",
        float,
        0.5,
        "A compacted partition is cleaned when more than this part of its sealed bytes was not "
        "cleaned yet.",
        minimum=0,
        maximum=1,
    ),
    TopicSetting(
        "min.compaction.lag.ms",
        int,
        0,
        "Time that a record of a compacted topic stays at least, also when a later one has its "
        "key, ms.",
    ),
    TopicSetting(
        "max.compaction.lag.ms",
        int,
        _NEVER,
        "Records of a compacted topic that are older than this are cleaned, whatever the dirty "
        "ratio, and their segment is sealed for it, ms.",
        minimum=100,
    ),
    TopicSetting(
        "delete.retention.ms",
        int,
        86_400_000,
        "Time that a tombstone (a record with a key and without a value) of a compacted topic "
        "stays after the first cleaning that met it, ms.",
    ),
    TopicSetting(
        "small.batch.bytes",
        int,
        0,
        "A sealed segment of at least 512 KiB whose batches have fewer bytes than this on average is "
        "written again, once, with batches of about 256 KiB; every record stays. 0: never.",
        maximum=32 << 10,
    ),
    TopicSetting(
        "key.column",
        str,
        "",
        "The column of a typed topic that has the keys, for compaction; it can be set once.",
    ),
    TopicSetting(
        "kafka.value.format",
        str,
        "json",
        "Rows of a typed topic as Kafka's clients read and write them: json, an object for each "
        "row; arrow, an Arrow stream of one row. Other topics have the bytes of their values.",
        allowed=("json", "arrow"),
    ),
    TopicSetting(
        "schema.compatibility",
        str,
        "backward",
        "Changes of a typed topic's schema that are allowed: backward: all by which stored rows "
        "stay readable. forward, full: neither renaming nor widening a column. none: any type may "
        "become another one, too (see docs/schemas.md).",
        allowed=("backward", "forward", "full", "none"),
    ),
    TopicSetting(
        "retention.ms",
        int,
        7 * 86_400_000,
        "A segment is removed when its newest record is older than this (records that are old "
        "when they come stay five minutes; with delay.enabled it counts from delivery), ms; -1: "
        "never.",
        minimum=-1,
    ),
    TopicSetting(
        "retention.bytes",
        int,
        -1,
        "Closed segments are removed, oldest first, while the partition without them still "
        "holds this many bytes; -1: never.",
        minimum=-1,
    ),
    TopicSetting(
        "durability",
        str,
        "disk",
        "disk: a batch is visible to consumers, and acknowledged with acks=all, after "
        "fdatasync. memory: after the write to the page cache.",
        allowed=("disk", "memory"),
    ),
    TopicSetting(
        "delay.enabled",
        bool,
        False,
        "Producers may have records of this topic delivered later (deliver_at, "
        "deliver_after); turned off, what is pending is still delivered.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "delay.levels",
        str,
        "",
        "Allowed delays, such as `5s 10s 1m 1h`: others are rounded up to the next one. Empty: "
        "any delay, to a millisecond.",
    ),
    TopicSetting(
        "partitioner",
        str,
        "producer",
        "Rule by which producers choose a record's partition: producer: as each is set; hash_slots: by "
        "the key's hash slot, so that a key keeps its order when partitions are added; only "
        "when it is created.",
        allowed=("producer", HASH_SLOTS),
    ),
    TopicSetting(
        "delivery.paused",
        bool,
        False,
        "Consumer groups and share groups are given no records of the topic: their "
        "members keep their partitions and go on where they were once it is false; producers, "
        "and readers without a group, are not held up.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "worker.dedicated",
        bool,
        False,
        "A worker process with a ring of its own for each partition of the topic; can be set "
        "only when the topic is created.",
        allowed=("true", "false"),
    ),
    TopicSetting(
        "group.share.record.lock.duration.ms",
        int,
        30_000,
        "Time that a record is locked for a member of a share group, ms; then another member may "
        "get it.",
        minimum=100,
        maximum=3_600_000,
    ),
    TopicSetting(
        "group.share.delivery.count.limit",
        int,
        5,
        "Number of times that a share group delivers a record that is not accepted; then it goes to the "
        "dead-letter topic.",
        minimum=1,
        maximum=10_000,
    ),
    TopicSetting(
        "group.share.partition.max.record.locks",
        int,
        2_000,
        "Most records of a partition that a share group may have in flight.",
        minimum=10,
        maximum=10_000,
    ),
    TopicSetting(
        "dead.letter.topic",
        str,
        "",
        "Topic for records that a share group or retry_later gives up, created when first "
        "needed; empty: the topic's name with `.dlq`.",
    ),
    TopicSetting(
        "derived.from",
        str,
        "",
        "The id of the topic whose retries or dead letters this one holds; `topic delete "
        "--with-derived` deletes it with that one. Clients set it when they create such a topic.",
    ),
)
TOPIC_SETTINGS: dict[str, TopicSetting] = {setting.name: setting for setting in _TABLE}

MIN_REPLICAS = "min.insync.replicas"
LATER = {
    MIN_REPLICAS: "there are no replicas yet; leave it out, or set it to 1",
}
"""Kafka's settings that this version does not support, with the reason; they are refused."""
APART = {
    "partitions": "the number of partitions is no setting: give it as `--partitions`, "
    "`NewTopic(partitions=)` or to `Admin.create_partitions`",
    "schema": "a schema is no setting: give it as `--schema FILE`, `NewTopic(schema=)`, and change "
    "it by `tailrace topic schema` or `Admin.alter_topics(schema=)`",
}
"""Properties of a topic that are given apart from its settings, with how."""
