"""Listing of a partition's pending rows for clients.

Owner: the scheduler. Reads only.

Invariants:
- A page has at most `limit` rows.
- Only due time and key of a row are copied, and a key above KEY_SHOWN_MAX is omitted. Rows are
  client data, and a page of the largest would be gigabytes.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.schedule.recurrence import Recurrence
from workers.delays.delay_log.batches import shown_due_us
from workers.delays.delay_log.reservations import Reservations
from workers.delays.store.pending_store import PendingStore
from workers.delays.store.recurring_rows import RecurringRows

KEY_SCAN_ROWS = 10_000
KEY_SHOWN_MAX = 4_096
"""Largest key shown, in bytes."""
_DUE, _KEY, _SIZE = 0, 1, 2


def listed_rows(
    store: PendingStore,
    recurring: RecurringRows,
    columns: list[str],
    begin: tuple[int, int],
    end_tick: int,
    limit: int,
    key: bytes | None,
    reservations: Reservations,
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """Return up to `limit` pending rows with (tick, offset) >= `begin` and tick < `end_tick`, in
    that order.

    Also return the key of the last row checked, or None if there are no more. `columns` names the
    column of the due times and, if there is one, that of the keys. `key` selects rows of one key.
    At most KEY_SCAN_ROWS are then checked in a call. Raises OSError.
    """
    page, last = store.page(
        begin, end_tick, limit if key is None else KEY_SCAN_ROWS, columns, _narrow,
        reservations.listed(columns),
    )  # fmt: skip
    result: list[dict[str, Any]] = []
    for tick, offset, rows, row in page:
        found = rows.column(_KEY)[row].as_py() if len(columns) > _KEY else None
        if key is not None and found != key:
            continue
        upcoming = recurring.upcoming(offset) or reservations.upcoming(offset)
        result.append(_described(tick, offset, rows, row, found, upcoming))
        if len(result) == limit:
            return result, (tick, offset)
    return result, last


def _narrow(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return due times and keys. A key that is too long is null, with its length beside it."""
    if rows.num_columns <= _KEY:
        return rows
    keys = rows.column(_KEY)
    sizes = pc.binary_length(keys)
    if (pc.max(sizes).as_py() or 0) > KEY_SHOWN_MAX:
        keys = pc.if_else(pc.less_equal(sizes, KEY_SHOWN_MAX), keys, pa.scalar(None, keys.type))
    return pa.RecordBatch.from_arrays([rows.column(_DUE), keys, sizes], ["due", "key", "size"])


def _described(
    tick: int,
    offset: int,
    columns: pa.RecordBatch,
    row: int,
    key: bytes | None,
    upcoming: tuple[int, Recurrence] | None,
) -> dict[str, Any]:
    due_us, repeat = upcoming or (columns.column(_DUE)[row].as_py(), None)
    described = {
        "tick": tick, "offset": offset, "due_us": shown_due_us(due_us),
        "key": None if key is None else base64.b64encode(key).decode(),
        "repeat": None if repeat is None else orjson.loads(repeat.to_json()),
    }  # fmt: skip
    if key is None and columns.num_columns > _SIZE and columns.column(_SIZE)[row].is_valid:
        described["key_bytes"] = columns.column(_SIZE)[row].as_py()
    return described
