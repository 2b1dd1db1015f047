"""Committed offsets: validation of commits, and the write buffer of the current step.

Owner: the service. Offsets are stored only in the store. `OffsetBook` buffers those of the current
    step, so that a step writes each of them once.
Invariants:
- Each partition of a commit is checked against the member's ownership at that moment.
- An owned partition's offset is changed only by its owner, at the epoch of the assignment or later.
- The offset of a partition without an owner may be changed from outside the group.
- An offset lies between 0 and the log end offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.groups.base.limits import OFFSET_MAX, GroupLimits
from appliance.groups.base.members import Member
from appliance.groups.base.messages import Partition, TopicImage, TopicView
from appliance.groups.base.request_validation import shown
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import OffsetRow
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError

Refusal = list[Any]
"""[topic, partition, code, sentence]."""


class OffsetBook:
    """The committed offsets of all groups."""

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._unwritten: dict[tuple[int, str, int], OffsetRow] = {}

    def put(self, row: OffsetRow) -> None:
        self._unwritten[row[:3]] = row

    def delete(self, group_id: int, topic_id: str, partition: int) -> None:
        self._unwritten.pop((group_id, topic_id, partition), None)
        self._store.delete_offsets([(group_id, topic_id, partition)])

    def get(self, group_id: int, topic_id: str, partition: int) -> OffsetRow | None:
        found = self._unwritten.get((group_id, topic_id, partition))
        return self._store.offset(group_id, topic_id, partition) if found is None else found

    def has_any(self, group_id: int, topic_id: str) -> bool:
        """True when the group has offsets in the topic."""
        self.settle()
        return self._store.has_offsets(group_id, topic_id)

    def topics_of(self, group_id: int) -> list[str]:
        """The ids of the topics that the group has offsets in."""
        self.settle()
        return self._store.offset_topics(group_id)

    def of_topic(self, group_id: int, topic_id: str, behind: int = -1) -> dict[int, OffsetRow]:
        """The topic's rows by partition, ascending, of partitions above `behind`."""
        self.settle()
        return {
            row.partition: row for row in self._store.offsets_of_topic(group_id, topic_id, behind)
        }

    def settle(self) -> None:
        """Write the buffered rows. Raises StorageError, DiskFullError."""
        if self._unwritten:
            self._store.put_offsets(self._unwritten.values())
            self._unwritten = {}

    def forget(self) -> None:
        """Drop the buffered rows after a rollback."""
        self._unwritten = {}


class Commit:
    """Validates the offsets of one request, one by one."""

    def __init__(
        self,
        topics: TopicImage,
        limits: GroupLimits,
        owners: Mapping[Partition, str],
        member: Member | None,
        member_epoch: int,
        now_ms: int,
        elapsed_ms: int,
        waits: Callable[[Partition], str | None] = lambda _: None,
    ) -> None:
        """`member`: None for a commit from outside the group. `now_ms`: wall clock. `elapsed_ms`:
        elapsed time. `waits`: the reason why the offset of a partition cannot be changed now.
        """
        self._topics = topics
        self._limits = limits
        self._owners = owners
        self._member = member
        self._member_epoch = member_epoch
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._waits = waits
        self.refused: list[Refusal] = []

    def row(self, group_id: int, entry: Any) -> OffsetRow | None:
        """The row of one entry [topic, partition, offset, leader epoch?, metadata?, topic id?];
        None: refused, and added to `refused`. Raises InvalidRequestError.
        """
        topic, partition, offset, leader_epoch, metadata, topic_id = entry_parts(entry)
        found = self._topics.by_id(topic_id) if topic_id else self._topics.by_name(topic)
        if found is None or found.name != topic:
            if topic_id and self._topics.by_name(topic) is not None:
                sentence = (
                    f"the offset is of a deleted topic {shown(topic)}; the topic that has "
                    "the name now was created later, with another id"
                )
                self._refuse(topic, partition, ErrorCode.UNKNOWN_TOPIC_ID, sentence)
            else:
                self._refuse(
                    topic, partition, ErrorCode.UNKNOWN_TOPIC, f"there is no topic {shown(topic)}"
                )
            return None
        if not 0 <= partition < found.partition_count:
            last = found.partition_count - 1
            self._refuse(
                topic,
                partition,
                ErrorCode.PARTITION_OUT_OF_RANGE,
                f"{topic} has the partitions 0 to {last}",
            )
            return None
        if (reason := self._waits((found.topic_id, partition))) is not None:
            self._refuse(topic, partition, ErrorCode.CONCURRENT_TRANSACTIONS, reason)
            return None
        if self._is_owner(topic, (found.topic_id, partition)) and self._is_in_log(
            found, partition, offset, metadata
        ):
            return OffsetRow(
                group_id,
                found.topic_id,
                partition,
                offset,
                leader_epoch,
                metadata,
                self._now_ms,
                self._elapsed_ms,
            )
        return None

    def _is_in_log(self, topic: TopicView, partition: int, offset: int, metadata: str) -> bool:
        end = self._topics.high_watermark(topic.topic_id, partition)
        most = self._limits.metadata_bytes_max
        where = f"{topic.name}-{partition}"
        if offset < 0:
            self._refuse(
                topic.name,
                partition,
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"the offset {offset} is negative",
            )
        elif end is None:
            self._refuse(
                topic.name, partition, ErrorCode.NOT_READY, f"the end of {where} is not known yet"
            )
        elif offset > end:
            self._refuse(
                topic.name,
                partition,
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"the offset {offset} lies beyond the end of {where}, {end}",
            )
        elif len(metadata) * 4 > most and len(metadata.encode()) > most:
            self._refuse(
                topic.name,
                partition,
                ErrorCode.INVALID_REQUEST,
                f"the metadata has more than {most} bytes",
            )
        else:
            return True
        return False

    def _is_owner(self, topic: str, partition: Partition) -> bool:
        owner = self._owners.get(partition)
        member = self._member
        if member is None:
            if owner is None:
                return True
            self._refuse(
                topic,
                partition[1],
                ErrorCode.PARTITION_NOT_OWNED,
                f"{topic}-{partition[1]} is owned by a member of the group, {owner}",
            )
            return False
        given = member.epoch_of(partition)
        if given is not None and given <= self._member_epoch:
            return True
        if self._member_epoch < member.epoch:
            self._refuse(
                topic, partition[1], ErrorCode.FENCED_MEMBER,
                f"the commit of {topic}-{partition[1]} is of member epoch {self._member_epoch}, "
                f"and the member has lost the partition since; its epoch is {member.epoch}",
            )  # fmt: skip
        else:
            now = "no member" if owner is None else f"member {owner}"
            self._refuse(
                topic,
                partition[1],
                ErrorCode.PARTITION_NOT_OWNED,
                f"{topic}-{partition[1]} is owned by {now}, not by this one",
            )
        return False

    def _refuse(self, topic: str, partition: int, code: ErrorCode, sentence: str) -> None:
        self.refused.append([topic, partition, int(code), sentence])


def entry_parts(entry: Any) -> tuple[str, int, int, int, str, str]:
    """Parse an entry into topic, partition, offset, leader epoch (-1: none), metadata and topic id
    (empty: the topic of that name). Raises InvalidRequestError.
    """
    if isinstance(entry, list) and 3 <= len(entry) <= 6:
        topic, partition, offset = entry[:3]
        leader_epoch = entry[3] if len(entry) > 3 and entry[3] is not None else -1
        metadata = entry[4] if len(entry) > 4 and entry[4] is not None else ""
        topic_id = entry[5] if len(entry) > 5 and entry[5] is not None else ""
        if (
            type(topic) is str
            and type(topic_id) is str
            and type(partition) is int
            and type(offset) is int
            and type(leader_epoch) is int
            and type(metadata) is str
            and -OFFSET_MAX <= partition <= OFFSET_MAX
            and -OFFSET_MAX <= offset <= OFFSET_MAX
            and -1 <= leader_epoch <= OFFSET_MAX
        ):
            return topic, partition, offset, leader_epoch, metadata, topic_id
    raise InvalidRequestError(
        "each entry of `offsets` is [topic, partition, offset, leader epoch or -1, metadata text, "
        "topic id or null]"
    )
