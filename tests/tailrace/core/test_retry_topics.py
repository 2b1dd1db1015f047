"""Names of derived topics: no two pairs of topic and group share one, whatever is cut, and those of
version 0.1 are read still.
"""

from __future__ import annotations

import string

from hypothesis import example, given
from hypothesis import strategies as st

from appliance.config.topic_config import DELAY_NAME_MAX, check_topic_name
from tailrace.core.topic_names import (
    HEADERS,
    RETRY_NAME_MAX,
    SUBSCRIPTIONS_MAX,
    added_headers,
    dead_letter_name,
    is_of_group,
    is_retry_topic,
    made_by_groups,
    retry_topic,
    retry_topics,
    sent_headers,
    with_retry_topics,
)

PARTS = st.lists(
    st.sampled_from(["shop", "eu", "mails", "retry", "dlq", "a", "", "x" * 120]),
    min_size=1,
    max_size=5,
).map(".".join)
TOPICS = st.one_of(PARTS, st.text(string.ascii_letters + "._-", min_size=1)).filter(
    lambda name: 0 < len(name) <= 249
)
GROUPS = st.one_of(PARTS.filter(bool), st.text(min_size=1, max_size=249))


@given(st.tuples(TOPICS, GROUPS), st.tuples(TOPICS, GROUPS))
@example(("shop.eu", "mails"), ("shop", "eu.mails"))
@example(("x" * 240, "one"), ("x" * 240, "two"))
@example(("x" * 249, "one"), ("x" * 248, "one"))
@example(("shop", "über"), ("shop", "öber"))
def test_two_pairs_of_topic_and_group_never_share_a_retry_topic(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (retry_topic(*one) == retry_topic(*other)) is (one == other)
    for topic, group in (one, other):
        name = retry_topic(topic, group)
        assert check_topic_name(name) == name
        assert len(name) <= RETRY_NAME_MAX <= DELAY_NAME_MAX
        assert is_retry_topic(name, group)
        assert made_by_groups(name, {topic}) == ".retry"
    if one[1] != other[1] and "." not in one[1]:
        assert is_retry_topic(retry_topic(*one), other[1]) is retry_topic(*one).endswith(
            f".{other[1]}.retry"
        )


@given(TOPICS, TOPICS)
@example("x" * 249, "x" * 248 + "y")
@example("x" * 246, "x" * 247)
def test_two_topics_never_share_a_dead_letter_topic(one: str, other: str) -> None:
    assert (dead_letter_name(one) == dead_letter_name(other)) is (one == other)
    assert check_topic_name(dead_letter_name(one)) == dead_letter_name(one)
    assert made_by_groups(dead_letter_name(one), {one}) == ".dlq"


def test_names_of_the_first_version_are_kept_where_they_were_unambiguous_and_read_where_they_were_not() -> (  # noqa: E501
    None
):
    assert retry_topics("shop.eu", "mails") == ("shop.eu.mails.retry",)
    current, earlier = retry_topics("shop", "eu.mails")
    assert earlier == "shop.eu.mails.retry"
    assert current.startswith("shop.eu.mails.retry.")
    assert len(retry_topics("shop", "über uns")) == 1, "the first version could not make one"
    assert dead_letter_name("shop") == "shop.dlq"


def test_what_waits_in_a_shared_retry_topic_is_of_the_group_whose_topic_it_names() -> None:
    def headers(topic: bytes) -> list[tuple[str, bytes | None]]:
        return [
            ("h", b"x"),
            *((name, topic if name == "retry.topic" else b"1") for name in HEADERS[1:]),
        ]

    shared = "shop.eu.mails.retry"
    assert is_of_group(headers(b"shop"), shared, "eu.mails")
    assert not is_of_group(headers(b"shop"), shared, "mails")
    assert is_of_group(headers(b"shop.eu"), shared, "mails")
    assert not is_of_group(headers(b"shop.eu"), shared, "eu.mails")
    assert is_of_group([("h", b"x")], shared, "mails"), (
        "something else has written it: who reads the topic has it"
    )


def test_headers_of_the_sender_are_told_from_those_that_were_added() -> None:
    own: list[tuple[str, bytes | None]] = [
        ("retry.attempt", b"nonsense"),
        ("retry.reason", None),
        *((name, b"mine") for name in HEADERS),
    ]
    added: list[tuple[str, bytes | None]] = [
        (name, b"%d" % number) for number, name in enumerate(HEADERS)
    ]
    assert sent_headers(own + added) == own
    assert added_headers(own + added) == dict(added)
    assert sent_headers(own + added[1:]) == own, "without topic_id, as the first version wrote"
    assert added_headers([("retry.topic", b"x")]) == {}
    assert added_headers([(name, None) for name in HEADERS]) == {}


def test_a_subscription_that_has_no_room_for_retry_topics_goes_without() -> None:
    topics = [f"t{number}" for number in range(SUBSCRIPTIONS_MAX // 2)]
    assert len(with_retry_topics(topics, "g")) == SUBSCRIPTIONS_MAX
    assert with_retry_topics(topics, "a.b") == topics
    assert with_retry_topics([*topics, "more"], "g") == [*topics, "more"]
