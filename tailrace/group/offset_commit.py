"""Committed offsets: committing them in order, and asking for them.

One request of commits is under way at a time; what is committed meanwhile waits and goes out
together, the latest offset of each partition. So the order is kept whatever is sent again, and a
program that commits each record costs one request for each answer.

Owner: one Consumer, one thread.
Invariants: an offset is committed with the id of the topic that it was read in, so that it says
    nothing of one that was made again under the name; of a partition no older offset is committed
    after a newer one of the same consumer; every commit ends once, with its error or without;
    callbacks are made in the order of their commits, by `run_callbacks` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from tailrace.client.connection import Connection
from tailrace.client.steps import Call, Steps, decode_answer
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import (
    CommitFailedError,
    InvalidRequestError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
    error_for,
    error_for_offset,
)
from tailrace.core.log import logger
from tailrace.core.records import OffsetAndMetadata
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import INT64_MAX, by_partition, whole
from tailrace.fetch.fetcher import PartitionPosition
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

COMMITS_AT_ONCE = 4_096
ASKED_AT_ONCE = 2_000
NS_PER_MS = 1_000_000
RETRY_NS = 50 * NS_PER_MS
POLL_INTERVAL_NS = 10 * NS_PER_MS
"""What cannot be sent now is tried again after so long, or when something comes."""
LOST_MEMBERSHIP = frozenset(
    {ErrorCode.PARTITION_NOT_OWNED, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_MEMBER}
)

ITEM_WITHOUT_ID = 5
"""Fields of an entry of COMMIT_OFFSETS of version 1."""

Offsets = dict[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Offsets, TailraceError | None], Any]


def offsets_of(given: Any) -> Offsets:
    """Offsets to commit, as users give them. Raises InvalidRequestError."""
    found: Offsets = {}
    for key, value in by_partition("offsets", given, "{TopicPartition(topic, 0): offset}").items():
        label = f"the offset of {key.topic}-{key.partition}"
        if isinstance(value, OffsetAndMetadata):
            offset, metadata, epoch = int(value), value.metadata, value.leader_epoch
        elif hasattr(value, "offset") and hasattr(value, "metadata"):  # kafka-python's
            offset, metadata, epoch = (
                value.offset,
                value.metadata,
                getattr(value, "leader_epoch", -1),
            )
        else:
            offset, metadata, epoch = value, "", -1
        if not isinstance(metadata, str):
            raise InvalidRequestError(
                f"the metadata of {key.topic}-{key.partition} is {metadata!r:.100}; it takes text"
            )
        found[key] = OffsetAndMetadata(
            whole(label, offset, 0), metadata, whole("leader_epoch", epoch, -1, INT64_MAX)
        )
    return found


def commit_error(code: ErrorCode, sentence: str) -> TailraceError:
    """What a refused commit raises."""
    return (
        CommitFailedError(sentence, code)
        if code in LOST_MEMBERSHIP
        else error_for_offset(code, sentence)
    )


class Commit:
    """Offsets that are to be committed together."""

    __slots__ = ("callback", "deadline_ns", "error", "is_done", "offsets", "topic_ids")

    def __init__(
        self,
        offsets: Offsets,
        topic_ids: Mapping[TopicPartition, str],
        callback: Callback | None,
        deadline_ns: int,
    ) -> None:
        self.offsets = offsets
        self.topic_ids = topic_ids
        """Of those that are read now: the topic that is meant."""
        self.callback = callback
        self.deadline_ns = deadline_ns
        self.error: TailraceError | None = None
        self.is_done = False


class CommitQueue:
    """See the module's docstring."""

    def __init__(
        self, connection: Connection, member_fields: Callable[[], dict[str, Any]],
        on_refused: Callable[[], None],
        topic_id: Callable[[TopicPartition], str] = lambda _: "",
    ) -> None:  # fmt: skip
        """`topic_id`: the id of the topic that a partition is read of, in hexadecimal; empty: it is
        not read. `member_fields`: the request's fields that say which member commits; raises
        CommitFailedError when there is none. `on_refused`: called when the appliance says that this
        is no member, or not the owner, any more.
        """
        self._connection = connection
        self._member_fields = member_fields
        self._on_refused = on_refused
        self._topic_id = topic_id
        self._waiting: deque[Commit] = deque()
        self._under_way: list[Commit] = []
        self._parts: list[list[list[Any]]] = []
        """What is still to be sent of those under way, one request each."""
        self._refused: dict[TopicPartition, TailraceError] = {}
        self._is_sent = False
        self._attempt = 0
        """Which request is under way: an answer to another one is not for us."""
        self._send_at_ns = 0
        self.ended: deque[Commit] = deque()
        """Done, and their callbacks not made."""

    def __bool__(self) -> bool:
        """Whether any commit has not ended."""
        return bool(self._waiting or self._under_way)

    def add(self, offsets: Offsets, callback: Callback | None, timeout_ms: float) -> Commit:
        """Commit these, after all that were added before."""
        topic_ids = {key: topic_id for key in offsets if (topic_id := self._topic_id(key))}
        commit = Commit(
            offsets, topic_ids, callback, self._connection.now_ns() + int(timeout_ms * NS_PER_MS)
        )
        self._waiting.append(commit)
        return commit

    def poll(self, now_ns: int) -> None:
        """Send what can be sent, and end what has had no answer in time."""
        while self and not self._is_sent and now_ns >= self._send_at_ns:
            if not self._under_way:
                self._collect()
            if not self._send():
                break
        if self and now_ns >= min(
            commit.deadline_ns for commit in (*self._under_way, *self._waiting)
        ):
            self._end_late(now_ns)

    def due_ns(self) -> int | None:
        """When `poll` has something to do though nothing comes."""
        if not self:
            return None
        deadline_ns = min(commit.deadline_ns for commit in (*self._under_way, *self._waiting))
        return (
            deadline_ns
            if self._is_sent
            else min(
                deadline_ns, max(self._send_at_ns, self._connection.now_ns() + POLL_INTERVAL_NS)
            )
        )

    def _collect(self) -> None:
        merged: Offsets = {}
        topic_ids: dict[TopicPartition, str] = {}
        while self._waiting and (
            not merged or len(merged) + len(self._waiting[0].offsets) <= COMMITS_AT_ONCE
        ):
            commit = self._waiting.popleft()
            self._under_way.append(commit)
            merged.update(commit.offsets)
            topic_ids.update(commit.topic_ids)
        items: list[list[Any]] = [
            [*key, int(one), one.leader_epoch, one.metadata, *_known(topic_ids.get(key))]
            for key, one in merged.items()
        ]
        self._parts = [
            items[start : start + COMMITS_AT_ONCE]
            for start in range(0, len(items), COMMITS_AT_ONCE)
        ]
        self._refused = {}

    def _send(self) -> bool:
        if not self._parts:
            self._finish(None)
            return True
        try:
            request = {**self._member_fields(), "offsets": self._spoken(self._parts[0])}
        except CommitFailedError as error:
            self._finish(error)
            return True
        self._attempt += 1
        self._is_sent = self._connection.request(
            Api.COMMIT_OFFSETS,
            [requests.encode_json(request)],
            partial(self._on_answer, self._attempt),
        )
        return self._is_sent

    def _spoken(self, items: list[list[Any]]) -> list[list[Any]]:
        """The same, as the appliance understands it: one of an earlier version knows topics by
        their names only.
        """
        has_ids = any(len(item) > ITEM_WITHOUT_ID for item in items)
        if has_ids and self._connection.version(Api.COMMIT_OFFSETS) == 1:
            return [item[:ITEM_WITHOUT_ID] for item in items]
        return items

    def _on_answer(self, attempt: int, response: Response | None) -> None:
        if attempt != self._attempt or not self._is_sent:
            return
        self._is_sent = False
        if response is None:
            return  # the connection was lost: sent again
        if response.code is not ErrorCode.OK:
            if ERROR_TABLE[response.code].retriable:
                self._send_at_ns = self._connection.now_ns() + RETRY_NS
                return
            if response.code in LOST_MEMBERSHIP:
                self._on_refused()
            self._finish(commit_error(response.code, response.detail()))
            return
        rejected = []
        for topic, partition, number, sentence in decode_answer(Api.COMMIT_OFFSETS, response)[
            "refused"
        ]:
            code = code_of(number)
            if ERROR_TABLE[code].retriable:
                rejected += [item for item in self._parts[0] if item[:2] == [topic, partition]]
            else:
                self._refused[TopicPartition(topic, partition)] = commit_error(code, sentence)
        if rejected:
            self._parts[0] = rejected
            self._send_at_ns = self._connection.now_ns() + RETRY_NS
            return
        if any(error.code in LOST_MEMBERSHIP for error in self._refused.values()):
            self._on_refused()
        del self._parts[0]
        if not self._parts:
            self._finish(None)

    def _finish(self, error: TailraceError | None) -> None:
        commits, self._under_way, self._parts = self._under_way, [], []
        for commit in commits:
            self._end(
                commit,
                error
                or next(
                    (self._refused[key] for key in commit.offsets if key in self._refused), None
                ),
            )

    def _end(self, commit: Commit, error: TailraceError | None) -> None:
        commit.error = error
        commit.is_done = True
        if commit.callback is not None:
            self.ended.append(commit)

    def _end_late(self, now_ns: int) -> None:
        late: TailraceError
        if self._connection.is_ready:
            late = RequestTimeoutError(
                "the commit got no answer in time; it may have been made all the same"
            )
        else:
            late = NotReachableError(
                "no appliance answers at "
                f"{self._connection.address}{self._connection.peer_error_suffix()}"
            )
        for commit in [one for one in self._waiting if now_ns >= one.deadline_ns]:
            self._waiting.remove(commit)
            self._end(commit, late)
        if self._under_way and all(now_ns >= one.deadline_ns for one in self._under_way):
            self._is_sent = False
            self._finish(late)

    def run_callbacks(self) -> None:
        """Make the callbacks of what has ended. What one raises is logged."""
        while self.ended:
            commit = self.ended.popleft()
            assert commit.callback is not None
            try:
                commit.callback(commit.offsets, commit.error)
            except Exception:
                logger.exception("the callback of commit_async raised")


def _known(topic_id: str | None) -> tuple[str, ...]:
    return () if topic_id is None else (topic_id,)


def asked_of(connection: Connection, cursors: Iterable[PartitionPosition]) -> list[list[Any]]:
    """Partitions as FETCH_OFFSETS asks for them: of the topics that the cursors read, where the
    appliance knows topics by their ids.
    """
    has_ids = connection.version(Api.FETCH_OFFSETS) > 1
    return [
        [*cursor.key, cursor.info.topic_id.hex()] if has_ids else [*cursor.key]
        for cursor in cursors
    ]


def fetch_committed(
    call: Call, group: str, keys: Iterable[TopicPartition], *, is_to_begin: bool = False
) -> Steps[dict[TopicPartition, OffsetAndMetadata | None]]:
    """What the group has committed of each partition; None: nothing. `is_to_begin`: see
    `starts_in`. `call`: a request and its answer. Raises what the appliance says.
    """
    requested = list(dict.fromkeys(keys))
    found: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(requested)
    for start in range(0, len(requested), ASKED_AT_ONCE):
        after: Any = None
        while True:
            request = {
                "group": group,
                "partitions": [list(key) for key in requested[start : start + ASKED_AT_ONCE]],
                "after": after,
            }
            try:
                answer = yield from call(Api.FETCH_OFFSETS, request)
            except TailraceError as error:
                if error.code is ErrorCode.UNKNOWN_GROUP:
                    return found
                raise
            found.update(starts_in(answer) if is_to_begin else committed_in(answer))
            after = answer.get("next")
            if after is None:
                break
    return found


NOT_COMMITTED_MS = -1
"""The time of an offset that nobody has committed: a consumer that would begin at the end begins
there, and misses nothing of a partition that was added.
"""


def committed_in(answer: Mapping[str, Any]) -> Offsets:
    """The offsets of one page of FETCH_OFFSETS; partitions of which nothing is committed are left
    out.
    """
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata, epoch)
        for topic, partition, offset, epoch, metadata, committed_ms, *_ in answer["offsets"]
        if offset >= 0 and committed_ms != NOT_COMMITTED_MS
    }


def starts_in(answer: Mapping[str, Any]) -> Offsets:
    """The same; and where nothing is committed, where a consumer begins that would begin at the
    end, if the appliance knows better.
    """
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata, epoch)
        for topic, partition, offset, epoch, metadata, *_ in answer["offsets"]
        if offset >= 0
    }


class PositionLookup:
    """Where partitions that have just been assigned begin: asked for without waiting, so that
    others go on.
    """

    def __init__(
        self,
        connection: Connection,
        group: str,
        on_found: Callable[[TopicPartition, OffsetAndMetadata], None],
        *,
        begins_at_end: bool,
    ) -> None:
        """`on_found`: told of each committed offset. `begins_at_end`: whether `starts_in` counts
        where nothing is committed.
        """
        self._connection = connection
        self._group = group
        self._on_found = on_found
        self._begins_at_end = begins_at_end
        self._cursors: dict[TopicPartition, PartitionPosition] = {}
        self._is_sent = False
        self._ask_at_ns = 0
        self.error: TailraceError | None = None
        """Why it does not come about; for poll to raise."""

    def __bool__(self) -> bool:
        return bool(self._cursors)

    def add(self, cursors: Iterable[PartitionPosition]) -> None:
        """Find out where these begin, unless they are moved before."""
        for cursor in cursors:
            cursor.from_committed = True
            self._cursors[cursor.key] = cursor

    def due_ns(self) -> int | None:
        """When `poll` has something to do though nothing comes."""
        return (
            None
            if self._is_sent or not self._cursors
            else max(self._ask_at_ns, self._connection.now_ns() + POLL_INTERVAL_NS)
        )

    def poll(self, now_ns: int) -> None:
        """Ask, if anything is to be asked."""
        if self._is_sent or now_ns < self._ask_at_ns:
            return
        for key in [key for key, cursor in self._cursors.items() if not cursor.from_committed]:
            del self._cursors[key]
        asked = dict(list(self._cursors.items())[:ASKED_AT_ONCE])
        if not asked:
            return
        request = {
            "group": self._group,
            "partitions": asked_of(self._connection, asked.values()),
            "after": None,
        }
        self._is_sent = self._connection.request(
            Api.FETCH_OFFSETS,
            [requests.encode_json(request)],
            lambda response: self._on_answer(asked, response),
        )

    def _on_answer(
        self, asked: dict[TopicPartition, PartitionPosition], response: Response | None
    ) -> None:
        self._is_sent = False
        if response is None:
            return
        found: Offsets = {}
        known: Collection[TopicPartition] = asked
        if response.code is ErrorCode.OK:
            answer = decode_answer(Api.FETCH_OFFSETS, response)
            found = starts_in(answer) if self._begins_at_end else committed_in(answer)
            if answer.get("next") is not None:  # the others are asked for again
                known = [
                    key
                    for topic, partition, *_ in answer["offsets"]
                    if (key := TopicPartition(topic, partition)) in asked
                ]
        elif response.code is not ErrorCode.UNKNOWN_GROUP:
            self._ask_at_ns = self._connection.now_ns() + RETRY_NS
            if not ERROR_TABLE[response.code].retriable:
                self.error = error_for(response.code, response.detail())
            return
        for key in known:
            self.place(asked[key], found.get(key))
            if self._cursors.get(key) is asked[key]:
                del self._cursors[key]

    def place(self, cursor: PartitionPosition, committed: OffsetAndMetadata | None) -> None:
        """The cursor begins at what `starts_in` has said, unless it has been moved meanwhile; None:
        where auto_offset_reset says.
        """
        if not cursor.from_committed:
            return
        if committed is None:
            cursor.from_committed = False
            return
        cursor.seek(int(committed))
        cursor.leader_epoch = cursor.taken_epoch = committed.leader_epoch
        self._on_found(cursor.key, committed)
