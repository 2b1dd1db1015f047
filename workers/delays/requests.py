"""What clients ask of delayed records: list, describe, cancel, reschedule.

A change is a batch in the delay log, one for each partition that it is about; it is answered when the log shows what came of it, since a delivery, or somebody
else's change, may come first.

Owner: the scheduler.
Crash: requests that were under way time out at their clients; what was in the log counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from shm.assignments import Assignment
from tailrace.delays import HORIZON_US, TICK_US, delay_id, delay_log_name, parse_delay_id, tick_of
from tailrace.errors import InvalidRequestError, TailraceError, UnknownDelayError, UnknownTopicError
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api

if TYPE_CHECKING:
    from workers.delays.delay_partition import DelayPartition

LIST_LIMIT = 1_000
CHANGE_LIMIT = 2_000
CHANGE_TIMEOUT_NS = 12_000_000_000
DEFER_NS = 5_000_000_000
"""How long a request about a row that is acknowledged (acks=1) waits for it to be settled."""
NEVER_US = 1 << 62


class NotSettledYet(Exception):
    """What a request is about lies above the high watermark."""


@dataclass(slots=True)
class Requester:
    front: int
    session: int
    correlation_id: int


@dataclass(slots=True)
class Part:
    """What a request changes in one partition: its batch in the delay log."""

    partition: DelayPartition
    token: int
    batch: bytearray
    rows: list[int]
    """Which of the request's items they are."""
    is_sent: bool = False


@dataclass(slots=True)
class PendingChange:
    """A request that cancels or reschedules, until the delay logs show what came of it."""

    requester: Requester
    results: list[dict[str, Any]]
    parts: list[Part]
    deadline_ns: int


class DelayRequests:
    """See the module's docstring."""

    def __init__(
        self,
        partitions: Mapping[tuple[str, int], DelayPartition],
        opening: Callable[[], list[Assignment]],
        write: Callable[[Assignment, Any], bool],
        respond: Callable[[Requester, ErrorCode, dict[str, Any]], None],
        wall_us: Callable[[], int],
        generation: int,
    ) -> None:
        """`partitions`: by (delay log's id, partition), those that are open. `opening`: delay logs that are known and not open yet.
        `write`: a batch into the lane of its worker; False: not now.
        """
        self._open = partitions
        self._opening = opening
        self._write = write
        self._respond = respond
        self._wall_us = wall_us
        self._generation = generation
        self._now_ns = 0
        self._changes: list[PendingChange] = []
        self._deferred: list[tuple[Requester, int, bytes, int]] = []
        """Requests about rows that were acknowledged but are not settled yet, each with its deadline."""
        self._next_token = 1

    @property
    def are_waiting(self) -> bool:
        """Whether some are to be looked at again soon, without a ring."""
        return bool(self._deferred) or any(not part.is_sent for change in self._changes for part in change.parts)

    def deadlines(self) -> list[int]:
        """When changes are given up."""
        return [change.deadline_ns for change in self._changes]

    def serve(self, requester: Requester, api: int, payload: bytes, now_ns: int) -> None:
        """Answer a request, now or when what it is about is known."""
        self._now_ns = now_ns
        self._serve(requester, api, payload, now_ns + DEFER_NS)

    def _serve(self, requester: Requester, api: int, payload: bytes, deadline_ns: int) -> None:
        try:
            self._answer(requester, api, payload, may_wait=self._now_ns < deadline_ns)
        except NotSettledYet:
            self._deferred.append((requester, api, payload, deadline_ns))
        except TailraceError as error:
            self._respond(requester, error.code, {"message": error.detail})
        except OSError as error:
            self._respond(requester, ErrorCode.STORAGE_ERROR, {"message": f"pending records cannot be read: {error}"})

    def serve_deferred(self, now_ns: int) -> int:
        self._now_ns = now_ns
        waiting, self._deferred = self._deferred, []
        for item in waiting:
            self._serve(*item)
        return len(waiting) - len(self._deferred)

    def _answer(self, requester: Requester, api: int, payload: bytes, *, may_wait: bool) -> None:
        request = orjson.loads(payload)
        if api == Api.LIST_DELAYS:
            self._respond(requester, ErrorCode.OK, self._list(request, may_wait))
        elif api == Api.DESCRIBE_DELAYS:
            self._respond(requester, ErrorCode.OK, {"partitions": [p.describe() for p in self._open.values()]})
        elif api == Api.CHANGE_DELAYS:
            self._change(requester, request, may_wait)
        else:
            raise TailraceError(f"API {api} is not the scheduler's", ErrorCode.UNKNOWN_API)

    def _await_opening(self, wanted: Callable[[Assignment], bool], may_wait: bool) -> None:
        """What is known and not open is neither there nor not there. Raises NotSettledYet, TailraceError when it has been waited for."""
        if any(wanted(log) for log in self._opening()):
            if may_wait:
                raise NotSettledYet
            raise TailraceError("the files of its pending records cannot be opened; the appliance's log says why", ErrorCode.STORAGE_ERROR)

    def _partitions_of(self, topic: object, may_wait: bool) -> list[DelayPartition]:
        self._await_opening(lambda log: log.topic == delay_log_name(str(topic)), may_wait)
        found = sorted((p for p in self._open.values() if p.topic.topic == topic), key=lambda p: p.topic.partition)
        if not found:
            raise UnknownTopicError(f"there is no topic {topic!r} with delays")
        return found

    def _list(self, request: dict[str, Any], may_wait: bool) -> dict[str, Any]:
        """A page of what is pending in a topic, by (partition, tick, offset). `after`: where the page before ended; one that is not the last may be short."""
        partitions = self._partitions_of(request.get("topic"), may_wait)
        for partition in partitions:
            partition.catch_up()
        limit, after = request.get("limit", 100), request.get("after")
        if not isinstance(limit, int) or not 1 <= limit <= LIST_LIMIT:
            raise InvalidRequestError(f"limit is {limit!r}; it takes 1 to {LIST_LIMIT}")
        from_us, to_us = request.get("from_us"), request.get("to_us")
        key = request.get("key")
        try:
            wanted_key = None if key is None else bytes.fromhex(key)
            begin = (int(from_us) + TICK_US - 1) // TICK_US if from_us is not None else 0
            end = (int(to_us) + TICK_US - 1) // TICK_US if to_us is not None else NEVER_US
            place = None if after is None else (int(after[0]), int(after[1]), int(after[2]))
        except (TypeError, ValueError, IndexError):
            raise InvalidRequestError(
                "from_us and to_us are whole numbers, key is hexadecimal, after is what the page before ended with"
            ) from None
        rows: list[dict[str, Any]] = []
        last = None
        for partition in partitions:
            number = partition.topic.partition
            if request.get("partition") not in (None, number) or (place is not None and number < place[0]):
                continue
            start = (place[1], place[2] + 1) if place is not None and number == place[0] else (0, 0)
            listed, reached = partition.listed(max(start, (begin, 0)), end, limit - len(rows), wanted_key)
            for row in listed:
                rows.append({
                    "delay_id": delay_id(partition.log.topic_id, number, row["offset"], row["due_us"]), "topic": partition.topic.topic,
                    "partition": number, "due_us": row["due_us"], "key": row["key"], "repeat": row["repeat"],
                })  # fmt: skip
            if reached is not None:
                last = [number, *reached]
                break
        return {"delays": rows, "after": last}

    def _change(self, requester: Requester, request: dict[str, Any], may_wait: bool) -> None:
        """Cancel or reschedule: `changes` is a list of {"delay_id", "due_us" (null: cancel)}. Answered when the delay logs show what came of it."""
        from workers.delays.pending_rows import one_batch, table_of

        items = request.get("changes")
        if not isinstance(items, list) or not 1 <= len(items) <= CHANGE_LIMIT:
            raise InvalidRequestError(f"the request needs a list `changes` of 1 to {CHANGE_LIMIT} entries")
        for partition in self._open.values():
            partition.catch_up()
        results: list[dict[str, Any]] = [{} for _ in items]
        gathered: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        for number, item in sorted(enumerate(items), key=_by_offset):  # a chunk of a bucket file is looked at once
            try:
                place, row = self._changed_row(item, request.get("topic"), may_wait)
                gathered.setdefault(place, []).append((number, row))
            except TailraceError as error:
                results[number] = {"code": int(error.code), "message": error.detail}
        parts = []
        for place, rows in gathered.items():
            partition = self._open[place]
            token, self._next_token = self._next_token, self._next_token + 1
            # A predecessor's tokens are in the log too.
            token = token << 32 | self._generation & 0xFFFFFFFF
            batch = partition.change_batch(one_batch(table_of([row for _, row in rows])), token)
            limit = int(partition.log.settings["max.message.bytes"])
            if len(batch) > limit:
                raise InvalidRequestError(f"what is rescheduled takes {len(batch)} bytes in one partition; {limit} are allowed at once")
            from workers.delays.delay_partition import Change

            partition.changes[token] = Change()
            parts.append(Part(partition, token, batch, [number for number, _ in rows]))
        self._changes.append(PendingChange(requester, results, parts, self._now_ns + CHANGE_TIMEOUT_NS))

    def _changed_row(self, item: Any, topic: object, may_wait: bool) -> tuple[tuple[str, int], Any]:
        """(partition, row to append). Raises TailraceError."""
        if not isinstance(item, dict):
            raise InvalidRequestError("each entry of `changes` must be an object")
        key = parse_delay_id(item.get("delay_id"))
        place = (key.topic_id.hex(), key.partition)
        partition = self._open.get(place)
        if partition is None:
            self._await_opening(lambda log: (log.topic_id.hex(), log.partition) == place, may_wait)
            raise UnknownDelayError("there is no topic with this delayed record")
        if topic is not None and partition.topic.topic != topic:
            raise UnknownDelayError(f"the delayed record belongs to topic {partition.topic.topic!r}, not {topic!r}")
        due_us = item.get("due_us")
        if due_us is not None and (
            not isinstance(due_us, int) or isinstance(due_us, bool) or not 0 <= due_us <= self._wall_us() + HORIZON_US
        ):
            raise InvalidRequestError(f"due_us is {due_us!r}; it takes microseconds since 1970, at most 20 years ahead")
        if may_wait and not partition.has_read(key.offset):
            raise NotSettledYet
        partition.hints[key.offset] = tick_of(key.due_us)
        if due_us is None:
            if not partition.waits(key.offset):
                partition.hints.pop(key.offset)
                raise UnknownDelayError
            return place, partition.cancellation(key.offset)
        row = partition.row_of(key.offset)
        if row is None:
            partition.hints.pop(key.offset)
            raise UnknownDelayError
        return place, partition.replacement(row, due_us, key.offset)

    def advance_changes(self, now_ns: int) -> int:
        """Send what is not sent; answer what is known, or too old."""
        self._now_ns = now_ns
        count = 0
        for change in list(self._changes):
            for part in change.parts:
                if not part.is_sent:
                    part.is_sent = self._write(part.partition.log, part.batch)
            outcomes = [part.partition.changes[part.token].outcomes for part in change.parts]
            if all(outcome is not None for outcome in outcomes):
                for part, outcome in zip(change.parts, outcomes, strict=True):
                    assert outcome is not None
                    for number, found in zip(part.rows, outcome, strict=True):
                        change.results[number] = self._outcome(part.partition, found)
                self._respond(change.requester, ErrorCode.OK, {"results": change.results})
            elif self._now_ns < change.deadline_ns:
                continue
            else:
                self._respond(
                    change.requester, ErrorCode.TIMED_OUT, {"message": "nobody knows yet whether the change was made; list what is pending"}
                )
            for part in change.parts:
                part.partition.changes.pop(part.token, None)
            self._changes.remove(change)
            count += 1
        if count and not self._changes:
            for partition in self._open.values():
                partition.hints.clear()  # what is left is of changes that were refused
        return count

    @staticmethod
    def _outcome(partition: DelayPartition, found: tuple[int, int] | bool | None) -> dict[str, Any]:
        if found is None:
            return {"code": 0}
        if isinstance(found, tuple):
            offset, due_us = found
            return {"code": 0, "due_us": due_us, "delay_id": delay_id(partition.log.topic_id, partition.log.partition, offset, due_us)}
        return {"code": int(ErrorCode.UNKNOWN_DELAY), "message": "it came too late: the record is delivered, or on its way"}


def _by_offset(numbered: tuple[int, Any]) -> tuple[int, int]:
    """(offset, number) of an entry of a request; what is no id comes first."""
    number, item = numbered
    try:
        return parse_delay_id(item.get("delay_id")).offset, number
    except (TailraceError, AttributeError):
        return -1, number
