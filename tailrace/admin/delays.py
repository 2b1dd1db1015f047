"""Administration of delayed records: list, cancel, reschedule. `tailrace.Admin` has these methods.

Each call makes a request or a few in the caller's thread. A change is durable when the method
returns.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from tailrace.admin.topic_list import partition_counts
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.client.records.delay_changes import (
    cancels_of,
    requests_of,
    reschedules_of,
    results_of,
    without_ids,
)
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidRequestError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.core.schedule.delays import moment_us
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.core.validation import name_of, optional_text_bytes, whole
from tailrace.protocol.frame import Api

T = TypeVar("T")
DELAYS_PAGE = 1_000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class PendingDelay(NamedTuple):
    """A delayed record that is not delivered yet, as `Admin.list_delays` returns it."""

    delay_id: str
    topic: str
    partition: int
    due: dt.datetime
    """The time of its delivery, of a recurring one the next, in UTC."""
    key: bytes | None
    repeat: Recurrence | None


class DelayAdmin:
    """The methods of `Admin` for delayed records."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    def list_delays(
        self,
        topic: str,
        *,
        partition: int | None = None,
        key: bytes | str | None = None,
        due_from: dt.datetime | None = None,
        due_to: dt.datetime | None = None,
    ) -> Iterator[PendingDelay]:
        """Iterate over a topic's delayed records by partition and due time, fetched page by page.
        `key`: only records with this key (text is encoded as UTF-8). `due_from`, `due_to`
        (datetimes with a time zone): only those due in between. Raises UnknownTopicError,
        DelayNotEnabledError, InvalidRequestError, also during the iteration.
        """
        self._connection.check_usable()
        return self._pages(delays_request(topic, partition, key, due_from, due_to))

    def _pages(self, request: dict[str, Any]) -> Iterator[PendingDelay]:
        while True:
            delays, request["after"] = self._run_steps(self._delays_page(request))
            yield from delays
            if request["after"] is None:
                return

    def _delays_page(self, request: dict[str, Any]) -> Steps[tuple[list[PendingDelay], str | None]]:
        """One page of `list_delays`, and the start of the next (None: this was the last)."""
        try:
            answer = yield from self._call(Api.LIST_DELAYS, request)
        except UnknownTopicError:
            if request["topic"] in (yield from partition_counts(self._call)):
                raise DelayNotEnabledError(
                    f"topic {request['topic']!r} has no delayed records: delay.enabled is false. "
                    "Set it to true with alter_topics() to delay records"
                ) from None
            raise
        delays = [
            PendingDelay(
                row["delay_id"], row["topic"], row["partition"],
                _EPOCH + dt.timedelta(microseconds=row["due_us"]),
                None if row["key"] is None else base64.b64decode(row["key"]),
                Recurrence(**row["repeat"]) if row["repeat"] else None,
            )
            for row in answer["delays"]
        ]  # fmt: skip
        return delays, answer["after"]

    @operation
    def cancel_delays(
        self, delay_ids: str | Iterable[str], *, topic: str | None = None
    ) -> Steps[dict[str, TailraceError | None]]:
        """Cancel delayed records: a delay_id, or several. Returns for each id None, or the error:
        UnknownDelayError after its delivery. `topic`: ids of other topics are refused. Raises
        InvalidRequestError, RequestTimeoutError.
        """
        return without_ids((yield from self._change_delays(cancels_of(delay_ids), topic)))

    @operation
    def reschedule_delays(
        self, dues: Mapping[str, dt.datetime], *, topic: str | None = None
    ) -> Steps[dict[str, str | TailraceError]]:
        """Change the due times of delayed records: delay_id -> datetime with a time zone. Returns
        for each its new id, which replaces the old one, or the error. Raises InvalidRequestError,
        RequestTimeoutError.
        """
        return (yield from self._change_delays(reschedules_of(dues), topic))

    def _change_delays(
        self, changes: Mapping[str, int | None], topic: str | None
    ) -> Steps[dict[str, Any]]:
        self._connection.check_usable()
        results: dict[str, Any] = {}
        for request in requests_of(changes, topic):
            answer = yield from self._call(Api.CHANGE_DELAYS, request)
            results |= results_of(request, answer)
        return results

    @operation
    def describe_delays(self) -> Steps[list[dict[str, Any]]]:
        """For each partition with delays: the number of waiting and of delivered records, the next
        due time, and the delay of the last delivery.
        """
        partitions: list[dict[str, Any]] = []
        answer: dict[str, Any] = {"after": None}
        while True:  # page by page
            answer = yield from self._call(Api.DESCRIBE_DELAYS, {"after": answer["after"]})
            partitions += answer["partitions"]
            if answer.get("after") is None:
                return partitions


def delays_request(
    topic: str,
    partition: int | None,
    key: bytes | str | None,
    due_from: dt.datetime | None,
    due_to: dt.datetime | None,
) -> dict[str, Any]:
    """A LIST_DELAYS request for the first page: see `Admin.list_delays`. Raises
    InvalidRequestError.
    """
    key_bytes = optional_text_bytes("key", key)
    return {
        "topic": name_of("topic", topic),
        "partition": None if partition is None else whole("partition", partition, 0),
        "limit": DELAYS_PAGE,
        "after": None, "key": None if key_bytes is None else key_bytes.hex(),
        "from_us": None if due_from is None else _moment_us("due_from", due_from),
        "to_us": None if due_to is None else _moment_us("due_to", due_to),
    }  # fmt: skip


def _moment_us(label: str, when: Any) -> int:
    """Microseconds since 1970 of a datetime with a time zone. Raises InvalidRequestError."""
    try:
        return moment_us(label, when)
    except InvalidRecordError as error:
        raise InvalidRequestError(error.detail) from None
