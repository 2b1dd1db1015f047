"""Changes of delayed records: cancel and reschedule requests on their way through the delay logs.

A change is one or more batches in the delay log of each partition it affects. It is answered when
the log shows its outcome, since a delivery or another change may come first. Batches of the
appliance carry a token, which no client can guess or write (see `DelayPartition.change_batch`).

Owner: the scheduler.

A batch that does not show in the log is sent again: the worker may have refused it, since the disk
was full or a decision on its way. A log that has it twice shows one outcome.

A change by a transaction takes effect with its commit (see `delay_log.reservations`).

Invariants:
- Each request is answered once.
- Reserved rows of all partitions <= RESERVED_BYTES when a change begins.
- Changes <= CHANGES_MAX, their batches <= CHANGES_BYTES, of one session <= SESSION_MAX.
- Batches of one request <= CHANGE_BYTES.

Crash: pending requests time out at their clients. Changes in the log are carried out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownDelayError
from tailrace.core.schedule.delays import DUE_COLUMN, delay_id, parse_delay_id, tick_of
from tailrace.protocol.frame import Api
from workers.delays.requests.validation import ChangeItem

if TYPE_CHECKING:
    from workers.delays.changing_transaction import ChangingTransaction
    from workers.delays.delay_log.ingest import Outcome
    from workers.delays.delay_partition import DelayPartition

CHANGE_TIMEOUT_NS = 12_000_000_000
CHANGES_MAX = 256
CHANGES_BYTES = 64 << 20
CHANGE_BYTES = 16 << 20
RESERVED_BYTES = 64 << 20
"""Memory of rows that open transactions have reserved, above which no more are."""
RESEND_NS = 100_000_000
"""Time after which a batch is sent again. It doubles each time."""
SESSION_MAX = 16
"""Largest number of changes, and of deferred requests, of one session."""


RESERVED = (
    "another transaction that is open has cancelled or rescheduled the record. Retry when it has "
    "ended"
)


ANOTHERS = (
    "the delayed record is not this user's: its owner may change it, and a user with `alter` of "
    "the topic's delays"
)


class NotSettledYet(Exception):
    """A request's row lies above the high watermark, or its partition has to be read on."""


@dataclass(slots=True)
class Requester:
    front: int
    session: int
    correlation_id: int

    def is_of_session_of(self, other: Requester) -> bool:
        return (self.front, self.session) == (other.front, other.session)


@dataclass(slots=True)
class Part:
    """Change of a request in one partition: its batch in the delay log."""

    place: tuple[str, int]
    partition: DelayPartition
    token: int
    batch: bytearray
    schema_id: int
    """The version of the delay log's schema that the batch has."""
    rows: list[int]
    """Indices of the request's items in this batch."""
    is_sent: bool = False
    resend_ns: int = 0
    wait_ns: int = RESEND_NS


@dataclass(slots=True)
class PendingChange:
    """A cancel or reschedule request whose outcome is not in the delay logs yet."""

    requester: Requester
    results: list[dict[str, Any]]
    parts: list[Part]
    deadline_ns: int
    transaction: ChangingTransaction | None = None

    @property
    def byte_count(self) -> int:
        return sum(len(part.batch) for part in self.parts)


class DelayChanges:
    """Pending changes of all partitions."""

    def __init__(
        self,
        partitions: Mapping[tuple[str, int], DelayPartition],
        await_opening: Callable[[Callable[[Assignment], bool], bool], None],
        await_decisions: Callable[[DelayPartition, bool], None],
        write: Callable[[Assignment, Any], bool],
        respond: Callable[[Requester, ErrorCode, dict[str, Any]], None],
        caught: Callable[[str, Exception], str],
        wall_us: Callable[[], int],
    ) -> None:
        """`await_opening`: raises NotSettledYet while a delay log that the predicate selects is
        being opened. `await_decisions`: see `DelayRequests`. For the others see there too.
        """
        self._open = partitions
        self._await_opening = await_opening
        self._await_decisions = await_decisions
        self._write = write
        self._respond = respond
        self._caught = caught
        self._wall_us = wall_us
        self._changes: list[PendingChange] = []
        self._detached: set[tuple[str, int]] = set()
        """Partitions that are closed for a move: their changes wait."""

    def detach(self, place: tuple[str, int]) -> None:
        """Have the changes of a partition wait until it is opened again, which is closed now."""
        if any(part.place == place for change in self._changes for part in change.parts):
            self._detached.add(place)

    def attach(self, place: tuple[str, int], partition: DelayPartition) -> None:
        """Go on with the changes of a partition that was opened, and has read nothing yet. What its
        log has of them shows when it is read.
        """
        from workers.delays.delay_log.ingest import Change

        if place not in self._detached:
            return
        self._detached.discard(place)
        for part in (part for change in self._changes for part in change.parts):
            if part.place == place and part.partition.changes[part.token].outcomes is None:
                part.partition = partition
                partition.changes[part.token] = Change()

    @property
    def has_unsent(self) -> bool:
        """True if a batch waits for room in its lane."""
        return any(not part.is_sent for change in self._changes for part in change.parts)

    def deadlines(self) -> list[int]:
        """Return the times at which changes time out, or are sent again."""
        return [
            min(
                [
                    change.deadline_ns,
                    *(
                        part.resend_ns
                        for part in change.parts
                        if part.is_sent and part.place not in self._detached
                    ),
                ]
            )
            for change in self._changes
        ]

    def begin(
        self,
        requester: Requester,
        items: list[Any],
        topic: str | None,
        transaction: ChangingTransaction | None,
        may_wait: bool,
        now_ns: int,
    ) -> None:
        """Cancel or reschedule the entries {"delay_id", "due_us" (null: cancel)}. Answered when the
        delay logs show the outcome. Raises TailraceError, NotSettledYet.
        """
        if (
            len(self._changes) >= CHANGES_MAX
            or sum(c.requester.is_of_session_of(requester) for c in self._changes) >= SESSION_MAX
        ):
            raise TailraceError(
                f"too many changes of delayed records are pending: the limits are {CHANGES_MAX} "
                f"and {SESSION_MAX} of one session. Retry shortly",
                ErrorCode.TOO_MANY_REQUESTS,
            )
        if (
            transaction is not None
            and sum(
                partition.transactions.reservations.byte_count for partition in self._open.values()
            )
            > RESERVED_BYTES
        ):
            raise TailraceError(
                f"open transactions have changed delayed records of more than {RESERVED_BYTES} "
                "bytes. Retry when some of them have ended",
                ErrorCode.TOO_MANY_REQUESTS,
            )
        results: list[dict[str, Any]] = [{} for _ in items]
        gathered: dict[tuple[tuple[str, int], int], list[tuple[int, list[Any]]]] = {}
        caught_up: set[tuple[str, int]] = set()
        byte_count = 0
        # by offset: a chunk of a bucket file is read once
        for number, item in sorted(enumerate(items), key=_by_offset):
            try:
                place, owner, rows = self._changed_rows(
                    ChangeItem.of(number, item, self._wall_us()),
                    topic,
                    transaction,
                    may_wait,
                    caught_up,
                )
                byte_count += sum(int(row.nbytes) for row in rows)
                if byte_count > CHANGE_BYTES:
                    raise TailraceError(
                        f"these records take more than {CHANGE_BYTES} bytes: change fewer at once",
                        ErrorCode.REQUEST_TOO_LARGE,
                    )
                gathered.setdefault((place, owner), []).append((number, rows))
            except TailraceError as error:
                results[number] = {"code": int(error.code), "message": error.detail}
        if (
            byte_count + sum(change.byte_count for change in self._changes)
            > CHANGES_BYTES + CHANGE_BYTES
        ):
            raise TailraceError(
                f"pending changes of delayed records take more than {CHANGES_BYTES} bytes. "
                "Retry shortly",
                ErrorCode.TOO_MANY_REQUESTS,
            )
        change = PendingChange(requester, results, [], now_ns + CHANGE_TIMEOUT_NS, transaction)
        for (place, owner), numbered in gathered.items():
            self._add_parts(change, place, owner, numbered)
        self._changes.append(change)

    def _add_parts(
        self,
        change: PendingChange,
        place: tuple[str, int],
        owner: int,
        rows: list[tuple[int, list[Any]]],
    ) -> None:
        """Add one partition's rows of one owner as batches that its log accepts. Halve them
        until they fit.
        """
        from workers.delays.delay_log.ingest import Change
        from workers.delays.store.pending_rows import one_batch, table_of

        partition = self._open[place]
        token = unguessable_token()
        batch = partition.change_batch(
            one_batch(table_of([row for _, rows_of in rows for row in rows_of])),
            token,
            change.transaction,
            owner,
        )
        limit = (
            partition.change_batches.payload_max
            if len(rows) == 1
            else min(
                partition.change_batches.payload_max,
                int(partition.log.settings["max.message.bytes"]),
            )
        )
        if len(batch) <= limit:
            partition.changes[token] = Change()
            change.parts.append(
                Part(
                    place,
                    partition,
                    token,
                    batch,
                    partition.log.schema_id,
                    [number for number, _ in rows],
                )
            )
        elif len(rows) == 1:
            message = f"the record takes {len(batch)} bytes in the delay log; the limit is {limit}"
            change.results[rows[0][0]] = {
                "code": int(ErrorCode.RECORD_TOO_LARGE),
                "message": message,
            }
        else:
            self._add_parts(change, place, owner, rows[: len(rows) // 2])
            self._add_parts(change, place, owner, rows[len(rows) // 2 :])

    def _changed_rows(
        self,
        item: ChangeItem,
        topic: str | None,
        transaction: ChangingTransaction | None,
        may_wait: bool,
        caught_up: set[tuple[str, int]],
    ) -> tuple[tuple[str, int], int, list[Any]]:
        """Return (partition, owner, rows to append) of a change: the change alone, or in a
        transaction the row as it is, then the change. The owner of a record is 0 where its row is
        not needed. Raises TailraceError.
        """
        key = item.key
        place = (key.topic_id.hex(), key.partition)
        partition = self._open.get(place)
        if partition is None:
            self._await_opening(lambda log: (log.topic_id.hex(), log.partition) == place, may_wait)
            raise UnknownDelayError("no topic has this delayed record")
        if topic is not None and partition.topic.topic != topic:
            raise UnknownDelayError(
                f"the delayed record belongs to topic {partition.topic.topic!r}, not {topic!r}"
            )
        if place not in caught_up:
            partition.catch_up()
            caught_up.add(place)
        if may_wait and not partition.has_read(key.offset):
            raise NotSettledYet
        partition.intake.hint(key.offset, tick_of(key.due_us))
        try:
            row = self._row_of(
                partition,
                key.offset,
                transaction,
                may_wait,
                is_needed=transaction is not None
                or item.due_us is not None
                or item.owner is not None,
            )
        except (TailraceError, NotSettledYet):
            partition.intake.hints.pop(key.offset, None)
            raise
        owner = 0 if row is True else partition.batches.owner_of(row)
        if item.owner not in (None, owner):
            raise TailraceError(ANOTHERS, ErrorCode.NOT_AUTHORIZED)
        if item.due_us is None:
            change = partition.cancellation(key.offset)
        else:
            change = partition.replacement(row, item.due_us, key.offset)
        if transaction is None:
            return place, owner, [change]
        due_us = row.column(DUE_COLUMN)[0].as_py()
        return place, owner, [partition.replacement(row, due_us, key.offset), change]

    def _row_of(
        self,
        partition: DelayPartition,
        offset: int,
        transaction: ChangingTransaction | None,
        may_wait: bool,
        *,
        is_needed: bool,
    ) -> Any:
        """Return a pending row that may be changed now, as a batch of one. Return True instead if
        the row is not needed. Raises TailraceError, NotSettledYet.
        """
        for is_last in (False, True):
            reserved_by = partition.transactions.reservations.key_of(offset)
            if transaction is not None and reserved_by == transaction.key:
                return partition.transactions.reservations.row_of(offset)
            if reserved_by is None:
                row = partition.row_of(offset) if is_needed else partition.waits(offset) or None
                if row is not None:
                    return row
            if is_last or not partition.transactions.has_open:
                break
            # a decision may be on its way that makes it pending, or has ended it
            self._await_decisions(partition, may_wait)
        if reserved_by is not None:
            raise TailraceError(RESERVED, ErrorCode.CONCURRENT_TRANSACTIONS)
        if partition.transactions.has_row(offset):
            raise TailraceError(
                "the record was sent in a transaction that is open still. Change it when that is "
                "committed",
                ErrorCode.CONCURRENT_TRANSACTIONS,
            )
        raise UnknownDelayError

    def advance(self, now_ns: int) -> int:
        """Send batches that are not sent yet.

        Answer changes whose outcome is known or whose time is over.
        """
        count = 0
        for change in list(self._changes):
            try:
                is_done = self._advance(change, now_ns)
            except Exception as error:  # boundary: a failing request affects no other
                sentence = self._caught(
                    f"api={int(Api.CHANGE_DELAYS)} session={change.requester.session}", error
                )
                self._respond(change.requester, ErrorCode.INTERNAL_ERROR, {"message": sentence})
                is_done = True
            if not is_done:
                continue
            for part in change.parts:
                part.partition.changes.pop(part.token, None)
            self._changes.remove(change)
            count += 1
        if count and not self._changes:
            self._detached.clear()
            for partition in self._open.values():
                partition.intake.hints.clear()  # the rest belongs to refused changes
        return count

    def _advance(self, change: PendingChange, now_ns: int) -> bool:
        """Return True if the change was answered."""
        is_known = True
        for part in change.parts:
            outcomes = part.partition.changes[part.token].outcomes
            if outcomes is None and self._open.get(part.place) is part.partition:
                self._send(part, now_ns)
            is_known = is_known and outcomes is not None
            for number, found in zip(part.rows, outcomes or (), strict=False):
                change.results[number] = self._outcome(part.partition, found)
        if is_known:
            self._respond(change.requester, ErrorCode.OK, {"results": change.results})
        elif now_ns >= change.deadline_ns or any(
            self._open.get(part.place) is not part.partition and part.place not in self._detached
            for part in change.parts
        ):
            self._respond(
                change.requester,
                ErrorCode.TIMED_OUT,
                {"message": "it is not known yet if the change was made; list what is pending"},
            )
        else:
            return False
        return True

    def _send(self, part: Part, now_ns: int) -> None:
        """Send a batch, or send it again when it is time."""
        schema_id = part.partition.log.schema_id
        if part.schema_id != schema_id:  # the worker refuses what was not appended before
            part.batch = part.partition.change_batches.renewed(part.batch, schema_id)
            part.schema_id = schema_id
        if part.is_sent and now_ns < part.resend_ns:
            return
        if self._write(part.partition.log, part.batch):
            part.is_sent = True
            part.resend_ns = now_ns + part.wait_ns
            part.wait_ns *= 2

    @staticmethod
    def _outcome(partition: DelayPartition, found: Outcome) -> dict[str, Any]:
        if found is None:
            return {"code": 0}
        if isinstance(found, tuple):
            offset, due_us = found
            return {
                "code": 0,
                "due_us": due_us,
                "delay_id": delay_id(
                    partition.log.topic_id, partition.log.partition, offset, due_us
                ),
            }
        if isinstance(found, ErrorCode):
            return {"code": int(found), "message": RESERVED}
        return {
            "code": int(ErrorCode.UNKNOWN_DELAY),
            "message": "too late: the record is delivered or in delivery",
        }


def unguessable_token() -> int:
    """Return a token for a batch of the appliance, that no client can guess."""
    return 1 + (int.from_bytes(os.urandom(8), "little") >> 2)


def _by_offset(numbered: tuple[int, Any]) -> tuple[int, int]:
    """Return (offset, number) of an entry of a request. Entries without a valid id come first."""
    number, item = numbered
    try:
        return parse_delay_id(item.get("delay_id")).offset, number
    except (TailraceError, AttributeError):
        return -1, number
