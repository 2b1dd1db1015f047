"""Requests that change committed offsets: commits of members and from outside, and changes by
operators.

Owner: the service.
Invariants:
- An entry is either applied or listed in the answer's `refused`.
- A malformed request changes nothing.
- A commit costs no read of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.members import Member, members_text
from appliance.groups.base.messages import Partition, TopicImage
from appliance.groups.base.offsets import Commit, OffsetBook, Refusal, entry_parts
from appliance.groups.base.request_validation import entries_in, epoch_in, member_in, shown
from appliance.groups.consumer import membership
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.prepared_offsets import (
    GroupOffsets,
    PreparedOffsets,
    prepared_rows,
)
from appliance.groups.consumer.start_offsets import StartOffsets
from appliance.groups.store.schema import OffsetRow
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import FencedMemberError, GroupNotEmptyError, UnknownMemberError


class PreparedCommit(NamedTuple):
    """The valid rows of a commit. Nothing is changed yet."""

    name: str
    rows: list[OffsetRow]
    refused: list[Refusal]


_NOTHING_REFUSED = b'{"refused":[]}'
_NO_MEMBER: Mapping[Partition, str] = {}


class OffsetRequests:
    """Handles COMMIT_OFFSETS and ALTER_GROUP_OFFSETS."""

    def __init__(
        self, table: GroupTable, book: OffsetBook, start_offsets: StartOffsets, topics: TopicImage,
        limits: GroupLimits, answer_max: int,
        wall_ms: Callable[[], int], elapsed_ms: Callable[[], int], waiting: PreparedOffsets,
    ) -> None:  # fmt: skip
        """`waiting`: the offsets of prepared transactions."""
        self._table = table
        self._book = book
        self._start_offsets = start_offsets
        self._topics = topics
        self._limits = limits
        self._answer_max = answer_max
        self._wall_ms = wall_ms
        self._elapsed_ms = elapsed_ms
        self._waiting = waiting

    def commit(self, name: str, request: dict[str, Any]) -> bytes:
        """Handle COMMIT_OFFSETS. Raises TailraceError when the whole request is refused."""
        prepared = self.prepare(name, request)
        self.apply(prepared)
        return self._answer(prepared.refused)

    def prepare(self, name: str, request: dict[str, Any]) -> PreparedCommit:
        """Check a commit against the group's members at this moment. Changes nothing. Raises
        TailraceError when the whole request is refused.
        """
        entries = entries_in(request)
        group = self._table.get(name)
        member, epoch = None, -1
        if request.get("member_id") is not None:
            member, epoch = self._member(group, name, request)
        judge = self._judge(name, {} if group is None else group.owners, member, epoch)
        rows = [row for entry in entries if (row := judge.row(0, entry)) is not None]
        if group is None and rows:
            self._table.check_room(name)
        return PreparedCommit(name, rows, judge.refused)

    def apply(self, prepared: PreparedCommit) -> None:
        """Buffer the rows of a prepared commit of the same step. Raises nothing."""
        self._keep(self._table.get(prepared.name), prepared.name, prepared.rows)

    def reserve(self, prepared: PreparedCommit) -> GroupOffsets:
        """The offsets of a prepared transaction, to store with it. Creates the group if it does not
        exist, so that its name is not given to a share group.
        """
        if prepared.rows and self._table.get(prepared.name) is None:
            self._table.create(prepared.name)
        return prepared_rows(prepared.name, prepared.rows)

    def apply_reserved(self, commit: GroupOffsets) -> None:
        """Buffer the offsets of a prepared transaction that is committed in this step. Its members
        were checked then. Those of deleted topics are left out.
        """
        rows = [
            OffsetRow(0, *one, self._wall_ms(), self._elapsed_ms())
            for one in commit.offsets
            if (topic := self._topics.by_id(one.topic_id)) is not None
            and one.partition < topic.partition_count
        ]
        self._keep(self._table.get(commit.group), commit.group, rows)

    def _member(
        self, group: ConsumerGroup | None, name: str, request: dict[str, Any]
    ) -> tuple[Member, int]:
        member_id, epoch = member_in(request), epoch_in(request)
        if group is None:
            raise UnknownMemberError(f"there is no group {shown(name)}")
        member = membership.known_member(group, request, member_id)
        if epoch > member.epoch:
            raise FencedMemberError(
                f"the commit is of member epoch {epoch}, the member's is {member.epoch}: it has "
                "joined again since"
            )
        return member, epoch

    def _judge(
        self, name: str, owners: Mapping[Partition, str], member: Member | None, epoch: int
    ) -> Commit:
        return Commit(
            self._topics, self._limits, owners, member, epoch, self._wall_ms(), self._elapsed_ms(),
            partial(self._waiting.sentence, name),
        )  # fmt: skip

    def _keep(self, group: ConsumerGroup | None, name: str, rows: list[OffsetRow]) -> None:
        """Buffer the rows. Creates the group if it does not exist; its room was checked."""
        if not rows:
            return
        if group is None:
            group = self._table.create(name)
        self._table.change(group)
        self._start_offsets.committed(group, rows)
        for row in rows:
            self._book.put(row._replace(group_id=group.group_id))

    def _answer(self, refused: list[Refusal]) -> bytes:
        if not refused:
            return _NOTHING_REFUSED
        body = orjson.dumps({"refused": refused})
        if len(body) > self._answer_max:  # the codes alone name the errors
            body = orjson.dumps({"refused": [[*refusal[:3], ""] for refusal in refused]})
        return body

    def alter(self, name: str, request: dict[str, Any]) -> bytes:
        """Handle ALTER_GROUP_OFFSETS: an operator sets or deletes offsets. Raises
        GroupNotEmptyError when the group has members.
        """
        group = self._table.get(name)
        if group is not None and group.members:
            raise GroupNotEmptyError(
                f"the group {name} has {members_text(group.members)}; none of its offsets were "
                "changed"
            )
        judge = self._judge(name, _NO_MEMBER, None, -1)
        rows: list[OffsetRow] = []
        gone: list[Partition] = []
        refused: list[Refusal] = []
        for entry in entries_in(request):
            topic, partition, offset, metadata = _alteration(entry)
            found = self._topics.by_name(topic)
            if offset is not None:
                row = judge.row(0, [topic, partition, offset, -1, metadata])
                if row is not None:
                    rows.append(row)
            elif found is None:
                refused.append(
                    [
                        topic,
                        partition,
                        int(ErrorCode.UNKNOWN_TOPIC),
                        f"there is no topic {shown(topic)}",
                    ]
                )
            elif sentence := self._waiting.sentence(name, (found.topic_id, partition)):
                code = int(ErrorCode.CONCURRENT_TRANSACTIONS)
                refused.append([topic, partition, code, sentence])
            else:
                gone.append((found.topic_id, partition))
        if group is None and rows:
            self._table.check_room(name)
        self._keep(group, name, rows)
        if group is not None and gone:
            self._table.change(group)
            for topic_id, partition in gone:
                self._book.delete(group.group_id, topic_id, partition)
        return self._answer(refused + judge.refused)


def _alteration(entry: Any) -> tuple[str, int, int | None, str]:
    """Parse an entry [topic, partition, offset or null, metadata?]. Raises InvalidRequestError."""
    if isinstance(entry, list) and 3 <= len(entry) <= 4:
        metadata = entry[3] if len(entry) == 4 else ""
        topic, partition, offset, _, text, _ = entry_parts(
            [*entry[:2], 0 if entry[2] is None else entry[2], -1, metadata]
        )
        return topic, partition, None if entry[2] is None else offset, text
    topic, partition, offset, _, text, _ = entry_parts(None)  # raises, and describes an entry
    return topic, partition, offset, text
