"""Effects of a transaction on groups: committed offsets and acknowledgements, checked when it is
about to end and applied when it is decided.

Owner: the group service.
Invariants: a check changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.groups.base.messages import GroupsOfAKind
from appliance.groups.base.request_validation import group_in, shown
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.offset_requests import OffsetRequests, PreparedCommit
from appliance.groups.consumer.prepared_offsets import PreparedOffsets
from appliance.groups.transactions.operations.ending import OffsetCommits
from tailrace.core.errors import InvalidGroupError


class TransactionEffects:
    """Effects of transactions on groups of both kinds."""

    def __init__(
        self,
        table: GroupTable,
        offset_requests: OffsetRequests,
        prepared_offsets: PreparedOffsets,
        share: GroupsOfAKind | None,
        suspended: SuspendedGroups,
        now_ns: Callable[[], int],
    ) -> None:
        """`now_ns`: the time of the service's step."""
        self._table = table
        self._offset_requests = offset_requests
        self._prepared_offsets = prepared_offsets
        self._share = share
        self._suspended = suspended
        self._now_ns = now_ns

    def for_coordinator(self) -> OffsetCommits:
        """The effects as the transaction coordinator calls them."""
        return OffsetCommits(
            self.prepare_offsets,
            self._offset_requests.apply,
            self._suspended.check,
            self._offset_requests.reserve,
            self._offset_requests.apply_reserved,
            self._prepared_offsets,
            self.prepare_acknowledgements,
            self.apply_acknowledgements,
        )

    def prepare_offsets(self, request: dict[str, Any]) -> PreparedCommit:
        """Check the offsets of one group in a transaction. Changes nothing. Raises
        TailraceError.
        """
        name = group_in(request)
        self._suspended.check(name)
        if self._share is not None and self._share.has(name):
            raise no_offsets(name)
        return self._offset_requests.prepare(name, request)

    def prepare_acknowledgements(self, request: dict[str, Any]) -> Any:
        """Check the acknowledgements of one share member in a transaction. Changes nothing. Raises
        TailraceError.
        """
        name = group_in(request)
        self._suspended.check(name)
        if self._share is None or self._table.get(name) is not None:
            raise InvalidGroupError(
                f"{shown(name)} is no share group: only share groups acknowledge records"
            )
        return self._share.prepare(name, request)

    def apply_acknowledgements(self, prepared: Any) -> None:
        """Apply the acknowledgements of a transaction that is committed in this step."""
        if self._share is not None:
            self._share.apply(prepared, self._now_ns())


def no_offsets(name: str) -> InvalidGroupError:
    """The refusal of a commit of offsets to a share group."""
    return InvalidGroupError(
        f"{shown(name)} is a share group: its members acknowledge records, they do not commit "
        "offsets"
    )
