"""Topics of members: a heartbeat that names none is checked by those that are remembered."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from netfront.access.member_topics import MemberTopics
from shm.rights.authorizer import AclTable, Principal
from tailrace.protocol.frame import WireError
from tests.kit.peers.needs import principal_with


def test_a_member_whose_user_may_not_read_its_topic_any_more_stays_no_longer() -> None:
    topics = MemberTopics()
    member = {"group": "g", "member_id": "m", "member_epoch": 3}
    allowed, denied = principal_with("read topic any"), principal_with("read group any")
    topics.heartbeat(denied, member)  # not known here: a fetch is refused anyway
    topics.heartbeat(allowed, {**member, "topics": ["orders"]})
    topics.heartbeat(allowed, member)
    for kind in ({}, {"kind": "consumer"}):
        with pytest.raises(WireError, match="User:a may not read topic 'orders'"):
            topics.heartbeat(denied, {**member, **kind})
    topics.heartbeat(denied, {**member, "kind": "share"})
    topics.heartbeat(denied, {**member, "member_epoch": -1})
    topics.heartbeat(denied, member)


def test_a_member_id_in_another_users_requests_changes_nothing_for_the_member() -> None:
    topics = MemberTopics()
    member = {"group": "g", "member_id": "m", "member_epoch": 3}
    one = principal_with("read topic orders")
    other = Principal("b", (), "", AclTable(), is_admin=True)
    topics.heartbeat(one, {**member, "topics": ["orders"]})
    topics.heartbeat(other, {**member, "topics": ["secret"]})
    topics.heartbeat(one, member)
    topics.refused(other, orjson.dumps({**member, "topics": ["secret"]}))
    assert orjson.loads(topics.checked(one, orjson.dumps(member)))["topics"] == ["orders"]
    topics.heartbeat(other, {**member, "member_epoch": -1})
    assert orjson.loads(topics.checked(one, orjson.dumps(member)))["topics"] == ["orders"]


def test_a_user_with_very_many_members_makes_no_other_users_member_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("netfront.access.member_topics.MEMBERS_MAX", 10)
    topics, denied = MemberTopics(), principal_with("read group any")
    other = Principal("b", (), "", AclTable(), is_admin=True)
    member = {"group": "g", "member_id": "m", "member_epoch": 3}
    topics.heartbeat(denied, {**member, "topics": ["orders"]})
    for number in range(50):
        beat = {**member, "member_id": str(number)}
        topics.heartbeat(other, {**beat, "topics": ["letters"]})
        if number % 3 == 0:
            topics.heartbeat(other, {**beat, "member_epoch": -1})
    with pytest.raises(WireError, match="may not read topic 'orders'"):
        topics.heartbeat(denied, member)


@pytest.mark.parametrize("malformed", [[], {}, 5, None])
def test_a_malformed_member_id_is_left_to_the_coordinator_which_says_so(malformed: Any) -> None:
    topics, principal = MemberTopics(), principal_with("read topic any")
    for epoch in (3, -1):
        topics.heartbeat(principal, {"group": "g", "member_id": malformed, "member_epoch": epoch})
    body = topics.checked(principal, orjson.dumps({"group": "g", "member_id": malformed}))
    assert orjson.loads(body) == {"group": "g", "member_id": malformed, "topics": []}
