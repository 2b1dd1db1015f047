"""Expiry of share groups without members for `offsets.retention.minutes`, as of consumer groups'
offsets. All time is elapsed time.

Owner: ShareService.
Invariants:
- A group is deleted when it had no member, and no operator changed its offsets, for the retention.
- A group without partitions is deleted EMPTY_KEPT_MS after its last member has gone.
- Work is done in slices of SLICE groups.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.groups.base.limits import GroupLimits
from appliance.groups.consumer.offset_expiry import EMPTY_KEPT_MS, SLICE, SLICE_NS, SWEEP_NS
from appliance.groups.share.group.share_group import ShareGroup


class EmptyGroups:
    """Sweeps the share groups for expired ones."""

    def __init__(self, limits: GroupLimits, now_ns: int) -> None:
        self._limits = limits
        self._due_ns = now_ns + SWEEP_NS
        self._names: list[str] = []
        """Names of the groups that this sweep has still to check, in reverse order."""

    @property
    def _retention_ms(self) -> int:
        return self._limits.offsets_retention_minutes * 60_000

    def next_deadline_ns(self) -> int:
        """Time of the next slice."""
        return self._due_ns

    def step(self, groups: Mapping[str, ShareGroup], now_ns: int, elapsed_ms: int) -> list[str]:
        """Check one slice if it is due. Returns the names of groups to delete."""
        if now_ns < self._due_ns:
            return []
        if not self._names:
            self._names = list(groups)
        some, self._names = self._names[-SLICE:], self._names[:-SLICE]
        self._due_ns = now_ns + (SLICE_NS if self._names else SWEEP_NS)
        return [name for name in some if name in groups and self._is_over(groups[name], elapsed_ms)]

    def _is_over(self, group: ShareGroup, elapsed_ms: int) -> bool:
        if group.members or not group.empty_since_ms:
            return False
        kept_ms = self._retention_ms if group.partitions else min(EMPTY_KEPT_MS, self._retention_ms)
        return elapsed_ms - group.empty_elapsed_ms >= kept_ms
