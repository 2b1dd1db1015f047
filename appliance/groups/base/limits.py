"""Limits of groups, members and commits: the bounds of all state that clients can make grow.

Owner: the appliance's settings, read at start. The other limits are constants of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROUP_NAME_MAX = 249
MEMBER_ID_MAX = 64
"""Characters of a member id. A uuid has 32, with hyphens 36."""
CLIENT_TEXT_MAX = 249
"""Characters of a client id or an instance id."""
TOPICS_MAX = 4_096
"""Topics that one member subscribes to; as many as an appliance has partitions."""
MEMBERS_IN_ALL_MAX = 100_000
"""Members of all consumer groups together, and likewise of all share groups."""
SHARE_ACQUIRED_MAX = 100_000
"""Acquired records of one share member."""
SUBSCRIPTIONS_MAX_BYTES = 1 << 28
"""Memory of the topic names in all subscriptions, counted as if no two subscriptions were equal."""
PARTITIONS_FOLLOWED_MAX = 4_000_000
"""Partitions of the topics that consumer groups subscribe to, summed over the groups. Each takes
some 250 bytes.
"""
SHARED_PARTITIONS_MAX = 1_500_000
"""Partitions that share groups have started to read, summed over the groups. Each takes some 650
bytes.
"""
NAME_BYTES = 57
"""Overhead of a str beside its characters."""
TOPIC_NAME_MAX = 255
PATTERN_MAX = 4_096
"""Characters of a member's `pattern`."""
COMMITS_MAX = 4_096
"""Partitions in one commit."""
PARTITIONS_ASKED_MAX = 100_000
"""Partitions in one request for committed offsets."""
DELETED_AT_ONCE_MAX = 1_000
"""Groups in one DELETE_GROUPS request."""
REBALANCE_TIMEOUT_MAX_MS = 7 * 86_400_000
OFFSET_MAX = 1 << 62

CLOSED_GRACE_NS = 1_000_000_000
"""Grace period in which a dynamic member whose connection closed may return over another one."""
FRONT_GRACE_NS = 4_000_000_000
"""Additional grace period when the connection closed because its front was killed.

A heartbeat interval comes on top. The members are healthy then, and the host may be busy.
"""
ASSIGNED_AT_ONCE_MEMBERS = 500
ASSIGN_PAUSE_NS_PER_MEMBER = 20_000
"""Pause between two assignments of a group, for each member above ASSIGNED_AT_ONCE_MEMBERS. A
thousand joins in a row do not cost a thousand assignments.
"""


@dataclass(slots=True)
class GroupLimits:
    """The appliance's settings of groups: `group.members.max`, `groups.max` and so on."""

    members_max: int = 10_000
    groups_max: int = 100_000
    session_timeout_min_ms: int = 1_000
    session_timeout_max_ms: int = 1_800_000
    offsets_retention_minutes: int = 10_080
    metadata_bytes_max: int = 4_096

    def take(self, settings: Mapping[str, Any]) -> None:
        """Use the appliance's settings, also changed ones while the process runs."""
        self.members_max = int(settings["group.members.max"])
        self.groups_max = int(settings["groups.max"])
        self.session_timeout_min_ms = int(settings["group.session.timeout.min.ms"])
        self.session_timeout_max_ms = int(settings["group.session.timeout.max.ms"])
        self.offsets_retention_minutes = int(settings["offsets.retention.minutes"])


@dataclass(slots=True)
class TransactionLimits:
    """The appliance's settings of transactions: `transaction.max.timeout.ms` and so on."""

    timeout_max_ms: int = 900_000
    id_expiration_ms: int = 604_800_000
    ids_max: int = 1_000_000
    prepared_max_ms: int = 604_800_000
    """0: a prepared transaction waits for ever."""

    def take(self, settings: Mapping[str, Any]) -> None:
        """Use the appliance's settings, also changed ones while the process runs."""
        self.timeout_max_ms = int(settings["transaction.max.timeout.ms"])
        self.id_expiration_ms = int(settings["transactional.id.expiration.ms"])
        self.prepared_max_ms = int(settings["transaction.prepared.max.ms"])
        self.ids_max = int(settings["transactional.ids.max"])
