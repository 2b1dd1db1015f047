"""Rules of access: their words, what is refused, and Kafka's tests of matching as a table."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shm.rights.acl import (
    OPERATIONS_OF,
    PATTERNS,
    RESOURCE_TYPES,
    THE_CLUSTER,
    Acl,
    acls_of,
    check_user_name,
    checked_acl,
)
from shm.rights.authorizer import DECISIONS_MAX, AclTable, Principal
from shm.rights.roles import consumer_acls, producer_acls
from tailrace.core.errors import InvalidRequestError


def rule(
    kind: str, name: str, pattern: str, principal: str, operation: str, permission: str = "allow",
    host: str = "*",
) -> dict[str, Any]:  # fmt: skip
    return {
        "resource_type": kind, "name": name, "pattern": pattern, "principal": principal,
        "operation": operation, "permission": permission, "host": host,
    }  # fmt: skip


def table_of(*rules: dict[str, Any]) -> AclTable:
    table = AclTable()
    for number, fields in enumerate(rules, 1):
        table.add(checked_acl(fields, number))
    return table


def principal(table: AclTable, user: str, host: str = "10.0.0.1", *groups: str) -> Principal:
    return Principal(user, groups, host, table, is_admin=False)


FOO, MANY = (
    [rule("topic", "foo_", "prefixed", "User:bob", operation, permission)]
    if operation
    else [
        rule("topic", "green2", "literal", "User:*", "read"),
        rule("topic", "green", "prefixed", "User:bob", "read"),
        rule("topic", "betamax4", "literal", "User:bob", "read"),
        rule("topic", "betamax", "literal", "User:bob", "read"),
        rule("topic", "beta", "prefixed", "User:*", "read"),
        rule("topic", "alpha", "prefixed", "User:*", "read"),
        rule("topic", "alp", "prefixed", "User:bob", "read", "deny"),
        rule("group", "*", "literal", "User:bob", "read"),
        rule("group", "wheel", "literal", "User:*", "read", "deny"),
    ]
    for operation, permission in (("read", "allow"), ("", ""))
)
BAR = [rule("group", "bar", "literal", "User:*", "read", "deny")]
ALL = [
    rule("topic", "foo", "literal", "User:*", "all"),
    rule("topic", "bar", "prefixed", "User:alice", "all"),
    rule("topic", "baz", "literal", "User:bob", "all"),
]


def foo(operation: str, permission: str = "allow") -> list[dict[str, Any]]:
    return [rule("topic", "foo_", "prefixed", "User:bob", operation, permission)]


@pytest.mark.parametrize(
    ("rules", "user", "operation", "kind", "name", "expected"),
    [
        # the operation implies describe, or describe-configs; a denial implies nothing
        (foo("read"), "bob", "read", "topic", "foo_bar", True),
        (foo("read"), "bob", "describe", "topic", "foo_bar", True),
        (foo("write"), "bob", "describe", "topic", "foo_bar", True),
        (foo("delete"), "bob", "describe", "topic", "foo_bar", True),
        (foo("alter"), "bob", "describe", "topic", "foo_bar", True),
        (foo("create"), "bob", "describe", "topic", "foo_bar", False),
        (foo("describe"), "bob", "read", "topic", "foo_bar", False),
        (foo("alter-configs"), "bob", "describe-configs", "topic", "foo_bar", True),
        (foo("alter-configs"), "bob", "describe", "topic", "foo_bar", False),
        (foo("read", "deny") + foo("describe"), "bob", "describe", "topic", "foo_bar", True),
        (foo("read", "deny") + foo("all"), "bob", "read", "topic", "foo_bar", False),
        (foo("all", "deny") + foo("read"), "bob", "describe", "topic", "foo_bar", False),
        # the principal
        (FOO, "alice", "read", "topic", "foo_bar", False),
        (BAR, "alice", "read", "group", "bar", False),
        # all operations
        (ALL, "alice", "write", "topic", "foo", True),
        (ALL, "alice", "describe-configs", "topic", "bar", True),
        (ALL, "alice", "describe", "topic", "baz", False),
        (ALL, "bob", "write", "topic", "foo", True),
        (ALL, "bob", "read", "topic", "bar", False),
        (ALL, "bob", "describe", "topic", "baz", True),
        (ALL, "malory", "describe", "topic", "foo", True),
        (ALL, "malory", "write", "topic", "bar", False),
        (ALL, "malory", "read", "topic", "baz", False),
        # many rules: prefixes, names and wildcards beside each other
        (MANY, "bob", "read", "topic", "green1", True),
        (MANY, "bob", "read", "group", "wheel", False),
        (MANY, "bob", "read", "topic", "alpha", False),
        (MANY, "bob", "read", "group", "arbitrary", True),
        (MANY, "bob", "read", "topic", "ala", False),
        (MANY, "eve", "read", "topic", "alphabet", True),
        (MANY, "eve", "read", "topic", "green2", True),
        (MANY, "eve", "read", "topic", "green", False),
        # the type of the resource
        (FOO, "bob", "read", "group", "foo_bar", False),
    ],
)
def test_a_decision_is_that_of_kafkas_authorizer(
    rules: list[dict[str, Any]], user: str, operation: str, kind: str, name: str, expected: bool
) -> None:
    asked = principal(table_of(*rules), user)
    assert asked.may(operation, kind, name) is expected
    assert asked.may(operation, kind, name) is expected, "as remembered"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orders", True), ("orders-x", True), ("orders.x", True), ("orders@delay", True),
        ("order", False), ("Orders", False), ("ORDERS", False), (" orders", False),
        ("оrders", False), ("ordеrs", False), ("ｏrders", False), ("*", False), ("", False),
    ],
)  # fmt: skip
def test_a_name_made_to_match_a_prefix_must_begin_with_it(name: str, expected: bool) -> None:
    asked = principal(table_of(rule("topic", "orders", "prefixed", "User:a", "read")), "a")
    assert asked.may("read", "topic", name) is expected


def test_an_asterisk_in_a_prefix_is_a_character() -> None:
    asked = principal(table_of(rule("group", "a*", "prefixed", "User:a", "read")), "a")
    assert asked.may("read", "group", "a*b")
    assert not asked.may("read", "group", "abc")


def test_a_literal_rule_does_not_match_longer_names() -> None:
    asked = principal(table_of(rule("topic", "orders", "literal", "User:a", "read")), "a")
    assert not asked.may("read", "topic", "orders-x")
    assert not asked.may("read", "topic", "orders.")


def test_a_host_is_matched_exactly() -> None:
    table = table_of(
        rule("topic", "t", "literal", "User:a", "read", host="10.0.0.1"),
        rule("topic", "t", "literal", "User:a", "write"),
        rule("topic", "t", "literal", "User:a", "write", "deny", host="10.0.0.2"),
    )
    near, far = principal(table, "a", "10.0.0.1"), principal(table, "a", "10.0.0.2")
    assert near.may("read", "topic", "t")
    assert near.may("write", "topic", "t")
    assert not far.may("read", "topic", "t")
    assert not far.may("write", "topic", "t")


def test_a_group_of_users_shares_permissions_and_denials() -> None:
    table = table_of(
        rule("topic", "t", "literal", "Group:sales", "all"),
        rule("topic", "t", "literal", "Group:guests", "write", "deny"),
    )
    assert principal(table, "a", "h", "sales").may("write", "topic", "t")
    assert not principal(table, "a", "h", "sales", "guests").may("write", "topic", "t")
    assert not principal(table, "sales").may("read", "topic", "t"), "a user with the group's name"


def test_some_resource_is_allowed_unless_a_denial_covers_every_permission() -> None:
    write = rule("topic", "a.", "prefixed", "User:a", "write")
    for denial, expected in [
        (rule("topic", "a.b", "prefixed", "User:a", "write", "deny"), True),
        (rule("topic", "a.", "literal", "User:a", "write", "deny"), True),
        (rule("topic", "a", "prefixed", "User:*", "write", "deny"), False),
        (rule("topic", "*", "literal", "User:a", "all", "deny"), False),
        (rule("topic", "*", "literal", "User:a", "read", "deny"), True),
    ]:
        assert principal(table_of(write, denial), "a").may_any("write", "topic") is expected
    assert not principal(table_of(write), "b").may_any("write", "topic")
    assert not principal(table_of(write), "a").may_any("read", "topic")


def test_removed_rules_leave_nothing_behind() -> None:
    rules = [*MANY, *ALL, *FOO]
    table = table_of(*rules)
    asked = principal(table, "bob")
    assert asked.may("read", "topic", "green1")
    for number in range(1, len(rules) + 1):
        table.remove(number)
        table.remove(number)
    asked.forget_decisions()
    assert not len(table)
    assert not table._by_principal
    assert not asked.may("read", "topic", "green1")


def test_a_replaced_rule_is_the_new_one() -> None:
    table = table_of(rule("topic", "a", "prefixed", "User:a", "read"))
    table.add(checked_acl(rule("topic", "b", "literal", "User:a", "read"), 1))
    asked = principal(table, "a")
    assert len(table) == 1
    assert not asked.may("read", "topic", "a")
    assert asked.may("read", "topic", "b")


def test_a_changed_rule_decides_for_its_principal_alone() -> None:
    table = table_of(*MANY, *ALL)
    bob = principal(table, "bob")
    assert bob.may("read", "topic", "green1")
    table.add(checked_acl(rule("topic", "green1", "literal", "User:bob", "read", "deny"), 900))
    table.add(checked_acl(rule("topic", "t", "literal", "User:eve", "read"), 901))
    bob.forget_decisions()
    assert not bob.may("read", "topic", "green1")
    table.remove(900)
    bob.forget_decisions()
    assert bob.may("read", "topic", "green1")
    assert not bob.may("read", "topic", "t")


@pytest.mark.parametrize("seed", range(3))
def test_decisions_are_the_same_however_rules_and_decisions_are_interleaved(seed: int) -> None:
    rng = random.Random(seed)
    table, present = AclTable(), dict[int, dict[str, Any]]()
    for _ in range(300):
        number = rng.randrange(1, 40)
        if rng.random() < 0.4:
            table.remove(number)
            present.pop(number, None)
        else:
            present[number] = rule(
                rng.choice(("topic", "group")), rng.choice(("a", "ab", "abc", "*")),
                rng.choice(("literal", "prefixed")), rng.choice(("User:x", "User:y", "User:*")),
                rng.choice(("read", "describe", "all")), rng.choice(("allow", "allow", "deny")),
            )  # fmt: skip
            table.add(checked_acl(present[number], number))
        if rng.random() < 0.5:
            asked = rng.choice("xy"), rng.choice(("read", "describe")), rng.choice(("a", "abc"))
            fresh = table_of(*present.values())
            one, other = (
                principal(each, asked[0]).may(asked[1], "topic", asked[2])
                for each in (table, fresh)
            )
            assert one is other, (asked, present)
    assert len(table) == len(present)


def test_remembered_decisions_are_bounded() -> None:
    asked = principal(table_of(*FOO), "bob")
    for number in range(DECISIONS_MAX + 10):
        assert asked.may("read", "topic", f"foo_{number}")
    assert len(asked._decisions) <= DECISIONS_MAX


def test_an_administrator_needs_no_rule() -> None:
    table = table_of(rule("topic", "*", "literal", "User:*", "all", "deny"))
    asked = Principal("root", (), "h", table, is_admin=True)
    assert asked.may("write", "topic", "t")
    assert asked.may_any("write", "topic")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"resource_type": "table"}, "it takes one of topic, group"),
        ({"resource_type": None}, "it takes one of"),
        ({"pattern": "regex"}, "literal, prefixed"),
        ({"operation": "own"}, "it takes one of all, read"),
        ({"operation": "idempotent-write"}, "it takes one of all, read"),
        ({"permission": "maybe"}, "allow, deny"),
        ({"principal": "bob"}, "write User:NAME"),
        ({"principal": "User:"}, "1 to 100 of the characters"),
        ({"principal": "User:b:b"}, "1 to 100 of the characters"),
        ({"principal": "Group:*"}, "1 to 100 of the characters"),
        ({"principal": "User:bоb"}, "1 to 100 of the characters"),
        ({"principal": 7}, "write User:NAME"),
        ({"name": ""}, "1 to 249"),
        ({"name": "x" * 250}, "1 to 249"),
        ({"name": "a\nb"}, "printable"),
        ({"name": None}, "1 to 249"),
        ({"host": "example.com"}, "an IP address"),
        ({"host": None}, "an IP address"),
        ({"hosts": "*"}, "no field 'hosts'"),
        ({"resource_type": "cluster", "operation": "alter", "name": "x"}, "the only cluster"),
    ],
)
def test_a_wrong_rule_is_refused_with_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    fields = {**rule("topic", "t", "literal", "User:a", "read"), **changed}
    with pytest.raises(InvalidRequestError, match="(?s)" + sentence.replace("*", r"\*")):
        checked_acl(fields)


def test_a_rule_is_shown_as_it_was_given() -> None:
    given = rule("topic", "t", "prefixed", "Group:g", "write", "deny", "::1")
    acl = checked_acl(given, 7)
    assert acl.shown() == {**given, "number": 7}
    assert acl.sentence() == "Group:g may not write topic 't'... from ::1"
    assert checked_acl(rule("topic", "*", "literal", "User:*", "all")).sentence() == (
        "User:* may all topic of any name"
    )
    assert acl.content == Acl(8, *acl.content).content


def test_rules_of_the_feed_are_those_that_were_given() -> None:
    given = [
        checked_acl(
            rule(
                kind, THE_CLUSTER if kind in ("cluster", "console") else name,
                "literal" if kind in ("cluster", "console") else pattern, who, operation,
                permission, host,
            ),
            7,
        )
        for kind in RESOURCE_TYPES
        for pattern in PATTERNS
        for operation in ("all", *OPERATIONS_OF[kind])
        for permission in ("allow", "deny")
        for who in ("User:a.b", "Group:g", "User:*")
        for host, name in (("*", "t"), ("10.0.0.1", "*"))
    ]  # fmt: skip
    found = acls_of([acl.shown() for acl in given])
    assert found == given
    assert {type(acl) for acl in found} == {Acl}


@pytest.mark.parametrize(
    "changed",
    [
        {"resource_type": "table"}, {"resource_type": []}, {"pattern": "regex"}, {"name": ""},
        {"operation": "idempotent-write"}, {"permission": "maybe"}, {"principal": "bob"},
        {"principal": "User:b:b"}, {"principal": "Group:*"}, {"principal": "User:a\n"},
        {"principal": 7}, {"name": "x" * 250}, {"name": "a\nb"}, {"name": None}, {"name": 7},
        {"host": "example.com"}, {"hosts": "*"},
    ],
)  # fmt: skip
def test_a_wrong_rule_of_the_feed_is_refused_as_a_given_one(changed: dict[str, Any]) -> None:
    fields = {**rule("topic", "t", "literal", "User:a", "read"), **changed}
    with pytest.raises(InvalidRequestError) as given:
        checked_acl(fields)
    with pytest.raises(InvalidRequestError) as fed:
        acls_of([{**fields, "number": 1}])
    assert fed.value.detail == given.value.detail


def test_names_of_users() -> None:
    for name in ("a", "a.b-c_d@e", "9", "x" * 100):
        assert check_user_name(name) == name
    for bad in ("", "x" * 101, "-a", "a b", "a:b", "á", "*", None, 7, "a\n"):
        with pytest.raises(InvalidRequestError, match="1 to 100"):
            check_user_name(bad)


def test_the_roles_allow_what_their_names_say() -> None:
    rules = [
        *producer_acls("User:p", "orders", transactional_id="pay"),
        *consumer_acls("User:c", "orders", "billing", pattern="prefixed"),
    ]
    table = table_of(*rules)
    produce, consume = principal(table, "p"), principal(table, "c")
    assert produce.may("write", "topic", "orders")
    assert produce.may("alter", "delay", "orders")
    assert produce.may("write", "transactional-id", "pay")
    assert not produce.may("read", "topic", "orders")
    assert consume.may("read", "topic", "orders-eu")
    assert consume.may("read", "group", "billing-1")
    assert not consume.may("write", "topic", "orders")
