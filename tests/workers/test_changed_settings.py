"""Changed settings act in a worker and a flusher that run."""

from __future__ import annotations

import pathlib
from typing import Any

from shm.memory.layout import ProcessWord
from tailrace.core.error_codes import ErrorCode
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import bench
from workers.segment.files import DiskFiles

MS = 1_000_000
SECOND = 1_000 * MS
HOUR_MS = 3_600_000


def settings(**changed: Any) -> dict[str, Any]:
    """Settings that the supervisor publishes to workers and flushers."""
    usual = {
        "flush.linger_ms": 0, "flush.batch_size": 1 << 20, "checkpoint_bytes": 64 << 20,
        "journal_bytes": 1 << 20, "reserve_bytes": 0, "retention.check.interval.ms": HOUR_MS,
        "cleaner.check.interval.ms": 15_000, "cleaner.dedupe.buffer.size": 1 << 20,
        "cleaner.io.max.bytes.per.second": 0,
        "producer.id.expiration.ms": 24 * HOUR_MS, "producer.ids.max": 10_000,
    }  # fmt: skip
    return usual | {name.replace("__", "."): value for name, value in changed.items()}


class Roomy(DiskFiles):
    """A disk of a known size with little free."""

    def total_bytes(self, path: str) -> int:
        return 1 << 40

    def free_bytes(self, path: str) -> int:
        return 1 << 30


def test_the_linger_and_the_size_of_a_group_change(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.settle()
        b.flusher.apply_settings(settings(flush__linger_ms=50, flush__batch_size=3_000))
        b.send(make_batch(3))
        b.step_worker()
        b.step_flusher()
        assert b.table.read(0).high_watermark == 0, "it waits for a larger group"
        b.send(make_batch(200))
        b.step_worker()
        b.settle()
        assert b.table.read(0).high_watermark == 203, "the group is large enough"
        b.send(make_batch(3))
        b.settle()
        b.now_ns += 51 * MS
        b.settle()
        assert b.table.read(0).high_watermark == 206
        b.flusher.apply_settings(settings())
        b.send(make_batch(3))
        b.settle()
        assert b.table.read(0).high_watermark == 209, "it does not linger any more"


def test_a_larger_reserve_makes_the_disk_full_at_once_and_a_smaller_one_ends_that(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path), Roomy()) as b:
        b.settle()
        b.flusher.apply_settings(settings(reserve_bytes=2 << 30))
        assert b.flusher_slot.load(ProcessWord.DISK_FULL) == 1
        b.flusher.apply_settings(settings())
        assert b.flusher_slot.load(ProcessWord.DISK_FULL) == 0


def test_checkpoints_follow_the_new_size(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.settle()
        log = next(iter(b.flusher._logs.all()))
        b.send(make_batch(2_000))
        b.settle()
        assert log.since_checkpoint_bytes > 4_096, "64 MiB are far"
        b.flusher.apply_settings(settings(checkpoint_bytes=8_192))
        b.send(make_batch(2_000))
        b.settle()
        assert log.since_checkpoint_bytes < 8_192


def test_expired_segments_are_looked_for_at_the_new_interval(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.settle()
        b.send(make_batch(3))
        b.settle()
        usual = b.flusher.next_deadline_ns()
        assert usual is not None
        assert usual - b.now_ns > HOUR_MS * MS // 2
        b.flusher.apply_settings(settings(retention__check__interval__ms=500))
        b.settle()
        found = b.flusher.next_deadline_ns()
        assert found is not None
        assert found - b.now_ns <= 501 * MS


def test_a_partition_remembers_as_many_producers_as_the_new_settings_say(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        b.settle()
        b.worker.apply_settings(settings(producer__ids__max=256))
        for producer_id in range(257):
            b.send(make_batch(1, producer_id=producer_id, sequence=0))
        b.settle()
        assert b.answers()[-1][0] == ErrorCode.TOO_MANY_PRODUCERS
        b.worker.apply_settings(settings(producer__ids__max=300))
        b.send(make_batch(1, producer_id=500, sequence=0))
        b.settle()
        assert b.answers()[-1][0] == ErrorCode.OK


def test_a_producer_is_forgotten_after_the_new_time(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.settle()
        b.send(make_batch(1, producer_id=5, sequence=0))
        b.settle()
        b.now_us += 60 * 1_000_000
        b.now_ns += 60 * SECOND
        b.worker.apply_settings(settings(producer__id__expiration__ms=1_000))
        b.send(make_batch(1, producer_id=5, sequence=0))
        b.settle()
        assert b.answers()[-1] == (ErrorCode.OK, 1), "not known as a repetition any more"
