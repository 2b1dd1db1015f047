"""Members of share groups, and their sessions: which partitions they fetch.

Requests of a member carry no member epoch, so the gateway keeps that of its last heartbeat.

Invariants:
- A session is its user's: another user's request of the same member id has one of its own.
- A request with another session epoch than the next one changes nothing.
- At most MEMBERS_MAX members are known, and at most SESSION_PARTITIONS_MAX partitions of a session.
  All sessions have PARTITIONS_MAX together. For more the user with the most makes room: of its
  members the one that was silent longest is forgotten, of its sessions that one ends, and the
  client begins another (SHARE_SESSION_NOT_FOUND).

Crash: sessions and epochs are in memory. Clients join again, and begin another session.
"""

from __future__ import annotations

from typing import Any

from netfront.access.user_entries import UserEntries
from netfront.kafka.apis.call import Call, RefusedError, Services
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode

MEMBERS_MAX = 20_000
SESSION_PARTITIONS_MAX = 20_000
PARTITIONS_MAX = 500_000
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


MemberId = tuple[str, str]
"""Group and member id."""
MemberKey = tuple[str, str, str]
"""User, group and member id."""


class ShareMembers:
    """The members of one gateway."""

    def __init__(self) -> None:
        self._known: UserEntries[MemberId, ShareMember] = UserEntries()
        self._sessions: UserEntries[MemberId, ShareMember] = UserEntries()
        """Members that have a session. The size of one is that of its partitions."""

    @property
    def partition_count(self) -> int:
        """Partitions of all sessions."""
        return self._sessions.size

    def get(self, key: MemberKey) -> ShareMember | None:
        """The member; None: it is unknown."""
        return self._known.get(key[0], key[1:])

    def note(self, key: MemberKey) -> ShareMember:
        """The member, which is heard of now; made if it is unknown."""
        user, member = key[0], key[1:]
        found = self._known.get(user, member)
        if found is not None:
            self._known.touch(user, member)
            return found
        found = ShareMember()
        self._known.put(user, member, found)
        if self._known.size > MEMBERS_MAX:
            largest, (group, member_id) = self._known.victim()
            self.forget((largest, group, member_id))
        return found

    def forget(self, key: MemberKey) -> None:
        """Forget a member, and end its session."""
        self.end_session(key)
        self._known.pop(key[0], key[1:])

    def begin_session(self, key: MemberKey) -> ShareMember:
        """The member, with a session without partitions."""
        self.end_session(key)
        found = self.note(key)
        self._sessions.put(key[0], key[1:], found, 0)
        found.session_epoch = 0
        return found

    def in_session(self, key: MemberKey) -> ShareMember:
        """The member, which is heard of now. Raises RefusedError: it has no session."""
        found = self._sessions.get(key[0], key[1:])
        if found is None:
            raise RefusedError(KafkaError.SHARE_SESSION_NOT_FOUND)
        self._sessions.touch(key[0], key[1:])
        return self.note(key)

    def end_session(self, key: MemberKey) -> None:
        """End a member's session, if it has one."""
        found = self._sessions.pop(key[0], key[1:])
        if found is not None:
            found.partitions.clear()
            found.session_epoch = -1

    def add_partition(self, key: MemberKey, place: Partition) -> None:
        """Add a partition to a session. Raises RefusedError: it has too many."""
        found = self._sessions.get(key[0], key[1:])
        if found is None or place in found.partitions:
            return
        if len(found.partitions) >= SESSION_PARTITIONS_MAX:
            raise RefusedError(
                KafkaError.INVALID_REQUEST,
                f"a share session has at most {SESSION_PARTITIONS_MAX} partitions: forget some, or "
                "divide the topics among members",
            )
        found.partitions[place] = None
        self._sessions.touch(key[0], key[1:], 1)
        while self.partition_count > PARTITIONS_MAX:
            user, (group, member_id) = self._sessions.victim()
            self.end_session((user, group, member_id))

    def drop_partition(self, key: MemberKey, place: Partition) -> None:
        """Take a partition out of a session."""
        found = self._sessions.get(key[0], key[1:])
        if found is not None and place in found.partitions:
            del found.partitions[place]
            self._sessions.touch(key[0], key[1:], -1)


def share_members(services: Services) -> ShareMembers:
    found: ShareMembers = services.state.setdefault("share_members", ShareMembers())
    return found


def member_key(call: Call) -> MemberKey:
    return call.user, call.request["group_id"] or "", call.request["member_id"] or ""


def begin_request(call: Call) -> ShareMember:
    """Check the session's epoch and go on to the next. Raises RefusedError."""
    members, key = share_members(call.services), member_key(call)
    epoch = call.request["share_session_epoch"]
    member = members.begin_session(key) if epoch == 0 else members.in_session(key)
    if epoch not in (0, FINAL_EPOCH, member.session_epoch):
        raise RefusedError(KafkaError.INVALID_SHARE_SESSION_EPOCH)
    if epoch == FINAL_EPOCH:
        members.end_session(key)
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
