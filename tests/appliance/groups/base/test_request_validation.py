"""Requests that no client may send, and their refusals."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.groups.base.limits import (
    DELETED_AT_ONCE_MAX,
    PARTITIONS_ASKED_MAX,
    PATTERN_MAX,
    REBALANCE_TIMEOUT_MAX_MS,
    TOPICS_MAX,
    GroupLimits,
)
from appliance.groups.base.messages import Requester
from appliance.groups.base.request_validation import group_in
from appliance.groups.consumer import group_table as table
from appliance.groups.consumer import membership
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    GroupFullError,
    InvalidGroupError,
    InvalidRequestError,
    NotSupportedError,
    TailraceError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, settle

OF_ONE_GROUP = (
    Api.GROUP_HEARTBEAT, Api.COMMIT_OFFSETS, Api.FETCH_OFFSETS, Api.DESCRIBE_GROUP,
    Api.ALTER_GROUP_OFFSETS, Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE,
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        5,
        ["billing"],
        {"a": 1},
        "x" * 250,
        "x" * 10_000,
        "a\nb",
        "a\0",
        "\x7f",
        "a\x85b",
        "tab\t",
    ],
)
def test_group_names_that_are_not_allowed(bench: Bench, name: Any) -> None:
    for api in OF_ONE_GROUP:
        with pytest.raises(InvalidGroupError) as caught:
            bench.ask(
                api,
                group=name,
                member_id="m1",
                member_epoch=0,
                topics=[],
                offsets=[["orders", 0, 1]],
            )
        assert len(str(caught.value)) < 400, "it does not repeat ten thousand characters"
    assert bench.ask(Api.LIST_GROUPS)["groups"] == []


@pytest.mark.parametrize("name", ["x", "x" * 249, "Rechnungen für März", "請求", "a b.c-d/e:f"])
def test_group_names_that_are_allowed(name: str) -> None:
    assert group_in({"group": name}) == name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"member_id": None}, "member_id"),
        ({"member_id": ""}, "member_id"),
        ({"member_id": "m" * 65}, "member_id"),
        ({"member_id": "m\n"}, "member_id"),
        ({"member_id": ["m"]}, "member_id"),
        ({"member_epoch": None}, "member_epoch"),
        ({"member_epoch": -3}, "member_epoch"),
        ({"member_epoch": True}, "member_epoch"),
        ({"member_epoch": 1 << 63}, "member_epoch"),
        ({"kind": "eager"}, "kind"),
        ({"kind": "classic"}, "session_timeout_ms"),
        ({"kind": ["share"]}, "kind"),
        ({"pattern": "x" * (PATTERN_MAX + 1)}, "pattern"),
        ({"topics": None}, "topics"),
        ({"topics": "orders"}, "topics"),
        ({"topics": [5]}, "topics"),
        ({"topics": [""]}, "topics"),
        ({"topics": ["x" * 256]}, "topics"),
        ({"topics": ["x"] * (TOPICS_MAX + 1)}, "topics"),
        ({"session_timeout_ms": 999}, "session_timeout_ms"),
        ({"session_timeout_ms": 1_800_001}, "session_timeout_ms"),
        ({"session_timeout_ms": "45s"}, "session_timeout_ms"),
        ({"rebalance_timeout_ms": 0}, "rebalance_timeout_ms"),
        ({"rebalance_timeout_ms": REBALANCE_TIMEOUT_MAX_MS + 1}, "rebalance_timeout_ms"),
        ({"heartbeat_interval_ms": -1}, "heartbeat_interval_ms"),
        ({"instance_id": 5}, "instance_id"),
        ({"instance_id": "x" * 250}, "instance_id"),
        ({"client_id": "a\x1b[31m"}, "client_id"),
        ({"assignor": 5}, "assignor"),
        ({"follows_catalog": 1}, "follows_catalog"),
        ({"owned": []}, "owned"),
        ({"owned": {"orders": 5}}, "owned"),
        ({"owned": {"orders": ["0"]}}, "owned"),
        ({"owned": {"x" * 65: [0]}}, "owned"),
    ],
)
def test_heartbeats_that_are_none_are_refused_and_change_nothing(
    bench: Bench, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        bench.ask(
            Api.GROUP_HEARTBEAT,
            **{"group": "billing", "member_id": "m1", "member_epoch": 0, "topics": [], **change},
        )
    assert bench.service.summary("billing") is None
    assert not bench.store.is_in_transaction


@pytest.mark.parametrize(
    ("api", "field", "entry", "most"),
    [
        (Api.DELETE_GROUPS, "groups", "nobody", DELETED_AT_ONCE_MAX),
        (Api.FETCH_OFFSETS, "partitions", ["orders", 0], PARTITIONS_ASKED_MAX),
    ],
)
def test_a_list_that_is_too_long_is_refused(
    bench: Bench, api: Api, field: str, entry: Any, most: int
) -> None:
    allowed: dict[str, Any] = {field: [entry] * most}
    bench.ask(api, group="billing", **allowed)
    too_long: dict[str, Any] = {field: [entry] * (most + 1)}
    with pytest.raises(InvalidRequestError, match=f"{field}.* at most {most} "):
        bench.ask(api, group="billing", **too_long)


def test_limits_of_members_and_groups(tmp_path: Any) -> None:
    bench = Bench(tmp_path, limits=GroupLimits(members_max=2, groups_max=2))
    settle(Client(bench, member_id="m1"), Client(bench, member_id="m2"))
    with pytest.raises(GroupFullError):
        Client(bench, member_id="m3").heartbeat()
    bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])
    for ask in (
        lambda: Client(bench, group="third").heartbeat(),
        lambda: bench.ask(Api.COMMIT_OFFSETS, group="third", offsets=[["orders", 0, 5]]),
        lambda: bench.ask(Api.ALTER_GROUP_OFFSETS, group="third", offsets=[["orders", 0, 5]]),
    ):
        with pytest.raises(TailraceError) as caught:
            ask()
        assert caught.value.code == ErrorCode.TOO_MANY_GROUPS
    bench.ask(Api.DELETE_GROUPS, groups=["tool"])
    Client(bench, group="third").heartbeat()
    bench.close()


def test_without_share_groups_a_request_of_them_is_refused_with_a_sentence(bench: Bench) -> None:
    with pytest.raises(NotSupportedError):
        bench.ask(
            Api.GROUP_HEARTBEAT,
            group="queue",
            kind="share",
            member_id="m1",
            member_epoch=0,
            topics=["orders"],
        )
    settle(Client(bench))
    with pytest.raises(InvalidGroupError, match="consumer group"):
        bench.ask(
            Api.GROUP_HEARTBEAT,
            group="billing",
            kind="share",
            member_id="m1",
            member_epoch=0,
            topics=["orders"],
        )
    with pytest.raises(InvalidGroupError, match="share groups"):
        bench.ask(Api.SHARE_ACQUIRE, group="billing", member_id="m1", member_epoch=1, max_records=5)
    with pytest.raises(InvalidRequestError, match="99"):
        bench.ask(99)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["orders", "billing", "m1", "share"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "group",
    "kind",
    "member_id",
    "member_epoch",
    "topics",
    "owned",
    "offsets",
    "partitions",
    "after",
    "part",
    "groups",
    "instance_id",
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)
@given(
    api=st.sampled_from([*OF_ONE_GROUP, Api.LIST_GROUPS, Api.DELETE_GROUPS]),
    request=st.dictionaries(st.sampled_from(FIELDS), VALUES),
)
def test_whatever_a_request_holds_it_is_answered_or_refused(
    bench: Bench, api: int, request: dict[str, Any]
) -> None:
    for more in (
        {},
        {"group": "billing"},
        {"group": "billing", "member_id": "m1", "member_epoch": 0, "topics": ["orders"]},
    ):
        with suppress(TailraceError):
            bench.service.handle(Requester(0, 1, 1), api, {**request, **more}, bench.now_ns)
        bench.service.step(bench.now_ns)
        bench.store.commit()
        assert all(len(answer.body) <= bench.answer_max for answer in bench.service.drain_answers())
        bench.service.drain_pushes()


def test_members_and_subscriptions_of_all_groups_together_are_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MEMBERS_IN_ALL_MAX", 2)
    one, two = Client(bench, group="a", member_id="m1"), Client(bench, group="b", member_id="m2")
    settle(one, two)
    with pytest.raises(GroupFullError, match="2 members"):
        Client(bench, group="c", member_id="m3").heartbeat()
    assert bench.service.summary("c") is None
    one.epoch = 0
    one.heartbeat()
    bench.restart()
    with pytest.raises(GroupFullError):
        Client(bench, group="c", member_id="m3").heartbeat()
    two.leave()
    Client(bench, group="c", member_id="m3").heartbeat()
    monkeypatch.setattr(membership, "SUBSCRIPTIONS_MAX_BYTES", 2_000)
    long = [f"{number:0100d}" for number in range(10)]
    one.heartbeat(topics=long)
    with pytest.raises(GroupFullError, match="subscribe to fewer"):
        one.heartbeat(topics=[*long, *(f"{number:0200d}" for number in range(10))])
    one.heartbeat(topics=["orders"])
    one.heartbeat(topics=long)


def test_partitions_that_all_groups_together_subscribe_to_are_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "PARTITIONS_FOLLOWED_MAX", 13)
    bench.topics.create("more", 5)
    one, two = Client(bench, group="a", member_id="m1"), Client(bench, group="b", member_id="m2")
    settle(one, two)
    with pytest.raises(GroupFullError, match="8 partitions, and 9 more"):
        Client(bench, group="c", member_id="m3", topics=["orders", "more"]).heartbeat()
    assert bench.service.summary("c") is None
    one.heartbeat(topics=["orders", "more"])
    with pytest.raises(GroupFullError):
        two.heartbeat(topics=["orders", "more"])
    settle(one, two, Client(bench, group="a", member_id="m4", topics=["orders", "more"]))
    bench.restart()
    settle(one, two)
    with pytest.raises(GroupFullError):
        Client(bench, group="c", member_id="m3").heartbeat()
    two.leave()
    bench.ask(Api.DELETE_GROUPS, groups=["b"])
    Client(bench, group="c", member_id="m3").heartbeat()
