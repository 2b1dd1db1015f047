"""The share groups in memory, with their sessions and timers: loaded from the store, written when a
step is settled, reloaded after a rollback.

Owner: ShareService.
Invariants:
- A group is in `changed` from before its first change until the commit or rollback.
- All share groups of the store are in the table.
- Each member and each partition with locks has one timer.
Crash: a successor loads members, locks, delivery counts and done records from the store. Locks and
    sessions restart, so no record is delivered twice because of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from appliance.groups.base.messages import Partition, SessionKey, TopicImage, work_for
from appliance.groups.base.timers import Timers
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import GroupRow

Timer = tuple[str, str, int]
"""(group, member id, -1), or (group, topic id, partition)."""


class ShareGroupTable:
    """All share groups."""

    def __init__(self, store: GroupStore, topics: TopicImage, now_ns: int) -> None:
        """Load all groups of the store. Raises StorageError."""
        self._store = store
        self._topics = topics
        self.by_name: dict[str, ShareGroup] = {}
        self.timers: Timers[Timer] = Timers()
        self.changed: set[str] = set()
        """Names of groups that may differ from the last commit."""
        self._members_of: dict[SessionKey, set[tuple[str, str]]] = {}
        """Connection -> (group, member id) of the members whose heartbeats use it."""
        self._deleted: dict[int, str] = {}
        """Id -> name of groups deleted since the last commit; several may share a name."""
        self._removed: dict[str, list[ShareMember]] = {}
        """Group name -> members removed since the last commit."""
        for row in store.groups("share"):
            self._load(row, now_ns)

    def __iter__(self) -> Iterator[ShareGroup]:
        return iter(self.by_name.values())

    def _load(self, row: GroupRow, now_ns: int) -> ShareGroup:
        group = self.by_name[row.name] = ShareGroup.load(
            row, self._store, self._topics, now_ns, self._store.elapsed_ms(now_ns)
        )
        if group.changed_partitions or group.gone_partitions or group.is_changed:
            self.changed.add(group.name)
        for member in group.members.values():
            self._bind(group, member)
            self.watch_member(group, member)
        for key in group.partitions:
            self.watch_partition(group, key)
        return group

    def create(self, name: str, now_ms: int) -> ShareGroup:
        """Create a group without members. `now_ms`: wall clock."""
        row = GroupRow(self._store.new_group_id(), name, "share", 0, "", 0, now_ms, 0, "{}")
        group = self.by_name[name] = ShareGroup(row, self._topics)
        return group

    def delete(self, group: ShareGroup) -> None:
        """Delete a group without members. Raises StorageError, DiskFullError."""
        self._deleted[group.group_id] = group.name  # first: a rollback needs it after any failure
        # At once, since a group of either kind may reuse the name in the same step.
        self._store.delete_group(group.group_id)
        for key in group.partitions:
            self.timers.set((group.name, *key), None)
        del self.by_name[group.name]
        self.changed.discard(group.name)

    def remove(
        self, group: ShareGroup, member: ShareMember, wall_ms: int, elapsed_ms: int
    ) -> dict[Partition, int]:
        """Remove a member. Returns the number of freed records by partition."""
        self._removed.setdefault(group.name, []).append(member)
        freed = group.release(member.member_id)
        group.remove(member, wall_ms, elapsed_ms)
        self.forget_session(group, member)
        self.timers.set((group.name, member.member_id, -1), None)
        self.changed.add(group.name)
        return freed

    # ---- sessions --------------------------------------------------------------------------------

    def move_session(self, group: ShareGroup, member: ShareMember, session: SessionKey) -> None:
        """Bind a member to the connection of its heartbeat."""
        if member.session != session:
            self.forget_session(group, member)
            member.session = session
            self._bind(group, member)
            # Written, since a successor of this process gets the end of the connection, too.
            group.changed_members.add(member.member_id)

    def _bind(self, group: ShareGroup, member: ShareMember) -> None:
        if member.session is not None:
            self._members_of.setdefault(member.session, set()).add((group.name, member.member_id))

    def forget_session(self, group: ShareGroup, member: ShareMember) -> None:
        """Unbind a member from its connection."""
        if member.session is not None:
            members = self._members_of.get(member.session, set())
            members.discard((group.name, member.member_id))
            if not members:
                self._members_of.pop(member.session, None)

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool) -> None:
        """Start the grace period of the members of a closed connection. `with_front`: it closed
        with its front.
        """
        for name, member_id in self._members_of.pop(session, ()):
            group = self.by_name.get(name)
            member = None if group is None else group.members.get(member_id)
            if group is None or member is None:
                continue
            member.closed(now_ns, with_front=with_front)
            self.watch_member(group, member)

    # ---- timers ----------------------------------------------------------------------------------

    def watch_member(self, group: ShareGroup, member: ShareMember) -> None:
        """Set the timer of a member's session."""
        self.timers.set((group.name, member.member_id, -1), member.deadline_ns())

    def watch_partition(self, group: ShareGroup, key: Partition) -> None:
        """Set the timer of a partition's locks."""
        partition = group.partitions.get(key)
        self.timers.set(
            (group.name, *key), None if partition is None else partition.next_deadline_ns()
        )

    # ---- transactions ----------------------------------------------------------------------------

    def settle(self, suspended: Container[str]) -> None:
        """Write the changed rows. Raises GroupFailure, StorageError, DiskFullError."""
        for name in self.changed:
            if name in self.by_name and name not in suspended:
                with work_for(name):
                    self.by_name[name].settle(self._store)

    def forget_changes(self) -> None:
        """Start the next step, after a commit or rollback."""
        self.changed.clear()
        self._deleted.clear()
        self._removed.clear()

    def rolled_back(self, now_ns: int, failed: str | None) -> None:
        """Reload the changed groups, and `failed`. Raises StorageError."""
        names = self.changed.union(self._deleted.values(), () if failed is None else (failed,))
        rows = {row.name: row for row in self._store.groups("share") if row.name in names}
        for name in names:
            old = self.by_name.pop(name, None)
            row = rows.get(name)
            group = None if row is None else self._load(row, now_ns)
            if old is not None:
                self._carry_over(old, group)
        self._deleted.clear()
        self._removed.clear()

    def _carry_over(self, old: ShareGroup, group: ShareGroup | None) -> None:
        """Copy the state of members that is not stored: connections and last requests."""
        for member in (*self._removed.get(old.name, ()), *old.members.values()):
            known = None if group is None else group.members.get(member.member_id)
            if group is None or known is None:
                self.forget_session(old, member)
                self.timers.set((old.name, member.member_id, -1), None)
                continue
            self.forget_session(old, known)
            known.session, known.last_request_ns, known.closed_ns = (
                member.session,
                member.last_request_ns,
                member.closed_ns,
            )
            known.acquires_over = member.acquires_over
            self._bind(group, known)
            self.watch_member(group, known)
        for key in old.partitions:
            if group is None or key not in group.partitions:
                self.timers.set((old.name, *key), None)
