"""Needs of each API: nothing less is enough, nothing more is asked for, no API is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.access.rules import RULES, refuse_unless
from shm.rights.acl import OPERATIONS_OF, checked_acl
from shm.rights.authorizer import AclTable, Principal
from tailrace.core.delays import delay_id
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError

ORDERS, LETTERS = "0a" * 16, "0b" * 16
NAMES = {ORDERS: "orders", LETTERS: "letters"}
TOKEN = delay_id(bytes.fromhex(ORDERS), 0, 5, 7)
FOREIGN = delay_id(bytes.fromhex("0c" * 16), 0, 5, 7)

NEEDED: dict[Api, list[tuple[dict[str, Any], list[str]]]] = {
    Api.CREATE_TOPICS: [
        ({"topics": [{"name": "a"}, {"name": "b"}]}, ["create topic a", "create topic b"]),
        ({"topics": [{"name": "a"}, {"name": "b"}]}, ["create cluster"]),
    ],
    Api.DELETE_TOPICS: [({"topics": [{"name": "a", "now": True}]}, ["delete topic a"])],
    Api.ALTER_TOPICS: [
        ({"topics": [{"name": "a", "partitions": 3}]}, ["alter topic a"]),
        ({"topics": [{"name": "a", "configs": {"x": 1}}]}, ["alter-configs topic a"]),
        (
            {"topics": [{"name": "a", "partitions": 3, "configs": {}}]},
            ["alter topic a", "alter-configs topic a"],
        ),
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
        (
            {"topic": "a", "changes": [{"delay_id": TOKEN}, {"delay_id": FOREIGN}]},
            ["alter delay a", "alter delay orders"],
        ),
        ({"topic": "a", "changes": [{"delay_id": "not one"}]}, ["alter delay a"]),
    ],
    Api.GROUP_HEARTBEAT: [
        ({"group": "g", "topics": None}, ["read group g"]),
        ({"group": "g", "topics": ["a", "b"]}, ["read group g", "read topic a", "read topic b"]),
    ],
    Api.COMMIT_OFFSETS: [
        ({"group": "g", "offsets": [["a", 0, 1, -1, ""]]}, ["read group g", "read topic a"])
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
    table = AclTable()
    for number, text in enumerate(allowed, 1):
        operation, kind, *name = text.split(" ")
        fields = {"principal": "User:a", "operation": operation, "resource_type": kind}
        if name:
            fields["name"] = "*" if name[0] == "any" else name[0]
        table.add(checked_acl(fields, number))
    return Principal("a", (), "127.0.0.1", table, is_admin=False)


def ask(principal: Principal, api: Api, request: dict[str, Any]) -> None:
    needs = RULES[api].needs
    assert needs is not None
    refuse_unless(principal, needs(request, NAMES.get))


def outcome(principal: Principal, api: Api, request: dict[str, Any]) -> ErrorCode:
    try:
        ask(principal, api, request)
    except WireError as error:
        return error.code
    return ErrorCode.OK


def test_every_api_has_a_rule() -> None:
    """A new API without a row here is refused to every user but administrators."""
    assert set(RULES) == set(Api)
    for api, rule in RULES.items():
        is_open = api in (Api.HANDSHAKE, Api.PING, Api.CREDIT)
        is_list = rule.lists is not None
        assert is_open or rule.is_checked_by_route or rule.needs is not None or is_list, Api(api)
        assert (rule.needs is not None) == (api in NEEDED), f"{Api(api).name}: a case for it above"


@pytest.mark.parametrize(("api", "request_body", "needs"), CASES)
def test_an_api_needs_exactly_this(
    api: Api, request_body: dict[str, Any], needs: list[str]
) -> None:
    ask(principal_with(*needs), api, request_body)
    for missing in needs:
        with pytest.raises(WireError, match="User:a may not") as caught:
            ask(principal_with(*(need for need in needs if need != missing)), api, request_body)
        assert caught.value.code is ErrorCode.NOT_AUTHORIZED
        denied = principal_with(*needs)
        operation, kind, *name = missing.split(" ")
        fields = {"principal": "User:*", "operation": operation, "resource_type": kind}
        if name:
            fields["name"] = "*" if name[0] == "any" else name[0]
        denied._table.add(checked_acl({**fields, "permission": "deny"}, 1_000))
        with pytest.raises(WireError, match="User:a may not"):
            ask(denied, api, request_body)


@pytest.mark.parametrize("api", list(NEEDED))
@pytest.mark.parametrize("value", [None, 7, "x", {}, [7], [{}], [[]], [None], [{"name": 7}]])
def test_a_request_whose_names_cannot_be_read_is_refused(api: Api, value: Any) -> None:
    """Otherwise a service could find names where the rule finds none."""
    for request, needs in NEEDED[api]:
        for field in request:
            code = outcome(principal_with(*needs), api, {**request, field: value})
            assert code in (
                ErrorCode.OK, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_AUTHORIZED
            )  # fmt: skip


@pytest.mark.parametrize("api", list(NEEDED))
def test_an_administrator_may_do_everything(api: Api) -> None:
    root = Principal("a", (), "127.0.0.1", AclTable(), is_admin=True)
    for request, _ in NEEDED[api]:
        ask(root, api, request)


@pytest.mark.parametrize(
    ("api", "allowed", "answer", "expected"),
    [
        (
            Api.LIST_GROUPS, "describe group g",
            {"groups": [{"group": "g"}, {"group": "h"}, {"group": None}], "next": "h"},
            {"groups": [{"group": "g"}], "next": "h"},
        ),
        (
            Api.LIST_DELETED_TOPICS, "read topic a",
            {"topics": [{"name": "a"}, {"name": "ab"}], "next": None},
            {"topics": [{"name": "a"}], "next": None},
        ),
        (
            Api.DESCRIBE_DELAYS, "write topic a",
            {"partitions": [{"topic": "b"}, {"topic": "a"}], "after": None},
            {"partitions": [{"topic": "a"}], "after": None},
        ),
        (
            Api.FETCH_OFFSETS, "describe topic a",
            {"offsets": [["a", 0, 1], ["b", 0, 1]], "next": None},
            {"offsets": [["a", 0, 1]], "next": None},
        ),
        (
            Api.DESCRIBE_GROUP, "describe topic a",
            {"group": {}, "partitions": [{"topic": "a"}, {"topic": "b"}]},
            {"group": {}, "partitions": [{"topic": "a"}]},
        ),
        (Api.DESCRIBE_GROUP, "read group g", {"members": [{}]}, {"members": [{}]}),
        (
            Api.LIST_TRANSACTIONS, "write transactional-id t",
            {"transactions": [{"transactional_id": "t"}, {"transactional_id": None}], "totals": {}},
            {"transactions": [{"transactional_id": "t"}]},
        ),
        (
            Api.LIST_TRANSACTIONS, "describe cluster",
            {"transactions": [{"transactional_id": None}], "totals": {}},
            {"transactions": [{"transactional_id": None}], "totals": {}},
        ),
    ],
)  # fmt: skip
def test_a_list_has_only_what_its_reader_may_describe(
    api: Api, allowed: str, answer: dict[str, Any], expected: dict[str, Any]
) -> None:
    lists = RULES[api].lists
    assert lists is not None
    assert lists(principal_with(allowed), answer) == expected
    assert (
        lists(Principal("r", (), "h", AclTable(), is_admin=True), answer)
        == (expected if api == Api.LIST_GROUPS else answer)
        or api == Api.LIST_GROUPS
    )


def test_the_rules_use_operations_that_an_acl_can_name() -> None:
    for needs in (needs for cases in NEEDED.values() for _, needs in cases):
        for text in needs:
            operation, kind, *_ = text.split(" ")
            assert operation in OPERATIONS_OF[kind]
