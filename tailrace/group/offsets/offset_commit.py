"""Commits of offsets, in order.

One commit request is in flight at a time. Offsets that are committed meanwhile wait, and are sent
together, the latest of each partition. So retries keep the order, and a program that commits each
record costs one request per response.

Owner: one Consumer, one thread.

Invariants:
- An offset is committed with the id of the topic that it was read in, so it never applies to a
  recreated topic.
- Within a consumer, a partition's older offset is never committed after a newer one.
- Each commit ends once, with an error or without. One that every response has put off ends with
  the last one's reason; "may be durable" is said only where a request has no response.
- Callbacks are called in the order of their commits, by `run_callbacks` only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import decode_answer
from tailrace.client.topics.offsets import Offsets, topic_id_of
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import (
    CommitFailedError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
    error_for_offset,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import JSON_MAX_BYTES, Api
from tailrace.protocol.json_messages import encode_json
from tailrace.protocol.session import Response

COMMITS_AT_ONCE = 4_096
PART_BYTES_MAX = JSON_MAX_BYTES // 2
NS_PER_MS = 1_000_000
RETRY_NS = 50 * NS_PER_MS
POLL_INTERVAL_NS = 10 * NS_PER_MS
"""The pause before a request that could not be sent is tried again."""
LOST_MEMBERSHIP = frozenset(
    {ErrorCode.PARTITION_NOT_OWNED, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_MEMBER}
)

ITEM_WITHOUT_ID = 5
"""The number of fields of an entry in COMMIT_OFFSETS version 1."""

Callback = Callable[[Offsets, TailraceError | None], Any]


def commit_error(code: ErrorCode, sentence: str) -> TailraceError:
    """The error of a refused commit."""
    return (
        CommitFailedError(sentence, code)
        if code in LOST_MEMBERSHIP
        else error_for_offset(code, sentence)
    )


def parts_of(items: Sequence[list[Any]]) -> list[list[list[Any]]]:
    """The items of each request: at most COMMITS_AT_ONCE, and PART_BYTES_MAX of JSON."""
    parts: list[list[list[Any]]] = []
    left = 0
    for item in items:
        size = len(encode_json(item)) + 1
        if size > left or len(parts[-1]) == COMMITS_AT_ONCE:
            parts.append([])
            left = PART_BYTES_MAX
        parts[-1].append(item)
        left -= size
    return parts


class Commit:
    """Offsets that are committed together."""

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
        """The topic id of each partition: of the record whose offset it is, else of the topic that
        is read; empty: the current topic of this name.
        """
        self.callback = callback
        self.deadline_ns = deadline_ns
        self.error: TailraceError | None = None
        self.is_done = False


class CommitQueue:
    """The commits of one consumer."""

    def __init__(
        self, connection: Connection, member_fields: Callable[[], dict[str, Any]],
        on_refused: Callable[[], None],
        topic_id: Callable[[TopicPartition], str] = lambda _: "",
    ) -> None:  # fmt: skip
        """`topic_id` is the id of the topic that a partition is read from, in hexadecimal; empty:
        it is not read. `member_fields` are the request's fields that identify the member; raises
        CommitFailedError if it is none. `on_refused` is called when the response says that this is
        not a member, or not the owner, any more.
        """
        self._connection = connection
        self._member_fields = member_fields
        self._on_refused = on_refused
        self._topic_id = topic_id
        self._waiting: deque[Commit] = deque()
        self._in_flight: list[Commit] = []
        self._parts: list[list[list[Any]]] = []
        """The requests that are still to be sent for the commits in flight."""
        self._refused: dict[TopicPartition, TailraceError] = {}
        self._put_off: dict[TopicPartition, TailraceError] = {}
        """Errors of partitions that the last response refused for now."""
        self._is_unknown = False
        """True if a request of the commits in flight was lost: it may have been carried out."""
        self._is_sent = False
        self._attempt = 0
        """The number of the request in flight. Responses to other requests are ignored."""
        self._send_at_ns = 0
        self.ended: deque[Commit] = deque()
        """Done, with callbacks that are not called yet."""

    def __bool__(self) -> bool:
        """True if a commit is not done."""
        return bool(self._waiting or self._in_flight)

    def add(self, offsets: Offsets, callback: Callback | None, timeout_ms: float) -> Commit:
        """Commit these offsets after all earlier ones."""
        topic_ids = {key: topic_id_of(key) or self._topic_id(key) for key in offsets}
        commit = Commit(
            offsets, topic_ids, callback, self._connection.now_ns() + int(timeout_ms * NS_PER_MS)
        )
        self._waiting.append(commit)
        return commit

    def poll(self, now_ns: int) -> None:
        """Send what is due, and end commits whose timeout has passed."""
        while self and not self._is_sent and now_ns >= self._send_at_ns:
            if not self._in_flight:
                self._collect()
            if not self._send():
                break
        if self and now_ns >= min(
            commit.deadline_ns for commit in (*self._in_flight, *self._waiting)
        ):
            self._end_late(now_ns)

    def due_ns(self) -> int | None:
        """The time of the next `poll` without input."""
        if not self:
            return None
        deadline_ns = min(commit.deadline_ns for commit in (*self._in_flight, *self._waiting))
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
            if any(
                topic_ids.get(key, topic_id) != topic_id
                for key, topic_id in self._waiting[0].topic_ids.items()
            ):
                break  # of a recreated topic: it goes into the next request
            commit = self._waiting.popleft()
            self._in_flight.append(commit)
            merged.update(commit.offsets)
            topic_ids.update(commit.topic_ids)
        items: list[list[Any]] = [
            [*key, int(one), one.leader_epoch, one.metadata, *_known(topic_ids.get(key))]
            for key, one in merged.items()
        ]
        self._parts = parts_of(items)
        self._refused = {}
        self._put_off = {}
        self._is_unknown = False

    def _send(self) -> bool:
        if not self._parts:
            self._finish(None)
            return True
        try:
            request = {
                **self._member_fields(),
                "offsets": self._for_version(self._parts[0]),
            }
        except CommitFailedError as error:
            self._finish(error)
            return True
        self._attempt += 1
        try:
            self._is_sent = self._connection.request(
                Api.COMMIT_OFFSETS,
                [encode_json(request)],
                partial(self._on_response, self._attempt),
            )
        except TailraceError as error:  # no request carries it
            self._finish(error)
            return True
        return self._is_sent

    def _for_version(self, items: list[list[Any]]) -> list[list[Any]]:
        """The items for the appliance's version of the API. Version 1 has no topic ids."""
        has_ids = any(len(item) > ITEM_WITHOUT_ID for item in items)
        if has_ids and self._connection.version(Api.COMMIT_OFFSETS) == 1:
            return [item[:ITEM_WITHOUT_ID] for item in items]
        return items

    def _on_response(self, attempt: int, response: Response | None) -> None:
        if attempt != self._attempt or not self._is_sent:
            return
        self._is_sent = False
        if response is None:
            self._is_unknown = True
            return  # the connection was lost: sent again
        self._put_off = {}
        if response.code is not ErrorCode.OK:
            if ERROR_TABLE[response.code].retriable:
                refusal = commit_error(response.code, response.detail())
                self._put_off = {
                    TopicPartition(topic, partition): refusal
                    for topic, partition, *_ in self._parts[0]
                }
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
                self._put_off[TopicPartition(topic, partition)] = commit_error(code, sentence)
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

    def _finish(
        self, error: TailraceError | None, put_off: Mapping[TopicPartition, TailraceError] = {}
    ) -> None:
        commits, self._in_flight, self._parts = self._in_flight, [], []
        for commit in commits:
            self._end(
                commit,
                next((put_off[key] for key in commit.offsets if key in put_off), None)
                or error
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
                "the commit has no response in time, and may be durable nevertheless"
            )
        else:
            late = NotReachableError(
                "no appliance answers at "
                f"{self._connection.address}{self._connection.peer_error_suffix()}"
            )
        for commit in [one for one in self._waiting if now_ns >= one.deadline_ns]:
            self._waiting.remove(commit)
            self._end(commit, late)
        if self._in_flight and all(now_ns >= one.deadline_ns for one in self._in_flight):
            is_known = self._connection.is_ready and not self._is_sent and not self._is_unknown
            self._is_sent = False
            self._finish(late, self._put_off if is_known else {})

    def run_callbacks(self) -> None:
        """Call the callbacks of commits that are done. An exception of one is logged."""
        while self.ended:
            commit = self.ended.popleft()
            assert commit.callback is not None
            try:
                commit.callback(commit.offsets, commit.error)
            except Exception:
                logger.exception("the callback of commit_async raised")


def _known(topic_id: str | None) -> tuple[str, ...]:
    return (topic_id,) if topic_id else ()
