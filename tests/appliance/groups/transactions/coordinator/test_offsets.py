"""Offsets of groups in a commit: all of them, or nothing is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tailrace.core.errors import (
    FencedMemberError,
    InvalidGroupError,
    OffsetOutOfRangeError,
    TailraceError,
)
from tailrace.protocol.frame import JSON_MAX_BYTES, Api
from tests.appliance.groups.transactions.kit import (
    Owner,
    World,
    commit_of,
    markers,
    offsets,
)


def test_offsets_of_a_fenced_member_decide_nothing(world: World) -> None:
    a = Owner(world)
    a.write()
    member: dict[str, Any] = {
        "group": "g",
        "member_id": "m",
        "member_epoch": 0,
        "topics": ["orders"],
    }
    body = world.ask(Api.GROUP_HEARTBEAT, **member)
    epoch = body["member_epoch"]
    with pytest.raises(FencedMemberError):
        a.end(offsets=[commit_of(member_id="m", member_epoch=epoch + 1)])
    with pytest.raises(TailraceError, match="owned by a member"):
        a.end(offsets=[commit_of("h", 3), commit_of()])
    assert (offsets(world), offsets(world, "h")) == (-1, -1)
    world.settle()
    assert markers(world) == [[], []]
    a.end(offsets=[commit_of(member_id="m", member_epoch=epoch)])
    assert offsets(world) == 5


def test_one_wrong_entry_of_any_group_decides_nothing(world: World) -> None:
    a = Owner(world)
    with pytest.raises(OffsetOutOfRangeError, match="nothing of the transaction was decided"):
        a.end(offsets=[commit_of(), commit_of("h", 1_000_000)])
    assert offsets(world) == -1
    a.end("abort")


def test_the_largest_commit_is_kept_whole_by_a_kill_or_not_at_all(world: World) -> None:
    """The offsets of 3 groups, as many as a request has room for."""
    world.topics.create("wide", 4_096)
    a = Owner(world)
    entries = [["wide", number, 0, -1, "m" * 60] for number in range(4_096)]
    request = a.request(
        offsets=[{"group": group, "member_id": None, "entries": entries} for group in "ghi"]
    )
    assert 900_000 < len(orjson.dumps(request)) < JSON_MAX_BYTES
    world.send(Api.END_TRANSACTION, **request)
    world.kill()  # before its commit
    assert [committed_count(world, group) for group in "ghi"] == [0, 0, 0]
    number = world.send(Api.END_TRANSACTION, **request)
    world.step()
    world.kill()
    assert [committed_count(world, group) for group in "ghi"] == [4_096] * 3
    assert world.ask(Api.END_TRANSACTION, **request) == world.answer(number)


def committed_count(world: World, group: str) -> int:
    """The number of partitions of "wide" that a group has committed an offset of."""
    count, left = 0, [["wide", number] for number in range(4_096)]
    while left:
        body = world.ask(Api.FETCH_OFFSETS, group=group, partitions=left)
        count += sum(one[2] >= 0 for one in body["offsets"])
        left = left[len(body["offsets"]) :]
    return count


def test_a_share_group_commits_no_offsets_in_a_transaction(tmp_path: Path) -> None:
    world = World(tmp_path, with_share=True)
    member: dict[str, Any] = {
        "group": "s",
        "member_id": "m",
        "member_epoch": 0,
        "topics": ["orders"],
    }
    world.ask(Api.GROUP_HEARTBEAT, kind="share", **member)
    a = Owner(world)
    with pytest.raises(InvalidGroupError):
        a.end(offsets=[commit_of("s")])
