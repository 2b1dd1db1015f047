"""Group requests: the part of the group service that handles each request, by its API and by the
kind of its group.

Owner: the process of groups, one thread.

Invariants:
- A group is of one kind: a request for another kind is refused, in words that name the group's.
- Requests of a suspended group are refused until its suspension ends.
"""

from __future__ import annotations

from typing import Any

from appliance.groups.agent.deletion import GroupDeletion
from appliance.groups.agent.transaction_effects import no_offsets
from appliance.groups.base.members import JOIN_EPOCH
from appliance.groups.base.messages import GroupsOfAKind, Requester
from appliance.groups.base.request_validation import (
    CONSUMER,
    SHARE,
    epoch_in,
    group_in,
    kind_in,
    member_in,
    shown,
)
from appliance.groups.base.responses import ANY, Responses
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer.classic_leases import CLASSIC, ClassicLeases
from appliance.groups.consumer.describe import GroupDescriber
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.heartbeats import Heartbeats
from appliance.groups.consumer.offset_requests import OffsetRequests
from appliance.groups.transactions.coordinator import TransactionCoordinator
from shm.messages.lane_messages import PRODUCER_OWNERS
from tailrace.core.errors import (
    InvalidGroupError,
    InvalidRequestError,
    NotSupportedError,
    UnknownGroupError,
)
from tailrace.protocol.frame import Api

TRANSACTION_APIS = frozenset(
    (
        Api.INIT_TRANSACTIONS,
        Api.END_TRANSACTION,
        Api.LIST_TRANSACTIONS,
        Api.DESCRIBE_TRANSACTION,
        Api.ABORT_TRANSACTION,
        Api.CREATE_BRANCHES,
        Api.JOIN_TRANSACTION,
        PRODUCER_OWNERS,
    )
)
_OF_ONE_GROUP = frozenset(
    (
        Api.COMMIT_OFFSETS,
        Api.FETCH_OFFSETS,
        Api.DESCRIBE_GROUP,
        Api.ALTER_GROUP_OFFSETS,
        Api.SHARE_ACQUIRE,
        Api.SHARE_ACKNOWLEDGE,
    )
)


class GroupRequests:
    """Handles requests of clients about groups and transactions."""

    def __init__(
        self,
        *,
        table: GroupTable,
        suspended: SuspendedGroups,
        classic: ClassicLeases,
        heartbeats: Heartbeats,
        offset_requests: OffsetRequests,
        describing: GroupDescriber,
        deletion: GroupDeletion,
        share: GroupsOfAKind | None,
        transactions: TransactionCoordinator | None,
        outgoing: Responses,
    ) -> None:
        """`share`, `transactions`: None where the appliance has none."""
        self._table = table
        self._suspended = suspended
        self._classic = classic
        self._heartbeats = heartbeats
        self._offset_requests = offset_requests
        self._describing = describing
        self._deletion = deletion
        self._share = share
        self._transactions = transactions
        self._outgoing = outgoing

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Handle one request; its answer goes to the step's responses. Raises TailraceError for
        a refusal.
        """
        if api == Api.GROUP_HEARTBEAT:
            if not self._heartbeats.try_quiet(requester, request, now_ns):
                self._heartbeat(requester, request, now_ns)
        elif api == Api.LIST_GROUPS:
            self._outgoing.answer(requester, ANY, self._describing.list_groups(request))
        elif api == Api.DELETE_GROUPS:
            self._outgoing.answer(requester, ANY, self._deletion.delete_all(request, now_ns))
        elif api in TRANSACTION_APIS:
            if self._transactions is None:
                raise NotSupportedError("this appliance has no transactions")
            self._transactions.handle(requester, api, request, now_ns)
        elif api in _OF_ONE_GROUP:
            name = group_in(request)
            self._suspended.check(name)
            if self._share is not None and self._share.has(name):
                if api == Api.COMMIT_OFFSETS:
                    raise no_offsets(name)
                self._share.handle(requester, api, request, now_ns)
            elif api == Api.ALTER_GROUP_OFFSETS and request.get("kind") == SHARE:
                self._begin_share_group(requester, name, request, now_ns)
            else:
                self._outgoing.answer(
                    requester, name, self._of_consumer_group(api, name, request, now_ns)
                )
        else:
            raise InvalidRequestError(f"API {api} is not served by the group coordinator")

    def _begin_share_group(
        self, requester: Requester, name: str, request: dict[str, Any], now_ns: int
    ) -> None:
        """Set start offsets of a share group that does not exist yet. It begins there."""
        if self._table.get(name) is not None:
            raise InvalidGroupError(
                f"{shown(name)} is a consumer group: use another name, or delete it first"
            )
        if self._share is None:
            raise NotSupportedError("this appliance has no share groups")
        self._classic.check_join(name, now_ns)
        self._table.check_room(name)
        self._share.handle(requester, Api.ALTER_GROUP_OFFSETS, request, now_ns)

    def _heartbeat(self, requester: Requester, request: dict[str, Any], now_ns: int) -> None:
        if request.get("kind") == CLASSIC:
            name = group_in(request)
            body = self._classic.handle(name, request, now_ns, self._member_count(name))
            self._outgoing.answer(requester, name, body)
            return
        name, kind, epoch, member_id = (
            group_in(request),
            kind_in(request),
            epoch_in(request),
            member_in(request),
        )
        self._suspended.check(name)
        taken = (
            SHARE
            if self._is_share(name)
            else CONSUMER
            if self._table.get(name) is not None
            else kind
        )
        if taken != kind:
            raise InvalidGroupError(
                f"{shown(name)} is a {taken} group: join it as such, or use another name"
            )
        if epoch == JOIN_EPOCH:
            self._classic.check_join(name, now_ns)
        if kind == SHARE:
            if self._share is None:
                raise NotSupportedError(
                    "this appliance has no share groups; join as a consumer group"
                )
            if epoch == JOIN_EPOCH and not self._share.has(name):
                self._table.check_room(name)
            self._share.handle(requester, Api.GROUP_HEARTBEAT, request, now_ns)
        elif epoch < JOIN_EPOCH:
            self._heartbeats.leave(requester, name, member_id, epoch, request, now_ns)
        elif epoch == JOIN_EPOCH:
            self._heartbeats.join(requester, name, member_id, request, now_ns)
        else:
            self._heartbeats.stay(requester, name, member_id, epoch, request, now_ns)

    def _of_consumer_group(
        self, api: int, name: str, request: dict[str, Any], now_ns: int
    ) -> bytes:
        """The body of the answer about a consumer group."""
        if api == Api.COMMIT_OFFSETS:
            if request.get("kind") != CLASSIC:
                self._classic.check_empty(name, now_ns)
            return self._offset_requests.commit(name, request)
        if api == Api.ALTER_GROUP_OFFSETS:
            self._classic.check_empty(name, now_ns)
            return self._offset_requests.alter(name, request)
        group = self._table.get(name)
        if api == Api.FETCH_OFFSETS:
            return self._describing.fetch_offsets(group, request)
        if group is None:
            raise UnknownGroupError(f"there is no group {shown(name)}")
        if api == Api.DESCRIBE_GROUP:
            return self._describing.describe(group, request, now_ns)
        raise InvalidGroupError(
            f"{shown(name)} is a consumer group: records are acquired and acknowledged in share "
            "groups"
        )

    def _member_count(self, name: str) -> int:
        """The members of a group, in none of which Kafka's classic protocol is spoken."""
        summary = summary_of(self._table, self._share, name)
        return 0 if summary is None else int(summary["members"] or self._is_share(name))

    def _is_share(self, name: str) -> bool:
        return self._share is not None and self._share.has(name)


def summary_of(table: GroupTable, share: GroupsOfAKind | None, name: str) -> dict[str, Any] | None:
    """The row of a group of any kind in LIST_GROUPS; None: deleted."""
    group = table.get(name)
    if group is not None:
        return group.summary()
    return share.summary(name) if share is not None and share.has(name) else None
