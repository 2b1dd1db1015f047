"""Messages and interfaces between the group service, its agent and its parts.

Owner: none; plain values and protocols.
Invariants:
- An `Answer.body` is JSON of at most the service's `answer_max` bytes.
- A topic id is a str of 32 hexadecimal digits everywhere in this package.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tailrace.core.errors import DiskFullError, TailraceError
from tailrace.core.hash_slots import HandOver

Partition = tuple[str, int]
"""(topic id, partition)."""


class SessionKey(NamedTuple):
    """A client's connection: the front, and the session's number there, which includes the front's
    generation.
    """

    front: int
    session: int


class Requester(NamedTuple):
    """The origin of a request, and the destination of its answer."""

    front: int
    session: int
    correlation_id: int


@dataclass(slots=True)
class Answer:
    """The answer to one request. `code` is an ErrorCode's number, `body` JSON."""

    requester: Requester
    code: int
    body: bytes
    is_undone: bool = False
    """A rollback has undone the request, which may be handled again."""


class GroupFailure(Exception):
    """Work for one group has failed. The step is rolled back and redone without that group."""

    def __init__(self, group: str, error: Exception) -> None:
        super().__init__(group, error)
        self.group = group
        self.error = error


@contextmanager
def work_for(group: str) -> Iterator[None]:
    """Turn an exception of the block into a GroupFailure, unless the whole database has failed."""
    try:
        yield
    except (DiskFullError, GroupFailure):
        raise
    except Exception as error:
        if isinstance(error.__cause__, sqlite3.Error) and not isinstance(
            error.__cause__, sqlite3.IntegrityError
        ):
            raise
        raise GroupFailure(group, error) from error


class Push(NamedTuple):
    """An unsolicited message to a session; it may be lost."""

    front: int
    session: int
    api: int
    body: bytes


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as groups see it. Delay logs are excluded."""

    name: str
    topic_id: str
    partition_count: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    hand_overs: Mapping[int, HandOver] = field(default_factory=dict)
    """With hash slots: partition that received slots -> its source partitions with their log end
    offsets at the change.
    """


class LogExtent(NamedTuple):
    """The offsets of a partition's log at one time."""

    beginning: int
    end: int
    """The last stable offset, where groups read to."""
    high_watermark: int


class TopicImage(Protocol):
    """The existing topics.

    It must hold the whole catalog before a service is created, since the service treats a missing
    topic as deleted.
    """

    def by_name(self, name: str) -> TopicView | None: ...

    def by_id(self, topic_id: str) -> TopicView | None: ...

    def topics(self) -> Iterable[TopicView]: ...

    def kept(self) -> Iterable[str]:
        """Ids of deleted topics that can come back."""

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        """The end offset of committed records; None: not known yet (its worker is starting)."""

    def high_watermark(self, topic_id: str, partition: int) -> int | None:
        """The high watermark, which open transactions do not hold back; None: not known."""

    def beginning_offset(self, topic_id: str, partition: int) -> int | None: ...

    def extent(self, topic_id: str, partition: int) -> LogExtent | None:
        """All of them in one read; None: not known."""


class GroupsOfAKind(Protocol):
    """Groups of another kind (share groups) in the same store, as the service uses them.

    The service validates a request's group name and its kind, and before a join `groups.max`. Then
    it passes the request on. Rows are written at the latest in `settle`, which the store's commit
    calls. Answers are drained after the commit.
    """

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Handle GROUP_HEARTBEAT, SHARE_ACQUIRE, SHARE_ACKNOWLEDGE, DESCRIBE_GROUP,
        ALTER_GROUP_OFFSETS or FETCH_OFFSETS of a group of this kind.
        """

    def prepare(self, name: str, request: dict[str, Any]) -> Any:
        """Check acknowledgements of a transaction. Changes nothing. Raises TailraceError."""

    def apply(self, prepared: Any, now_ns: int) -> None:
        """Apply what `prepare` has returned in the same step."""

    def session_closed(
        self, session: SessionKey, now_ns: int, *, with_front: bool = False
    ) -> None: ...

    def topics_changed(self, now_ns: int, suspended: Container[str] = ()) -> None:
        """Follow a change of the catalog. `suspended`: names of groups to skip, since they failed
        recently. Raises GroupFailure.
        """

    def step(self, now_ns: int, suspended: Mapping[str, int]) -> None:
        """Run timers. `suspended`: group name -> end of its suspension. Raises GroupFailure."""

    def settle(self, suspended: Container[str] = ()) -> None:
        """Write the changed rows; the store calls this before it commits. Raises GroupFailure,
        StorageError, DiskFullError.
        """

    def next_deadline_ns(self) -> int | None: ...

    def drain_answers(self) -> list[Answer]: ...

    def drain_pushes(self) -> list[Push]: ...

    def rolled_back(self, now_ns: int, error: TailraceError, failed: str | None = None) -> None: ...

    def has(self, group: str) -> bool: ...

    def count(self) -> int:
        """Number of groups of this kind."""

    def summary(self, group: str) -> dict[str, Any]:
        """The group's row in LIST_GROUPS: group, kind, state, members, assignor, epoch."""

    def delete(self, group: str, now_ns: int) -> None:
        """Delete a group. Raises GroupNotEmptyError."""
