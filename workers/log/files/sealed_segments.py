"""Sealed segments of a log: which there are, and how they are swapped and removed.

Owner: the flusher.

Invariants:
- A segment never changes. A swap replaces it by a cleaned one, in one durable step
  (`workers.segment.segment_swap`).
- At most one swap is decided and not finished. Until it is, no segment is removed.
- `files_version` grows with each swap.

Crash: a decided swap has its intent beside the segments, and the next start finishes it.
"""

from __future__ import annotations

from collections.abc import Callable

from shm.crash_points import crash_point
from workers.log.files.partition_directory import PartitionDirectory
from workers.log.producers.transaction_indexes import TransactionIndexes
from workers.segment import segment_swap
from workers.segment.checkpoint import SealedSegment
from workers.segment.files import Files
from workers.segment.segment_swap import CleanedRun


class SealedSegments(dict[int, SealedSegment]):
    """The sealed segments of one log, by base offset."""

    def __init__(
        self,
        files: Files,
        home: PartitionDirectory,
        indexes: TransactionIndexes,
        checkpoint: Callable[[], None],
    ) -> None:
        """`checkpoint` writes a checkpoint of the log, durably. It may raise OSError."""
        super().__init__()
        self._files = files
        self._home = home
        self._indexes = indexes
        self._checkpoint = checkpoint
        self._swap: CleanedRun | None = None
        """A swap that is decided and not finished."""
        self.files_version = 0
        """The partition table shows it."""
        self.unscrubbed: list[int] = []
        """Segments whose indexes were not checked since the start, the active one among them
        (`workers.log.index_scrubber`).
        """

    def take_over(self, recovered: dict[int, SealedSegment]) -> None:
        """Begin with the segments that recovery has found. None of them is scrubbed."""
        self.clear()
        self.update(recovered)
        self.unscrubbed = sorted(recovered)

    def oldest_first(self) -> list[SealedSegment]:
        return [self[base] for base in sorted(self)]

    def with_following(self, end: int) -> list[tuple[SealedSegment, int]]:
        """The segments, each with the offset at which the next begins. `end`: where the one after
        the last begins.
        """
        segments = self.oldest_first()
        ends = [*(segment.base for segment in segments[1:]), end]
        return list(zip(segments, ends, strict=False))  # without segments zip drops the spare end

    # ---- swaps -----------------------------------------------------------------------------------

    @property
    def is_swapping(self) -> bool:
        """True while a swap is decided and not finished."""
        return self._swap is not None

    def are_replaced_by(self, run: CleanedRun) -> bool:
        """True if the segments that the run replaces are here, as the cleaner read them."""
        known = [self.get(base) for base, _ in run.replaced]
        return [segment and [segment.base, segment.size] for segment in known] == run.replaced

    def decide_swap(self, run: CleanedRun) -> None:
        """Decide a swap, durably. Raises OSError; the swap may be decided then (`is_swapping`)."""
        self._checkpoint()  # none before the run was sealed may be the newest
        crash_point("flusher.before_swap")
        try:
            segment_swap.write_intent(self._files, self._home.path, run)
        except OSError:
            # Its name may be there although the sync failed: a start would carry it out.
            self._swap = run if segment_swap.has_intent(self._files, self._home.path) else None
            raise
        self._swap = run
        crash_point("flusher.after_swap_intent")

    def finish_swap(self) -> CleanedRun | None:
        """Finish a swap that is decided. Everything must be synced. Returns its run, None if there
        is none. Raises OSError; then call it again.
        """
        run = self._swap
        if run is None:
            return None
        segment_swap.carry_out(self._files, self._home.path, run)
        crash_point("flusher.after_swap")
        for base, _ in run.replaced:
            self.pop(base, None)
            if run.has_transactions:
                continue  # its index stays, and may be unscrubbed
            self._indexes.forget(base)
            if base in self.unscrubbed:
                self.unscrubbed.remove(base)
        self[run.base] = run.sealed
        self.files_version += 1
        self.end_swap(run)
        return run

    def end_swap(self, run: CleanedRun) -> None:
        """Let both checkpoints know the cleaned segment, which is in its place, then forget the
        intent. Raises OSError; the swap is then decided still.
        """
        self._swap = run
        self._checkpoint()
        self._checkpoint()
        crash_point("flusher.before_swap_end")
        segment_swap.remove_intent(self._files, self._home.path)
        self._swap = None

    # ---- removal ---------------------------------------------------------------------------------

    def remove_below(self, offset: int, end: int) -> int:
        """Remove the segments that lie wholly below `offset`, none during a swap. `end`: see
        `with_following`. Returns how many. Raises OSError.
        """
        removed = 0
        for segment, following in [] if self.is_swapping else self.with_following(end):
            if following > offset:
                break
            self._home.remove_segment(segment.base)
            self._indexes.forget(segment.base)
            del self[segment.base]
            removed += 1
        return removed
