"""Needs of each API: nothing less is enough, nothing more is asked for, no API is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.access.rules import RULES, refuse_unless
from shm.messages.lane_messages import AUDIT_REQUEST, PRODUCER_OWNERS
from shm.rights.acl import OPERATIONS_OF, checked_acl
from shm.rights.authorizer import AclTable, Principal
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError
from tests.kit.matrices import case
from tests.kit.peers.needs import CASES, NAMES, NEEDED, principal_with
from tests.kit.stepped.fronts import FakeFront


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
        assert (rule.needs is not None) == (api in NEEDED), (
            f"{Api(api).name}: tests.kit.peers.needs"
        )


def test_a_front_answers_no_api_without_a_rule() -> None:
    """Also none of those by which processes of the appliance ask each other."""
    handlers = FakeFront(1).front._dispatcher.handlers
    assert set(handlers) | {Api.HANDSHAKE} == set(RULES)
    assert not {AUDIT_REQUEST, PRODUCER_OWNERS} & set(handlers)


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


@pytest.mark.parametrize("value", [None, 7, "x", {}, [7], [{}], [[]], [None], [{"name": 7}]])
def test_a_request_whose_names_cannot_be_read_is_refused(value: Any) -> None:
    """Otherwise a service could find names where the rule finds none."""
    for api, requests in NEEDED.items():
        for request, needs in requests:
            for field in request:
                with case(api, field):
                    code = outcome(principal_with(*needs), api, {**request, field: value})
                    assert code in (
                        ErrorCode.OK, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_AUTHORIZED
                    )  # fmt: skip


def test_an_administrator_may_do_everything() -> None:
    root = Principal("a", (), "127.0.0.1", AclTable(), is_admin=True)
    for api, requests in NEEDED.items():
        for request, _ in requests:
            with case(api, request):
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
            Api.DESCRIBE_GROUP, "describe topic a",
            {"members": [
                {"topics": ["a", "b"], "owned": {"a": [0], "b": [1]}, "target": {"b": [0]},
                 "stuck": "has not given back b-1 for 9 s: its program does not call poll"},
                {"topics": ["a"], "owned": {}, "target": {}, "stuck": "is away for 9 s"},
            ]},
            {"members": [
                {"topics": ["a"], "owned": {"a": [0]}, "target": {},
                 "stuck": "has not given back partitions: its program does not call poll"},
                {"topics": ["a"], "owned": {}, "target": {}, "stuck": "is away for 9 s"},
            ]},
        ),
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
