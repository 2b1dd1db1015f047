"""Topics of share members: a member acquires records only while its user may read all its topics.

A member names its topics when it joins, and SHARE_ACQUIRE names none. So the front adds the topics
that it has checked to each SHARE_ACQUIRE. The group coordinator compares them with the member's own
and refuses with NOT_READY where they differ, as behind a restart of the front; its response has the
topics, and the client's next request is checked by them.

Owner: one front.
Invariants:
- Members that are remembered <= MEMBERS_MAX. A member that is forgotten is refused once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from shm.rights.acl import READ, TOPIC
from shm.rights.authorizer import Principal
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError
from tailrace.protocol.json_messages import encode_error

MEMBERS_MAX = 10_000


class ShareTopics:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._topics: dict[tuple[str, str], list[str]] = {}
        """By group and member id."""

    def heartbeat(self, request: dict[str, Any]) -> None:
        """Note the topics of a heartbeat that was checked."""
        if request.get("kind") == "share" and isinstance(request.get("topics"), list):
            self._learn(request.get("group"), request.get("member_id"), request["topics"])

    def _learn(self, group: object, member_id: object, topics: Sequence[Any]) -> None:
        if not isinstance(group, str) or not isinstance(member_id, str):
            return
        if len(self._topics) >= MEMBERS_MAX and (group, member_id) not in self._topics:
            self._topics.pop(next(iter(self._topics)))
        self._topics[group, member_id] = sorted({name for name in topics if isinstance(name, str)})

    def checked(self, principal: Principal, body: bytes) -> bytes:
        """The body of SHARE_ACQUIRE with the member's topics. Raises WireError if its user may not
        read one of them.
        """
        request = orjson.loads(body)
        topics = self._topics.get((request.get("group"), request.get("member_id")), [])
        for name in topics:
            if not principal.may(READ, TOPIC, name):
                raise WireError(
                    ErrorCode.NOT_AUTHORIZED,
                    f"{principal.names[0]} may not read topic {name[:249]!r}, to which this member "
                    "subscribes",
                )
        request["topics"] = topics
        return orjson.dumps(request)

    def refused(self, body: bytes) -> bytes:
        """Take the topics of a refusal. Returns the part of it that the client gets."""
        answer = orjson.loads(body)
        if isinstance(answer.get("topics"), list):
            self._learn(answer.get("group"), answer.get("member_id"), answer["topics"])
        return encode_error(str(answer.get("message", "")))
