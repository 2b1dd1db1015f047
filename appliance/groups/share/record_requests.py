"""Requests about records: acquired by a member, and acknowledged.

Owner: the share service.
Invariants: a request that is repeated with its sequence gets the same answer.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson

from appliance.groups.base.messages import (
    SessionKey,
)
from appliance.groups.base.request_validation import user_in
from appliance.groups.share import request_validation as requests
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.group_table import ShareGroupTable
from appliance.groups.share.membership import ShareMembership
from appliance.groups.share.transactional import PreparedAcknowledgements, check
from appliance.groups.share.wake_ups import WakeUps
from tailrace.core.errors import (
    InvalidRequestError,
)

logger = logging.getLogger(__name__)


class RecordRequests:
    """Acquires and acknowledges for the members of all share groups."""

    def __init__(
        self,
        table: ShareGroupTable,
        membership: ShareMembership,
        wake_ups: WakeUps,
        runs_max: int,
    ) -> None:
        """`runs_max`: most runs of acquired records in an answer."""
        self._table = table
        self._membership = membership
        self._wake_ups = wake_ups
        self._runs_max = runs_max

    def unchecked(self, name: str, request: dict[str, Any]) -> bytes:
        """The refusal of a request whose front has checked other topics than those of its member;
        empty: it has checked them, or the appliance has no users.
        """
        if not user_in(request):
            return b""
        _, member = self._membership.member_of(name, request)
        if sorted(set(member.topics)) == request.get("topics"):
            return b""
        return orjson.dumps(
            {
                "message": "the rights to the topics of this member are looked up: ask again",
                "group": name, "member_id": member.member_id, "topics": list(member.topics),
            }
        )  # fmt: skip

    def acquire(
        self, name: str, session: SessionKey, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any]:
        """Acquire records, and acknowledge earlier ones. Raises TailraceError."""
        group, member = self._membership.member_of(name, request)
        count = requests.whole(request, "max_records", 0, requests.RECORDS_MAX)
        given, sequence = requests.acknowledgements_of(request), self._sequence(member, request)
        member.acquires_over = session
        if sequence and sequence == member.sequence:
            return member.last_answer
        if count and not given and not group.room_of(member, count):
            raise InvalidRequestError(
                f"this consumer has {member.acquired_at_most} acquired records, the limit: "
                "acknowledge some of them first"
            )
        refused, freed = group.acknowledge(member, given, self._runs_max, now_ns)
        answer = group.acquire(member, count, self._runs_max, now_ns)
        answer["refused"] = refused
        changed = bool(given or answer["acquired"] or answer["dead"])
        self._after_records(group, member, sequence if changed else 0, answer)
        self._wake_ups.released(group, freed)
        if count and not answer["acquired"] and not answer["dead"]:
            group.waiting.setdefault(member.member_id)
        else:
            group.waiting.pop(member.member_id, None)
        return answer

    def acknowledge(self, name: str, request: dict[str, Any], now_ns: int) -> dict[str, Any]:
        """Acknowledge, release or reject acquired records. Raises TailraceError."""
        group, member = self._membership.member_of(name, request)
        given, sequence = requests.acknowledgements_of(request), self._sequence(member, request)
        if sequence and sequence == member.sequence:
            return member.last_answer
        refused, freed = group.acknowledge(member, given, self._runs_max, now_ns)
        answer = {"refused": refused}
        self._after_records(group, member, sequence if given else 0, answer)
        self._wake_ups.released(group, freed)
        return answer

    def prepare(self, name: str, request: dict[str, Any]) -> PreparedAcknowledgements:
        """Check acknowledgements that go with the commit of a transaction. Changes nothing. Raises
        TailraceError.
        """
        return check(*self._membership.member_of(name, request), request)

    def apply(self, prepared: PreparedAcknowledgements, now_ns: int) -> None:
        """Apply the acknowledgements of a transaction that is committed in this step."""
        self._table.changed.add(prepared.group)
        group = self._table.by_name[prepared.group]
        member = group.members[prepared.member_id]
        _, freed = group.acknowledge(member, prepared.given, self._runs_max, now_ns)
        for key in group.changed_partitions:
            self._table.watch_partition(group, key)
        self._wake_ups.released(group, freed)

    @staticmethod
    def _sequence(member: ShareMember, request: dict[str, Any]) -> int:
        """The request's sequence; 0: none. Raises InvalidRequestError when it is lower than the
        last one.
        """
        sequence = requests.whole(request, "sequence", 0, 1 << 62, 0)
        if 0 < sequence < member.sequence:
            raise InvalidRequestError(
                f"sequence is {sequence}, and the request before had {member.sequence}; sequences "
                "must ascend"
            )
        return sequence

    def _after_records(
        self, group: ShareGroup, member: ShareMember, sequence: int, answer: dict[str, Any]
    ) -> None:
        if sequence:
            member.sequence, member.last_answer = sequence, answer
            group.changed_members.add(member.member_id)
        for key in group.changed_partitions:
            self._table.watch_partition(group, key)
