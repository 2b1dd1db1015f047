"""Assignors: Kafka's published examples, and what holds for every group."""

from __future__ import annotations

import random
import sys
import types
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.groups.base import assignors
from appliance.groups.base.assignors import (
    BUILT_IN,
    Assignment,
    Assignor,
    MemberView,
    range_assignor,
    roundrobin_assignor,
    sticky_assignor,
)


def view(
    *topics: str, owned: tuple[tuple[str, int], ...] = (), instance_id: str | None = None
) -> MemberView:
    return MemberView(frozenset(topics), instance_id, owned)


def named(assignment: Assignment) -> dict[str, list[str]]:
    """As Kafka's documentation writes it: t0p1 is partition 1 of t0."""
    return {
        member: [f"{topic}p{partition}" for topic, partition in sorted(partitions)]
        for member, partitions in assignment.items()
    }


# ---- published examples --------------------------------------------------------------------------


def test_range_as_in_the_javadoc_of_range_assignor() -> None:
    members = {"C0": view("t0", "t1"), "C1": view("t0", "t1")}
    assert named(range_assignor(members, {"t0": 3, "t1": 3})) == {
        "C0": ["t0p0", "t0p1", "t1p0", "t1p1"],
        "C1": ["t0p2", "t1p2"],
    }


def test_round_robin_as_in_the_javadoc_of_round_robin_assignor() -> None:
    equal = {"C0": view("t0", "t1"), "C1": view("t0", "t1")}
    assert named(roundrobin_assignor(equal, {"t0": 3, "t1": 3})) == {
        "C0": ["t0p0", "t0p2", "t1p1"],
        "C1": ["t0p1", "t1p0", "t1p2"],
    }
    unequal = {"C0": view("t0"), "C1": view("t0", "t1"), "C2": view("t0", "t1", "t2")}
    assert named(roundrobin_assignor(unequal, {"t0": 1, "t1": 2, "t2": 3})) == {
        "C0": ["t0p0"],
        "C1": ["t1p0"],
        "C2": ["t1p1", "t2p0", "t2p1", "t2p2"],
    }


def test_sticky_as_in_the_javadoc_of_sticky_assignor() -> None:
    topics = {"t0": 2, "t1": 2, "t2": 2, "t3": 2}
    members = {name: view(*topics) for name in ("C0", "C1", "C2")}
    first = sticky_assignor(members, topics)
    assert named(first) == {
        "C0": ["t0p0", "t1p1", "t3p0"],
        "C1": ["t0p1", "t2p0", "t3p1"],
        "C2": ["t1p0", "t2p1"],
    }
    left = {name: view(*topics, owned=tuple(first[name])) for name in ("C0", "C2")}
    assert named(sticky_assignor(left, topics)) == {
        "C0": ["t0p0", "t1p1", "t2p0", "t3p0"],
        "C2": ["t0p1", "t1p0", "t2p1", "t3p1"],
    }, "the five that C0 and C2 had stay with them"


def test_sticky_with_unequal_subscriptions_as_in_the_javadoc_of_sticky_assignor() -> None:
    topics = {"t0": 1, "t1": 2, "t2": 3}
    members = {"C0": view("t0"), "C1": view("t0", "t1"), "C2": view("t0", "t1", "t2")}
    first = sticky_assignor(members, topics)
    assert named(first) == {"C0": ["t0p0"], "C1": ["t1p0", "t1p1"], "C2": ["t2p0", "t2p1", "t2p2"]}
    left = {
        name: view(*sorted(members[name].topics), owned=tuple(first[name])) for name in ("C1", "C2")
    }
    assert named(sticky_assignor(left, topics)) == {
        "C1": ["t0p0", "t1p0", "t1p1"],
        "C2": ["t2p0", "t2p1", "t2p2"],
    }


# ---- what always holds ---------------------------------------------------------------------------

Group = tuple[dict[str, MemberView], dict[str, int]]
NAMES = ("alpha", "beta", "gamma", "delta")


@st.composite
def groups(draw: st.DrawFn) -> Group:
    topics = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), max_size=4))
    is_equal = draw(st.booleans())
    subscriptions = st.frozensets(st.sampled_from((*NAMES, "there-is-no-such-topic")), max_size=5)
    shared = draw(subscriptions)
    owned = st.lists(st.tuples(st.sampled_from((*NAMES, "gone")), st.integers(-1, 10)), max_size=8)
    members = {}
    for number in draw(st.lists(st.integers(0, 99), max_size=9, unique=True)):
        instance_id = draw(st.none() | st.just(f"i{99 - number}"))
        members[f"m{number}"] = MemberView(
            shared if is_equal else draw(subscriptions), instance_id, draw(owned)
        )
    return members, topics


def moved(before: dict[str, MemberView], after: Assignment) -> int:
    return sum(len(set(view.owned) - set(after.get(member, ()))) for member, view in before.items())


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(group=groups(), seed=st.integers(0, 9))
def test_every_partition_has_one_owner_that_subscribes_whatever_the_order_of_members(
    name: str, group: Group, seed: int
) -> None:
    members, topics = group
    assignor = BUILT_IN[name]
    assignment = assignor(members, topics)
    assert set(assignment) == set(members)
    given_out = Counter(one for partitions in assignment.values() for one in partitions)
    subscribed = {topic for view in members.values() for topic in view.topics if topic in topics}
    assert given_out == Counter(
        (topic, partition) for topic in subscribed for partition in range(topics[topic])
    )
    assert all(
        topic in members[member].topics
        for member, partitions in assignment.items()
        for topic, _ in partitions
    )
    order, topic_order = list(members), list(topics)
    random.Random(seed).shuffle(order)
    random.Random(seed).shuffle(topic_order)
    assert (
        assignor({one: members[one] for one in order}, {one: topics[one] for one in topic_order})
        == assignment
    )


@pytest.mark.parametrize("assignor", [roundrobin_assignor, sticky_assignor])
@given(group=groups())
def test_equal_subscriptions_have_loads_within_one(assignor: Assignor, group: Group) -> None:
    members, topics = group
    if len({view.topics for view in members.values()}) == 1:
        loads = [len(partitions) for partitions in assignor(members, topics).values()]
        assert max(loads) - min(loads) <= 1


@given(group=groups())
def test_range_is_balanced_within_one_in_each_topic(group: Group) -> None:
    members, topics = group
    assignment = range_assignor(members, topics)
    for topic in topics:
        numbers = [
            [partition for name, partition in assignment[one] if name == topic]
            for one in members
            if topic in members[one].topics
        ]
        if numbers:
            assert max(map(len, numbers)) - min(map(len, numbers)) <= 1
            assert all(
                mine == list(range(mine[0], mine[0] + len(mine))) for mine in numbers if mine
            ), "neighbours"


@given(group=groups())
def test_sticky_no_member_can_take_one_from_another_and_be_less_loaded(group: Group) -> None:
    members, topics = group
    assignment = sticky_assignor(members, topics)
    for member, partitions in assignment.items():
        for topic, _ in partitions:
            for other, view in members.items():
                if topic in view.topics:
                    assert len(assignment[other]) + 2 > len(partitions) or other == member


@given(group=groups())
def test_sticky_moves_nothing_when_nothing_has_changed(group: Group) -> None:
    members, topics = group
    first = sticky_assignor(members, topics)
    again = {
        one: MemberView(view.topics, view.instance_id, first[one]) for one, view in members.items()
    }
    assert sticky_assignor(again, topics) == first


@given(count=st.integers(1, 12), partitions=st.integers(1, 60), leaver=st.integers(0, 11))
def test_sticky_moves_no_more_than_balance_needs(count: int, partitions: int, leaver: int) -> None:
    topics = {"orders": partitions}
    first = sticky_assignor({f"m{number:02d}": view("orders") for number in range(count)}, topics)
    having = {one: view("orders", owned=tuple(mine)) for one, mine in first.items()}
    joined = sticky_assignor({**having, "m99": view("orders")}, topics)
    assert moved(having, joined) == len(joined["m99"]), "only what the new member has"
    gone = f"m{leaver % count:02d}"
    left = {one: having[one] for one in having if one != gone}
    if left:
        assert moved(left, sticky_assignor(left, topics)) == 0, (
            "what was the leaver's is shared out, all else stays"
        )


def test_sticky_of_200_members_and_1000_partitions_moves_five_when_one_dies() -> None:
    topics = {f"t{number}": 100 for number in range(10)}
    members = {f"m{number:03d}": view(*topics) for number in range(200)}
    first = sticky_assignor(members, topics)
    assert {len(mine) for mine in first.values()} == {5}
    left = {one: view(*topics, owned=tuple(mine)) for one, mine in first.items() if one != "m100"}
    after = sticky_assignor(left, topics)
    assert moved(left, after) == 0
    assert sorted(map(len, after.values()))[-5:] == [6] * 5


def test_a_static_member_that_returns_has_its_place_in_range() -> None:
    topics = {"orders": 4}
    before = range_assignor(
        {"b": view("orders", instance_id="pod-0"), "a": view("orders", instance_id="pod-1")}, topics
    )
    after = range_assignor(
        {"z": view("orders", instance_id="pod-0"), "a": view("orders", instance_id="pod-1")}, topics
    )
    assert before["b"] == after["z"] == [("orders", 0), ("orders", 1)]


def test_sticky_with_very_many_different_subscriptions() -> None:
    chance = random.Random(7)
    topics = {f"t{number}": 10 for number in range(100)}
    members = {f"m{number:04d}": view(*chance.sample(sorted(topics), 5)) for number in range(2_000)}
    loads = Counter(map(len, sticky_assignor(members, topics).values()))
    assert set(loads) == {0, 1}
    members = {f"m{number:04d}": view(*chance.sample(sorted(topics), 50)) for number in range(30)}
    loads = Counter(map(len, sticky_assignor(members, topics).values()))
    assert max(loads) - min(loads) <= 1


def test_sticky_is_quick_where_one_of_two_subscribes_to_almost_what_the_other_has() -> None:
    topics = {f"t{number:04}": 1 for number in range(4_096)}
    everything = frozenset(topics)
    owned = [(topic, 0) for topic in topics]
    lines = 0

    def count(_frame: types.FrameType, _event: str, _value: Any) -> Any:
        nonlocal lines
        lines += 1
        assert lines < 500 * len(topics), (
            "more than 500 lines run for each partition: no group is served meanwhile"
        )
        return count

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        result = sticky_assignor(
            {"a": MemberView(everything, None, owned), "b": MemberView(everything - {"t0000"})},
            topics,
        )
    finally:
        sys.settrace(tracer)
    assert {member_id: len(mine) for member_id, mine in result.items()} == {"a": 2_048, "b": 2_048}


def test_sticky_ends_in_time_along_chains_and_stairs_of_subscriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = {f"t{number:03}": 4 for number in range(120)}
    names = sorted(topics)
    owned = [(topic, partition) for topic in names for partition in range(4)]
    stairs = {
        f"m{number:03}": MemberView(frozenset(names[number:]), None, () if number else owned)
        for number in range(120)
    }
    chain = {
        f"m{number:03}": MemberView(
            frozenset(names[number : number + 2]), None, owned[: 0 if number else 8]
        )
        for number in range(120)
    }
    for steps_max in (1, assignors.STEPS_MAX):
        monkeypatch.setattr(assignors, "STEPS_MAX", steps_max)
        for members in (stairs, chain):
            result = sticky_assignor(members, topics)
            assert sorted(one for mine in result.values() for one in mine) == owned, (
                "each once, however early it ends"
            )
            assert all(
                topic in members[member_id].topics
                for member_id, mine in result.items()
                for topic, _ in mine
            )
