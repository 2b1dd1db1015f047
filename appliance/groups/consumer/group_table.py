"""The consumer groups in memory: loaded from the store, written when a step is settled, reloaded
after a rollback.

Owner: the service.
Invariants:
- A group is in `changed` from before its first change until the commit or rollback.
- All consumer groups of the store are in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from appliance.groups.base.limits import PARTITIONS_FOLLOWED_MAX, GroupLimits
from appliance.groups.base.members import Member
from appliance.groups.base.messages import TopicImage
from appliance.groups.base.request_validation import CONSUMER, shown
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.consumer.membership import Sessions, paused_of
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import GroupRow, MemberRow
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import GroupFullError, StorageError, TailraceError


class GroupTable:
    """All consumer groups."""

    def __init__(
        self, store: GroupStore, topics: TopicImage, limits: GroupLimits, sessions: Sessions,
        other_count: Callable[[], int], wall_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        """`other_count`: returns the number of groups of other kinds."""
        self._store = store
        self._topics = topics
        self._limits = limits
        self._sessions = sessions
        self._other_count = other_count
        self._wall_ms = wall_ms
        self._elapsed_ms = elapsed_ms
        self._by_name: dict[str, ConsumerGroup] = {}
        self._by_id: dict[int, ConsumerGroup] = {}
        self.changed: dict[int, str] = {}
        """Groups that this step has changed, created or deleted: id -> name."""
        self._removed: dict[int, dict[str, Member]] = {}
        """Group id -> members that this step has removed."""
        self._followed_count = 0
        """Partitions of the topics that groups subscribe to, summed over the groups."""

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(self._by_name.values())

    @property
    def count(self) -> int:
        """Number of consumer groups."""
        return len(self._by_name)

    def get(self, name: str) -> ConsumerGroup | None:
        return self._by_name.get(name)

    def of_id(self, group_id: int) -> ConsumerGroup:
        return self._by_id[group_id]

    def find(self, group_id: int) -> ConsumerGroup | None:
        """The group of an id; None: deleted."""
        return self._by_id.get(group_id)

    def load(self, now_ns: int) -> None:
        """Load all groups of the store. Raises StorageError."""
        rows: dict[int, list[Any]] = {}
        for row in self._store.all_members():
            rows.setdefault(row.group_id, []).append(row)
        for group_row in self._store.groups(CONSUMER):
            group = self._of_rows(group_row, rows.get(group_row.group_id, ()), now_ns)
            self._load_group(group)
            if group.is_dirty:
                self.change(group)

    def _of_rows(self, row: GroupRow, members: Iterable[MemberRow], now_ns: int) -> ConsumerGroup:
        """Decode a group. Raises StorageError when its rows are damaged though SQLite finds the
        file intact.
        """
        try:
            return ConsumerGroup.of_rows(row, members, now_ns)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(
                f"{self._store.path} is damaged: the rows of the group {shown(row.name)} cannot "
                f"be read ({type(error).__name__}: {error!s:.100}). "
                "Restore it from a backup or move it away (groups then begin without members and "
                "committed offsets)"
            ) from error

    def _load_group(self, group: ConsumerGroup) -> None:
        self._by_name[group.name] = self._by_id[group.group_id] = group
        self.count_partitions(group)
        group.paused = paused_of(group.signature, self._topics)
        for member in group.members.values():
            self._sessions.watch(group.group_id, member)

    def change(self, group: ConsumerGroup) -> None:
        """Note that the group is about to change."""
        self.changed[group.group_id] = group.name

    def remove(self, group: ConsumerGroup, member: Member) -> None:
        """Remove a member. A rollback restores its last heartbeat and session."""
        self.change(group)
        self._removed.setdefault(group.group_id, {})[member.member_id] = member
        self._sessions.forget(member)
        group.remove(member, self._wall_ms(), self._elapsed_ms())

    def changed_groups(self) -> list[ConsumerGroup]:
        """The groups that this step has changed, without the deleted ones."""
        return [self._by_id[group_id] for group_id in self.changed if group_id in self._by_id]

    def check_room(self, name: str) -> None:
        """Raises TailraceError (TOO_MANY_GROUPS) when the number of groups is at its limit."""
        count = len(self._by_name) + self._other_count()
        if count >= self._limits.groups_max:
            detail = (
                f"there are {count} groups, as many as groups.max allows: {shown(name)} was "
                "not created"
            )
            raise TailraceError(detail, ErrorCode.TOO_MANY_GROUPS)

    def check_partitions(self, group: ConsumerGroup | None, names: Iterable[str]) -> None:
        """Raises GroupFullError when subscribing to these topics would exceed the limit of followed
        partitions.
        """
        known: Mapping[str, Any] = {} if group is None else group.signature
        more = sum(
            topic.partition_count
            for name in names
            if name not in known and (topic := self._topics.by_name(name)) is not None
        )
        if more and self._followed_count + more > PARTITIONS_FOLLOWED_MAX:
            raise GroupFullError(
                f"all groups together subscribe to {self._followed_count} partitions, and {more} "
                "more are too many: subscribe to fewer topics"
            )

    def count_partitions(
        self, group: ConsumerGroup | None, gone: ConsumerGroup | None = None
    ) -> None:
        """Update the count of followed partitions, for a `group` with a new signature and a deleted
        group `gone`.
        """
        if group is not None:
            count = sum(count for _, count in group.signature.values())
            self._followed_count += count - group.followed_count
            group.followed_count = count
        if gone is not None:
            self._followed_count -= gone.followed_count

    def create(self, name: str) -> ConsumerGroup:
        """Create a group without members. Call `check_room` before."""
        group = ConsumerGroup(self._store.new_group_id(), name, self._wall_ms(), self._elapsed_ms())
        self.change(group)
        self._load_group(group)
        return group

    def delete(self, group: ConsumerGroup) -> None:
        """Delete a group without members, with its offsets. Offsets of this step have to be written
        before. Raises StorageError, DiskFullError.
        """
        self.change(group)
        self._store.delete_group(group.group_id)
        del self._by_name[group.name], self._by_id[group.group_id]
        self.count_partitions(None, group)

    def write(self, group: ConsumerGroup) -> None:
        """Write the changed rows of a group. Raises StorageError, DiskFullError."""
        if group.touched:
            there = [group.members[one] for one in group.touched if one in group.members]
            gone = [(group.group_id, one) for one in group.touched if one not in group.members]
            if gone:
                self._store.delete_members(gone)
            if there:
                self._store.put_members([member.row(group.group_id) for member in there])
                for member in there:
                    member.has_new_settings = False
            group.touched.clear()
        if group.is_row_changed:
            self._store.put_groups([group.row()])
            group.is_row_changed = False

    def kept(self) -> None:
        """Forget the changes of the step, which was committed."""
        self.changed, self._removed = {}, {}

    def rolled_back(self, now_ns: int) -> None:
        """Reload the groups that the step has changed. Raises StorageError."""
        changed, self.changed = self.changed, {}
        removed, self._removed = self._removed, {}
        for group_id, name in changed.items():
            self._reload(group_id, name, removed.get(group_id, {}), now_ns)

    def _reload(self, group_id: int, name: str, removed: Mapping[str, Member], now_ns: int) -> None:
        known = removed
        old = self._by_id.pop(group_id, None)
        if old is not None:
            known = {**removed, **old.members}
            self.count_partitions(None, old)
            for member in old.members.values():
                self._sessions.forget(member)
            del self._by_name[name]
        row = self._store.group(group_id)
        if row is None:
            return
        group = self._of_rows(row, self._store.members(group_id), now_ns)
        group.is_dirty = group.is_dirty or (
            bool(group.members) and group.subscribed(self._topics) != group.signature
        )
        if group.is_dirty:
            self.change(group)
        self._load_group(group)
        for member in group.members.values():
            before = known.get(member.member_id)
            if before is not None:
                self._sessions.resume(group_id, member, before)
