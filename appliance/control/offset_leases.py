"""Retention leases: readers keep a partition's records from an offset on from retention for a time.

A lease is on the disk before it is sent to the flusher, and its reader is answered when the flusher
has it. From then on retention keeps its records, also after a kill of any process. A restarted
flusher gets every lease before it may remove anything (`workers.log.retention.leases`).

Owner: the controller; a table beside the catalog's.
Invariants:
- A lease belongs to a partition of one topic and is deleted with it.
- At most PER_PARTITION_MAX leases a partition and MAX in all, each for at most LEASE_MAX_MS of
  elapsed time (`shm.runtime.elapsed_time`). A user has at most a half of either.
- A lease is its user's, which its front names in `user`: another user's of the same name is another
  lease. It is kept as USER/NAME. Without users it is NAME.
- A request is carried out completely or refused completely.

Crash: SQLite recovers the table. A lease on the disk that was not sent goes to the flusher with the
next feed; its reader was not answered.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import orjson

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.catalog.transaction import Database, Transaction
from shm.queues.lane import LaneWriter
from shm.runtime.elapsed_time import MARK_EVERY_MS, US_PER_MS, ElapsedTime, Mark
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    DiskFullError,
    InvalidRequestError,
    StorageError,
    TailraceError,
    UnknownTopicIdError,
)

LEASE_MAX_MS = 86_400_000
NAME_MAX = 100
PER_PARTITION_MAX = 64
MAX = 16_384
PER_REQUEST_MAX = 4_096
WAITING_MAX = 2 * PER_REQUEST_MAX
"""Most leases that wait for a flusher."""
ANSWER_TIMEOUT_NS = 20_000_000_000
_TABLE = """
CREATE TABLE IF NOT EXISTS leases (
    topic_id BLOB NOT NULL REFERENCES topics ON DELETE CASCADE, partition INTEGER NOT NULL,
    name TEXT NOT NULL, first_offset INTEGER NOT NULL, ttl_ms INTEGER NOT NULL,
    ends_us INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition, name)
) STRICT;
"""


class Way(Protocol):
    """The way to a flusher (`appliance.control.publishing.lane_sender.LaneSender`): its lane, and
    what does not fit that yet.
    """

    @property
    def index(self) -> int: ...
    @property
    def lane(self) -> LaneWriter: ...
    @property
    def queue(self) -> Sized: ...


AWay = TypeVar("AWay", bound=Way)


@dataclass(slots=True)
class _Waiting(Generic[AWay]):
    """A request whose leases are on the disk, and on their way to their flushers."""

    requester: Any
    rows: list[PartitionRow]
    ways: list[AWay]
    is_list: bool
    deadline_ns: int


class OffsetLeases(Generic[AWay]):
    """See the module's docstring."""

    def __init__(
        self,
        database: Database,
        monotonic_ns: Callable[[], int],
        existing: Callable[[dict[str, Any]], Topic],
        flusher_of: Callable[[PartitionRow], AWay],
        put: Callable[[AWay, int, bytes], None],
        table_of: Callable[[PartitionRow], PartitionTable],
        respond: Callable[[Any, ErrorCode, dict[str, Any]], None],
    ) -> None:
        """`existing`: the topic of {"name": ...}; raises UnknownTopicError. `put`: send a LEASE
        message for a slot, with this payload, that way.
        """
        self._db = database
        self._existing = existing
        self._flusher_of = flusher_of
        self._put = put
        self._table_of = table_of
        self._respond = respond
        self._waiting: list[_Waiting[AWay]] = []
        database.executescript(_TABLE)
        self._monotonic_ns = monotonic_ns
        mark = Mark.of_rows(database.execute("SELECT name, value FROM meta").fetchall())
        self._elapsed = ElapsedTime(mark, monotonic_ns())
        if (
            mark is None
        ):  # an earlier build stored ends by the wall clock, which may have been set since: its leases last as long as new ones  # noqa: E501
            with Transaction(database):
                database.execute("UPDATE leases SET ends_us = ? + ttl_ms * 1000", (self._now_us(),))
                self.keep_time()

    def _now_us(self) -> int:
        """Elapsed time."""
        return self.elapsed_ms() * US_PER_MS

    def elapsed_ms(self) -> int:
        """Elapsed time."""
        return self._elapsed.ms(self._monotonic_ns())

    def keep_time(self, after_ms: int = MARK_EVERY_MS) -> None:
        """Write elapsed time down, if the last mark is `after_ms` old; part of a transaction.
        Should that fail, leases and the bin last a little longer.
        """
        mark = self._elapsed.mark_due(self._monotonic_ns(), after_ms)
        if mark is not None:
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", mark.rows())
            self._elapsed.kept(mark)

    @property
    def is_waiting(self) -> bool:
        """True if a request waits for a flusher."""
        return bool(self._waiting)

    # ---- requests --------------------------------------------------------------------------------

    def take(
        self, requester: Any, request: dict[str, Any], now_ns: int
    ) -> Callable[[TailraceError], None]:
        """Keep what a LEASE_OFFSETS request asks for, and tell the flushers; returns what to call
        when the transaction that this is part of could not be committed. Raises
        InvalidRequestError, UnknownTopicError, StorageError, DiskFullError.
        """
        name, ttl_ms = request.get("lease"), request.get("ttl_ms")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
            raise InvalidRequestError(
                f"the lease's name is missing or too long: it takes 1 to {NAME_MAX} characters"
            )
        if not _is_number(ttl_ms, LEASE_MAX_MS):
            raise InvalidRequestError(f"ttl_ms is {str(ttl_ms)[:40]}; it takes 0 to {LEASE_MAX_MS}")
        items = request.get("partitions", [request])
        if (
            not isinstance(items, list)
            or not 0 < len(items) <= PER_REQUEST_MAX
            or not all(isinstance(item, dict) for item in items)
        ):
            raise InvalidRequestError(
                f"`partitions` must be a list of 1 to {PER_REQUEST_MAX} objects"
            )
        if sum(len(waiting.rows) for waiting in self._waiting) + len(items) > WAITING_MAX:
            raise TailraceError(
                "too many leases wait for a flusher that is not responding; try again later",
                ErrorCode.NOT_READY,
            )
        requested = [self._checked(item) for item in items]
        user = request.get("user")
        owner = f"{user}/" if isinstance(user, str) and user else ""
        name = f"{owner}{name}"
        self._keep(name, ttl_ms, requested, owner)
        ways: dict[int, AWay] = {}
        for topic, row, offset in requested:
            way = self._flusher_of(row)
            ways[way.index] = way
            self._put(way, row.slot, _payload(topic.topic_id, row, name, offset, ttl_ms))
        rows = [row for _, row, _ in requested]
        waiting = _Waiting(
            requester,
            rows,
            list(ways.values()),
            "partitions" in request,
            now_ns + ANSWER_TIMEOUT_NS,
        )
        self._waiting.append(waiting)
        return lambda error: self._abandon(waiting, error)

    def _abandon(self, waiting: _Waiting[AWay], error: TailraceError) -> None:
        """Fail a request whose leases are not on the disk. A flusher that has them already keeps
        some records too long.
        """
        self._waiting.remove(waiting)
        self._respond(waiting.requester, error.code, {"message": error.detail})

    def _checked(self, item: dict[str, Any]) -> tuple[Topic, PartitionRow, int]:
        topic = self._existing({"name": item.get("topic")})
        topic_id = item.get("topic_id")
        if topic_id is not None and topic_id != topic.topic_id.hex():
            raise UnknownTopicIdError(
                f"the lease is of a topic {topic.name!r} that was deleted; the one that has the "
                "name now is another"
            )
        number, offset = item.get("partition"), item.get("offset")
        if not _is_number(number, len(topic.partitions) - 1):
            raise InvalidRequestError(f"topic {topic.name!r} has no partition {str(number)[:40]}")
        if not _is_number(offset, 2**62):
            raise InvalidRequestError(
                f"offset is {str(offset)[:40]}; a lease takes a whole number from 0 on"
            )
        row = next(row for row in topic.partitions if row.partition == number)
        return topic, row, offset

    def _keep(
        self, name: str, ttl_ms: int, requested: list[tuple[Topic, PartitionRow, int]], owner: str
    ) -> None:
        """`owner` begins the names of all leases of the user; empty: there are no users."""
        now_us = self._now_us()
        try:
            with Transaction(self._db):
                self._db.execute("DELETE FROM leases WHERE ends_us <= ?", (now_us,))
                keys = [(topic.topic_id, row.partition, name) for topic, row, _ in requested]
                self._db.executemany(
                    "DELETE FROM leases WHERE topic_id = ? AND partition = ? AND name = ?", keys
                )
                if ttl_ms:
                    self._check_room({key[:2] for key in keys}, owner)
                    ends_us = now_us + ttl_ms * 1000
                    rows = [
                        (*key, offset, ttl_ms, ends_us)
                        for key, (_, _, offset) in zip(keys, requested, strict=True)
                    ]
                    self._db.executemany(
                        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", rows
                    )
                self.keep_time()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                raise DiskFullError(
                    "the lease cannot be stored: the disk of the catalog is full"
                ) from error
            raise StorageError(f"the lease cannot be stored: {error}") from error

    def _check_room(self, partitions: set[tuple[bytes, int]], owner: str) -> None:
        """Check that there is room for one more of each of these leases.

        Raises: InvalidRequestError.
        """
        self._check_count(len(partitions), MAX, "there are", owner)
        for key in partitions:
            noun = f"partition {key[1]} has"
            self._check_count(
                1, PER_PARTITION_MAX, noun, owner, "topic_id = ? AND partition = ?", key
            )

    def _check_count(
        self, added: int, most: int, noun: str, owner: str,
        where: str = "true", values: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        query = f"SELECT count(*), min(ends_us) FROM leases WHERE {where}"
        count, soonest_us = self._db.execute(query, values).fetchone()
        if owner and count + added > most // 2:
            query += " AND substr(name, 1, ?) = ?"
            own, own_soonest_us = self._db.execute(query, (*values, len(owner), owner)).fetchone()
            if own + added > most // 2:
                raise InvalidRequestError(
                    f"{noun} {own} leases of user {owner[:-1]!r}, and the limit of a user is "
                    f"{most // 2}; release some (ttl_ms 0){self._until(own_soonest_us)}"
                )
        if count + added > most:
            raise InvalidRequestError(
                f"{noun} {count} leases, and the limit is {most}; release some (ttl_ms "
                f"0){self._until(soonest_us)}"
            )

    def _until(self, ends_us: int | None) -> str:
        return (
            ""
            if ends_us is None
            else " or wait for the first to end, in "
            f"{max(0, ends_us - self._now_us()) // 1_000_000} s"
        )

    # ---- telling ---------------------------------------------------------------------------------

    def feed(self, out: AWay, topics: Iterable[Topic]) -> None:
        """Send a restarted flusher every lease of its partitions."""
        rows = {
            (topic.topic_id, row.partition): row
            for topic in topics
            if topic.state != "deleting"
            for row in topic.partitions
            if self._flusher_of(row) is out
        }
        now_us = self._now_us()
        found = self._db.execute(
            "SELECT topic_id, partition, name, first_offset, ttl_ms, ends_us FROM leases WHERE "
            "ends_us > ?",
            (now_us,),
        )
        for topic_id, partition, name, offset, ttl_ms, ends_us in found.fetchall():
            row = rows.get((topic_id, partition))
            if row is not None:
                # The time in which the host was off does not count, and a mark may be old: no lease
                # is longer than it was asked for.
                left_ms = min(ttl_ms, max(1, (ends_us - now_us) // 1000))
                self._put(out, row.slot, _payload(topic_id, row, name, offset, left_ms))

    def names_of(self, topic_id: bytes, partition: int) -> set[str]:
        """The leases of a partition that have not ended. Raises sqlite3.Error."""
        rows = self._db.execute(
            "SELECT name FROM leases WHERE topic_id = ? AND partition = ? AND ends_us > ?",
            (topic_id, partition, self._now_us()),
        )
        return {name for (name,) in rows}

    def answer_taken(self, now_ns: int) -> int:
        """Answer requests whose leases the flushers have. Only now does the log start offset in the
        table tell if a lease came in time.
        """
        count = 0
        for waiting in list(self._waiting):
            if all(not way.queue and way.lane.is_empty() for way in waiting.ways):
                starts = [
                    self._table_of(row).read(row.slot).log_start_offset for row in waiting.rows
                ]
                answer = (
                    {"log_start_offsets": starts}
                    if waiting.is_list
                    else {"log_start_offset": starts[0]}
                )
                self._respond(waiting.requester, ErrorCode.OK, answer)
            elif now_ns >= waiting.deadline_ns:
                self._respond(
                    waiting.requester,
                    ErrorCode.TIMED_OUT,
                    {"message": "the lease is stored, but its flusher has not confirmed it yet"},
                )
            else:
                continue
            self._waiting.remove(waiting)
            count += 1
        return count


def _is_number(value: Any, largest: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def _payload(topic_id: bytes, row: PartitionRow, name: str, offset: int, ttl_ms: int) -> bytes:
    return orjson.dumps(
        {
            "topic_id": topic_id.hex(),
            "partition": row.partition,
            "lease": name,
            "offset": offset,
            "ttl_ms": ttl_ms,
        }
    )
