"""Acknowledgements that go with the commit of a transaction: checked, then applied with its
decision.

    COMMIT arrives -> check: every record is locked by its member -> decision -> apply

Owner: the share service, in a step of the group service.
Invariants:
- `check` changes nothing. What it returns can be applied without a refusal, if nothing of the group
  has changed in between.
- Only a commit carries them, so a transaction that is aborted has acknowledged nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.request_validation import Acknowledgement, acknowledgements_of
from tailrace.core.errors import InvalidRequestError, LockLostError

OUTCOMES = ("accept", "release")
"""A rejected record has a dead letter, which its consumer would write outside of the
transaction.
"""


class PreparedAcknowledgements(NamedTuple):
    """The checked acknowledgements of one member."""

    group: str
    member_id: str
    given: list[Acknowledgement]


def check(
    group: ShareGroup, member: ShareMember, request: dict[str, Any]
) -> PreparedAcknowledgements:
    """Check the acknowledgements of a member. Raises InvalidRequestError, LockLostError."""
    given = acknowledgements_of(request)
    for topic_id, number, first, last, outcome in given:
        if outcome not in OUTCOMES:
            raise InvalidRequestError(
                f"a transaction cannot {outcome} a record of share group {group.name!r:.100}; it "
                f"takes {' or '.join(OUTCOMES)}"
            )
        partition = group.partitions.get((topic_id, number))
        if partition is None or group.rules(topic_id) is None:
            raise LockLostError(
                f"records of share group {group.name!r:.100} cannot be acknowledged: topic "
                f"{topic_id!r:.100} was deleted, or the state of partition {number} was reset; "
                "nothing of the transaction was decided"
            )
        lost = partition.not_locked_by(member.member_id, first, last)
        if lost:
            begin, end = lost[0]
            raise LockLostError(
                f"offsets {begin} to {end} of partition {number} are not locked by this member of "
                f"share group {group.name!r:.100}: their lock has expired, or they are done; "
                "nothing of the transaction was decided"
            )
    return PreparedAcknowledgements(group.name, member.member_id, given)
