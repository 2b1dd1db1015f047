"""Needs of each API: requests, and the rights that exactly are enough for them ("operation type
name").
"""

from __future__ import annotations

from typing import Any

from shm.rights.acl import checked_acl
from shm.rights.authorizer import AclTable, Principal
from tailrace.core.schedule.delays import delay_id
from tailrace.protocol.frame import Api

ORDERS, LETTERS = "0a" * 16, "0b" * 16
NAMES = {ORDERS: "orders", LETTERS: "letters"}
TOKEN = delay_id(bytes.fromhex(ORDERS), 0, 5, 7)
FOREIGN = delay_id(bytes.fromhex("0c" * 16), 0, 5, 7)

NEEDED: dict[Api, list[tuple[dict[str, Any], list[str]]]] = {
    Api.CREATE_TOPICS: [
        ({"topics": [{"name": "a"}, {"name": "b"}]}, ["create topic a", "create topic b"]),
        ({"topics": [{"name": "a"}, {"name": "b"}]}, ["create cluster"]),
        (
            {"topics": [{"name": "a", "configs": {"dead.letter.topic": "b"}}]},
            ["create topic a", "write topic b"],
        ),
    ],
    Api.DELETE_TOPICS: [({"topics": [{"name": "a", "now": True}]}, ["delete topic a"])],
    Api.ALTER_TOPICS: [
        ({"topics": [{"name": "a", "partitions": 3}]}, ["alter topic a"]),
        ({"topics": [{"name": "a", "configs": {"x": 1}}]}, ["alter-configs topic a"]),
        (
            {"topics": [{"name": "a", "configs": {"dead.letter.topic": ""}}]},
            ["alter-configs topic a"],
        ),
        (
            {"topics": [{"name": "a", "configs": {"dead.letter.topic": "b"}}]},
            ["alter-configs topic a", "write topic b"],
        ),
        (
            {"topics": [{"name": "a", "partitions": 3, "configs": {}}]},
            ["alter topic a", "alter-configs topic a"],
        ),
        ({"topics": [{"name": "a", "schema": "", "delay_schema": ""}]}, ["alter topic a"]),
        ({"topics": [{"name": "a", "delay_schema": ""}]}, ["alter-configs topic a"]),
        ({"topics": [{"name": "a", "online": True}]}, ["alter cluster"]),
        ({"topics": [{"name": "a"}]}, ["alter topic a"]),
        ({"topics": [{"name": "a", "of a later version": 1}]}, ["alter topic a"]),
    ],
    Api.DELETE_RECORDS: [
        ({"topics": [{"name": "a", "partitions": {"0": 1}}]}, ["delete topic a"])
    ],
    Api.UNDELETE_TOPICS: [
        ({"topics": [{"name": "a"}]}, ["create topic a"]),
        ({"topics": [{"name": "a", "as": "b"}]}, ["create topic a", "create topic b"]),
        ({"topics": [{"name": ORDERS}]}, ["alter cluster"]),
        ({"topics": [{"name": ORDERS.upper(), "as": "b"}]}, ["alter cluster", "create topic b"]),
    ],
    Api.PURGE_TOPICS: [
        ({"topics": [{"name": "a"}]}, ["delete topic a"]),
        ({"topics": [{"name": ORDERS}]}, ["alter cluster"]),
    ],
    Api.COMPACT_TOPIC: [({"name": "a", "number": 1}, ["alter topic a"])],
    Api.LEASE_OFFSETS: [
        ({"lease": "l", "topic": "a", "partition": 0}, ["read topic a"]),
        ({"partitions": [{"topic": "a"}, {"topic": "b"}]}, ["read topic a", "read topic b"]),
        ({"topic": "a", "partitions": [{"topic": "b"}]}, ["read topic b"]),
    ],
    Api.INIT_PRODUCER_ID: [({}, ["write topic any"]), ({}, ["idempotent-write cluster"])],
    Api.DESCRIBE_CLUSTER: [({}, ["describe cluster"])],
    Api.DESCRIBE_CONFIGS: [({"names": None}, ["describe-configs cluster"])],
    Api.ALTER_CONFIGS: [({"set": {}}, ["alter-configs cluster"])],
    Api.RELOAD_CONFIG: [({}, ["alter-configs cluster"])],
    Api.DESCRIBE_QUOTAS: [({}, ["describe-configs cluster"])],
    Api.ALTER_QUOTAS: [({"changes": []}, ["alter-configs cluster"])],
    Api.LIST_DELAYS: [({"topic": "a"}, ["read topic a", "describe delay a"])],
    Api.CHANGE_DELAYS: [
        ({"topic": None, "changes": [{"delay_id": TOKEN}]}, ["alter delay orders"]),
        ({"topic": None, "changes": [{"delay_id": TOKEN}]}, ["write topic orders"]),
        (
            {"topic": "a", "changes": [{"delay_id": TOKEN}, {"delay_id": FOREIGN}]},
            ["alter delay a", "alter delay orders"],
        ),
        ({"topic": "a", "changes": [{"delay_id": "not one"}]}, ["alter delay a"]),
        (
            {"topic": "a", "changes": [], "transaction": {"producer_id": 1 << 62}},
            ["alter delay a", "write transactional-id any"],
        ),
    ],
    Api.GROUP_HEARTBEAT: [
        ({"group": "g", "topics": None}, ["read group g"]),
        ({"group": "g", "topics": ["a", "b"]}, ["read group g", "read topic a", "read topic b"]),
        ({"group": "g", "kind": "classic"}, ["cluster-action cluster", "read group g"]),
    ],
    Api.COMMIT_OFFSETS: [
        ({"group": "g", "offsets": [["a", 0, 1, -1, ""]]}, ["read group g", "read topic a"]),
        (
            {"group": "g", "kind": "classic", "offsets": [["a", 0, 1, -1, ""]]},
            ["cluster-action cluster", "read group g", "read topic a"],
        ),
    ],
    Api.FETCH_OFFSETS: [
        ({"group": "g", "partitions": None}, ["describe group g"]),
        ({"group": "g", "partitions": [["a", 0]]}, ["describe group g", "describe topic a"]),
    ],
    Api.DESCRIBE_SCHEMAS: [({"topic": "a"}, ["describe topic a"])],
    Api.DESCRIBE_GROUP: [({"group": "g"}, ["describe group g"])],
    Api.DELETE_GROUPS: [({"groups": ["g", "h"]}, ["delete group g", "delete group h"])],
    Api.ALTER_GROUP_OFFSETS: [
        ({"group": "g", "offsets": [["a", 0, None, ""]]}, ["read group g", "read topic a"])
    ],
    Api.SHARE_ACQUIRE: [
        ({"group": "g"}, ["read group g"]),
        (
            {"group": "g", "acknowledge": [[ORDERS, 0, 1, 2, "accept"], ["0d" * 16, 0, 1, 2, ""]]},
            ["read group g", "read topic orders"],
        ),
    ],
    Api.SHARE_ACKNOWLEDGE: [
        (
            {"group": "g", "acknowledge": [[LETTERS, 0, 1, 2, "accept"]]},
            ["read group g", "read topic letters"],
        )
    ],
    Api.INIT_TRANSACTIONS: [({"transactional_id": "t"}, ["write transactional-id t"])],
    Api.END_TRANSACTION: [
        ({"transactional_id": "t", "outcome": "abort"}, ["write transactional-id t"]),
        (
            {
                "transactional_id": "t",
                "offsets": [{"group": "g", "entries": [["a", 0, 1, -1, ""]]}],
                "acknowledgements": [{"group": "h", "acknowledge": [[ORDERS, 0, 1, 2, "accept"]]}],
            },
            [
                "write transactional-id t", "read group g", "read topic a", "read group h",
                "read topic orders",
            ],
        ),
    ],
    Api.DESCRIBE_TRANSACTION: [({"transactional_id": "t"}, ["describe transactional-id t"])],
    Api.ABORT_TRANSACTION: [
        ({"transactional_id": "t"}, ["write transactional-id t"]),
        ({"producer_id": 7, "producer_epoch": 0}, ["alter cluster"]),
        (
            {"transactional_id": "t", "producer_id": 7},
            ["write transactional-id t", "alter cluster"],
        ),
    ],
    Api.CREATE_BRANCHES: [({"transactional_id": "t"}, ["write transactional-id t"])],
    Api.JOIN_TRANSACTION: [({"transactional_id": "t"}, ["write transactional-id t"])],
    Api.LIST_USERS: [({}, ["describe cluster"])],
    Api.ALTER_USERS: [({"user": "a", "action": "delete"}, ["alter cluster"])],
    Api.LIST_ACLS: [({}, ["describe cluster"])],
    Api.ALTER_ACLS: [({"add": []}, ["alter cluster"])],
    Api.TEST_ACL: [({"principal": "User:a"}, ["describe cluster"])],
}  # fmt: skip
CASES = [(api, request, needs) for api, cases in NEEDED.items() for request, needs in cases]


def principal_with(*allowed: str) -> Principal:
    """The user `a` with these rights."""
    table = AclTable()
    for number, text in enumerate(allowed, 1):
        operation, kind, *name = text.split(" ")
        fields = {"principal": "User:a", "operation": operation, "resource_type": kind}
        if name:
            fields["name"] = "*" if name[0] == "any" else name[0]
        table.add(checked_acl(fields, number))
    return Principal("a", (), "127.0.0.1", table, is_admin=False)
