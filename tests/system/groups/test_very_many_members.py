"""Ten thousand groups, and ten thousand members of one of them, on a real appliance: all are
served, in bounded memory, and one that is too many is refused.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import orjson
import psutil
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tests.kit.members.groups import read_until
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_members import insist
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until

MANY = 10_000
AT_ONCE = 32
PARTITIONS = 100
MEMORY_MAX_BYTES = 300 << 20
"""Memory of the process of groups; a Python process with its modules takes 25 MiB."""


def ask_all(client: RawClient, api: Api, requests: Iterable[dict[str, Any]]) -> Counter[ErrorCode]:
    """Several at a time; returns how often each code came."""
    waiting: deque[int] = deque()
    codes: Counter[ErrorCode] = Counter()
    for request in requests:
        waiting.append(client.send(api, orjson.dumps(request)))
        if len(waiting) == AT_ONCE:
            codes[client.answer(waiting.popleft())[0]] += 1
    codes.update(client.answer(one)[0] for one in waiting)
    return codes


@pytest.mark.long
def test_ten_thousand_groups_and_a_group_of_ten_thousand_members(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    names = [f"{topic}-{number:05d}" for number in range(MANY)]
    crowd = f"{topic}-crowd"
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address) as producer,
        RawClient(appliance.address) as client,
    ):
        admin.create_topics([NewTopic(topic, 1), NewTopic(f"{topic}-wide", PARTITIONS)])
        producer.send(topic, b"x").result(60)
        insist(client, Api.DELETE_GROUPS, {"groups": []})
        process = psutil.Process(children(appliance)["tr-groups-0"])
        commits = (
            {"group": name, "offsets": [[topic, 0, number % 2, -1, ""]]}
            for number, name in enumerate(names)
        )
        assert ask_all(client, Api.COMMIT_OFFSETS, commits) == {ErrorCode.OK: MANY}
        assert {name for name in admin.list_groups() if name.startswith(topic)} == set(names), (
            "page by page"
        )
        member = {
            "group": crowd,
            "member_epoch": 0,
            "topics": [f"{topic}-wide"],
            "owned": {},
            "session_timeout_ms": 1_800_000,
        }
        joins = ({**member, "member_id": f"{number:032x}"} for number in range(MANY))
        assert ask_all(client, Api.GROUP_HEARTBEAT, joins) == {ErrorCode.OK: MANY}
        code, answer = client.ask(Api.GROUP_HEARTBEAT, {**member, "member_id": "f" * 32})
        assert code is ErrorCode.GROUP_FULL
        assert "group.members.max" in answer["message"]
        found = {}

        def is_assigned() -> bool:
            found.update(admin.describe_groups(crowd, lag_seconds=False)[crowd])
            return (
                sum(sum(map(len, one["target"].values())) for one in found["members"]) == PARTITIONS
            )

        wait_until(is_assigned, "each partition is somebody's")
        assert found["member_count"] == len(found["members"]) == MANY
        assert found["rebalances"] < MANY // 4, "members that come together are assigned together"
        assert process.memory_info().rss < MEMORY_MAX_BYTES
        with Consumer(
            topic, bootstrap=appliance.address, group_id=names[0], auto_offset_reset="earliest"
        ) as consumer:
            assert len(read_until([consumer], 1)) == 1, "others are served"
        kill_and_wait_for_successor(appliance, "tr-groups-0")
        insist(client, Api.LIST_GROUPS, {"after": ""})
        assert (
            admin.describe_groups(crowd, members=False, lag_seconds=False)[crowd]["member_count"]
            == MANY
        ), "all is there again"
        process = psutil.Process(children(appliance)["tr-groups-0"])
        assert process.memory_info().rss < MEMORY_MAX_BYTES
        leaves = (
            {"group": crowd, "member_epoch": -1, "member_id": f"{number:032x}"}
            for number in range(MANY)
        )
        assert ask_all(client, Api.GROUP_HEARTBEAT, leaves) == {ErrorCode.OK: MANY}
        admin.delete_groups([crowd, *names])
        assert not [name for name in admin.list_groups() if name.startswith(topic)]
