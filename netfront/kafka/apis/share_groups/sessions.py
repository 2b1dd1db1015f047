"""Members of share groups, and their sessions: which partitions they fetch.

Requests of a member carry no member epoch, so the gateway keeps that of its last heartbeat.

Invariants:
- A session is its user's: another user's request of the same member id has one of its own.
- A request with another session epoch than the next one changes nothing.

Crash: sessions and epochs are in memory. Clients join again, and begin another session.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError, Services
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode

SESSIONS_MAX = 20_000
FINAL_EPOCH = -1
EPOCH_MAX = (1 << 31) - 1
Partition = tuple[str, int]
"""Topic id, hexadecimal, and partition."""


class ShareMember:
    """A member of a share group, and its session here."""

    __slots__ = ("assigned", "epoch", "partitions", "session_epoch", "topics")

    def __init__(self) -> None:
        self.epoch = 0
        """Epoch of its last heartbeat; 0: unknown."""
        self.session_epoch = -1
        """The next request's; -1: there is no session."""
        self.partitions: dict[Partition, None] = {}
        self.topics: list[str] | None = None
        """Names of the topics that it reads; None: unknown."""
        self.assigned: dict[bytes, int] | None = None
        """Topic ids and their numbers of partitions, as it was told last."""


MemberKey = tuple[str, str, str]
"""User, group and member id."""


def share_members(services: Services) -> OrderedDict[MemberKey, ShareMember]:
    found: OrderedDict[MemberKey, ShareMember] = services.state.setdefault(
        "share_members", OrderedDict()
    )
    return found


def member_key(call: Call) -> MemberKey:
    return call.user, call.request["group_id"] or "", call.request["member_id"] or ""


def share_member(call: Call) -> ShareMember:
    members, key = share_members(call.services), member_key(call)
    found = members.setdefault(key, ShareMember())
    members.move_to_end(key)
    if len(members) > SESSIONS_MAX:
        members.popitem(last=False)
    return found


def begin_request(call: Call) -> ShareMember:
    """Check the session's epoch and go on to the next. Raises RefusedError."""
    member, epoch = share_member(call), call.request["share_session_epoch"]
    if epoch == 0:
        member.partitions.clear()
        member.session_epoch = 0
    elif member.session_epoch < 0:
        raise RefusedError(KafkaError.SHARE_SESSION_NOT_FOUND)
    elif epoch not in (FINAL_EPOCH, member.session_epoch):
        raise RefusedError(KafkaError.INVALID_SHARE_SESSION_EPOCH)
    if epoch == FINAL_EPOCH:
        member.session_epoch = -1
        member.partitions.clear()
    else:
        member.session_epoch = 1 if member.session_epoch >= EPOCH_MAX else member.session_epoch + 1
    return member


def share_error(code: int) -> KafkaError:
    """Kafka's code for one of the coordinator about a member.

    The rights to group and topics have been checked before. What the coordinator refuses for the
    user is the member id of another user, which is no member of this one.
    """
    if code == ErrorCode.NOT_AUTHORIZED:
        return KafkaError.UNKNOWN_MEMBER_ID
    return coordinator_error(code)


def identity_of(call: Call, member: ShareMember) -> dict[str, Any]:
    request = call.request
    return {
        "group": request["group_id"], "member_id": request["member_id"],
        "member_epoch": member.epoch,
    }  # fmt: skip
