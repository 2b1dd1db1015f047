"""Administration of groups against an appliance that answers what a test says: pages, pieces,
refusals, lag in seconds.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tailrace import Admin, OffsetAndMetadata, TopicPartition
from tailrace.admin.groups import GroupAdmin, add_lag_seconds
from tailrace.aio import AsyncAdmin
from tailrace.client.connections.steps import Steps, lifted, run_at_once
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import GroupNotEmptyError, OffsetOutOfRangeError, UnknownGroupError
from tailrace.protocol.frame import Api

Answers = Callable[[Api, dict[str, Any]], dict[str, Any]]


class ScriptedAdmin(Admin):
    """An Admin whose requests `answers` answers; `asked` has them."""

    answers: Answers

    def __init__(self) -> None:
        super().__init__("localhost:1")
        self.asked: list[tuple[Api, dict[str, Any]]] = []

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        yield from ()
        self.asked.append((api, dict(request)))
        return self.answers(api, request)


@contextmanager
def admin_with(answers: Answers) -> Iterator[ScriptedAdmin]:
    admin = ScriptedAdmin()
    admin.answers = answers
    with admin:
        yield admin


def group_of(name: str, members: int = 0) -> dict[str, Any]:
    return {
        "group": name,
        "kind": "consumer",
        "state": "STABLE" if members else "EMPTY",
        "members": members,
        "assignor": "sticky",
        "epoch": 3,
    }


def partition(number: int, committed: int, end: int, **others: Any) -> dict[str, Any]:
    lag = None if committed < 0 else end - committed
    return {
        "topic": "t",
        "partition": number,
        "committed": committed,
        "beginning": 0,
        "end": end,
        "lag": lag,
        "member_id": None,
        **others,
    }


def test_pages_are_put_together() -> None:
    names = [f"g{n:03}" for n in range(10)]

    def answers(api: Api, request: dict[str, Any]) -> dict[str, Any]:
        if api is Api.LIST_GROUPS:
            rest = [name for name in names if name > request["after"]]
            return {
                "groups": [group_of(name) for name in rest[:3]],
                "next": rest[2] if len(rest) > 3 else None,
            }
        assert api is Api.DESCRIBE_GROUP
        rows: list[Any] = (
            [{"member_id": n} for n in range(5)]
            if request["part"] == "members"
            else [partition(n, 1, 1) for n in range(4)]
        )
        start = request["after"] or 0
        return {
            "group": group_of(request["group"], 5),
            request["part"]: rows[start : start + 2],
            "next": start + 2 if start + 2 < len(rows) else None,
        }

    with admin_with(answers) as admin:
        assert list(admin.list_groups()) == names
        assert len(admin.asked) == 4
        described = admin.describe_groups("g001")["g001"]
        assert [member["member_id"] for member in described["members"]] == [0, 1, 2, 3, 4]
        assert [row["partition"] for row in described["partitions"]] == [0, 1, 2, 3]
        assert (described["member_count"], described["state"]) == (5, "STABLE")
        assert list(admin.describe_groups()) == names, "none named: all"
        del admin.asked[:]
        assert all(row["committed_ms"] == -1 for row in described["partitions"]), (
            "not said: not known"
        )
        assert admin.describe_groups("g001", members=False)["g001"] == {**described, "members": []}
        assert {request["part"] for _, request in admin.asked} == {"partitions"}


def test_only_partitions_with_lag_are_asked_for_its_seconds_and_each_offset_of_one_is() -> None:
    asked: list[dict[str, Any]] = []

    def call(api: Api, request: dict[str, Any]) -> dict[str, Any]:
        assert api is Api.LIST_OFFSETS
        asked.extend(request["partitions"])
        found = []
        for item in request["partitions"]:
            offset = item["at"]["time_of"]
            made_us = {2: -1, 3: 9_000_000}.get(item["partition"], offset * 1_000_000)
            code = ErrorCode.UNKNOWN_TOPIC if item["partition"] == 4 else ErrorCode.OK
            found.append({**item, "code": int(code), "offset": offset, "timestamp_us": made_us})
        return {"offsets": found}

    rows = [
        partition(0, 5, 9), partition(0, 6, 9), partition(1, 7, 7), partition(2, 1, 9),
        partition(3, 1, 9), partition(4, 1, 9), partition(5, -1, 9),
        {**partition(6, -1, 9), "lag": 9}, {**partition(7, 0, 9), "start_offset": 3},
    ]  # fmt: skip
    run_at_once(add_lag_seconds(lifted(call), rows, 8_000_000))
    assert [row["lag_seconds"] for row in rows] == [3.0, 2.0, 0.0, None, 0.0, None, None, None, 5.0]
    assert {item["partition"] for item in asked} == {0, 2, 3, 4, 7}


def test_committed_offsets_are_those_asked_for_or_all_there_are() -> None:
    kept = {("t", 0): 7, ("t", 2): 9, ("u", 0): 0}

    def answers(api: Api, request: dict[str, Any]) -> dict[str, Any]:
        assert api is Api.FETCH_OFFSETS
        requested = (
            sorted(kept)
            if request["partitions"] is None
            else [tuple(key) for key in request["partitions"]]
        )
        rest = [
            key for key in requested if request["after"] is None or list(key) > request["after"]
        ]
        rows = [[*key, kept.get(key, -1), 4, "m", 1_000 if key in kept else -1] for key in rest[:2]]
        return {"offsets": rows, "next": list(rest[1]) if len(rest) > 2 else None}

    with admin_with(answers) as admin:
        found = admin.list_group_offsets("g")
        assert {key: value and value.offset for key, value in found.items()} == kept
        first = found[TopicPartition("t", 0)]
        assert first is not None
        assert (first.metadata, first.leader_epoch) == ("m", 4)
        some = admin.list_group_offsets("g", [TopicPartition("t", 0), TopicPartition("t", 1)])
        assert (some[TopicPartition("t", 0)], some[TopicPartition("t", 1)]) == (first, None)


def test_offsets_are_set_in_pieces_and_the_first_refusal_is_raised() -> None:
    refused: list[list[Any]] = []

    def answers(_api: Api, _request: dict[str, Any]) -> dict[str, Any]:
        return {"refused": refused}

    with admin_with(answers) as admin:
        admin.alter_group_offsets("g", {TopicPartition("t", n): n for n in range(1_500)})
        assert [len(request["offsets"]) for _, request in admin.asked] == [1_024, 476]
        del admin.asked[:]
        admin.alter_group_offsets(
            "g", {TopicPartition("t", 0): OffsetAndMetadata(5, "why"), TopicPartition("t", 1): None}
        )
        assert admin.asked[0][1] == {
            "group": "g",
            "offsets": [["t", 0, 5, "why"], ["t", 1, None, ""]],
        }
        refused.append(["t", 0, int(ErrorCode.OFFSET_OUT_OF_RANGE), "t-0 ends at 3"])
        with pytest.raises(
            OffsetOutOfRangeError,
            match=r"t-0 ends at 3\. Give the offset of the next record to read: from 0 to the end of the log\.",  # noqa: E501
        ):
            admin.alter_group_offsets("g", {TopicPartition("t", 0): 5})


def test_the_first_group_that_cannot_be_deleted_is_named() -> None:
    def answers(_api: Api, request: dict[str, Any]) -> dict[str, Any]:
        codes = {"busy": ErrorCode.GROUP_NOT_EMPTY, "none": ErrorCode.UNKNOWN_GROUP}
        return {
            "results": [
                {"group": g, "code": int(codes.get(g, ErrorCode.OK)), "message": f"{g}!"}
                for g in request["groups"]
            ]
        }

    with admin_with(answers) as admin:
        admin.delete_groups("gone")
        admin.delete_groups([])
        with pytest.raises(GroupNotEmptyError, match="busy!"):
            admin.delete_groups(["gone", "busy", "none"])
        with pytest.raises(UnknownGroupError):
            admin.delete_groups(["none"])
        assert [request["groups"] for _, request in admin.asked] == [
            ["gone"],
            ["gone", "busy", "none"],
            ["none"],
        ]


def test_coroutines_have_the_same_methods() -> None:
    async def look() -> None:
        async with AsyncAdmin("localhost:1") as admin:
            for name, method in vars(GroupAdmin).items():
                if not name.startswith("_"):
                    assert inspect.signature(
                        getattr(admin, name)
                    ).parameters.keys() == inspect.signature(method).parameters.keys() - {"self"}

    asyncio.run(look())
