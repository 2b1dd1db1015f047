"""Values of Kafka's topic settings as ours. Names are the same on both sides, and FIXED has those
of Kafka that have one value here.

Owner: pure. The Kafka gateway and `tailrace migrate` use it, so that a topic gets the same settings
on both ways.
"""

from __future__ import annotations

NEVER_MS = 1 << 62
"""The largest time here."""
KAFKA_NEVER_MS = (1 << 63) - 1
POLICY = "cleanup.policy"
CODEC = "compression.type"
COMPACTION_LAG = "max.compaction.lag.ms"
FIXED = {
    "flush.messages": str(KAFKA_NEVER_MS),
    "flush.ms": str(KAFKA_NEVER_MS),
    "follower.replication.throttled.replicas": "",
    "leader.replication.throttled.replicas": "",
    "message.timestamp.after.max.ms": str(KAFKA_NEVER_MS),
    "message.timestamp.before.max.ms": str(KAFKA_NEVER_MS),
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.storage.enable": "false",
    "segment.jitter.ms": "0",
    "unclean.leader.election.enable": "false",
}
"""Settings of Kafka that cannot be chosen here, with the value that holds: a program that names it
gets what it asks for.
"""


def our_value(name: str, value: str) -> str:
    """The value of a setting here, for one of Kafka."""
    if name == POLICY:
        return ",".join(sorted({part.strip() for part in value.split(",") if part.strip()}))
    if name == CODEC and value == "uncompressed":
        return "none"
    if name == COMPACTION_LAG and value == str(KAFKA_NEVER_MS):
        return str(NEVER_MS)
    return value


def kafka_value(name: str, value: str) -> str:
    """The value of a setting in Kafka, for one of ours."""
    if name == CODEC and value == "none":
        return "uncompressed"
    if name == COMPACTION_LAG and value == str(NEVER_MS):
        return str(KAFKA_NEVER_MS)
    return value
