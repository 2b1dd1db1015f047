"""Wake-ups: pushes to members that wait for records.

Owner: the share service.
Invariants: a released record wakes at most one member.
"""

from __future__ import annotations

from itertools import islice

from appliance.groups.base.messages import Partition, Push
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_json


class WakeUps:
    """The pushes of a step."""

    def __init__(self) -> None:
        self._pushes: list[Push] = []

    def released(self, group: ShareGroup, freed: dict[Partition, int]) -> None:
        """Push to waiting members that records are available, to at most one for each record."""
        count = sum(freed.values())
        if count and group.waiting:
            for member in list(islice(group.sleepers({topic_id for topic_id, _ in freed}), count)):
                self.push(group, member)

    def push(self, group: ShareGroup, member: ShareMember) -> None:
        """Push to a member that it may acquire records."""
        group.waiting.pop(member.member_id, None)
        if member.acquires_over is not None:
            body = encode_json({"group": group.name, "member_id": member.member_id})
            self._pushes.append(Push(*member.acquires_over, int(Api.GROUP_HEARTBEAT), body))

    def drain(self) -> list[Push]:
        """The pushes so far."""
        pushes, self._pushes = self._pushes, []
        return pushes
