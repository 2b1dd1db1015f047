"""Planted faults of compaction, each with a seed near one that finds it. The checks of the
simulation must find them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.format.segments.transaction_index import AbortedBatches
from workers.clean import merging_pass
from workers.clean.cleaned_file import CleanedFile
from workers.clean.cleaning_pass import CleaningPass
from workers.clean.merged_batches import NONE_US, MergedBatches
from workers.clean.superseded import Superseded
from workers.flush import log_cleaner
from workers.flush.cleaning import watched_log
from workers.log.retention.compaction_rules import cleanable
from workers.log.retention.expiry import new_start
from workers.segment import segment_swap
from workers.segment.files import write_durably

Plant = Callable[[pytest.MonkeyPatch], None]


class _Unsynced:
    """Files whose data is not synced."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def sync_data(self, _fd: int) -> None:
        """Leave it to the page cache."""


def _keep_aborted_records(patch: pytest.MonkeyPatch) -> None:
    """The cleaner takes aborted records for committed ones."""
    patch.setattr(AbortedBatches, "has", lambda *_: False)


def _drop_tombstones_at_once(patch: pytest.MonkeyPatch) -> None:
    """A tombstone goes with the first pass that meets it."""

    def drop(self: CleaningPass, source: Any, kept: Any) -> int:
        kept &= ~np.asarray(source.rows.column(self._value_index).is_null())
        return NONE_US

    patch.setattr(CleaningPass, "_drop_tombstones", drop)


def _sync_no_cleaned_file(patch: pytest.MonkeyPatch) -> None:
    """A run is reported, and its file is in the page cache only."""
    finish = CleanedFile.finish

    def unsynced(self: CleanedFile, *given: Any, **named: Any) -> Any:
        self._files = _Unsynced(self._files)
        return finish(self, *given, **named)

    patch.setattr(CleanedFile, "finish", unsynced)


def _decide_in_the_page_cache(patch: pytest.MonkeyPatch) -> None:
    """Segments are replaced before the intent is durable."""
    write = write_durably
    patch.setattr(segment_swap, "write_durably", lambda *given: write(*given, sync=False))
    carry_out = segment_swap.carry_out

    def early(files: Any, directory: str, run: Any) -> None:
        patched = type("Early", (_Unsynced,), {"sync_directory": lambda *_: None})(files)
        carry_out(patched, directory, run)

    patch.setattr(segment_swap, "carry_out", early)


def _leave_swaps_half_done(patch: pytest.MonkeyPatch) -> None:
    """A start does not finish the swap that its predecessor has decided."""
    patch.setattr(segment_swap, "finish_swap", lambda *_: None)


def _number_rows_anew(patch: pytest.MonkeyPatch) -> None:
    """Give the rows that are left of a range its last offsets."""
    encode = MergedBatches._encode

    def renumbered(
        self: MergedBatches, made: Any, rows: Any, offsets: Any, until: int, **named: Any
    ) -> None:
        encode(self, made, rows, np.arange(until - len(offsets), until), until, **named)

    patch.setattr(MergedBatches, "_encode", renumbered)


def _pass_the_last_stable_offset(patch: pytest.MonkeyPatch) -> None:
    """Segments with open transactions are cleaned."""
    rule = cleanable
    patch.setattr(
        watched_log,
        "cleanable",
        lambda segments, *, stable_offset, now_us, min_lag_ms: rule(
            segments, stable_offset=stable_offset + (1 << 40), now_us=now_us, min_lag_ms=min_lag_ms
        ),
    )


def _miss_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """A batch is passed over though its last record is the latest of its key."""
    rule = Superseded.is_superseded
    patch.setattr(
        Superseded, "is_superseded", lambda self, start, end: rule(self, start, max(start, end - 1))
    )


def _forget_the_dirty_part(patch: pytest.MonkeyPatch) -> None:
    """Only the keys of the first dirty segment are looked for; later ones count as superseded."""
    kept = Superseded.kept

    def first_only(self: Superseded, source: Any) -> Any:
        found = kept(self, source)
        dirty = [each for each in self._segments if not each.is_cleaned]
        if dirty[1:] and source.header.base_offset >= dirty[-1].base:
            found = np.zeros_like(found)
        return found

    patch.setattr(Superseded, "kept", first_only)


def _merge_aborted_batches(patch: pytest.MonkeyPatch) -> None:
    """Rows of aborted transactions are merged with others, and have no transaction then."""
    patch.setattr(merging_pass, "_is_mergeable", lambda header, _: not header.is_control)


def _let_all_expire(patch: pytest.MonkeyPatch) -> None:
    """Retention does not ask for cleanup.policy."""
    rule = new_start
    patch.setattr(
        log_cleaner,
        "new_start",
        lambda *given, retention_ms, **named: rule(
            *given, retention_ms=300 if retention_ms < 0 else retention_ms, **named
        ),
    )


def _expire_early(patch: pytest.MonkeyPatch) -> None:
    """Segments expire an hour before their time."""
    rule = new_start
    patch.setattr(
        log_cleaner,
        "new_start",
        lambda *given, now_us, **named: rule(*given, now_us=now_us + 3_600_000_000, **named),
    )


PLANTED: list[tuple[Plant, int, tuple[str, ...]]] = [
    (_keep_aborted_records, 1, ()),
    (_drop_tombstones_at_once, 4, ()),
    (_sync_no_cleaned_file, 0, ("power",)),
    (_decide_in_the_page_cache, 22, ("power",)),
    (_leave_swaps_half_done, 4, ("crash point", "kill flusher")),
    (_number_rows_anew, 0, ()),
    (_pass_the_last_stable_offset, 11, ()),
    (_miss_the_last_row, 0, ()),
    (_forget_the_dirty_part, 0, ()),
    (_merge_aborted_batches, 0, ()),
    (_let_all_expire, 0, ()),
    (_expire_early, 19, ()),
]
"""A fault, the first seed to try, and the faults under which it shows (none: those of the seed)."""
