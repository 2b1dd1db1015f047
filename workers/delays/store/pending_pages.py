"""Pending pages: pages of pending rows in due order, for listings.

A page is selected by its rows' keys (tick, offset), from memory and from every file that may have
some. Only the rows of the page are then read. A page costs the keys of its files and holds no more
rows than it has.

Owner: the scheduler. Reads only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.format.directory.delay_files import Chunk, PendingDamagedError
from workers.delays.store.array_wheel import NEVER
from workers.delays.store.bucket_files import BucketFile, Ints, is_above
from workers.delays.store.pending_rows import PendingRows

logger = logging.getLogger(__name__)

Listed = tuple[int, int, pa.RecordBatch, int]
"""(tick, offset, batch, row in it)."""
Others = tuple[Ints, Ints, Callable[[Ints], pa.RecordBatch]]
"""(ticks, offsets, places -> columns of the page) of pending rows that are neither in memory nor in
a file.
"""
_TICK, _OFFSET, _SOURCE, _PLACE = range(4)


@dataclass(slots=True)
class _Page:
    """Smallest rows found so far, up to the limit."""

    limit: int
    keys: np.ndarray[Any, np.dtype[np.int64]]
    """(tick, offset, number of the source, place in it) of each row, in order."""
    sources: list[Callable[[Ints], pa.RecordBatch]]
    """Functions from places to rows, by source."""

    @property
    def is_full(self) -> bool:
        return len(self.keys) >= self.limit

    @property
    def last_tick(self) -> int:
        """Tick of the last row of a full page, else NEVER. Later rows cannot enter the page."""
        return int(self.keys[-1, _TICK]) if self.is_full else NEVER

    def offer(
        self, ticks: Ints, offsets: Ints, places: Ints, read: Callable[[Ints], pa.RecordBatch]
    ) -> None:
        """Add rows of a source.

        If a row is there already (a row being saved is in memory too), the first stays.
        """
        near = ticks <= (
            np.partition(ticks, self.limit - 1)[self.limit - 1]
            if len(ticks) > self.limit
            else NEVER
        )
        keys = np.stack((ticks, offsets, np.full(len(ticks), len(self.sources)), places), axis=1)[
            near
        ]
        self.sources.append(read)
        keys = np.concatenate([self.keys, keys])
        keys = keys[np.lexsort((keys[:, _SOURCE], keys[:, _OFFSET], keys[:, _TICK]))]
        is_first = np.ones(len(keys), bool)
        is_first[1:] = (keys[1:, :_SOURCE] != keys[:-1, :_SOURCE]).any(axis=1)
        self.keys = keys[is_first][: self.limit]

    def read(self) -> list[Listed]:
        """Return the page's rows, in order of (tick, offset). Raises OSError."""
        found: dict[int, Listed] = {}
        for number in np.unique(self.keys[:, _SOURCE]).tolist():
            mine = np.flatnonzero(self.keys[:, _SOURCE] == number)
            try:
                rows = self.sources[number](self.keys[mine, _PLACE])
            except PendingDamagedError as error:
                logger.error("bucket_damaged reason=%r", str(error))
                continue
            for row, place in enumerate(mine.tolist()):
                found[place] = (
                    int(self.keys[place, _TICK]),
                    int(self.keys[place, _OFFSET]),
                    rows,
                    row,
                )
        return [found[place] for place in sorted(found)]


def page_of(
    rows: PendingRows,
    files: Sequence[BucketFile],
    read_rows: Callable[[BucketFile, Chunk], tuple[Ints, Ints, pa.RecordBatch]],
    begin: tuple[int, int],
    end_tick: int,
    limit: int,
    columns: list[str],
    shown: Callable[[pa.RecordBatch], pa.RecordBatch],
    others: Others | None = None,
) -> tuple[list[Listed], tuple[int, int] | None]:
    """Return the first `limit` pending rows with (tick, offset) >= `begin` and tick < `end_tick`,
    in order.

    Also return the key of the last row, or None if there are no more. `files` are those whose rows
    are not in memory, and `read_rows` reads a chunk of one. `columns` are the columns to copy,
    which all versions have, `shown` reduces them. Rows of a damaged chunk are left out and logged.
    Raises OSError.
    """

    def within(ticks: Ints, offsets: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return is_above(ticks, offsets, (begin[0], begin[1] - 1)) & (ticks < end_tick)

    page = _Page(limit, np.empty((0, 4), np.int64), [])
    waiting = rows.still_alive(rows.wheel.select(lambda piece: within(piece[:, 0], piece[:, 1])))
    page.offer(
        waiting[:, 0],
        waiting[:, 1],
        np.arange(len(waiting)),
        lambda places: shown(
            rows.columns_of(waiting[places], lambda run, at: run.select(columns).take(pa.array(at)))
        ),
    )
    if others is not None:
        ticks, offsets, rows_at = others
        places = np.flatnonzero(within(ticks, offsets))
        page.offer(
            ticks[places],
            offsets[places],
            places,
            lambda places: shown(rows_at(places)),
        )
    for file in sorted(files, key=lambda file: file.entry.start):
        if file.last_tick < begin[0] or file.entry.start >= end_tick:
            continue
        if file.entry.start > page.last_tick:
            break
        try:
            for chunk in list(file.row_chunks()):
                if (
                    chunk.max_tick < begin[0]
                    or chunk.min_tick >= end_tick
                    or chunk.min_tick > page.last_tick
                ):
                    continue
                ticks, offsets = file.keys_of(chunk)
                places = np.flatnonzero(within(ticks, offsets))
                ticks, offsets = ticks[places], offsets[places]
                left = file.left(chunk, ticks, offsets)

                def read(
                    places: Ints, file: BucketFile = file, chunk: Chunk = chunk
                ) -> pa.RecordBatch:
                    found = read_rows(file, chunk)[2]
                    return shown(found.select(columns).take(pa.array(places)))

                page.offer(ticks[left], offsets[left], places[left], read)
        except PendingDamagedError as error:
            logger.error("bucket_damaged reason=%r", str(error))
    return page.read(), (page.last_tick, int(page.keys[-1, _OFFSET])) if page.is_full else None
