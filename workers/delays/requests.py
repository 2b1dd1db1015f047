"""Requests about delayed records: list, describe, cancel and reschedule.

A change is one or more batches in the delay log of each partition it affects. It is answered when
the log shows its outcome, since a delivery or another change may come first. Batches of the
appliance carry a token, which no client can guess or write (see `DelayPartition.change_batch`).

Owner: the scheduler.

Invariants:
- Each request is answered once.
- A response fits its lane. Lists end by bytes as well as by count, and say where to continue.
- Deferred requests <= DEFERRED_MAX, their bytes <= DEFERRED_BYTES, of one session <= SESSION_MAX.
- Changes <= CHANGES_MAX, their batches <= CHANGES_BYTES, of one session <= SESSION_MAX.
- Batches of one request <= CHANGE_BYTES.

Crash: pending requests time out at their clients. Changes in the log are carried out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from shm.lane_messages import Assignment
from tailrace.core.delays import delay_id, delay_log_name, parse_delay_id, tick_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownDelayError, UnknownTopicError
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.messages import decode_json
from workers.delays.request_validation import (
    NEVER_TICK,
    ChangeItem,
    DescribeRequest,
    ListRequest,
    changes_in,
    topic_in,
)

if TYPE_CHECKING:
    from workers.delays.delay_partition import DelayPartition

CHANGE_TIMEOUT_NS = 12_000_000_000
DEFER_NS = 5_000_000_000
"""Time that a request waits for an acknowledged row (acks=1) to be settled."""
DEFERRED_RETRY_NS = 5_000_000
"""First retry interval. It doubles each time."""
DEFERRED_MAX = 256
DEFERRED_BYTES = 16 << 20
CHANGES_MAX = 256
CHANGES_BYTES = 64 << 20
CHANGE_BYTES = 16 << 20
SESSION_MAX = 16
LIST_PARTITIONS = 64
"""Largest number of partitions in a page of a list."""


class NotSettledYet(Exception):
    """A request's row lies above the high watermark."""


@dataclass(slots=True)
class Requester:
    front: int
    session: int
    correlation_id: int

    def is_of_session_of(self, other: Requester) -> bool:
        return (self.front, self.session) == (other.front, other.session)


@dataclass(slots=True)
class Deferred:
    """A request about acknowledged rows that are not settled yet."""

    requester: Requester
    api: int
    payload: bytes
    deadline_ns: int
    retry_ns: int
    wait_ns: int


@dataclass(slots=True)
class Part:
    """Change of a request in one partition: its batch in the delay log."""

    place: tuple[str, int]
    partition: DelayPartition
    token: int
    batch: bytearray
    rows: list[int]
    """Indices of the request's items in this batch."""
    is_sent: bool = False


@dataclass(slots=True)
class PendingChange:
    """A cancel or reschedule request whose outcome is not in the delay logs yet."""

    requester: Requester
    results: list[dict[str, Any]]
    parts: list[Part]
    deadline_ns: int

    @property
    def byte_count(self) -> int:
        return sum(len(part.batch) for part in self.parts)


class DelayRequests:
    """Requests about delayed records of all partitions."""

    def __init__(
        self,
        partitions: Mapping[tuple[str, int], DelayPartition],
        opening: Callable[[], list[Assignment]],
        write: Callable[[Assignment, Any], bool],
        respond: Callable[[Requester, ErrorCode, dict[str, Any]], None],
        caught: Callable[[str, Exception], str],
        wall_us: Callable[[], int],
        page_bytes: int,
    ) -> None:
        """Parameters:
        - `partitions`: open partitions by (delay log's id, partition).
        - `opening`: returns the delay logs that are known and not open yet.
        - `write`: writes a batch to its worker's lane, or returns False if it is full.
        - `caught`: see `shm.runtime.error_handler`.
        - `page_bytes`: approximate size limit of a response.
        """
        self._open = partitions
        self._opening = opening
        self._write = write
        self._respond = respond
        self._caught = caught
        self._wall_us = wall_us
        self._page_bytes = page_bytes
        self._now_ns = 0
        self._changes: list[PendingChange] = []
        self._deferred: list[Deferred] = []

    @property
    def are_waiting(self) -> bool:
        """True if a request must be checked again soon, without a ring."""
        return bool(self._deferred) or any(
            not part.is_sent for change in self._changes for part in change.parts
        )

    def deadlines(self) -> list[int]:
        """Return the times at which changes time out."""
        return [change.deadline_ns for change in self._changes]

    # ---- one request -----------------------------------------------------------------------------

    def serve(self, requester: Requester, api: int, payload: bytes, now_ns: int) -> None:
        """Answer a request, at once or when its rows are settled.

        Unexpected errors are answered too.
        """
        self._now_ns = now_ns
        self._serve(Deferred(requester, api, payload, now_ns + DEFER_NS, 0, DEFERRED_RETRY_NS))

    def _serve(self, item: Deferred) -> None:
        requester = item.requester
        try:
            self._answer(
                requester, item.api, item.payload, may_wait=self._now_ns < item.deadline_ns
            )
        except NotSettledYet:
            self._defer(item)
        except (TailraceError, WireError) as error:
            self._respond(requester, error.code, {"message": error.detail})
        except OSError as error:
            self._respond(
                requester,
                ErrorCode.STORAGE_ERROR,
                {"message": f"pending records cannot be read: {error}"},
            )
        except Exception as error:  # boundary: a failing request affects no other
            sentence = self._caught(f"api={item.api} session={requester.session}", error)
            self._respond(requester, ErrorCode.INTERNAL_ERROR, {"message": sentence})

    def _defer(self, item: Deferred) -> None:
        waiting = self._deferred
        is_full = (
            len(waiting) >= DEFERRED_MAX
            or sum(len(other.payload) for other in waiting) + len(item.payload) > DEFERRED_BYTES
        )
        if (
            is_full
            or sum(other.requester.is_of_session_of(item.requester) for other in waiting)
            >= SESSION_MAX
        ):
            self._respond(
                item.requester,
                ErrorCode.TOO_MANY_REQUESTS,
                {
                    "message": "too many requests wait for records to be stored: the limits are "
                    f"{DEFERRED_MAX} requests and {SESSION_MAX} of one session. Retry shortly"
                },
            )
            return
        item.retry_ns = self._now_ns + item.wait_ns
        item.wait_ns *= 2
        waiting.append(item)

    def serve_deferred(self, now_ns: int) -> int:
        """Retry deferred requests that are due. Return how many were answered."""
        self._now_ns = now_ns
        due = [
            item for item in self._deferred if item.retry_ns <= now_ns or item.deadline_ns <= now_ns
        ]
        if due:
            self._deferred = [
                item
                for item in self._deferred
                if item.retry_ns > now_ns and item.deadline_ns > now_ns
            ]
        before = len(self._deferred)
        for item in due:
            self._serve(item)
        return before + len(due) - len(self._deferred)

    def _answer(self, requester: Requester, api: int, payload: bytes, *, may_wait: bool) -> None:
        request = decode_json(payload)
        if api == Api.LIST_DELAYS:
            self._respond(requester, ErrorCode.OK, self._list(ListRequest.of(request), may_wait))
        elif api == Api.DESCRIBE_DELAYS:
            self._respond(requester, ErrorCode.OK, self._describe(DescribeRequest.of(request)))
        elif api == Api.CHANGE_DELAYS:
            self._change(
                requester, changes_in(request), topic_in(request, is_needed=False), may_wait
            )
        else:
            raise TailraceError(f"API {api} is not the scheduler's", ErrorCode.UNKNOWN_API)

    def _await_opening(self, requested: Callable[[Assignment], bool], may_wait: bool) -> None:
        """Defer a request about a delay log that is known and not open. Raises NotSettledYet, or
        TailraceError after the wait.
        """
        if any(requested(log) for log in self._opening()):
            if may_wait:
                raise NotSettledYet
            raise TailraceError(
                "the files of its pending records cannot be opened; the appliance's log says why",
                ErrorCode.STORAGE_ERROR,
            )

    # ---- showing ---------------------------------------------------------------------------------

    def _partitions_of(self, topic: str, may_wait: bool) -> list[DelayPartition]:
        self._await_opening(lambda log: log.topic == delay_log_name(topic), may_wait)
        found = sorted(
            (p for p in self._open.values() if p.topic.topic == topic),
            key=lambda p: p.topic.partition,
        )
        if not found:
            raise UnknownTopicError(f"topic {topic!r} does not exist or has no delays")
        return found

    def _list(self, request: ListRequest, may_wait: bool) -> dict[str, Any]:
        """Return a page of a topic's pending rows, by (partition, tick, offset). `after` is where
        it ended. A page that is not the last may be short or empty.
        """
        rows: list[dict[str, Any]] = []
        byte_count = scanned = 0
        place = request.after or (0, -1, 0)
        for partition in self._partitions_of(request.topic, may_wait):
            number = partition.topic.partition
            if request.partition not in (None, number) or number < place[0]:
                continue
            if scanned == LIST_PARTITIONS:
                return {"delays": rows, "after": list(place)}
            scanned += 1
            partition.catch_up()
            start = (place[1], place[2] + 1) if number == place[0] else (0, 0)
            listed, reached = partition.listed(
                max(start, (request.begin_tick, 0)),
                request.end_tick,
                request.limit - len(rows),
                request.key,
            )
            for row in listed:
                described = {
                    "delay_id": delay_id(partition.log.topic_id, number, row["offset"],
                    row["due_us"]), "topic": partition.topic.topic,
                    "partition": number, **row,
                }  # fmt: skip
                key = described.pop("tick"), described.pop("offset")
                byte_count += len(orjson.dumps(described)) + 1
                if rows and byte_count > self._page_bytes:
                    return {"delays": rows, "after": list(place)}
                rows.append(described)
                place = (number, *key)
            if reached is not None:
                return {"delays": rows, "after": [number, *reached]}
            place = (number, NEVER_TICK, 0)
        return {"delays": rows, "after": None}

    def _describe(self, request: DescribeRequest) -> dict[str, Any]:
        """Return a page of the partitions, by (topic, partition). `after` is where it ended."""
        found: list[dict[str, Any]] = []
        byte_count = 0
        last: list[str | int] = []
        for key, partition in sorted(
            ((p.topic.topic, p.topic.partition), p) for p in self._open.values()
        ):
            if request.after is not None and key <= request.after:
                continue
            described = partition.describe()
            byte_count += len(orjson.dumps(described)) + 1
            if found and (byte_count > self._page_bytes or len(found) == request.limit):
                return {"partitions": found, "after": last}
            found.append(described)
            last = list(key)
        return {"partitions": found, "after": None}

    # ---- changing --------------------------------------------------------------------------------

    def _change(
        self, requester: Requester, items: list[Any], topic: str | None, may_wait: bool
    ) -> None:
        """Cancel or reschedule the entries {"delay_id", "due_us" (null: cancel)}. Answered when the
        delay logs show the outcome.
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
        results: list[dict[str, Any]] = [{} for _ in items]
        gathered: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        caught_up: set[tuple[str, int]] = set()
        byte_count = 0
        # by offset: a chunk of a bucket file is read once
        for number, item in sorted(enumerate(items), key=_by_offset):
            try:
                place, row = self._changed_row(
                    ChangeItem.of(number, item, self._wall_us()), topic, may_wait, caught_up
                )
                byte_count += int(row.nbytes)
                if byte_count > CHANGE_BYTES:
                    raise TailraceError(
                        f"these records take more than {CHANGE_BYTES} bytes: change fewer at once",
                        ErrorCode.REQUEST_TOO_LARGE,
                    )
                gathered.setdefault(place, []).append((number, row))
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
        change = PendingChange(requester, results, [], self._now_ns + CHANGE_TIMEOUT_NS)
        for place, rows in gathered.items():
            self._add_parts(change, place, rows)
        self._changes.append(change)

    def _add_parts(
        self, change: PendingChange, place: tuple[str, int], rows: list[tuple[int, Any]]
    ) -> None:
        """Add one partition's rows as batches that its log accepts. Halve them until they fit."""
        from workers.delays.log_ingest import Change
        from workers.delays.store.pending_rows import one_batch, table_of

        partition = self._open[place]
        token = 1 + (int.from_bytes(os.urandom(8), "little") >> 2)  # no client can guess it
        batch = partition.change_batch(one_batch(table_of([row for _, row in rows])), token)
        limit = (
            partition.payload_max
            if len(rows) == 1
            else min(partition.payload_max, int(partition.log.settings["max.message.bytes"]))
        )
        if len(batch) <= limit:
            partition.changes[token] = Change()
            change.parts.append(
                Part(place, partition, token, batch, [number for number, _ in rows])
            )
        elif len(rows) == 1:
            message = f"the record takes {len(batch)} bytes in the delay log; the limit is {limit}"
            change.results[rows[0][0]] = {
                "code": int(ErrorCode.RECORD_TOO_LARGE),
                "message": message,
            }
        else:
            self._add_parts(change, place, rows[: len(rows) // 2])
            self._add_parts(change, place, rows[len(rows) // 2 :])

    def _changed_row(
        self, item: ChangeItem, topic: str | None, may_wait: bool, caught_up: set[tuple[str, int]]
    ) -> tuple[tuple[str, int], Any]:
        """Return (partition, row to append) of a change. Raises TailraceError."""
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
        intake = partition.intake
        intake.hint(key.offset, tick_of(key.due_us))
        if item.due_us is None:
            if not partition.waits(key.offset):
                intake.hints.pop(key.offset, None)
                raise UnknownDelayError
            return place, partition.cancellation(key.offset)
        row = partition.row_of(key.offset)
        if row is None:
            intake.hints.pop(key.offset, None)
            raise UnknownDelayError
        return place, partition.replacement(row, item.due_us, key.offset)

    def advance_changes(self, now_ns: int) -> int:
        """Send batches that are not sent yet.

        Answer changes whose outcome is known or whose time is over.
        """
        self._now_ns = now_ns
        count = 0
        for change in list(self._changes):
            try:
                is_done = self._advance(change)
            except Exception as error:  # boundary, as in `_serve`
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
            for partition in self._open.values():
                partition.intake.hints.clear()  # the rest belongs to refused changes
        return count

    def _advance(self, change: PendingChange) -> bool:
        """Return True if the change was answered."""
        is_known = True
        for part in change.parts:
            if not part.is_sent and self._open.get(part.place) is part.partition:
                part.is_sent = self._write(part.partition.log, part.batch)
            outcomes = part.partition.changes[part.token].outcomes
            is_known = is_known and outcomes is not None
            for number, found in zip(part.rows, outcomes or (), strict=False):
                change.results[number] = self._outcome(part.partition, found)
        if is_known:
            self._respond(change.requester, ErrorCode.OK, {"results": change.results})
        elif self._now_ns >= change.deadline_ns or any(
            self._open.get(part.place) is not part.partition for part in change.parts
        ):
            self._respond(
                change.requester,
                ErrorCode.TIMED_OUT,
                {"message": "it is not known yet if the change was made; list what is pending"},
            )
        else:
            return False
        return True

    @staticmethod
    def _outcome(partition: DelayPartition, found: tuple[int, int] | bool | None) -> dict[str, Any]:
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
        return {
            "code": int(ErrorCode.UNKNOWN_DELAY),
            "message": "too late: the record is delivered or in delivery",
        }


def _by_offset(numbered: tuple[int, Any]) -> tuple[int, int]:
    """Return (offset, number) of an entry of a request. Entries without a valid id come first."""
    number, item = numbered
    try:
        return parse_delay_id(item.get("delay_id")).offset, number
    except (TailraceError, AttributeError):
        return -1, number
