"""Requests that cancel or reschedule delayed records, and their responses.

Owner: pure.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRecordError, InvalidRequestError, TailraceError, error_for
from tailrace.core.schedule.delays import due_time_us, moment_us
from tailrace.core.validation import mapping_of, name_list, name_of

CHANGES_AT_ONCE = 2_000
"""Largest number of records in a request."""


def cancels_of(delay_ids: str | Iterable[str]) -> dict[str, int | None]:
    """delay_id -> None, of each record to cancel. Raises InvalidRequestError."""
    return dict.fromkeys(name_list("delay_ids", delay_ids))


def reschedules_of(dues: Mapping[str, dt.datetime]) -> dict[str, int | None]:
    """delay_id -> new due time in microseconds. Raises InvalidRequestError."""
    changes: dict[str, int | None] = {}
    now_us = time.time_ns() // 1000
    for name, due in mapping_of("dues", dues, "{delay_id: datetime}").items():
        try:
            moment_us(f"the time for {name!r:.60}", due)
        except InvalidRecordError as error:
            raise InvalidRequestError(error.detail) from None
        changes[name_of("a delay_id", name)] = due_time_us(due, None, now_us)
    return changes


def requests_of(changes: Mapping[str, int | None], topic: str | None) -> list[dict[str, Any]]:
    """Bodies of CHANGE_DELAYS. Raises InvalidRequestError."""
    if topic is not None:
        name_of("topic", topic)
    items = [{"delay_id": name, "due_us": due_us} for name, due_us in changes.items()]
    return [
        {"changes": items[start : start + CHANGES_AT_ONCE], "topic": topic}
        for start in range(0, len(items), CHANGES_AT_ONCE)
    ]


def results_of(request: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Map each delay_id of a request to the new one, None if it is cancelled, or its error."""
    results: dict[str, Any] = {}
    for item, result in zip(request["changes"], answer["results"], strict=True):
        refused = result["code"] != ErrorCode.OK
        results[str(item["delay_id"])] = (
            error_for(code_of(result["code"]), result.get("message", ""))
            if refused
            else result.get("delay_id")
        )
    return results


def without_ids(results: Mapping[str, Any]) -> dict[str, TailraceError | None]:
    """The results of cancels: None, or the error."""
    return {
        name: found if isinstance(found, TailraceError) else None for name, found in results.items()
    }
