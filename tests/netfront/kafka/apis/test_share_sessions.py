"""Share sessions: their epochs, and bounds of what is known of members and partitions."""

from __future__ import annotations

import pytest

from netfront.kafka.apis.call import RefusedError
from netfront.kafka.apis.share_groups import sessions as module
from netfront.kafka.apis.share_groups.sessions import MemberKey, ShareMembers
from netfront.kafka.wire.errors import KafkaError


def key(name: str, user: str = "") -> MemberKey:
    return user, "group", name


def test_a_session_that_nobody_began_leaves_no_member() -> None:
    members = ShareMembers()
    with pytest.raises(RefusedError) as raised:
        members.in_session(key("a"))
    assert raised.value.code is KafkaError.SHARE_SESSION_NOT_FOUND
    assert members.get(key("a")) is None


def test_a_session_has_so_many_partitions_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSION_PARTITIONS_MAX", 2)
    members = ShareMembers()
    member = members.begin_session(key("a"))
    for partition in (0, 1, 0, 1):
        members.add_partition(key("a"), ("t", partition))
    with pytest.raises(RefusedError, match="at most 2 partitions"):
        members.add_partition(key("a"), ("t", 2))
    members.drop_partition(key("a"), ("t", 0))
    members.add_partition(key("a"), ("t", 2))
    assert list(member.partitions) == [("t", 1), ("t", 2)]
    assert members.partition_count == 2


def test_the_session_that_was_silent_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTITIONS_MAX", 4)
    members = ShareMembers()
    for name in "ab":
        members.begin_session(key(name)).epoch = 7
        for partition in (0, 1):
            members.add_partition(key(name), ("t", partition))
    members.in_session(key("a"))
    members.begin_session(key("c"))
    members.add_partition(key("c"), ("t", 0))
    assert members.partition_count == 3
    with pytest.raises(RefusedError) as raised:
        members.in_session(key("b"))
    assert raised.value.code is KafkaError.SHARE_SESSION_NOT_FOUND
    ended = members.get(key("b"))
    assert ended is not None
    assert ended.epoch == 7  # it is still a member
    assert len(members.in_session(key("a")).partitions) == 2


def test_members_that_are_forgotten_or_begin_again_give_their_partitions_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 2)
    members = ShareMembers()
    for name in "abc":
        members.begin_session(key(name))
        members.add_partition(key(name), ("t", 0))
    assert members.get(key("a")) is None
    assert members.partition_count == 2
    members.begin_session(key("b"))
    assert members.partition_count == 1
    members.forget(key("c"))
    members.forget(key("c"))
    members.end_session(key("b"))
    assert members.partition_count == 0


def test_a_user_with_very_many_members_and_partitions_ends_its_own_sessions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 5)
    monkeypatch.setattr(module, "PARTITIONS_MAX", 8)
    members = ShareMembers()
    alice = members.begin_session(key("a", "alice"))
    for partition in (0, 1):
        members.add_partition(key("a", "alice"), ("t", partition))
    for number in range(50):
        members.begin_session(key(str(number), "bob"))
        for partition in range(4):
            members.add_partition(key(str(number), "bob"), ("t", partition))
    assert members.in_session(key("a", "alice")) is alice
    assert len(alice.partitions) == 2
    assert members.partition_count <= 8
    assert members.get(key("40", "bob")) is None
    assert members.get(key("49", "bob")) is not None
