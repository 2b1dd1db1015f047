"""A segment that a failed sync or a split began has a snapshot of the producers: the checkpoints
may be lost, and the earlier segments removed.
"""

from __future__ import annotations

import errno
import pathlib
import random
import shutil

import pytest

from tailrace.format.record_batch.batch_header import CONTROL_ABORT, CONTROL_COMMIT
from tailrace.format.segments.segment import PRODUCERS_SUFFIX, file_name, segment_bases
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import Bench, bench
from tests.kit.log_files.recovered_logs import recover
from tests.kit.transactional.transactions import RingFiller, producer
from workers.log.files.active_segment import first_to_keep
from workers.log.partition_log import PartitionLog
from workers.log.producers.producer_snapshots import decode_producers, write_snapshot
from workers.log.producers.producer_state import ProducerTable
from workers.segment.checkpoint import CHECKPOINT_FILES
from workers.segment.files import DiskFiles


class RefusingSyncs(DiskFiles):
    """A disk whose next sync fails when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    def sync_data(self, fd: int) -> None:
        if self.refuses:
            self.refuses = False
            raise OSError(errno.EIO, "broken")
        super().sync_data(fd)


def settle(b: Bench) -> None:
    """Step the flusher until there is nothing to do."""
    while b.step_flusher() or not b.is_running:
        pass
    b.ring.cursors[0].store(b.ring.settled.load())


def the_log(b: Bench) -> PartitionLog:
    (log,) = b.flusher._logs.all()
    return log


def lose_checkpoints(directory: pathlib.Path) -> None:
    for name in CHECKPOINT_FILES:
        (directory / name).unlink(missing_ok=True)


def test_a_batch_before_a_rewritten_segment_is_recognised_when_the_checkpoints_are_lost(
    tmp_path: pathlib.Path,
) -> None:
    files = RefusingSyncs()
    first = make_batch(3, producer_id=1)
    with bench(str(tmp_path), files) as b:
        b.send(bytes(first))
        b.settle()
        files.refuses = True
        b.send(make_batch(2, producer_id=2))
        b.settle()
        assert segment_bases([p.name for p in (tmp_path / "t-0").iterdir()]) == [0, 3]
        b.flusher.close()
    lose_checkpoints(tmp_path / "t-0")
    with bench(str(tmp_path)) as b:
        b.settle()
        b.send(bytes(first))
        b.send(make_batch(2, producer_id=2))
        b.settle()
        assert b.answers() == [(0, 0), (0, 3)]
        assert b.table.read(0).high_watermark == 5


def test_a_batch_before_a_split_is_recognised_when_its_segment_and_checkpoint_are_gone(
    tmp_path: pathlib.Path,
) -> None:
    first = make_batch(3, producer_id=1)
    with bench(str(tmp_path)) as b:
        b.send(bytes(first))
        b.send(make_batch(2, producer_id=2))
        b.settle()
        log = the_log(b)
        assert log.live is not None
        second = first_to_keep(log.files, log.live, 3, -1)
        assert second is not None
        assert log.split(second)
        log.advance_start(3)
        assert segment_bases([p.name for p in (tmp_path / "t-0").iterdir()]) == [3]
    with bench(str(tmp_path)) as b:
        b.settle()
        b.send(bytes(first))
        b.settle()
        assert b.answers() == [(0, 0)]
        assert b.table.read(0).high_watermark == 5


@pytest.mark.parametrize("seed", range(5))
def test_producers_and_transactions_are_as_they_were_without_checkpoints(
    tmp_path: pathlib.Path, seed: int
) -> None:
    """A transaction that began before a rewritten segment and ended in it begins where it did."""
    chance = random.Random(seed)
    files = RefusingSyncs()
    epochs = {producer(number): 0 for number in range(3)}
    begun: dict[tuple[int, int], int] = {}
    opened: set[int] = set()
    compared = 0
    (tmp_path / "log").mkdir()
    with bench(str(tmp_path / "log"), files) as b:
        filler = RingFiller(b.regions["ring"])
        for number in range(60):
            chosen = chance.choice(sorted(epochs))
            if chance.random() < 0.6:
                offset = filler.data(chance.randint(1, 4), chosen, epochs[chosen])
                begun.setdefault((chosen, epochs[chosen]), offset)
                opened.add(chosen)
            elif chosen in opened:
                outcome = chance.choice((CONTROL_COMMIT, CONTROL_ABORT))
                filler.marker(chosen, epochs[chosen], outcome)
                opened.discard(chosen)
                epochs[chosen] += 1
            else:
                filler.data(1, 7)
            if chance.random() < 0.4:
                files.refuses = chance.random() < 0.4
                settle(b)
                files.refuses = False
                copy = tmp_path / f"copy-{number}"
                shutil.copytree(tmp_path / "log" / "t-0", copy)
                found = recover(copy / file_name(0))
                live = the_log(b).producers
                assert sorted(found.producers.to_snapshot(), key=str) == sorted(
                    live.to_snapshot(), key=str
                )
                assert list(found.producers.transactions) == list(live.transactions)
                for aborted in found.transactions.aborted:
                    key = aborted.producer_id, aborted.producer_epoch
                    assert aborted.first_offset == begun[key]
                    compared += 1
        assert len(b.segment_paths()) > 2
    assert compared


def test_a_snapshot_of_a_segment_that_was_never_completed_is_replaced(
    tmp_path: pathlib.Path,
) -> None:
    """It knows batches that were then refused: a retry of one would be taken for a duplicate."""
    table = ProducerTable()
    table.record(1, 0, 0, 2, 5, 8, 0)
    path = tmp_path / file_name(5, PRODUCERS_SUFFIX)
    write_snapshot(DiskFiles(), str(tmp_path), 5, table)
    found = decode_producers(path.read_bytes())
    assert found is not None
    assert len(found) == 1
    write_snapshot(DiskFiles(), str(tmp_path), 5, ProducerTable())
    found = decode_producers(path.read_bytes())
    assert found is not None
    assert not len(found)
