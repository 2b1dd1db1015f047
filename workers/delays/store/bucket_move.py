"""Move of a bucket's rows nearer to their time: to the buckets of lower levels, a chunk at a time.

Owner: the scheduler, as a job of a partition's `PendingStore`.
Invariants: the manifest says of each chunk either that its rows are in the old file, or where they
are now. The new files are durable before it says so.
Crash: a chunk that the manifest has not noted is moved again; what was written of it is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from shm.crash_points import crash_point
from workers.delays.store.array_wheel import no_rows, split
from workers.delays.store.bucket_files import BucketFile, width_of
from workers.delays.store.bucket_set import LOAD_AHEAD_TICKS, BucketSet, label_of, labels_of


def move_down(buckets: BucketSet, file: BucketFile, now_tick: Callable[[], int]) -> Iterator[None]:
    """Move a bucket's rows to lower buckets, a chunk at a time, or to a new file of the same
    bucket if most are cancelled. `now_tick`: the clock. Raises OSError.
    """
    to_lower = file.entry.start <= now_tick() + LOAD_AHEAD_TICKS + width_of(file.entry.level - 1)
    for chunk, ticks, offsets, rows in buckets.intact_chunks(file):
        left = buckets.left(file, chunk, ticks, offsets, as_saved=True)
        ticks, offsets, rows = ticks[left], offsets[left], rows.filter(pa.array(left))
        touched: dict[BucketFile, None] = {}  # in the order of writing
        if to_lower:
            labels = labels_of(ticks, max(now_tick(), file.entry.start))
        else:
            labels = np.full(len(ticks), label_of(file.entry.level, file.entry.start))
        places = (
            np.stack((ticks, offsets, np.arange(len(ticks))), axis=1) if len(ticks) else no_rows()
        )
        for label, piece in split(places, labels):
            target = buckets.open_bucket(label, file.schema_id, file)
            buckets.append(target, piece[:, 0], piece[:, 1], rows.take(pa.array(piece[:, 2])))
            target.unsaved_cancels |= file.unsaved_cancels.intersection(piece[:, 1].tolist())
            touched[target] = None
            yield
        for target in touched:
            target.sync()
            yield
        buckets.sync_names()
        file.forget_chunk(chunk)
        buckets.save_manifest()
        crash_point("scheduler.after_move")
    buckets.remove([file])
