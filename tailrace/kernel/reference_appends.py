"""The worker's append step for batches that need no thought, in Python: there is no quick way, each batch takes the worker's own, `Worker._produce`.

So the truth that the compiled `quick_append` is held against is the worker itself, with its checks and its errors (`tests/workers/test_quick_append.py`).

Owner: one worker. Invariants: a batch that is not taken has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.formats.arrow_metadata import SchemaLayout
    from tailrace.formats.checksum import Readable


class BatchShape:
    """What the structural check needs of a schema."""

    def __init__(self, layout: SchemaLayout) -> None:
        self.layout = layout


def is_good_batch(batch: Readable, seed: int, shape: BatchShape, max_message_bytes: int) -> bool:
    """Whether a client's batch is sound by both checksums and by its structure. The compiled one may also say False of a sound batch of a form that is rare
    (with an extension, of more than 64 MiB): then `verify_batch` and `check_structure` are asked, which say what is wrong.
    """
    from tailrace.formats.batch_header import BatchFormatError, verify_batch
    from tailrace.formats.structure import UnsafeBatchError, check_structure

    try:
        header = verify_batch(memoryview(batch), seed)
        check_structure(batch, header, shape.layout, max_message_bytes=max_message_bytes)
    except (BatchFormatError, UnsafeBatchError):
        return False
    return True


class QuickPartition:
    """Of a partition of a worker: what each batch asks for."""

    next_offset: int
    leader_epoch: int
    last_append_us: int
    max_message_bytes: int
    slot_map_version: int
    log_append_time: bool
    seed: int

    def _note(self, shape: BatchShape, schema_id: int, data_dir: int, has_special_rules: bool) -> None:
        """What follows from the assignment. `has_special_rules`: it is a delay log, whose batches all need thought."""


def quick_append(
    ring: Any, lane: Any, source: int, produce_kind: int, count_max: int, partitions: dict[int, Any], tables: list[Any], now_us: int,
    expiration_us: int, older_bytes: int,
) -> tuple[int, int, bool]:  # fmt: skip
    """Append batches from a lane up to the first message that needs thought, `count_max` at most; returns (how many, their bytes, whether fronts reply to one
    as soon as it is published).

    `produce_kind`: the kind of messages that are batches. `tables`: a partition table for each data directory, None where it takes nothing now.
    `expiration_us`: producers that have appended nothing for so long are forgotten. `older_bytes`: of what is remembered of a producer, so much is kept behind
    its newest batch.
    """
    return 0, 0, False
