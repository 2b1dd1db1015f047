"""A classic group: the state machine of JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

    EMPTY --join--> PREPARING --all joined, or the time is over--> COMPLETING --sync of leader-->
    STABLE --join, leave, expiry--> PREPARING

After Kafka's GroupCoordinator. Time is passed in. Requests that wait get a waiter, which is
completed with the response.

Owner: one gateway. Nothing is stored: offsets are the appliance's, and after a restart of the
gateway members join again (UNKNOWN_MEMBER_ID).

Invariants:
- Of a member, one join and one sync wait at most.
- A generation's assignments are given only to members that know this generation.
- A member that neither waits nor was heard of for its session timeout is removed.
- An instance id belongs to one member, and a member to one user.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from netfront.kafka.exchange.waiter import Waiter
from netfront.kafka.groups.classic_member import MS, GroupError, Join, Member
from netfront.kafka.wire.errors import KafkaError
from shm.runtime.timing_wheel import NEVER_NS

INITIAL_DELAY_NS = 250 * MS
"""Time that an empty group waits for more members after the first one."""


class State(Enum):
    """A group's state, by Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(slots=True)
class ClassicGroup:
    """One group."""

    name: str
    members_max: int
    state: State = State.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    lease_until_ns: int = 0
    """Until when the process of groups refuses members of other protocols."""
    _instances: dict[str, str] = field(default_factory=dict)
    _pending: dict[str, int] = field(default_factory=dict)
    """Ids that were given out and have not joined, and when they are forgotten."""
    _phase_ends_ns: int = NEVER_NS
    """The end of joining (PREPARING), or of syncing (COMPLETING)."""
    _joins_from_ns: int = 0
    """Joining lasts at least until then."""

    # ---- join ------------------------------------------------------------------------------------

    def join(self, request: Join, now_ns: int) -> Waiter:
        """Handle a JoinGroup request; the waiter gets the response. Raises GroupError."""
        self._check_protocols(request)
        if request.instance_id is not None and request.instance_id in self._instances:
            known_id = self._instances[request.instance_id]
            self.members[known_id].check_user(request.user)
            if not request.member_id:
                return self._replace(known_id, request, now_ns)
            if request.member_id != known_id:
                raise GroupError(KafkaError.FENCED_INSTANCE_ID)
        if not request.member_id:
            return self._join_new(request, now_ns)
        member = self.members.get(request.member_id)
        if member is None:
            if self._pending.pop(request.member_id, None) is None:
                raise GroupError(KafkaError.UNKNOWN_MEMBER_ID)
            return self._add(request.member_id, request, now_ns)
        member.check_user(request.user)
        return self._rejoin(member, request, now_ns)

    def _check_protocols(self, request: Join) -> None:
        """Raises GroupError unless the members of the group share a protocol with this one."""
        names = {name for name, _ in request.protocols}
        if not names or not request.protocol_type:
            raise GroupError(KafkaError.INCONSISTENT_GROUP_PROTOCOL)
        others = [each for each in self.members.values() if each.member_id != request.member_id]
        if not others:
            return
        shared = names.intersection(*({name for name, _ in each.protocols} for each in others))
        if request.protocol_type != self.protocol_type or not shared:
            raise GroupError(KafkaError.INCONSISTENT_GROUP_PROTOCOL)

    def _join_new(self, request: Join, now_ns: int) -> Waiter:
        if len(self.members) + len(self._pending) >= self.members_max:
            raise GroupError(KafkaError.GROUP_MAX_SIZE_REACHED)
        prefix = request.instance_id or request.client_id or "member"
        member_id = f"{prefix}-{uuid.uuid4()}"
        if request.instance_id is None and request.requires_known_id:
            self._pending[member_id] = now_ns + request.session_timeout_ms * MS
            waiter = Waiter()
            waiter.complete({"error_code": KafkaError.MEMBER_ID_REQUIRED, "member_id": member_id,
                             "protocol_name": "", "leader": "", "members": []})  # fmt: skip
            return waiter
        return self._add(member_id, request, now_ns)

    def _add(self, member_id: str, request: Join, now_ns: int) -> Waiter:
        session_ns = request.session_timeout_ms * MS
        member = self.members[member_id] = Member(
            member_id, request.instance_id, request.client_id, request.host, session_ns,
            request.rebalance_timeout_ms * MS, request.protocols, now_ns + session_ns,
            request.user,
        )  # fmt: skip
        if request.instance_id is not None:
            self._instances[request.instance_id] = member_id
        self.protocol_type = request.protocol_type
        return self._wait_for_join(member, now_ns)

    def _rejoin(self, member: Member, request: Join, now_ns: int) -> Waiter:
        """A known member joins: it begins a rebalance only if that changes something."""
        is_same = member.protocols == request.protocols
        member.expires_ns = now_ns + member.session_timeout_ns
        is_quiet = is_same and (
            self.state is State.COMPLETING
            or (self.state is State.STABLE and member.member_id != self.leader)
        )
        if is_quiet:
            waiter = Waiter()
            waiter.complete(self._joined(member))
            return waiter
        member.protocols = request.protocols
        member.session_timeout_ns = request.session_timeout_ms * MS
        member.rebalance_timeout_ns = request.rebalance_timeout_ms * MS
        return self._wait_for_join(member, now_ns)

    def _replace(self, known_id: str, request: Join, now_ns: int) -> Waiter:
        """A static member has started again: it takes its place under another id."""
        member = self.members.pop(known_id)
        for waiter in (member.joining, member.syncing):
            if waiter is not None:
                waiter.complete({"error_code": KafkaError.FENCED_INSTANCE_ID})
        member.joining = member.syncing = None
        is_same = member.protocols == request.protocols
        member.member_id = f"{request.instance_id}-{uuid.uuid4()}"
        member.protocols = request.protocols
        member.client_id, member.host = request.client_id, request.host
        member.session_timeout_ns = request.session_timeout_ms * MS
        member.rebalance_timeout_ns = request.rebalance_timeout_ms * MS
        member.expires_ns = now_ns + member.session_timeout_ns
        self.members[member.member_id] = member
        self._instances[str(request.instance_id)] = member.member_id
        was_leader = self.leader == known_id
        if was_leader:
            self.leader = member.member_id
        if self.state is not State.STABLE or not is_same:
            return self._wait_for_join(member, now_ns)
        waiter, response = Waiter(), self._joined(member)
        if was_leader and request.can_skip_assignment:
            response["skip_assignment"] = True
        elif was_leader:
            # It takes the assignment that is there, as another member does.
            response["leader"], response["members"] = known_id, []
        waiter.complete(response)
        return waiter

    def _wait_for_join(self, member: Member, now_ns: int) -> Waiter:
        if member.joining is not None:
            member.joining.complete({"error_code": KafkaError.UNKNOWN_MEMBER_ID})
        member.joining = waiter = Waiter()
        if self.state is not State.PREPARING:
            self._prepare(now_ns)
        self._complete_join_if_all(now_ns)
        return waiter

    def _prepare(self, now_ns: int) -> None:
        """Begin a rebalance."""
        self._joins_from_ns = now_ns
        if self.state is State.EMPTY:
            self._joins_from_ns += INITIAL_DELAY_NS
        for member in self.members.values():
            if member.syncing is not None:
                waiter, member.syncing = member.syncing, None
                waiter.complete({"error_code": KafkaError.REBALANCE_IN_PROGRESS})
        self.state = State.PREPARING
        longest_ns = max((each.rebalance_timeout_ns for each in self.members.values()), default=0)
        self._phase_ends_ns = max(now_ns + longest_ns, self._joins_from_ns)

    def _complete_join_if_all(self, now_ns: int) -> None:
        if self.state is State.PREPARING and now_ns >= self._joins_from_ns and self._all_joined:
            self._complete_join(now_ns)

    @property
    def _all_joined(self) -> bool:
        return not self._pending and all(
            member.joining is not None for member in self.members.values()
        )

    def _complete_join(self, now_ns: int) -> None:
        """All have joined, or the time is over: those that did not join are removed, but for static
        members, which have their session's time to come back.
        """
        for member in list(self.members.values()):
            if member.joining is None and member.instance_id is None:
                self._drop(member)
        joined = [member for member in self.members.values() if member.joining is not None]
        if self.members and not joined:
            self._phase_ends_ns = now_ns + max(
                member.rebalance_timeout_ns for member in self.members.values()
            )
            return
        self.generation = self.generation + 1 if self.generation < (1 << 31) - 1 else 1
        self._phase_ends_ns = NEVER_NS
        if not joined:
            self._empty()
            return
        self.state = State.COMPLETING
        self.protocol = self._choose_protocol()
        if self.leader not in self.members or self.members[self.leader].joining is None:
            self.leader = joined[0].member_id
        self._phase_ends_ns = now_ns + max(member.rebalance_timeout_ns for member in joined)
        for member in self.members.values():
            member.was_synced = False
            member.assignment = b""
        for member in joined:
            waiter, member.joining = member.joining, None
            member.expires_ns = now_ns + member.session_timeout_ns
            assert waiter is not None
            waiter.complete(self._joined(member))

    def _choose_protocol(self) -> str:
        """The protocol that most members like best, of those that all support."""
        members = list(self.members.values())
        shared = set.intersection(*({name for name, _ in each.protocols} for each in members))
        votes = dict.fromkeys((name for name, _ in members[0].protocols if name in shared), 0)
        for member in members:
            votes[next(name for name, _ in member.protocols if name in shared)] += 1
        return max(votes, key=votes.__getitem__)

    def _joined(self, member: Member) -> dict[str, Any]:
        protocol = self.protocol or ""
        members = []
        if member.member_id == self.leader:
            members = [
                {"member_id": each.member_id, "group_instance_id": each.instance_id,
                 "metadata": each.metadata(protocol)}
                for each in self.members.values()
            ]  # fmt: skip
        return {
            "error_code": KafkaError.NONE, "generation_id": self.generation,
            "protocol_type": self.protocol_type, "protocol_name": protocol,
            "leader": self.leader, "member_id": member.member_id, "members": members,
        }  # fmt: skip

    # ---- sync, heartbeat, leave ------------------------------------------------------------------

    def member(self, member_id: str, instance_id: str | None, user: str | None = None) -> Member:
        """The member of this id. Raises GroupError, also for another user's, if `user` is given."""
        if instance_id is not None:
            known_id = self._instances.get(instance_id)
            if known_id is None:
                raise GroupError(KafkaError.UNKNOWN_MEMBER_ID)
            if known_id != member_id:
                raise GroupError(KafkaError.FENCED_INSTANCE_ID)
        member = self.members.get(member_id)
        if member is None:
            raise GroupError(KafkaError.UNKNOWN_MEMBER_ID)
        if user is not None:
            member.check_user(user)
        return member

    def check_generation(self, generation: int) -> None:
        """Raises GroupError unless the generation is the group's."""
        if generation != self.generation:
            raise GroupError(KafkaError.ILLEGAL_GENERATION)

    def check_protocol(self, protocol_type: str | None, protocol: str | None) -> None:
        """Raises GroupError unless what a member names is the group's."""
        is_same_type = protocol_type is None or protocol_type == self.protocol_type
        if not is_same_type or (protocol is not None and protocol != self.protocol):
            raise GroupError(KafkaError.INCONSISTENT_GROUP_PROTOCOL)

    def sync(self, member: Member, assignments: Iterable[tuple[str, bytes]], now_ns: int) -> Waiter:
        """Handle a SyncGroup request of a member that knows the generation. Raises GroupError."""
        member.expires_ns = now_ns + member.session_timeout_ns
        if self.state is State.PREPARING:
            raise GroupError(KafkaError.REBALANCE_IN_PROGRESS)
        if member.syncing is not None:
            member.syncing.complete({"error_code": KafkaError.REBALANCE_IN_PROGRESS})
        member.syncing = waiter = Waiter()
        member.was_synced = True
        if self.state is State.COMPLETING and member.member_id == self.leader:
            for member_id, assignment in assignments:
                if member_id in self.members:
                    self.members[member_id].assignment = assignment
            self.state = State.STABLE
            if all(each.was_synced for each in self.members.values()):
                self._phase_ends_ns = NEVER_NS
        if self.state is State.STABLE:
            for each in self.members.values():
                self._give_assignment(each, now_ns)
        return waiter

    def _give_assignment(self, member: Member, now_ns: int) -> None:
        if member.syncing is None:
            return
        waiter, member.syncing = member.syncing, None
        member.expires_ns = now_ns + member.session_timeout_ns
        waiter.complete(
            {"error_code": KafkaError.NONE, "protocol_type": self.protocol_type,
             "protocol_name": self.protocol, "assignment": member.assignment}
        )  # fmt: skip

    def heartbeat(self, member: Member, now_ns: int) -> KafkaError:
        """Note that the member is alive."""
        member.expires_ns = now_ns + member.session_timeout_ns
        if self.state is State.PREPARING:
            return KafkaError.REBALANCE_IN_PROGRESS
        return KafkaError.NONE

    def leave(
        self, member_id: str, instance_id: str | None, now_ns: int, user: str | None = None
    ) -> KafkaError:
        """Remove a member by its id, or a static one by its instance id alone. `user`: of this user
        only.
        """
        if instance_id is not None and not member_id:
            member_id = self._instances.get(instance_id, "")
        if instance_id is None and self._pending.pop(member_id, None) is not None:
            self._complete_join_if_all(now_ns)
            return KafkaError.NONE
        try:
            member = self.member(member_id, instance_id, user)
        except GroupError as error:
            return error.code
        self._remove(member, now_ns)
        return KafkaError.NONE

    def abandon(self, waiter: Waiter, now_ns: int) -> None:
        """The connection of a waiting request was closed: its member has its session's time."""
        for member in self.members.values():
            if member.joining is waiter:
                member.joining = None
                member.expires_ns = now_ns + member.session_timeout_ns
            if member.syncing is waiter:
                member.syncing = None
                member.expires_ns = now_ns + member.session_timeout_ns

    def _drop(self, member: Member) -> None:
        del self.members[member.member_id]
        if member.instance_id is not None:
            self._instances.pop(member.instance_id, None)
        for waiter in (member.joining, member.syncing):
            if waiter is not None:
                waiter.complete({"error_code": KafkaError.UNKNOWN_MEMBER_ID})
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), "")

    def _remove(self, member: Member, now_ns: int) -> None:
        self._drop(member)
        if self.state in (State.STABLE, State.COMPLETING):
            self._prepare(now_ns)
        self._complete_join_if_all(now_ns)

    def _empty(self) -> None:
        self.state, self.protocol, self.leader = State.EMPTY, None, ""
        self._phase_ends_ns = NEVER_NS

    def dissolve(self) -> None:
        """Drop all members: the group is another protocol's. Those that ask join again."""
        for member in list(self.members.values()):
            self._drop(member)
        self._pending.clear()
        self._empty()

    # ---- time ------------------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """True if it has no members."""
        return not self.members and not self._pending

    def next_deadline_ns(self) -> int:
        """Time when `advance` has something to do."""
        deadlines = [self._phase_ends_ns, *self._pending.values()]
        if self.state is State.PREPARING and self._all_joined:
            deadlines.append(self._joins_from_ns)
        deadlines += [
            member.expires_ns
            for member in self.members.values()
            if member.joining is None and member.syncing is None
        ]
        return min(deadlines)

    def advance(self, now_ns: int) -> None:
        """Remove who has expired, and end a phase whose time is over."""
        for member_id in [each for each, at_ns in self._pending.items() if at_ns <= now_ns]:
            del self._pending[member_id]
        for member in list(self.members.values()):
            is_waiting = member.joining is not None or member.syncing is not None
            if not is_waiting and member.expires_ns <= now_ns:
                self._remove(member, now_ns)
        self._complete_join_if_all(now_ns)
        if self._phase_ends_ns > now_ns:
            return
        if self.state is State.PREPARING:
            self._complete_join(now_ns)
            return
        self._phase_ends_ns = NEVER_NS
        for member in list(self.members.values()):
            if not member.was_synced:
                self._remove(member, now_ns)
