"""The APIs that work, each with its versions: what ApiVersions says.

Invariants:
- A version is listed only if `definitions.json` has it and its handler serves all of it.
- PRODUCE's lowest version is announced as 0, as Kafka 4 does: librdkafka takes a broker without it
  for one that is too old. Versions 0 to 2 are refused.
"""

from __future__ import annotations

import importlib

from netfront.kafka.apis.call import Call, Handler, Row
from netfront.kafka.apis.cluster.brokers import describe_cluster
from netfront.kafka.apis.cluster.coordinators import find_coordinator
from netfront.kafka.apis.cluster.features import FEATURES, update_features
from netfront.kafka.apis.cluster.metadata import describe_topic_partitions, metadata
from netfront.kafka.apis.groups import consumer_groups
from netfront.kafka.apis.groups.classic_groups import heartbeat, join_group, leave_group, sync_group
from netfront.kafka.apis.groups.group_offsets import offset_commit, offset_delete, offset_fetch
from netfront.kafka.apis.records.fetch import fetch
from netfront.kafka.apis.records.offsets import list_offsets, offset_for_leader_epoch
from netfront.kafka.apis.records.produce import produce
from netfront.kafka.apis.sasl import sasl_authenticate, sasl_handshake
from netfront.kafka.apis.transactions.end import end_transaction
from netfront.kafka.apis.transactions.init_producer_id import init_producer_id
from netfront.kafka.apis.transactions.offsets import commit_offsets
from netfront.kafka.apis.transactions.partitions import add_offsets, add_partitions
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError

API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
PRODUCE = 0
FEATURES_FROM_0 = 4
"""First version of ApiVersions whose clients know features that may be at level 0."""


def api_versions(call: Call) -> Steps:
    """List the APIs. The answer to an unknown version is one of version 0."""
    yield from ()
    return versions_response(KafkaError.NONE, call.version)


def _rare(module: str, name: str) -> Handler:
    """The handler `name` of an API's module, which is imported with the first request: a gateway
    that serves programs alone does not pay for tools.
    """

    def handle(call: Call) -> Steps:
        steps: Steps = getattr(importlib.import_module(f"netfront.kafka.apis.{module}"), name)(call)
        return steps

    return handle


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
    15: Row(0, 6, _rare("groups.group_admin", "describe_groups")),
    16: Row(0, 5, _rare("groups.group_admin", "list_groups")),
    SASL_HANDSHAKE: Row(0, 1, sasl_handshake),
    API_VERSIONS: Row(0, 4, api_versions),
    19: Row(2, 7, _rare("admin.topics", "create_topics")),
    20: Row(1, 6, _rare("admin.topics", "delete_topics")),
    21: Row(0, 2, _rare("admin.topics", "delete_records")),
    22: Row(0, 6, init_producer_id),
    23: Row(2, 4, offset_for_leader_epoch),
    24: Row(0, 3, add_partitions),
    25: Row(0, 4, add_offsets),
    26: Row(0, 5, end_transaction),
    27: Row(1, 1, _rare("transactions.markers", "write_markers")),
    28: Row(0, 5, commit_offsets),
    29: Row(1, 3, _rare("security.acls", "describe_acls")),
    30: Row(1, 3, _rare("security.acls", "create_acls")),
    31: Row(1, 3, _rare("security.acls", "delete_acls")),
    32: Row(1, 4, _rare("admin.configs", "describe_configs")),
    33: Row(0, 2, _rare("admin.configs", "alter_configs")),
    34: Row(1, 2, _rare("admin.log_dirs", "alter_replica_log_dirs")),
    35: Row(1, 5, _rare("admin.log_dirs", "describe_log_dirs")),
    SASL_AUTHENTICATE: Row(0, 2, sasl_authenticate),
    37: Row(0, 3, _rare("admin.topics", "create_partitions")),
    42: Row(0, 2, _rare("groups.group_admin", "delete_groups")),
    43: Row(0, 2, _rare("admin.leadership", "elect_leaders")),
    44: Row(0, 1, _rare("admin.configs", "incremental_alter_configs")),
    45: Row(0, 1, _rare("admin.leadership", "alter_reassignments")),
    46: Row(0, 0, _rare("admin.leadership", "list_reassignments")),
    47: Row(0, 0, offset_delete),
    48: Row(0, 1, _rare("security.client_quotas", "describe_quotas")),
    49: Row(0, 1, _rare("security.client_quotas", "alter_quotas")),
    50: Row(0, 0, _rare("security.scram_users", "describe_credentials")),
    51: Row(0, 0, _rare("security.scram_users", "alter_credentials")),
    55: Row(0, 2, _rare("cluster.quorum", "describe_quorum")),
    57: Row(0, 2, update_features),
    60: Row(0, 2, describe_cluster),
    61: Row(0, 0, _rare("records.active_producers", "describe_producers")),
    65: Row(0, 0, _rare("transactions.listing", "describe_transactions")),
    66: Row(0, 2, _rare("transactions.listing", "list_transactions")),
    68: Row(0, 1, consumer_groups.heartbeat),
    69: Row(0, 1, consumer_groups.describe),
    74: Row(0, 1, _rare("admin.configs", "list_config_resources")),
    75: Row(0, 0, describe_topic_partitions),
    76: Row(1, 1, _rare("share_groups.heartbeat", "heartbeat")),
    77: Row(1, 1, _rare("share_groups.description", "describe")),
    78: Row(1, 2, _rare("share_groups.fetch", "fetch")),
    79: Row(1, 2, _rare("share_groups.acknowledgements", "acknowledge")),
    90: Row(0, 1, _rare("share_groups.start_offsets", "describe_offsets")),
    91: Row(0, 0, _rare("share_groups.start_offsets", "alter_offsets")),
    92: Row(0, 0, _rare("share_groups.start_offsets", "delete_offsets")),
}


def versions_response(error: KafkaError, version: int) -> dict[str, object]:
    """The response of ApiVersions. Older clients of Java fail at a feature whose lowest level is 0
    (KAFKA-17492): as by Kafka, they are told those in use alone.
    """
    return {
        "error_code": error,
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level}
            for name, level in FEATURES.items()
            if version >= FEATURES_FROM_0
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
