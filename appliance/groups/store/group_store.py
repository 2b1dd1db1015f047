"""The rows of groups: members, committed offsets and the state of share partitions.

Owner: the process `groups`, alone.
Invariants: group ids are never reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from appliance.groups.store.database import StoreDatabase, refusals
from appliance.groups.store.schema import GroupRow, MemberRow, OffsetRow, ShareRow


class GroupStore(StoreDatabase):
    """The database with its groups."""

    def _load(self) -> None:
        (highest,) = self._db.execute("SELECT coalesce(max(group_id), 0) FROM groups").fetchone()
        self._next_group_id = 1 + max(int(highest), self._meta("last_group_id"))

    # ---- groups and members ----------------------------------------------------------------------

    def new_group_id(self) -> int:
        """A group id that was never used."""
        number = self._next_group_id
        self._next_group_id += 1
        return number

    def groups(self, kind: str) -> list[GroupRow]:
        """All groups of a kind ("consumer", "share"), by id."""
        return [
            GroupRow(*row)
            for row in self.read("SELECT * FROM groups WHERE kind = ? ORDER BY group_id", (kind,))
        ]

    def group(self, group_id: int) -> GroupRow | None:
        rows = self.read("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        return GroupRow(*rows[0]) if rows else None

    def group_names(self, after: str, limit: int) -> list[str]:
        """Names of groups of all kinds after `after`, sorted."""
        return [
            name
            for (name,) in self.read(
                "SELECT name FROM groups WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
            )
        ]

    def groups_empty_since(
        self, cutoff_ms: int, behind_group_id: int, limit: int
    ) -> list[tuple[int, int, bool]]:
        """(id, empty since, has offsets) by id, of consumer groups that lost their last member
        before `cutoff_ms`. Both times are elapsed time.
        """
        sql = (
            "SELECT group_id, empty_elapsed_ms, EXISTS (SELECT 1 FROM offsets WHERE "
            "offsets.group_id = groups.group_id) FROM groups"
            " WHERE empty_since_ms > 0 AND empty_elapsed_ms <= ? AND group_id > ? AND kind = "
            "'consumer' ORDER BY group_id LIMIT ?"
        )
        found = self.read(sql, (cutoff_ms, behind_group_id, limit))
        return [
            (group_id, empty_elapsed_ms, bool(has_offsets))
            for group_id, empty_elapsed_ms, has_offsets in found
        ]

    def put_groups(self, rows: Iterable[GroupRow]) -> None:
        self.write_many(
            "INSERT INTO groups (group_id, name, kind, epoch, assignor, rebalances, created_ms, "
            "empty_since_ms, detail, empty_elapsed_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id) DO UPDATE SET epoch = "
            "excluded.epoch,"
            " assignor = excluded.assignor, rebalances = excluded.rebalances, empty_since_ms = "
            "excluded.empty_since_ms, detail = excluded.detail,"
            " empty_elapsed_ms = excluded.empty_elapsed_ms",
            rows,
        )

    def delete_group(self, group_id: int) -> None:
        """Delete the group with its members, offsets and share partitions."""
        self.write_many(
            "INSERT OR REPLACE INTO meta VALUES ('last_group_id', ?)", [(self._next_group_id - 1,)]
        )
        for table in ("groups", "members", "offsets", "share_partitions"):
            self.write_many(f"DELETE FROM {table} WHERE group_id = ?", [(group_id,)])

    def members(self, group_id: int) -> list[MemberRow]:
        """A group's members, by id."""
        return [
            MemberRow(*row)
            for row in self.read(
                "SELECT * FROM members WHERE group_id = ? ORDER BY member_id", (group_id,)
            )
        ]

    def all_members(self) -> Iterator[MemberRow]:
        """The members of all groups, by group id."""
        with refusals():
            for row in self._db.execute("SELECT * FROM members ORDER BY group_id, member_id"):
                yield MemberRow(*row)

    def put_members(self, rows: Iterable[MemberRow]) -> None:
        """Insert or update members. Empty settings keep the stored ones."""
        self.write_many(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (group_id, member_id) DO "
            "UPDATE SET epoch = excluded.epoch,"
            " settings = iif(excluded.settings = '', settings, excluded.settings), assignment = "
            "excluded.assignment, target = excluded.target",
            rows,
        )

    def delete_members(self, keys: Iterable[tuple[int, str]]) -> None:
        """`keys`: (group id, member id)."""
        self.write_many("DELETE FROM members WHERE group_id = ? AND member_id = ?", keys)

    # ---- committed offsets -----------------------------------------------------------------------

    def put_offsets(self, rows: Iterable[OffsetRow]) -> None:
        self.write_many(
            "INSERT INTO offsets (group_id, topic_id, partition, committed, leader_epoch, "
            "metadata, committed_ms, committed_elapsed_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id, topic_id, partition) DO "
            "UPDATE SET committed = excluded.committed,"
            " leader_epoch = excluded.leader_epoch, metadata = excluded.metadata, committed_ms = "
            "excluded.committed_ms,"
            " committed_elapsed_ms = excluded.committed_elapsed_ms",
            rows,
        )

    def delete_offsets(self, keys: Iterable[tuple[int, str, int]]) -> None:
        """`keys`: (group id, topic id, partition)."""
        self.write_many(
            "DELETE FROM offsets WHERE group_id = ? AND topic_id = ? AND partition = ?", keys
        )

    def offset(self, group_id: int, topic_id: str, partition: int) -> OffsetRow | None:
        sql = "SELECT * FROM offsets WHERE group_id = ? AND topic_id = ? AND partition = ?"
        rows = self.read(sql, (group_id, topic_id, partition))
        return OffsetRow(*rows[0]) if rows else None

    def offsets_of_topic(self, group_id: int, topic_id: str, behind: int) -> list[OffsetRow]:
        """The topic's rows of partitions above `behind`, in order."""
        sql = (
            "SELECT * FROM offsets WHERE group_id = ? AND topic_id = ? AND partition > ? ORDER "
            "BY partition"
        )
        return list(map(OffsetRow._make, self.read(sql, (group_id, topic_id, behind))))

    def has_offsets(self, group_id: int, topic_id: str) -> bool:
        return bool(
            self.read(
                "SELECT 1 FROM offsets WHERE group_id = ? AND topic_id = ? LIMIT 1",
                (group_id, topic_id),
            )
        )

    def offset_topics(self, group_id: int) -> list[str]:
        """Ids of the topics in which the group has offsets."""
        return [
            topic_id
            for (topic_id,) in self.read(
                "SELECT DISTINCT topic_id FROM offsets WHERE group_id = ?", (group_id,)
            )
        ]

    def expire_offsets(self, group_id: int, cutoff_ms: int) -> bool:
        """Delete the group's offsets that were committed before `cutoff_ms` of elapsed time.
        Returns whether others are left.
        """
        self.write_many(
            "DELETE FROM offsets WHERE group_id = ? AND committed_elapsed_ms <= ?",
            [(group_id, cutoff_ms)],
        )
        return bool(self.read("SELECT 1 FROM offsets WHERE group_id = ? LIMIT 1", (group_id,)))

    def all_offset_topics(self) -> list[str]:
        """Ids of all topics in which any group has offsets (one index step for each)."""
        sql = (
            "WITH RECURSIVE ids(id) AS (SELECT min(topic_id) FROM offsets UNION ALL"
            " SELECT (SELECT min(topic_id) FROM offsets WHERE topic_id > ids.id) FROM ids WHERE "
            "ids.id IS NOT NULL) SELECT id FROM ids WHERE id IS NOT NULL"
        )
        return [topic_id for (topic_id,) in self.read(sql)]

    def delete_topic_offsets(self, topic_id: str, committed_before_ms: int, limit: int) -> int:
        """Delete at most `limit` offsets of a topic, in all groups, that were committed before a
        moment of elapsed time. Returns the number of deleted rows.
        """
        sql = (
            "DELETE FROM offsets WHERE (group_id, topic_id, partition) IN"
            " (SELECT group_id, topic_id, partition FROM offsets WHERE topic_id = ? AND "
            "committed_elapsed_ms <= ? LIMIT ?)"
        )
        return self.write_many(sql, [(topic_id, committed_before_ms, limit)])

    # ---- share partitions ------------------------------------------------------------------------

    def share_states(self, group_id: int) -> list[ShareRow]:
        """The group's share partitions, by topic id and partition."""
        sql = "SELECT * FROM share_partitions WHERE group_id = ? ORDER BY topic_id, partition"
        return [ShareRow(*row) for row in self.read(sql, (group_id,))]

    def put_share_states(self, rows: Iterable[ShareRow]) -> None:
        self.write_many("INSERT OR REPLACE INTO share_partitions VALUES (?, ?, ?, ?)", rows)

    def delete_share_states(self, keys: Iterable[tuple[int, str, int]]) -> None:
        """`keys`: (group id, topic id, partition)."""
        self.write_many(
            "DELETE FROM share_partitions WHERE group_id = ? AND topic_id = ? AND partition = ?",
            keys,
        )
