"""Groups whose members speak Kafka's classic protocol keep other protocols out."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.errors import GroupNotEmptyError, InvalidGroupError, InvalidRequestError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench

LEASE: dict[str, Any] = {
    "group": "g", "kind": "classic", "member_id": "kafka", "member_epoch": 0,
    "session_timeout_ms": 60_000,
}  # fmt: skip
JOIN: dict[str, Any] = {
    "group": "g", "member_id": "7c1d9a52-0000-4000-8000-000000000001", "member_epoch": 0,
    "topics": ["orders"], "follows_catalog": False, "assignor": "sticky",
    "session_timeout_ms": 45_000,
    "rebalance_timeout_ms": 300_000, "heartbeat_interval_ms": 3_000, "client_id": "c", "owned": {},
}  # fmt: skip


def test_a_lease_keeps_members_and_changes_from_outside_away(bench: Bench) -> None:
    bench.ask(Api.GROUP_HEARTBEAT, **LEASE)
    with pytest.raises(InvalidGroupError, match="classic"):
        bench.ask(Api.GROUP_HEARTBEAT, **JOIN)
    offsets: dict[str, Any] = {"group": "g", "offsets": [["orders", 0, 5, -1, ""]]}
    with pytest.raises(GroupNotEmptyError, match="classic"):
        bench.ask(Api.COMMIT_OFFSETS, **offsets)
    assert bench.ask(Api.COMMIT_OFFSETS, **{**offsets, "kind": "classic"}) == {"refused": []}
    with pytest.raises(GroupNotEmptyError, match="classic"):
        bench.ask(Api.ALTER_GROUP_OFFSETS, group="g", offsets=[["orders", 0, 0, ""]])
    (result,) = bench.ask(Api.DELETE_GROUPS, groups=["g"])["results"]
    assert result["code"] == GroupNotEmptyError.default_code
    bench.ask(Api.GROUP_HEARTBEAT, **{**LEASE, "member_epoch": -1})
    assert bench.ask(Api.COMMIT_OFFSETS, **offsets) == {"refused": []}


def test_a_lease_that_is_not_renewed_runs_out(bench: Bench) -> None:
    bench.ask(Api.GROUP_HEARTBEAT, **LEASE)
    bench.wait(60)
    assert bench.ask(Api.GROUP_HEARTBEAT, **JOIN)["member_epoch"] == 1
    with pytest.raises(InvalidGroupError, match="has 1 members"):
        bench.ask(Api.GROUP_HEARTBEAT, **LEASE)


@pytest.mark.parametrize("duration", [0, -1, None, "x", 300_001])
def test_a_lease_of_another_length_is_refused(bench: Bench, duration: object) -> None:
    with pytest.raises(InvalidRequestError, match="session_timeout_ms"):
        bench.ask(Api.GROUP_HEARTBEAT, **{**LEASE, "session_timeout_ms": duration})
