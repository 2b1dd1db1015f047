"""Leader epochs as Kafka's clients get them: those of a topic that was deleted and created again
lie above all of the one that had its name before.

    Kafka's epoch = seconds from 2020 to the creation of the topic + our epoch

A client that goes on in another topic of the name knows an epoch of the deleted one. It asks where
that epoch ended (OffsetForLeaderEpoch), and is told the log start offset, as by Kafka for an epoch
before the first one. It begins there (Java), or where `auto.offset.reset` says (librdkafka). So it
does behind a restart of the gateway, too, of which `read_positions` remembers nothing.

The time of creation is the controller's (`appliance.catalog.tables.former_topics`): it lies behind
the seconds that the epochs of a deleted topic of the name stood for.

Epochs below OLDEST are ours as they are: an earlier version has told them.

Owner: pure.

Invariants:
- The epochs of a partition ascend as ours do.
- The process of groups has our epochs, as our clients commit them.
"""

from __future__ import annotations

from netfront.kafka.wire.errors import KafkaError
from shm.messages.lane_messages import Assignment

OLDEST = 3 * 365 * 86_400
OF_DELETED = -2
"""An epoch of a topic that had the name before."""
UNKNOWN = -1
_BEGIN_S = 1_577_836_800
_LATEST = 1 << 30
_INT32_MAX = (1 << 31) - 1


def base_epoch(route: Assignment) -> int:
    """Kafka's number of our epoch 0."""
    return min(max(OLDEST, route.created_us // 1_000_000 - _BEGIN_S), _LATEST)


def to_kafka(route: Assignment, epoch: int) -> int:
    """Kafka's number of one of our epochs; -1: it is not known."""
    return UNKNOWN if epoch < 0 else min(base_epoch(route) + epoch, _INT32_MAX)


def epoch_error(route: Assignment, current: int, known: int) -> KafkaError:
    """The error for the leader epoch of a partition that a client knows. `current`: ours."""
    known = from_kafka(route, known)
    if known in (UNKNOWN, current):
        return KafkaError.NONE
    if known < current:
        return KafkaError.FENCED_LEADER_EPOCH
    return KafkaError.UNKNOWN_LEADER_EPOCH


def from_kafka(route: Assignment, epoch: int) -> int:
    """Our number of one of Kafka's epochs; -1: it is not known; OF_DELETED."""
    if epoch < OLDEST:
        return max(UNKNOWN, epoch)
    base = base_epoch(route)
    return OF_DELETED if epoch < base else epoch - base
