"""Values of Kafka's topic settings as ours. Names are the same on both sides.

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
