"""What all share groups together take: members, subscriptions, partitions that they keep a state of.

Owner: ShareGroups. Invariants: the sums are those of the entries; an entry is set anew whenever what it counts may have changed.
"""

from __future__ import annotations

from appliance.groups.limits import MEMBERS_IN_ALL_MAX, SHARE_PARTITIONS_MAX, SUBSCRIPTIONS_MAX_BYTES
from appliance.groups.membership import subscription_bytes
from tailrace.errors import GroupFullError, TailraceError
from tailrace.protocol.errors import ErrorCode


class ShareRoom:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], int] = {}
        """(group, member id) -> what its subscription takes."""
        self._partitions: dict[str, int] = {}
        """Group -> how many partitions it has a state of."""
        self._bytes_sum = 0
        self._partitions_sum = 0

    @property
    def member_count(self) -> int:
        """Members of all share groups."""
        return len(self._bytes)

    @property
    def partition_count(self) -> int:
        """Partitions that share groups have states of."""
        return self._partitions_sum

    def set_member(self, group: str, member_id: str, topics: tuple[str, ...] | None) -> None:
        """What it subscribes to; None: it is gone."""
        key = group, member_id
        self._bytes_sum -= self._bytes.pop(key, 0)
        if topics is not None:
            self._bytes[key] = subscription_bytes(topics)
            self._bytes_sum += self._bytes[key]

    def set_partitions(self, group: str, count: int) -> None:
        """How many partitions it has a state of; 0 also when it is gone."""
        self._partitions_sum += count - self._partitions.pop(group, 0)
        if count:
            self._partitions[group] = count

    def check(self, group: str, member_id: str, topics: tuple[str, ...], more_partitions: int) -> None:
        """Whether a member may subscribe to this, whereby the group sees so many partitions for the first time. Raises GroupFullError, TailraceError
        (TOO_MANY_GROUPS).
        """
        known = self._bytes.get((group, member_id))
        if known is None and len(self._bytes) >= MEMBERS_IN_ALL_MAX:
            raise GroupFullError(f"all share groups together have {len(self._bytes)} members, as many as an appliance serves")
        if self._bytes_sum - (known or 0) + subscription_bytes(topics) > SUBSCRIPTIONS_MAX_BYTES:
            raise GroupFullError(
                f"the names of topics that all share members subscribe to take {self._bytes_sum} bytes: subscribe to fewer"
            )
        if self._partitions_sum + more_partitions > SHARE_PARTITIONS_MAX:
            raise TailraceError(
                f"all share groups together keep the state of {self._partitions_sum} partitions, and {SHARE_PARTITIONS_MAX} are allowed: this "
                f"subscription would add {more_partitions}; subscribe to fewer, or delete groups that are not needed",
                ErrorCode.TOO_MANY_GROUPS,
            )
