"""Members of consumer groups by the frames alone: what a client in another language would send."""

from __future__ import annotations

import os
from typing import Any

from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import wait_until

AGAIN = (ErrorCode.NOT_READY, ErrorCode.TIMED_OUT)


class RawMember:
    """One member of a group, over a connection that may be another one later."""

    def __init__(self, client: RawClient, group: str, topics: list[str], **more: Any) -> None:
        """`more`: other fields of its first heartbeat."""
        self.client = client
        self.group = group
        self.member_id = os.urandom(16).hex()
        self.epoch = 0
        self.owned: dict[str, list[int]] = {}
        self._first = {
            "kind": "consumer", "topics": topics, "session_timeout_ms": 600_000,
            "rebalance_timeout_ms": 600_000, "heartbeat_interval_ms": 3_000,
            "client_id": "raw", **more,
        }  # fmt: skip

    def heartbeat(self) -> ErrorCode:
        """One, the first of which joins; takes up what it is given at once."""
        request: dict[str, Any] = {
            "group": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "owned": self.owned,
        }
        code, answer = self.client.ask(
            Api.GROUP_HEARTBEAT, request | (self._first if not self.epoch else {})
        )
        if code is ErrorCode.OK:
            self.epoch = answer["member_epoch"]
            self.owned = answer.get("assignment", self.owned)
        return code

    def settle(self, count: int) -> None:
        """Heartbeats until it has so many partitions, and the group knows that it has."""
        wait_until(
            lambda: self.heartbeat() is ErrorCode.OK and self.count == count,
            f"the member has {count} partitions",
        )
        assert self.heartbeat() is ErrorCode.OK

    @property
    def count(self) -> int:
        """Number of partitions that the member has."""
        return sum(map(len, self.owned.values()))

    def commit(self, offsets: dict[tuple[str, int], int]) -> tuple[ErrorCode, dict[str, Any]]:
        entries = [
            [topic, partition, offset, -1, ""] for (topic, partition), offset in offsets.items()
        ]
        request = {
            "group": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "offsets": entries,
        }
        return self.client.ask(Api.COMMIT_OFFSETS, request)


def insist(client: RawClient, api: int, value: dict[str, Any]) -> dict[str, Any]:
    """Ask until it is answered with something else than "ask again"."""
    found: list[tuple[ErrorCode, dict[str, Any]]] = []

    def is_answered() -> bool:
        found.append(client.ask(api, value))
        return found[-1][0] not in AGAIN

    wait_until(is_answered, "an answer")
    code, answer = found[-1]
    assert code is ErrorCode.OK, (code, answer)
    return answer


def committed(client: RawClient, group: str) -> dict[tuple[str, int], int]:
    """Committed offsets of the group, by topic and partition."""
    answer = insist(client, Api.FETCH_OFFSETS, {"group": group, "partitions": None})
    assert answer["next"] is None
    return {(topic, partition): offset for topic, partition, offset, *_ in answer["offsets"]}


def process_named(client: RawClient, name: str = "groups-0") -> dict[str, Any] | None:
    """Row of `tailrace status` about a process; None: there is none."""
    found = client.ask(Api.DESCRIBE_CLUSTER, {})[1]["processes"]
    return next((process for process in found if process["name"] == name), None)
