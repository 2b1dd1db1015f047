"""The table of rights: a rule for each API of the gateway. An API without one needs alter
of the cluster.

What a handler asks the front is checked there once more, by `netfront.access.rules`.

Owner: one gateway; pure functions of a request, its user and its response.

Invariants:
- A handler sees the part of a request that its user may make.
- Errors are Kafka's. Administrators need no rule.

Source: Kafka's KafkaApis, and the table of operations and resources of its documentation.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from netfront.kafka.apis.call import Call, Handler
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.rights import groups, records, security, topics
from netfront.kafka.rights.checks import (
    AnsweredError,
    Rule,
    by_topic,
    nothing,
    on_cluster,
)
from shm.rights.acl import ALTER, ALTER_CONFIGS, DELETE, DESCRIBE, DESCRIBE_CONFIGS, READ

RULES: Final[dict[int, Rule]] = {
    0: records.produce,
    1: by_topic("responses", READ, records.fetched, field="topic"),
    2: by_topic("topics", DESCRIBE, records.listed_offsets),
    3: topics.metadata,
    8: groups.offset_commit,
    9: groups.offset_fetch,
    10: groups.find_coordinator,
    11: groups.member,
    12: groups.member,
    13: groups.member,
    14: groups.member,
    15: groups.described("groups"),
    16: groups.list_groups,
    17: nothing,
    18: nothing,
    19: topics.create_topics,
    20: topics.delete_topics,
    21: by_topic("topics", DELETE, records.deleted_records),
    22: records.init_producer_id,
    23: by_topic("topics", DESCRIBE, records.ended_epochs, field="topic"),
    24: records.add_partitions,
    25: records.add_offsets,
    26: records.end_transaction,
    27: records.write_markers,
    28: records.commit_offsets,
    29: on_cluster(DESCRIBE),
    30: security.create_acls,
    31: security.delete_acls,
    32: topics.configs(DESCRIBE_CONFIGS, "results"),
    33: topics.configs(ALTER_CONFIGS, "responses"),
    34: topics.alter_replica_log_dirs,
    35: topics.describe_log_dirs,
    36: nothing,
    37: topics.create_partitions,
    42: groups.delete_groups,
    43: on_cluster(ALTER),
    44: topics.configs(ALTER_CONFIGS, "responses"),
    45: on_cluster(ALTER),
    46: on_cluster(DESCRIBE),
    47: groups.offset_delete,
    48: on_cluster(DESCRIBE_CONFIGS),
    49: security.alter_quotas,
    50: on_cluster(DESCRIBE),
    51: security.alter_credentials,
    55: on_cluster(DESCRIBE),
    57: on_cluster(ALTER),
    60: topics.describe_cluster,
    61: by_topic("topics", READ, records.producers),
    65: records.describe_transactions,
    66: records.list_transactions,
    68: groups.subscriber,
    69: groups.described("group_ids"),
    74: on_cluster(DESCRIBE_CONFIGS),
    75: topics.topic_partitions,
    76: groups.subscriber,
    77: groups.described("group_ids"),
    78: groups.share_records,
    79: groups.share_records,
    90: groups.share_offsets,
    91: groups.alter_share_offsets,
    92: groups.delete_share_offsets,
}


def allowed(call: Call, handler: Handler) -> Steps:
    """Serve the part of a request that its user may make. Raises RefusedError."""
    assert call.principal is not None
    if call.principal.is_admin:
        return (yield from handler(call))
    rule = RULES.get(call.api, on_cluster(ALTER))
    try:
        found = rule(call)
        merge = (yield from found) if isinstance(found, Generator) else found
    except AnsweredError as answered:
        return answered.response
    response = yield from handler(call)
    if merge is not None and response is not None:
        merge(response)
    return response
