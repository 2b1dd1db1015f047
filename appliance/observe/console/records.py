"""Records of a partition for the page: from an offset, a time, or the newest ones; with a search.

Owner: the thread of a request, with a consumer of its own.
Invariants:
- At most RECORDS_MAX records and about ANSWER_MAX_BYTES are answered, and SCANNED_MAX records are
  read for a search. The answer has the offset at which the next request continues.
- A long value is cut, and the answer says how long it is.
- Nothing is committed: the consumer has no group.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import orjson

from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.units import digits_in

RECORDS_MAX = 200
RECORDS_DEFAULT = 50
SCANNED_MAX = 100_000
ANSWER_MAX_BYTES = 1 << 20
CUT_BYTES = 16 << 10
"""Length above which a key or value is cut."""
POLL_MS = 1_000
SEARCH_NS = 5_000_000_000
"""Longest time of a search."""


def browse(address: str, topic: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Read records. `query` has `partition`, `limit`, `search`, `isolation`, and one of `offset`,
    `time_ms` or neither (the newest records). Raises TailraceError.
    """
    where = TopicPartition(topic, _number(query, "partition", 0))
    limit = min(_number(query, "limit", RECORDS_DEFAULT), RECORDS_MAX) or 1
    needle = query.get("search", "")
    isolation = query.get("isolation", "read_committed")
    with Consumer(
        bootstrap=address, client_id="tailrace-console", isolation_level=isolation
    ) as consumer:
        consumer.assign([where])
        beginning = consumer.beginning_offsets([where])[where]
        end = consumer.end_offsets([where])[where]
        start = _start(consumer, where, query, limit, beginning, end)
        consumer.seek(where, start)
        rows, offset = _read(consumer, where, needle.encode(), limit, start, end)
    return {
        "topic": topic, "partition": where.partition, "beginning": beginning, "end": end,
        "start": start, "next": offset, "records": rows,
    }  # fmt: skip


def _start(
    consumer: Consumer,
    where: TopicPartition,
    query: Mapping[str, str],
    limit: int,
    beginning: int,
    end: int,
) -> int:
    """The offset to begin at, between the beginning and the end."""
    if query.get("time_ms"):
        found = consumer.offsets_for_times({where: _number(query, "time_ms", 0)})[where]
        start = end if found is None else found.offset
    elif query.get("offset"):
        start = _number(query, "offset", 0)
    else:
        start = beginning if query.get("search") else end - limit
    return max(beginning, min(start, end))


def _read(
    consumer: Consumer, where: TopicPartition, needle: bytes, limit: int, start: int, end: int
) -> tuple[list[dict[str, Any]], int]:
    """(rows, the offset behind the last record that was read)."""
    rows: list[dict[str, Any]] = []
    read = size_bytes = 0
    offset = start
    give_up_ns = time.monotonic_ns() + SEARCH_NS
    while offset < end and read < SCANNED_MAX and time.monotonic_ns() < give_up_ns:
        records = consumer.poll(timeout_ms=POLL_MS)
        if not records:
            position = consumer.position(where)
            if position <= offset:
                continue
            offset = position  # markers and aborted records have been passed
        for record in records:
            if record.offset >= end:
                return rows, end
            read += 1
            offset = record.offset + 1
            if needle and not _contains(record, needle):
                continue
            row = _row(record)
            size_bytes += len(orjson.dumps(row))
            rows.append(row)
            if len(rows) >= limit or size_bytes >= ANSWER_MAX_BYTES:
                return rows, offset
    return rows, offset


def _row(record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ms": record.timestamp,
        "key": _field(record.key),
        "value": _field(record.value),
        "headers": [[name, _field(value)] for name, value in record.headers],
    }


def _field(value: Any) -> Any:
    """A key or value for JSON: None, `{"text"}`, `{"base64"}` or `{"json"}`, with `"size"` if it is
    cut.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return _cut("json", orjson.dumps(value, default=_plain).decode())
    data = bytes(value)
    try:
        return _cut("text", data.decode())
    except UnicodeDecodeError:
        field = {"base64": base64.b64encode(data[:CUT_BYTES]).decode("ascii")}
        return field if len(data) <= CUT_BYTES else {**field, "size": len(data)}


def _cut(kind: str, text: str) -> dict[str, Any]:
    if len(text) <= CUT_BYTES:
        return {kind: text}
    return {kind if kind == "text" else "text": text[:CUT_BYTES], "size": len(text)}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    return str(value)


def _contains(record: Record, needle: bytes) -> bool:
    value = record.value
    data = orjson.dumps(value, default=_plain) if isinstance(value, dict) else value
    return (
        needle in (data or b"")
        or needle in (record.key if isinstance(record.key, bytes) else b"")
        or any(needle in (value or b"") for _, value in record.headers)
    )


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    number = digits_in(text)
    if number is None:
        raise InvalidRequestError(f"{name} is {text[:40]!r}; write a number from 0")
    return number
