"""Valid requests of groups and queues, for `tests.fuzz.requests.conversations`: few groups and few
members, so that requests meet what others have made.

Owner: pure but for the random source. Invariants: those of `tests.fuzz.requests.conversations`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tailrace.protocol.frame import Api
from tests.fuzz.requests.world import World

Made = tuple[Api, dict[str, Any]]


def _group(rng: random.Random) -> str:
    return f"g{rng.randrange(6)}"


def _queue(rng: random.Random) -> str:
    """A share group's name, mostly: the requests of queues get past its kind."""
    return f"q{rng.randrange(3)}" if rng.random() < 0.9 else _group(rng)


def _member(rng: random.Random) -> str:
    return f"{rng.randrange(8):032x}"


def _share_member(rng: random.Random) -> dict[str, Any]:
    """A member that asks of a queue: few members with small epochs, so that one is met now and
    then.
    """
    return {
        "group": _queue(rng),
        "member_id": f"{rng.randrange(2):032x}",
        "member_epoch": rng.choice((1, 1, 2, 3, 5)),
    }


def _some_partition(rng: random.Random, world: World) -> tuple[str, int]:
    return rng.choice(world.names or ["t"]), rng.randrange(3)


def _group_heartbeat(rng: random.Random, world: World) -> Made:
    epoch = rng.choice((0, 0, 1, 2, 5, -1, -2))
    if rng.random() < 0.4:
        topics = (
            [name for name, _ in (_some_partition(rng, world), _some_partition(rng, world))]
            if epoch == 0
            else None
        )
        reset = rng.choice(("earliest", "earliest", "latest"))
        return (
            Api.GROUP_HEARTBEAT,
            {
                **_share_member(rng),
                "kind": "share",
                "member_epoch": epoch,
                "topics": topics,
                "offset_reset": reset,
                "session_timeout_ms": 10_000,
            },
        )
    value: dict[str, Any] = {
        "group": _group(rng), "kind": rng.choice(("consumer", "consumer", "share")),
        "member_id": _member(rng), "member_epoch": epoch,
        "instance_id": rng.choice((None, None, "one")),
        "topics": [_some_partition(rng, world)[0]] if epoch == 0 else None,
        "follows_catalog": rng.random() < 0.3,
        "assignor": rng.choice((None, "sticky", "range", "roundrobin")),
        "session_timeout_ms": 2_000,
        "rebalance_timeout_ms": 5_000, "heartbeat_interval_ms": 500, "client_id": "fuzz",
    }  # fmt: skip
    if value["kind"] == "consumer":
        value["owned"] = (
            {}
            if epoch == 0
            else rng.choice((None, {rng.choice(world.targets).info.topic_id.hex(): [0]}))
        )
    return (Api.GROUP_HEARTBEAT, value)


def _commit_offsets(rng: random.Random, world: World) -> Made:
    offsets = [
        [*_some_partition(rng, world), rng.choice((0, 0, 1, 50)), -1, ""]
        for _ in range(rng.choice((1, 3)))
    ]
    member = rng.choice((None, _member(rng)))
    return (
        Api.COMMIT_OFFSETS,
        {
            "group": _group(rng),
            "member_id": member,
            "member_epoch": -1 if member is None else rng.randrange(1, 4),
            "offsets": offsets,
        },
    )


def _fetch_offsets(rng: random.Random, world: World) -> Made:
    requested = rng.choice((None, [list(_some_partition(rng, world))]))
    return (Api.FETCH_OFFSETS, {"group": _group(rng), "partitions": requested, "after": None})


def _list_groups(rng: random.Random, _world: World) -> Made:
    return (Api.LIST_GROUPS, {"after": rng.choice(("", "g3"))})


def _describe_group(rng: random.Random, _world: World) -> Made:
    return (
        Api.DESCRIBE_GROUP,
        {
            "group": rng.choice((_group, _queue))(rng),
            "after": None,
            "part": rng.choice(("members", "partitions")),
        },
    )


def _delete_groups(rng: random.Random, _world: World) -> Made:
    return (Api.DELETE_GROUPS, {"groups": [rng.choice((_group, _queue))(rng)]})


def _alter_group_offsets(rng: random.Random, world: World) -> Made:
    return (
        Api.ALTER_GROUP_OFFSETS,
        {
            "group": rng.choice((_group, _queue))(rng),
            "offsets": [[*_some_partition(rng, world), rng.choice((0, 1, None)), ""]],
        },
    )


def _runs(rng: random.Random, world: World) -> list[list[Any]]:
    kind = rng.choice(("accept", "release", "reject", "renew"))
    return [[rng.choice(world.targets).info.topic_id.hex(), 0, 0, rng.randrange(5), kind]]


def _share_acquire(rng: random.Random, world: World) -> Made:
    acknowledge = rng.choice(([], _runs(rng, world)))
    value = {
        **_share_member(rng),
        "max_records": rng.randrange(1, 50),
        "sequence": rng.choice((0, 0, 1, 2, 50)),
    }
    return (Api.SHARE_ACQUIRE, {**value, "acknowledge": acknowledge})


def _share_acknowledge(rng: random.Random, world: World) -> Made:
    value = {**_share_member(rng), "sequence": rng.choice((0, 0, 1, 2, 50))}
    return (Api.SHARE_ACKNOWLEDGE, {**value, "acknowledge": _runs(rng, world)})


def _transactional_id(rng: random.Random) -> str:
    return rng.choice(("t1", "t2", "t3"))


def _init_transactions(rng: random.Random, _world: World) -> Made:
    return (
        Api.INIT_TRANSACTIONS,
        {
            "transactional_id": _transactional_id(rng),
            "timeout_ms": rng.choice((1_000, 60_000)),
            "client_id": "fuzz",
        },
    )


def _guessed(rng: random.Random) -> dict[str, Any]:
    """A transaction, or a branch: owners and epochs are guessed, and most of them are wrong."""
    return {
        "transactional_id": _transactional_id(rng),
        "owner": rng.choice((0, 1, (1 << 32) + rng.randrange(1, 9))),
        "producer_id": (1 << 62) + rng.choice((0, 1 << 32, 2 << 32)) + rng.randrange(9),
        "producer_epoch": rng.randrange(4),
    }


def _end_transaction(rng: random.Random, world: World) -> Made:
    offsets = [[*_some_partition(rng, world), rng.choice((0, 1, 50)), -1, ""]]
    return (
        Api.END_TRANSACTION,
        {
            **_guessed(rng),
            "outcome": rng.choice(("commit", "abort", "prepare", "stage")),
            "staged": rng.choice((None, "", "offsets", "x" * 70_000)),
            "branches": rng.choice((None, [], [_branch(rng)], [_branch(rng), _branch(rng)])),
            "is_empty": rng.choice((None, True, False)),
            "offsets": rng.choice((None, [], [{"group": _group(rng), "entries": offsets}])),
        },
    )


def _branch(rng: random.Random) -> list[int]:
    guessed = _guessed(rng)
    return [guessed["producer_id"], guessed["producer_epoch"]]


def _create_branches(rng: random.Random, _world: World) -> Made:
    return (Api.CREATE_BRANCHES, {**_guessed(rng), "count": rng.choice((1, 3, 2_000, 2_001))})


def _join_transaction(rng: random.Random, _world: World) -> Made:
    return (Api.JOIN_TRANSACTION, {**_guessed(rng), "attempt": rng.choice(("a", "b", "c"))})


def _list_transactions(rng: random.Random, _world: World) -> Made:
    return (
        Api.LIST_TRANSACTIONS,
        {
            "states": rng.choice((None, ["ongoing"], ["empty", "aborting"])),
            "next": rng.choice((None, "t1")),
            "hanging": rng.choice((None, True)),
        },
    )


def _describe_transaction(rng: random.Random, _world: World) -> Made:
    value = {
        "transactional_id": _transactional_id(rng),
        "owner": rng.choice((None, 1, (1 << 32) + 1)),
    }
    if rng.random() < 0.3:
        value |= {"producer_id": (1 << 62) + rng.randrange(3), "producer_epoch": rng.randrange(3)}
    return (Api.DESCRIBE_TRANSACTION, value)


def _abort_transaction(rng: random.Random, _world: World) -> Made:
    value: dict[str, Any] = {"transactional_id": _transactional_id(rng)}
    if rng.random() < 0.3:
        value = {"producer_id": (1 << 62) + rng.randrange(3), "producer_epoch": rng.randrange(3)}
    return (Api.ABORT_TRANSACTION, value)


GROUP_REQUESTS: dict[Api, tuple[Callable[[random.Random, World], Made], int]] = {
    Api.GROUP_HEARTBEAT: (_group_heartbeat, 6),
    Api.COMMIT_OFFSETS: (_commit_offsets, 4),
    Api.FETCH_OFFSETS: (_fetch_offsets, 2),
    Api.LIST_GROUPS: (_list_groups, 1),
    Api.DESCRIBE_GROUP: (_describe_group, 2),
    Api.DELETE_GROUPS: (_delete_groups, 1),
    Api.ALTER_GROUP_OFFSETS: (_alter_group_offsets, 2),
    Api.SHARE_ACQUIRE: (_share_acquire, 3),
    Api.SHARE_ACKNOWLEDGE: (_share_acknowledge, 2),
    Api.INIT_TRANSACTIONS: (_init_transactions, 2),
    Api.END_TRANSACTION: (_end_transaction, 2),
    Api.CREATE_BRANCHES: (_create_branches, 2),
    Api.JOIN_TRANSACTION: (_join_transaction, 2),
    Api.LIST_TRANSACTIONS: (_list_transactions, 1),
    Api.DESCRIBE_TRANSACTION: (_describe_transaction, 1),
    Api.ABORT_TRANSACTION: (_abort_transaction, 1),
}
"""API -> how to make a request, and how often it comes (relative to the others)."""
