"""Quota rules: Kafka's precedence as a table, whose share is counted, and texts that come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.quotas.quota_rules import (
    QUOTAS,
    Entity,
    Rules,
    checked_entity,
    of_topic,
    parse_rules,
    rule_texts,
    share_of,
)
from tailrace.core.errors import InvalidSettingError

RATE = "producer_byte_rate"
PRECEDENCE = (
    ("user=u client=c", Entity("u", "c")), ("user=u client=*", Entity("u", "c")),
    ("user=u", Entity("u")), ("user=* client=c", Entity("u", "c")),
    ("user=* client=*", Entity("u", "c")), ("user=*", Entity("u")),
    ("client=c", Entity(None, "c")), ("client=*", Entity(None, "c")),
)  # fmt: skip
"""KIP-257, the most specific first; and the entity that is counted for user u, client c."""
NAMES = st.text(min_size=1, max_size=20)


@pytest.mark.parametrize("first", range(len(PRECEDENCE)))
def test_the_most_specific_rule_decides_and_says_who_shares(first: int) -> None:
    texts = [
        f"{text} {RATE}={place + 1}" for place, (text, _) in enumerate(PRECEDENCE) if place >= first
    ]
    share = share_of(parse_rules(reversed(texts)), RATE, "u", "c")
    assert share == (PRECEDENCE[first][1], first + 1)


def test_a_more_specific_rule_without_the_quota_leaves_it_to_the_next() -> None:
    rules = parse_rules(["user=u client=c request_rate=1", f"user=* {RATE}=7"])
    assert share_of(rules, RATE, "u", "c") == (Entity("u"), 7)
    assert share_of(rules, "consumer_byte_rate", "u", "c") is None


def test_a_rule_of_another_name_is_not_taken() -> None:
    rules = parse_rules([f"user=u client=c {RATE}=1", f"client=C {RATE}=2"])
    assert share_of(rules, RATE, "u", "d") is None
    assert share_of(rules, RATE, "v", "c") is None
    assert share_of(rules, RATE, "*", "*") is None


def test_every_prefix_of_a_topic_counts() -> None:
    rules = parse_rules(
        ["prefix=a topics_max=1", "prefix=a.b topics_max=2", "prefix=b topics_max=3",
         "prefix=* topics_max=4"]
    )  # fmt: skip
    assert sorted(share.value for share in of_topic(rules, "topics_max", "a.bc")) == [1, 2, 4]
    assert sorted(share.value for share in of_topic(rules, "topics_max", "a")) == [1, 4]


@given(st.lists(st.tuples(NAMES | st.none(), NAMES | st.none(), NAMES), max_size=6))
def test_texts_are_parsed_to_the_rules_that_they_were_made_of(
    names: list[tuple[str | None, str | None, str]],
) -> None:
    rules: Rules = {}
    for user, client, prefix in names:
        if user is None and client is None:
            rules[checked_entity(prefix=prefix)] = {"topics_max": 3}
        else:
            rules[checked_entity(user, client)] = {RATE: 5, "connections_max": 0}
    texts = rule_texts(rules)
    assert parse_rules(texts) == rules
    assert rule_texts(parse_rules(texts)) == texts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("producer_byte_rate=1", "needs an entity"),
        ("user=u", "sets nothing"),
        ("user=u no_such=1", "is no quota; there are"),
        ("user=u producer_byte_rate=0", "from 1 to"),
        ("user=u producer_byte_rate=-5", "from 1 to"),
        ("user=u producer_byte_rate=9e9", "whole number"),
        ("user=u producer_byte_rate=", "whole number"),
        ("user=u user=v producer_byte_rate=1", "write it as"),
        ("user=u producer_byte_rate", "write it as"),
        ("prefix=p producer_byte_rate=1", "is a quota of users and clients"),
        ("user=u stored_bytes_max=1", "is a quota of a prefix"),
        ("user=u prefix=p topics_max=1", "not of both"),
        ("user= producer_byte_rate=1", "takes a name"),
        (f"user={'x' * 256} producer_byte_rate=1", "at most 255"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidSettingError, match=reason):
        parse_rules([text])


def test_two_rules_of_an_entity_are_refused_however_they_are_encoded() -> None:
    with pytest.raises(InvalidSettingError, match="two rules"):
        parse_rules(["user=a%61 request_rate=1", "user=aa request_rate=2"])


def test_an_asterisk_as_a_name_is_the_default_only_unencoded() -> None:
    rules = parse_rules(["user=%2A request_rate=1"])
    assert list(rules) == [Entity("*")], "no user may have this name"


def test_sizes_have_units_and_counts_have_none() -> None:
    rules = parse_rules(["user=u producer_byte_rate=10MiB"])
    assert rules == {Entity("u"): {RATE: 10 << 20}}
    with pytest.raises(InvalidSettingError):
        parse_rules(["user=u request_rate=10MiB"])


def test_every_quota_is_a_rate_or_a_sum_by_its_name() -> None:
    for name, row in QUOTAS.items():
        assert row.is_rate == name.endswith("_rate")
        assert row.is_rate != name.endswith("_max")
