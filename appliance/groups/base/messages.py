"""What passes between the group service, the process that runs it, and its parts.

Owner: nobody; plain values and protocols.
Invariants: an `Answer.body` is JSON of at most the service's `answer_max` bytes. A topic id is its
    32 hexadecimal digits everywhere in this package.
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
    """A client's connection: the front, and the session's number there (with the front's generation
    in it).
    """

    front: int
    session: int


class Requester(NamedTuple):
    """Who has asked: where the answer goes."""

    front: int
    session: int
    correlation_id: int


@dataclass(slots=True)
class Answer:
    """The answer to one request. `code`: an ErrorCode's number; `body`: JSON."""

    requester: Requester
    code: int
    body: bytes
    is_undone: bool = False
    """The request was carried out, and a rollback has undone it: it may be handled again."""


class GroupFailure(Exception):
    """Work for one group has failed: the step is undone, and carried out again without that
    group.
    """

    def __init__(self, group: str, error: Exception) -> None:
        super().__init__(group, error)
        self.group = group
        self.error = error


@contextmanager
def work_for(group: str) -> Iterator[None]:
    """Raise GroupFailure for what fails inside, unless the whole database has failed."""
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
    """Something that a session did not ask for; it may be lost."""

    front: int
    session: int
    api: int
    body: bytes


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as groups see it. Delay logs are no topics here."""

    name: str
    topic_id: str
    partition_count: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    hand_overs: Mapping[int, HandOver] = field(default_factory=dict)
    """With hash slots: partition that got slots from others -> where each of those ended then."""


class TopicImage(Protocol):
    """The topics that exist now. The whole catalog must be in it before a service is made: a topic
    that it lacks is a topic that was deleted.
    """

    def by_name(self, name: str) -> TopicView | None: ...

    def by_id(self, topic_id: str) -> TopicView | None: ...

    def topics(self) -> Iterable[TopicView]: ...

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        """The offset behind the last record; None: not known yet (its worker is starting)."""

    def beginning_offset(self, topic_id: str, partition: int) -> int | None: ...

    def bounds(self, topic_id: str, partition: int) -> tuple[int, int] | None:
        """(beginning, end), of one moment, for less than each of them costs; None: not known."""


class GroupsOfAKind(Protocol):
    """Groups of another kind (share groups) in the same store, as the service uses them.

    The service checks a request's group name and that the name is not one of the other kind, and
    `groups.max` before a join; then it hands the request over. Rows are written when `settle` is
    called (from the store's commit) at the latest; answers are taken after the commit.
    """

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """GROUP_HEARTBEAT, SHARE_ACQUIRE, SHARE_ACKNOWLEDGE, DESCRIBE_GROUP, ALTER_GROUP_OFFSETS,
        FETCH_OFFSETS of a group of this kind.
        """

    def session_closed(
        self, session: SessionKey, now_ns: int, *, with_front: bool = False
    ) -> None: ...

    def topics_changed(self, now_ns: int, suspended: Container[str] = ()) -> None:
        """`suspended`: names of groups that have failed a moment ago; nothing is done for them.
        Raises GroupFailure.
        """

    def step(self, now_ns: int, suspended: Mapping[str, int]) -> None:
        """`suspended`: until when, by name. Raises GroupFailure."""

    def settle(self, suspended: Container[str] = ()) -> None:
        """Write the rows that have changed; called by the store before it commits. Raises
        GroupFailure, StorageError, DiskFullError.
        """

    def next_deadline_ns(self) -> int | None: ...

    def drain_answers(self) -> list[Answer]: ...

    def drain_pushes(self) -> list[Push]: ...

    def rolled_back(self, now_ns: int, error: TailraceError, failed: str | None = None) -> None: ...

    def has(self, group: str) -> bool: ...

    def count(self) -> int:
        """How many groups of this kind there are."""

    def summary(self, group: str) -> dict[str, Any]:
        """The group's row in LIST_GROUPS: group, kind, state, members, assignor, epoch."""

    def delete(self, group: str, now_ns: int) -> None:
        """Raises GroupNotEmptyError."""
