"""Deletion of groups of all kinds: DELETE_GROUPS.

Owner: the group service.
Invariants: a group with members, or with offsets that a transaction has prepared, stays.
"""

from __future__ import annotations

from typing import Any

import orjson

from appliance.groups.base.limits import DELETED_AT_ONCE_MAX
from appliance.groups.base.members import members_text
from appliance.groups.base.messages import GroupsOfAKind
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.base.request_validation import group_in, shown
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer.classic_leases import ClassicLeases
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.prepared_offsets import PreparedOffsets
from tailrace.core.errors import (
    GroupNotEmptyError,
    InvalidRequestError,
    TailraceError,
    UnknownGroupError,
)


class GroupDeletion:
    """Deletes groups that are not used."""

    def __init__(
        self,
        table: GroupTable,
        book: OffsetBook,
        prepared_offsets: PreparedOffsets,
        classic: ClassicLeases,
        share: GroupsOfAKind | None,
        suspended: SuspendedGroups,
    ) -> None:
        self._table = table
        self._book = book
        self._prepared_offsets = prepared_offsets
        self._classic = classic
        self._share = share
        self._suspended = suspended

    def delete_all(self, request: dict[str, Any], now_ns: int) -> bytes:
        """Delete the groups of a request; returns the answer's body. Raises InvalidRequestError."""
        names = request.get("groups")
        if not isinstance(names, list) or len(names) > DELETED_AT_ONCE_MAX:
            raise InvalidRequestError(
                f"the request needs a list `groups` of at most {DELETED_AT_ONCE_MAX} names"
            )
        results = []
        for name in names:
            code, message = 0, ""
            try:
                self._delete(group_in({"group": name}), now_ns)
            except TailraceError as error:
                code, message = int(error.code), error.detail
            results.append(
                {
                    "group": name if isinstance(name, str) else shown(name),
                    "code": code,
                    "message": message,
                }
            )
        return orjson.dumps({"results": results})

    def _delete(self, name: str, now_ns: int) -> None:
        self._suspended.check(name)
        self._classic.check_empty(name, now_ns)
        if self._share is not None and self._share.has(name):
            self._share.delete(name, now_ns)
            return
        group = self._table.get(name)
        if group is None:
            raise UnknownGroupError(f"there is no group {shown(name)}")
        if group.members:
            raise GroupNotEmptyError(f"the group {name} has {members_text(group.members)}")
        self._prepared_offsets.check_group(name)
        self._book.settle()
        self._table.delete(group)
