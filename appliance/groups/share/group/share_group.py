"""One share group: its members, and the state of its partitions.

Owner: ShareService.
Invariants: a member or partition differs from its row exactly when it is in `changed_members`,
    `gone_members`, `changed_partitions` or `gone_partitions`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from appliance.groups.base.deleted_topics import DeletedTopics
from appliance.groups.base.limits import SHARE_ACQUIRED_MAX
from appliance.groups.base.messages import Partition, TopicImage, TopicView
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.subscriptions import Subscriptions
from appliance.groups.share.partition import codec
from appliance.groups.share.partition.share_partition import SharePartition
from appliance.groups.share.request_validation import Acknowledgement
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import GroupRow, ShareRow
from tailrace.core.error_codes import ErrorCode

logger = logging.getLogger(__name__)
NOT_LOCKED = "the lock has expired, or the records are done"
Refused = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a topic that rule its acquisitions."""

    is_paused: bool
    lock_ns: int
    delivery_limit: int
    locks_max: int

    @classmethod
    def of(cls, topic: TopicView) -> Rules:
        settings = topic.settings
        return cls(
            bool(settings.get("delivery.paused", False)),
            int(settings.get("group.share.record.lock.duration.ms", 30_000)) * 1_000_000,
            int(settings.get("group.share.delivery.count.limit", 5)),
            int(settings.get("group.share.partition.max.record.locks", 2_000)),
        )


class ShareGroup:
    """One share group."""

    def __init__(self, row: GroupRow, topics: TopicImage) -> None:
        self.group_id = row.group_id
        self.name = row.name
        self.epoch = row.epoch
        self.created_ms = row.created_ms
        self.empty_since_ms = row.empty_since_ms
        self.empty_elapsed_ms = row.empty_elapsed_ms
        detail = orjson.loads(row.detail)
        self.names: dict[str, str] = detail.get("names", {})
        """Topic id -> name, of the topics that the group has started to read."""
        self.deleted_topics = DeletedTopics(detail.get("gone"))
        self.members: dict[str, ShareMember] = {}
        self.partitions: dict[Partition, SharePartition] = {}
        self.waiting: dict[str, None] = {}
        """Ids of members that wait for records, the longest waiting first."""
        self.is_changed = False
        self.changed_partitions: set[Partition] = set()
        self.changed_members: set[str] = set()
        self.gone_partitions: set[Partition] = set()
        self.gone_members: set[str] = set()
        self._topics = topics
        self._rules: dict[str, Rules] = {}
        self.subscriptions = Subscriptions(topics)

    # ---- rows ------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, row: GroupRow, store: GroupStore, topics: TopicImage, now_ns: int, elapsed_ms: int
    ) -> ShareGroup:
        """Load a group; its locks and sessions restart. Raises StorageError."""
        group = cls(row, topics)
        for member_row in store.members(row.group_id):
            try:
                group.members[member_row.member_id] = ShareMember.from_row(member_row, now_ns)
            except (ValueError, TypeError, KeyError) as error:  # the client joins again
                logger.error(
                    "share_member_damaged group=%r member=%s reason=%r",
                    row.name,
                    member_row.member_id,
                    str(error),
                )
                group.gone_members.add(member_row.member_id)
        for share_row in store.share_states(row.group_id):
            key = share_row.topic_id, share_row.partition
            try:
                partition = SharePartition(codec.decode(share_row.state))
            except codec.StateFormatError as error:
                logger.error(
                    "share_state_damaged group=%r topic_id=%s partition=%d reason=%r",
                    row.name, *key, str(error),
                )  # fmt: skip
                partition = SharePartition.starting_at(0)
                group.changed_partitions.add(key)
            rules = group.rules(share_row.topic_id)
            partition.extend_locks(now_ns, 0 if rules is None else rules.lock_ns)
            group.partitions[key] = partition
            group._note_name(key[0])
            group.follow_log(key)
        group.follow_topics(elapsed_ms)
        return group

    def row(self) -> GroupRow:
        """The group's row."""
        detail = orjson.dumps({"names": self.names, "gone": self.deleted_topics.to_json()}).decode()
        return GroupRow(
            self.group_id,
            self.name,
            "share",
            self.epoch,
            "",
            0,
            self.created_ms,
            self.empty_since_ms,
            detail,
            self.empty_elapsed_ms,
        )

    def settle(self, store: GroupStore) -> None:
        """Write the changed rows. Raises StorageError, DiskFullError."""
        if self.is_changed:
            store.put_groups([self.row()])
            self.is_changed = False
        if self.gone_members:
            store.delete_members((self.group_id, member_id) for member_id in self.gone_members)
            self.gone_members.clear()
        if self.changed_members:
            store.put_members(
                self.members[member_id].row(self.group_id) for member_id in self.changed_members
            )
            self.changed_members.clear()
        if self.gone_partitions:
            store.delete_share_states((self.group_id, *key) for key in self.gone_partitions)
            self.gone_partitions.clear()
        if self.changed_partitions:
            store.put_share_states(
                ShareRow(self.group_id, *key, codec.encode(self.partitions[key].spans))
                for key in self.changed_partitions
            )
            self.changed_partitions.clear()

    # ---- topics ----------------------------------------------------------------------------------

    def rules(self, topic_id: str) -> Rules | None:
        """The delivery rules of a topic; None: there is no such topic."""
        rules = self._rules.get(topic_id)
        if rules is None:
            topic = self._topics.by_id(topic_id)
            if topic is None:
                return None
            rules = self._rules[topic_id] = Rules.of(topic)
        return rules

    def follow_topics(self, elapsed_ms: int) -> bool:
        """Follow a change of the catalog: update the subscriptions and drop deleted topics, but for
        the partitions of those that can come back. Returns whether rules or subscriptions changed.
        """
        before, self._rules = self._rules, {}
        self.subscriptions.topics_changed()
        deleted = {
            topic_id
            for topic_id in {*self.names, *(key[0] for key in self.partitions)}
            if self._topics.by_id(topic_id) is None
        }
        kept = set(self._topics.kept())
        for key in [key for key in self.partitions if key[0] in deleted - kept]:
            self.forget_partition(key)
        for topic_id in deleted & self.names.keys():
            self.deleted_topics.add(self.names.pop(topic_id), elapsed_ms)
            self.is_changed = True
        update = any(self.rules(topic_id) != rules for topic_id, rules in before.items())
        for member in self.members.values():
            if self.subscriptions.apply(member, self.members):
                update = True
                self.first_sight(member, is_joining=False)
        return update

    def first_sight(self, member: ShareMember, *, is_joining: bool) -> None:
        """Set the start offset of the member's partitions that are new to the group.

        The offset_reset of the joining member decides. Partitions added to a known topic, and those
        of a topic created while the group waited for it or recreated, start at their beginning, so
        that no record is missed.
        """
        known = {topic_id for topic_id, _ in self.partitions}
        for key in member.partitions:
            if key in self.partitions:
                continue
            at_end = (
                is_joining
                and not member.resets_to_earliest
                and key[0] not in known
                and not self._is_recreated(key[0])
            )
            offset = (
                self._topics.end_offset(*key) if at_end else self._topics.beginning_offset(*key)
            )
            if offset is None and not at_end:
                offset = 0  # `follow_log` moves it to the log's beginning once that is known
            if offset is not None:
                self.put_partition(key, SharePartition.starting_at(offset))
        if self.deleted_topics:
            for key in member.partitions:
                topic = self._topics.by_id(key[0])
                if (
                    key in self.partitions
                    and topic is not None
                    and self.deleted_topics.forget(topic.name)
                ):
                    self.is_changed = True

    def _is_recreated(self, topic_id: str) -> bool:
        """True when a topic of the same name was deleted while the group used it."""
        topic = self._topics.by_id(topic_id)
        return topic is not None and topic.name in self.deleted_topics

    def _note_name(self, topic_id: str) -> None:
        topic = self._topics.by_id(topic_id)
        if topic is not None and topic_id not in self.names:
            self.names[topic_id] = topic.name
            self.is_changed = True

    def put_partition(self, key: Partition, partition: SharePartition) -> None:
        """Add or replace the state of a partition."""
        self.partitions[key] = partition
        self.changed_partitions.add(key)
        self.gone_partitions.discard(key)
        self._note_name(key[0])

    def forget_partition(self, key: Partition) -> None:
        """Drop the state of a partition, as if the group had never read it."""
        if self.partitions.pop(key, None) is not None:
            self.changed_partitions.discard(key)
            self.gone_partitions.add(key)

    # ---- members ---------------------------------------------------------------------------------

    def add(self, member: ShareMember) -> None:
        """Add a member, or replace one that joins again."""
        self.epoch += 1
        member.epoch = self.epoch
        self.members[member.member_id] = member
        self.empty_since_ms = 0
        self.is_changed = True
        self.changed_members.add(member.member_id)
        self.gone_members.discard(member.member_id)

    def remove(self, member: ShareMember, wall_ms: int, elapsed_ms: int) -> None:
        """Remove a member, whose records were released before."""
        del self.members[member.member_id]
        self.waiting.pop(member.member_id, None)
        self.epoch += 1
        self.is_changed = True
        self.changed_members.discard(member.member_id)
        self.gone_members.add(member.member_id)
        if not self.members:
            self.empty_since_ms, self.empty_elapsed_ms = wall_ms, elapsed_ms

    def sleepers(self, topic_ids: Collection[str]) -> Iterator[ShareMember]:
        """Waiting members that subscribe to one of these topics, the longest waiting first."""
        reads: dict[int, bool] = {}
        for member_id in self.waiting:
            member = self.members[member_id]
            key = id(member.partitions)  # one list for all members with the same subscription
            if key not in reads:
                reads[key] = any(topic_id in topic_ids for topic_id, _ in member.partitions)
            if reads[key]:
                yield member

    def release(self, member_id: str) -> dict[Partition, int]:
        """Free all records of a member. Returns the number of records by partition."""
        freed = {}
        for key, partition in self.partitions.items():
            count = partition.release_member(member_id)
            if count:
                freed[key] = count
                self.changed_partitions.add(key)
        return freed

    # ---- records ---------------------------------------------------------------------------------

    def room_of(self, member: ShareMember, count: int) -> int:
        """The number of records, at most `count`, that a member may still acquire."""
        if member.acquired_at_most + count > SHARE_ACQUIRED_MAX:
            member.acquired_at_most = sum(
                partition.acquired_by(member.member_id) for partition in self.partitions.values()
            )
        return max(0, min(count, SHARE_ACQUIRED_MAX - member.acquired_at_most))

    def acquire(
        self, member: ShareMember, count_max: int, runs_max: int, now_ns: int
    ) -> dict[str, Any]:
        """Acquire up to `count_max` records for a member, from its partitions in rotation. Returns
        the answer's fields.
        """
        acquired: list[list[Any]] = []
        dead: list[list[Any]] = []
        ends: list[list[Any]] = []
        lock_ns: list[int] = []
        left, total = self.room_of(member, count_max), len(member.partitions)
        given_max = left
        start = member.rotation
        for step in range(total):
            at = (start + step) % total
            key = member.partitions[at]
            found = self._current(key)
            if found is None:
                continue
            partition, end_offset, rules = found
            given = partition.acquire(
                member.member_id, left, end_offset, rules.delivery_limit, rules.locks_max, now_ns,
                rules.lock_ns,
                runs_max - len(acquired) - len(dead),
            )  # fmt: skip
            if given:
                self.changed_partitions.add(key)
                member.rotation = (at + 1) % total
                lock_ns.append(rules.lock_ns)
            elif (
                not lock_ns
                and partition.next_offset >= end_offset
                and partition.room(rules.locks_max)
                and len(ends) < runs_max
            ):
                ends.append([*key, partition.next_offset])
            for each in given:
                (dead if each.is_dead else acquired).append(
                    [*key, each.first, each.last, each.delivery_count]
                )
                left -= each.last - each.first + 1
            if not left or len(acquired) + len(dead) >= runs_max:
                break
        member.acquired_at_most += given_max - left
        if lock_ns:
            ends = []
        return {
            "acquired": acquired,
            "dead": dead,
            "ends": ends,
            "lock_ms": min(lock_ns, default=0) // 1_000_000,
        }

    def _current(self, key: Partition) -> tuple[SharePartition, int, Rules] | None:
        """A partition's state that follows its log, its end offset and its rules. None: nothing can
        be delivered now.
        """
        rules = self.rules(key[0])
        if rules is None or rules.is_paused:
            return None
        extent = self._topics.extent(*key)
        if extent is None:
            return None
        beginning, end_offset, high_watermark = extent
        partition = self.partitions.get(key)
        if partition is None:
            partition = SharePartition.starting_at(
                beginning if self._is_recreated(key[0]) else end_offset
            )
            self.put_partition(key, partition)
        if partition.follow_log(beginning, high_watermark):
            self.changed_partitions.add(key)
        return partition, end_offset, rules

    def follow_log(self, key: Partition) -> None:
        """Follow the log of a partition, if its bounds are known.

        A start calls it before the log grows, since records lost in a power failure and their
        successors have the same offsets.
        """
        extent = self._topics.extent(*key)
        if extent is not None and self.partitions[key].follow_log(
            extent.beginning, extent.high_watermark
        ):
            self.changed_partitions.add(key)

    def acknowledge(
        self, member: ShareMember, given: Iterable[Acknowledgement], runs_max: int, now_ns: int
    ) -> tuple[Refused, dict[Partition, int]]:
        """Apply the acknowledgements of a member. Returns the refused runs, and by partition the
        number of records that other members may acquire now. Above `runs_max` refused runs, those
        of one acknowledgement are reported as a single run from the first to the last.
        """
        refused: Refused = []
        freed: dict[Partition, int] = {}
        for topic_id, number, first, last, outcome in given:
            key = topic_id, number
            partition, rules = self.partitions.get(key), self.rules(topic_id)
            if partition is None or rules is None:
                refused.append(
                    [
                        *key,
                        first,
                        last,
                        int(ErrorCode.UNKNOWN_TOPIC),
                        "the topic was deleted, or the partition's state was reset",
                    ]
                )
                continue
            room, available = partition.room(rules.locks_max), partition.spans.available_count
            lost = partition.acknowledge(
                member.member_id, first, last, outcome, now_ns, rules.lock_ns
            )
            if outcome != "renew":
                done = last - first + 1 - sum(end - begin + 1 for begin, end in lost)
                member.acquired_at_most = max(0, member.acquired_at_most - done)
            if len(lost) > 1 and len(refused) + len(lost) > runs_max:
                lost = [(lost[0][0], lost[-1][1])]
            refused += [[*key, *run, int(ErrorCode.LOCK_LOST), NOT_LOCKED] for run in lost]
            if lost == [(first, last)]:
                continue
            self.changed_partitions.add(key)
            if outcome != "renew":
                more = partition.spans.available_count - available
                if more <= 0 and not room:
                    more = partition.room(rules.locks_max)
                if more > 0:
                    freed[key] = freed.get(key, 0) + more
        return refused, freed
