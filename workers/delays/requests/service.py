"""Requests about delayed records: list, describe, cancel and reschedule.

Cancelling and rescheduling are in `changes`.

Owner: the scheduler.

Invariants:
- Each request is answered once.
- A response fits its lane. Lists end by bytes as well as by count, and say where to continue.
- Deferred requests <= DEFERRED_MAX, their bytes <= DEFERRED_BYTES, of one session <= SESSION_MAX.

Crash: pending requests time out at their clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownTopicError
from tailrace.core.schedule.delays import delay_id, delay_log_name
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.json_messages import decode_json
from workers.delays.requests.changes import (
    SESSION_MAX,
    DelayChanges,
    NotSettledYet,
    Requester,
    unguessable_token,
)
from workers.delays.requests.validation import (
    NEVER_TICK,
    DescribeRequest,
    ListRequest,
    changes_in,
    topic_in,
    transaction_in,
)

if TYPE_CHECKING:
    from workers.delays.delay_log.ingest import Change
    from workers.delays.delay_partition import DelayPartition

DEFER_NS = 5_000_000_000
"""Time that a request waits for an acknowledged row (acks=1) to be settled."""
DEFERRED_RETRY_NS = 5_000_000
"""First retry interval. It doubles each time."""
BARRIER_RESEND_NS = 200_000_000
DEFERRED_MAX = 256
DEFERRED_BYTES = 16 << 20
LIST_PARTITIONS = 64
"""Largest number of partitions in a page of a list."""


@dataclass(slots=True)
class Deferred:
    """A request about acknowledged rows that are not settled yet."""

    requester: Requester
    api: int
    payload: bytes
    deadline_ns: int
    retry_ns: int
    wait_ns: int
    barriers: dict[int, Barrier] = field(default_factory=dict)
    """Barriers by the identity of their partition."""


@dataclass(slots=True)
class Barrier:
    """A change without effect. When it shows in the delay log, so do the markers of all
    transactions that were decided when the request came.
    """

    partition: DelayPartition
    token: int
    change: Change
    send_ns: int = 0


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
        self._respond = respond
        self._caught = caught
        self._page_bytes = page_bytes
        self._now_ns = 0
        self._write = write
        self._serving: Deferred | None = None
        self._changes = DelayChanges(
            partitions,
            self._await_opening,
            self._await_decisions,
            write,
            respond,
            caught,
            wall_us,
        )
        self._deferred: list[Deferred] = []

    @property
    def are_waiting(self) -> bool:
        """True if a request must be checked again soon, without a ring."""
        return bool(self._deferred) or self._changes.has_unsent

    def deadlines(self) -> list[int]:
        """Return the times at which changes time out."""
        return self._changes.deadlines()

    # ---- one request -----------------------------------------------------------------------------

    def serve(self, requester: Requester, api: int, payload: bytes, now_ns: int) -> None:
        """Answer a request, at once or when its rows are settled.

        Unexpected errors are answered too.
        """
        self._now_ns = now_ns
        self._serve(Deferred(requester, api, payload, now_ns + DEFER_NS, 0, DEFERRED_RETRY_NS))

    def _serve(self, item: Deferred) -> None:
        requester = item.requester
        self._serving = item
        try:
            self._answer(
                requester, item.api, item.payload, may_wait=self._now_ns < item.deadline_ns
            )
        except NotSettledYet:
            if self._defer(item):
                return
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
        for barrier in item.barriers.values():
            barrier.partition.changes.pop(barrier.token, None)

    def _defer(self, item: Deferred) -> bool:
        """Have a request served again later. Return False if it was refused."""
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
            return False
        item.retry_ns = self._now_ns + item.wait_ns
        item.wait_ns *= 2
        waiting.append(item)
        return True

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

    def detach(self, place: tuple[str, int]) -> None:
        """See `DelayChanges.detach`."""
        self._changes.detach(place)

    def attach(self, place: tuple[str, int], partition: DelayPartition) -> None:
        """See `DelayChanges.attach`."""
        self._changes.attach(place, partition)

    def advance_changes(self, now_ns: int) -> int:
        """See `DelayChanges.advance`."""
        return self._changes.advance(now_ns)

    def _answer(self, requester: Requester, api: int, payload: bytes, *, may_wait: bool) -> None:
        request = decode_json(payload)
        if api == Api.LIST_DELAYS:
            self._respond(requester, ErrorCode.OK, self._list(ListRequest.of(request), may_wait))
        elif api == Api.DESCRIBE_DELAYS:
            self._respond(requester, ErrorCode.OK, self._describe(DescribeRequest.of(request)))
        elif api == Api.CHANGE_DELAYS:
            self._changes.begin(
                requester, changes_in(request), topic_in(request, is_needed=False),
                transaction_in(request), may_wait, self._now_ns,
            )  # fmt: skip
        else:
            raise TailraceError(f"API {api} is not the scheduler's", ErrorCode.UNKNOWN_API)

    def _await_opening(self, requested: Callable[[Assignment], bool], may_wait: bool) -> None:
        """Defer a request about a delay log that is known and not open. Raises NotSettledYet, or
        TailraceError after the wait.
        """
        awaited = [log for log in self._opening() if requested(log)]
        if awaited:
            if may_wait:
                raise NotSettledYet
            if any(log.departing for log in awaited):
                raise TailraceError(
                    "the partition is moving to another data directory; try again in a moment",
                    ErrorCode.NOT_READY,
                )
            raise TailraceError(
                "the files of its pending records cannot be opened; the appliance's log says why",
                ErrorCode.STORAGE_ERROR,
            )

    def _await_decisions(self, partition: DelayPartition, may_wait: bool) -> None:
        """Defer a request until the log shows each transaction as ended that was decided before the
        request. Raises NotSettledYet, or TailraceError after the wait.

        A commit is answered when it is decided. Its marker follows, within milliseconds. The
        decision is in the worker's lane by then, and the worker reads that before a barrier.
        """
        from workers.delays.delay_log.ingest import Change

        item = self._serving
        assert item is not None
        barrier = item.barriers.get(id(partition))
        if barrier is None:
            token = unguessable_token()
            barrier = item.barriers[id(partition)] = Barrier(partition, token, Change())
            partition.changes[token] = barrier.change
        if barrier.change.outcomes is not None:
            return
        if not may_wait:
            raise TailraceError(
                "transactions that are decided have not ended in the delay log in time; its disk "
                "may be full or slow. Retry",
                ErrorCode.TIMED_OUT,
            )
        if self._now_ns >= barrier.send_ns:
            batch = partition.change_batch(partition.batches.barrier(), barrier.token)
            if self._write(partition.log, batch):
                barrier.send_ns = self._now_ns + BARRIER_RESEND_NS
        raise NotSettledYet

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
            if partition.transactions.has_open:
                self._await_decisions(partition, may_wait)
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
