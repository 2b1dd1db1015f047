"""Topics of members: a member stays in its group, and acquires records of a share group, only while
its user may read all its topics.

A member names its topics when it joins. Its later heartbeats name none: the front refuses them by
the topics that it remembers, so that a member without the right gives its partitions up.

SHARE_ACQUIRE names none either. The front adds the topics that it has checked. The group
coordinator compares them with the member's own and refuses with NOT_READY where they differ, as
behind a restart of the front; its response has the topics, and the client's next request is checked
by them.

Owner: one front.
Invariants:
- A member is its user's: the same id in another user's requests is another member, whose topics
  change nothing for the first one.
- Members that are remembered <= MEMBERS_MAX. Beyond it the user with the most of them loses its
  oldest. A member that is forgotten is refused once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from netfront.access.user_entries import UserEntries
from shm.rights.acl import READ, TOPIC
from shm.rights.authorizer import Principal
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError
from tailrace.protocol.json_messages import encode_error

MEMBERS_MAX = 10_000


class MemberTopics:
    """Topics by member, and the checks of requests that name none."""

    def __init__(self) -> None:
        self._topics: UserEntries[tuple[str, str], list[str]] = UserEntries()
        """By group and member id."""

    def heartbeat(self, principal: Principal, request: dict[str, Any]) -> None:
        """Note the topics of a heartbeat that was checked, or check those that it leaves out.
        Raises WireError.
        """
        group, member_id = request.get("group"), request.get("member_id")
        if isinstance(request.get("topics"), list):
            self._learn(principal.user, group, member_id, request["topics"])
            return
        epoch = request.get("member_epoch")
        if isinstance(epoch, int) and epoch < 0:
            if isinstance(group, str) and isinstance(member_id, str):
                self._topics.pop(principal.user, (group, member_id))
        elif request.get("kind") != "share":  # it gives its records back with SHARE_ACQUIRE
            _refuse_unless_all(principal, self.topics_of(principal.user, group, member_id))

    def topics_of(self, user: str, group: object, member_id: object) -> list[str]:
        """The topics of a member. A malformed id has none: the group coordinator refuses it."""
        if not isinstance(group, str) or not isinstance(member_id, str):
            return []
        return self._topics.get(user, (group, member_id)) or []

    def _learn(self, user: str, group: object, member_id: object, topics: Sequence[Any]) -> None:
        if not isinstance(group, str) or not isinstance(member_id, str):
            return
        names = sorted({name for name in topics if isinstance(name, str)})
        self._topics.put(user, (group, member_id), names)
        if self._topics.size > MEMBERS_MAX:
            self._topics.pop(*self._topics.victim())

    def checked(self, principal: Principal, body: bytes) -> bytes:
        """The body of SHARE_ACQUIRE with the member's topics. Raises WireError if its user may not
        read one of them.
        """
        request = orjson.loads(body)
        topics = self.topics_of(principal.user, request.get("group"), request.get("member_id"))
        _refuse_unless_all(principal, topics)
        request["topics"] = topics
        return orjson.dumps(request)

    def refused(self, principal: Principal, body: bytes) -> bytes:
        """Take the topics of a refusal. Returns the part of it that the client gets."""
        answer = orjson.loads(body)
        if isinstance(answer.get("topics"), list):
            self._learn(
                principal.user, answer.get("group"), answer.get("member_id"), answer["topics"]
            )
        return encode_error(str(answer.get("message", "")))


def _refuse_unless_all(principal: Principal, topics: Sequence[str]) -> None:
    for name in topics:
        if not principal.may(READ, TOPIC, name):
            raise WireError(
                ErrorCode.NOT_AUTHORIZED,
                f"{principal.names[0]} may not read topic {name[:249]!r}, to which this member "
                "subscribes",
            )
