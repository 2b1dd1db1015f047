"""The APIs that work, each with its versions: what ApiVersions says.

Invariants:
- A version is listed only if `definitions.json` has it and its handler serves all of it.
- PRODUCE's lowest version is announced as 0, as Kafka 4 does: librdkafka takes a broker without it
  for one that is too old. Versions 0 to 2 are refused.
"""

from __future__ import annotations

from netfront.kafka.apis.admin.configs import (
    alter_configs,
    describe_configs,
    incremental_alter_configs,
    list_config_resources,
)
from netfront.kafka.apis.admin.leadership import (
    alter_reassignments,
    elect_leaders,
    list_reassignments,
)
from netfront.kafka.apis.admin.log_dirs import alter_replica_log_dirs, describe_log_dirs
from netfront.kafka.apis.admin.topics import (
    create_partitions,
    create_topics,
    delete_records,
    delete_topics,
)
from netfront.kafka.apis.call import Call, Row
from netfront.kafka.apis.cluster.brokers import describe_cluster
from netfront.kafka.apis.cluster.coordinators import find_coordinator
from netfront.kafka.apis.cluster.features import FEATURES, update_features
from netfront.kafka.apis.cluster.metadata import describe_topic_partitions, metadata
from netfront.kafka.apis.cluster.quorum import describe_quorum
from netfront.kafka.apis.groups import consumer_groups
from netfront.kafka.apis.groups.classic_groups import heartbeat, join_group, leave_group, sync_group
from netfront.kafka.apis.groups.group_admin import delete_groups, describe_groups, list_groups
from netfront.kafka.apis.groups.group_offsets import offset_commit, offset_delete, offset_fetch
from netfront.kafka.apis.records.active_producers import describe_producers
from netfront.kafka.apis.records.fetch import fetch
from netfront.kafka.apis.records.offsets import list_offsets, offset_for_leader_epoch
from netfront.kafka.apis.records.produce import produce
from netfront.kafka.apis.sasl import sasl_authenticate, sasl_handshake
from netfront.kafka.apis.security.acls import create_acls, delete_acls, describe_acls
from netfront.kafka.apis.security.client_quotas import alter_quotas, describe_quotas
from netfront.kafka.apis.security.scram_users import alter_credentials, describe_credentials
from netfront.kafka.apis.share_groups import acknowledgements as share_acknowledgements
from netfront.kafka.apis.share_groups import fetch as share_fetch
from netfront.kafka.apis.share_groups import heartbeat as share_heartbeat
from netfront.kafka.apis.share_groups.description import describe as describe_share_groups
from netfront.kafka.apis.share_groups.start_offsets import (
    alter_offsets,
    delete_offsets,
    describe_offsets,
)
from netfront.kafka.apis.transactions.end import end_transaction
from netfront.kafka.apis.transactions.init_producer_id import init_producer_id
from netfront.kafka.apis.transactions.listing import describe_transactions, list_transactions
from netfront.kafka.apis.transactions.markers import write_markers
from netfront.kafka.apis.transactions.offsets import commit_offsets
from netfront.kafka.apis.transactions.partitions import add_offsets, add_partitions
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError

API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
PRODUCE = 0


def api_versions(call: Call) -> Steps:
    """List the APIs. The answer to an unknown version is one of version 0."""
    yield from ()
    return versions_response(KafkaError.NONE)


APIS: dict[int, Row] = {
    PRODUCE: Row(3, 13, produce),
    1: Row(4, 18, fetch),
    2: Row(1, 11, list_offsets),
    3: Row(0, 13, metadata),
    8: Row(2, 10, offset_commit),
    9: Row(1, 10, offset_fetch),
    10: Row(0, 6, find_coordinator),
    11: Row(0, 9, join_group),
    12: Row(0, 4, heartbeat),
    13: Row(0, 5, leave_group),
    14: Row(0, 5, sync_group),
    15: Row(0, 6, describe_groups),
    16: Row(0, 5, list_groups),
    SASL_HANDSHAKE: Row(0, 1, sasl_handshake),
    API_VERSIONS: Row(0, 4, api_versions),
    19: Row(2, 7, create_topics),
    20: Row(1, 6, delete_topics),
    21: Row(0, 2, delete_records),
    22: Row(0, 6, init_producer_id),
    23: Row(2, 4, offset_for_leader_epoch),
    24: Row(0, 3, add_partitions),
    25: Row(0, 4, add_offsets),
    26: Row(0, 5, end_transaction),
    27: Row(1, 1, write_markers),
    28: Row(0, 5, commit_offsets),
    29: Row(1, 3, describe_acls),
    30: Row(1, 3, create_acls),
    31: Row(1, 3, delete_acls),
    32: Row(1, 4, describe_configs),
    33: Row(0, 2, alter_configs),
    34: Row(1, 2, alter_replica_log_dirs),
    35: Row(1, 5, describe_log_dirs),
    SASL_AUTHENTICATE: Row(0, 2, sasl_authenticate),
    37: Row(0, 3, create_partitions),
    42: Row(0, 2, delete_groups),
    43: Row(0, 2, elect_leaders),
    44: Row(0, 1, incremental_alter_configs),
    45: Row(0, 1, alter_reassignments),
    46: Row(0, 0, list_reassignments),
    47: Row(0, 0, offset_delete),
    48: Row(0, 1, describe_quotas),
    49: Row(0, 1, alter_quotas),
    50: Row(0, 0, describe_credentials),
    51: Row(0, 0, alter_credentials),
    55: Row(0, 2, describe_quorum),
    57: Row(0, 2, update_features),
    60: Row(0, 2, describe_cluster),
    61: Row(0, 0, describe_producers),
    65: Row(0, 0, describe_transactions),
    66: Row(0, 2, list_transactions),
    68: Row(0, 1, consumer_groups.heartbeat),
    69: Row(0, 1, consumer_groups.describe),
    74: Row(0, 1, list_config_resources),
    75: Row(0, 0, describe_topic_partitions),
    76: Row(1, 1, share_heartbeat.heartbeat),
    77: Row(1, 1, describe_share_groups),
    78: Row(1, 2, share_fetch.fetch),
    79: Row(1, 2, share_acknowledgements.acknowledge),
    90: Row(0, 1, describe_offsets),
    91: Row(0, 0, alter_offsets),
    92: Row(0, 0, delete_offsets),
}


def versions_response(error: KafkaError) -> dict[str, object]:
    """The response of ApiVersions."""
    return {
        "error_code": error,
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level}
            for name, level in FEATURES.items()
        ],
        "finalized_features_epoch": 1,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in FEATURES.items()
        ],
        "api_keys": [
            {"api_key": api, "min_version": 0 if api == PRODUCE else row.low,
             "max_version": row.high}
            for api, row in sorted(APIS.items())
        ],
    }  # fmt: skip
