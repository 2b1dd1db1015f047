"""Transactions in the flusher: the last stable offset and the transaction indexes, over kills,
power losses and failing disks.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random
from contextlib import suppress
from typing import Any

import pytest

from appliance.observe.checks import log_verifier
from appliance.observe.checks.findings import Severity
from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.record_batch.batch_header import CONTROL_ABORT, CONTROL_COMMIT
from tailrace.format.segments.segment import file_name
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    decode_transaction_index,
    encode_header,
)
from tests.kit import seeds
from tests.kit.log_files.logs import Bench, assignment, bench, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.log_files.transaction_files import flip_bit_in
from tests.kit.transactional.transactions import (
    RingFiller,
    check_transaction_indexes,
    headers_in,
    producer,
)
from workers.flush.cleaning.chores import INDEX_RETRY_NS
from workers.flush.flusher_settings import FlusherSettings
from workers.log.producers.transaction_indexes import TransactionIndexes, WalkedTransactions
from workers.segment.files import DiskFiles

A, B = producer(1), producer(2)


def settle(b: Bench) -> None:
    """Step the flusher until there is nothing to do."""
    while b.step_flusher() or not b.is_running:
        pass
    b.ring.cursors[0].store(b.ring.settled.load())


def small_segments(**settings: Any) -> Assignment:
    """A partition whose segments have 16 KiB."""
    made = assignment(**settings)
    made.settings["segment.bytes"] = 16_384
    return made


def stable(b: Bench) -> int:
    return b.table.stable(0)[0]


def checked(b: Bench) -> int:
    """Compare indexes and last stable offset with the log. Returns the batches left out."""
    state = b.table.read(0)
    return check_transaction_indexes(
        b.files, f"{b.directory}/t-0", state.last_stable_offset, state.high_watermark
    )


def test_without_transactions_the_last_stable_offset_is_the_high_watermark(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3)
        filler.data(2, 7)
        settle(b)
        assert b.table.stable(0) == (5, 0)
        assert not [n for n in os.listdir(f"{tmp_path}/t-0") if "txn" in n]


def test_an_open_transaction_holds_it_and_the_marker_moves_it(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3)
        filler.data(2, A)
        filler.data(4)
        settle(b)
        assert stable(b) == 3
        filler.data(1, B)
        filler.marker(A, 0, CONTROL_COMMIT)
        settle(b)
        assert stable(b) == 9
        assert b.table.stable(0)[1] == 0
        filler.marker(B, 0, CONTROL_ABORT)
        settle(b)
        assert stable(b) == 12
        assert b.table.stable(0)[1] > 0
        assert checked(b) == 1


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_transactions_over_kills_of_the_flusher(
    tmp_path: pathlib.Path, seed: int
) -> None:
    chance = random.Random(seed)
    with bench(str(tmp_path)) as b:
        b.assignments = [small_segments()]
        b.kill_flusher()
        run(b, RingFiller(b.regions["ring"]), chance, 150)
        assert checked(b) > 0


def outcome_of(producer_id: int, epoch: int) -> int:
    """The decision, which is durable before the first marker: a lost marker comes again as it
    was.
    """
    return (CONTROL_COMMIT, CONTROL_ABORT)[random.Random(f"{producer_id} {epoch}").randint(0, 1)]


def run(
    b: Bench,
    filler: RingFiller,
    chance: random.Random,
    count: int,
    epochs: dict[int, int] | None = None,
    opened: set[int] | None = None,
) -> None:
    """Append at random, and kill flushers. `epochs`, `opened`: where to begin."""
    epochs = dict.fromkeys(map(producer, range(4)), 0) if epochs is None else epochs
    opened = set() if opened is None else opened
    least = 0
    for _ in range(count):
        chosen = chance.choice(sorted(epochs))
        action = chance.random()
        if action < 0.5:
            filler.data(chance.randint(1, 30), chosen, epochs[chosen])
            opened.add(chosen)
        elif action < 0.6:
            filler.data(chance.randint(1, 30))
        elif chosen in opened:
            filler.marker(chosen, epochs[chosen], outcome_of(chosen, epochs[chosen]))
            opened.discard(chosen)
            epochs[chosen] += 1
        if chance.random() < 0.3:
            b.step_flusher()
        if chance.random() < 0.1:
            b.kill_flusher()
        if chance.random() < 0.2:
            settle(b)
            checked(b)
            assert stable(b) >= least
            least = stable(b)
    settle(b)
    checked(b)


@pytest.mark.parametrize("block", seeds.fixed_blocks(1, 12), ids=seeds.block_name)
def test_any_order_of_transactions_over_kills_and_power_losses(block: range) -> None:
    for seed in block:
        over_power_losses(seed)


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(10, 50), ids=seeds.block_name)
def test_new_orders_of_transactions_over_kills_and_power_losses(block: range) -> None:
    for seed in block:
        over_power_losses(seed)


def over_power_losses(seed: int) -> None:
    """Five runs over one disk, each ended by a kill in the middle of a write, and a power loss."""
    chance = random.Random(seed)
    disk = SimDisk()
    epochs = dict.fromkeys(map(producer, range(4)), 0)
    opened: set[int] = set()
    for run_number in range(5):
        b = Bench(
            "/data", simulated_regions(1 << 20), SimFiles(disk),
            FlusherSettings(journal_bytes=1 << 20, checkpoint_bytes=20_000),
            assignments=[small_segments()], run=f"run {run_number}", lost_memory=run_number > 0,
        )  # fmt: skip
        settle(b)
        checked(b)
        state = b.table.read(0)
        note_found(b, epochs, opened)
        filler = RingFiller(b.regions["ring"], state.high_watermark, state.leader_epoch)
        operations = chance.randint(20, 400)

        def die(operation: str, path: str) -> None:
            nonlocal operations
            operations -= 1
            if operations < 0:
                raise KeyboardInterrupt(operation, path)

        disk.hook = die
        with suppress(KeyboardInterrupt):
            run(b, filler, chance, 60, epochs, opened)
        disk.hook = None
        b.release()
        disk = disk.lose_power(chance)


def note_found(b: Bench, epochs: dict[int, int], opened: set[int]) -> None:
    """Continue with the epochs in the log: a worker that starts derives them so."""
    opened.clear()
    for _, header in headers_in(b.files, "/data/t-0") if epochs else ():
        if header.is_marker:
            epochs[header.producer_id] = header.producer_epoch + 1
            opened.discard(header.producer_id)
        elif header.is_transactional:
            epochs[header.producer_id] = header.producer_epoch
            opened.add(header.producer_id)


def test_a_start_repairs_what_was_removed_damaged_or_cut(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.assignments = [small_segments()]
        b.kill_flusher()
        filler = RingFiller(b.regions["ring"])
        for epoch in range(40):
            filler.data(30, A, epoch)
            filler.data(20, B)
            filler.marker(A, epoch, CONTROL_ABORT)
            settle(b)
        left_out = checked_after_end(b, filler)
        paths = sorted((tmp_path / "t-0").glob(f"*{TRANSACTION_INDEX_SUFFIX}"))
        assert len(paths) > 4
        paths[0].unlink()
        paths[1].write_bytes(b"garbage")
        damaged = bytearray(paths[2].read_bytes())
        damaged[-1] ^= 1
        paths[2].write_bytes(damaged)
        paths[-1].write_bytes(paths[-1].read_bytes()[:-5])
        b.kill_flusher()
        settle(b)
        assert checked(b) == left_out
        b.flusher.close()
        totals = log_verifier.check([str(tmp_path / "t-0")])
        assert [f.text for f in totals.findings] == []


def test_a_marker_that_a_damaged_range_has_lost_uncovers_nothing(tmp_path: pathlib.Path) -> None:
    """The next start walks over the damage. Behind it the producer has gone on."""
    with bench(str(tmp_path)) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3, A)
        open_at = filler.data(2, B)
        marker = filler.marker(A, 0, CONTROL_ABORT)
        filler.data(3, A, 1)
        settle(b)
        assert stable(b) == open_at
        flip_bit_in(tmp_path / "t-0", ".arrows")
        b.kill_flusher()
        settle(b)
        state = b.table.read(0)
        assert (state.last_stable_offset, state.high_watermark) == (open_at, marker + 4)
        filler.leader_epoch = state.leader_epoch
        filler.marker(B, 0, CONTROL_COMMIT)
        filler.marker(A, 1, CONTROL_COMMIT)
        settle(b)
        assert stable(b) == filler.next_offset
        path = tmp_path / "t-0" / file_name(0, TRANSACTION_INDEX_SUFFIX)
        aborted = AbortedBatches(decode_transaction_index(path.read_bytes(), 0))
        assert aborted.has(A, 0, 0)
        assert not aborted.has(A, 1, marker + 1)
        b.flusher.close()
        findings = log_verifier.check([str(tmp_path / "t-0")]).findings
        assert {finding.severity for finding in findings} == {Severity.NOTE}


def test_the_version_of_the_indexes_grows_over_restarts(tmp_path: pathlib.Path) -> None:
    """Fronts read an index again when the version that they know has changed."""
    with bench(str(tmp_path)) as b:
        filler = RingFiller(b.regions["ring"])
        seen = [b.table.stable(0)[1]]
        for epoch in range(4):
            filler.data(1, A, epoch)
            filler.marker(A, epoch, CONTROL_ABORT)
            settle(b)
            seen.append(b.table.stable(0)[1])
            b.kill_flusher()
            settle(b)
            seen.append(b.table.stable(0)[1])
        assert seen == sorted(set(seen))


@pytest.mark.parametrize("damage", ["missing", "damaged", "another outcome"])
def test_log_verify_finds_a_wrong_transaction_index(tmp_path: pathlib.Path, damage: str) -> None:
    with bench(str(tmp_path)) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3, A)
        filler.marker(A, 0, CONTROL_ABORT)
        settle(b)
        b.flusher.close()
    (path,) = (tmp_path / "t-0").glob(f"*{TRANSACTION_INDEX_SUFFIX}")
    if damage == "missing":
        path.unlink()
    elif damage == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(encode_header(0))
    (finding,) = log_verifier.check([str(tmp_path / "t-0")]).findings
    assert finding.severity is Severity.REPAIRABLE
    assert finding.path == str(path)


def checked_after_end(b: Bench, filler: RingFiller) -> int:
    filler.marker(B, 0, CONTROL_COMMIT)
    settle(b)
    return checked(b)


class FailingIndexes(DiskFiles):
    """A disk that refuses writes to transaction indexes."""

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.attempts = 0
        """Refused."""

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        if self.error and path.endswith(TRANSACTION_INDEX_SUFFIX):
            self.attempts += 1
            raise OSError(self.error, os.strerror(self.error), path)
        return super().open_for_write(path, exclusive=exclusive)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_while_an_index_cannot_be_written_the_last_stable_offset_waits(
    tmp_path: pathlib.Path, code: int
) -> None:
    files = FailingIndexes()
    with bench(str(tmp_path), files) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3, A)
        settle(b)
        files.error = code
        filler.marker(A, 0, CONTROL_ABORT)
        filler.data(2)
        settle(b)
        state = b.table.read(0)
        assert (state.high_watermark, state.last_stable_offset) == (6, 0)
        assert state.state is SlotState.ONLINE
        files.error = 0
        b.now_ns += 300_000_000
        settle(b)
        assert stable(b) == 6
        assert checked(b) == 1


def test_an_index_goes_with_its_segment_and_an_open_transaction_stays(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        b.assignments = [small_segments(retention_bytes=0)]
        b.kill_flusher()
        filler = RingFiller(b.regions["ring"])
        for epoch in range(12):
            filler.data(30, A, epoch)
            filler.marker(A, epoch, CONTROL_ABORT)
        first_open = filler.data(1, B)
        settle(b)
        for _ in range(12):
            filler.data(30)
            settle(b)
        state = b.table.read(0)
        assert state.last_stable_offset == first_open
        assert 0 < state.log_start_offset <= first_open
        names = os.listdir(f"{tmp_path}/t-0")
        segments = {name[:20] for name in names if name.endswith(".arrows")}
        assert {name[:20] for name in names if name.endswith(TRANSACTION_INDEX_SUFFIX)} <= segments
        filler.marker(B, 0, CONTROL_COMMIT)
        for _ in range(12):  # retention by bytes is checked when a segment is sealed
            filler.data(30)
            settle(b)
        assert b.table.read(0).log_start_offset > first_open


def test_the_name_of_an_index_is_durable_with_its_entries() -> None:
    """A checkpoint behind it keeps the next start from walking its segment: an index that is gone
    would hold the readers of committed records for ever.
    """
    for is_successor in (False, True):
        disk = SimDisk(["/data"])
        indexes = TransactionIndexes(SimFiles(disk), "/data")
        indexes.note(0, None)
        metadata = PartitionMetadata("t", 0, bytes(16), {})
        indexes.write([0], metadata)
        if is_successor:  # its predecessor was killed before it had synced anything
            indexes = TransactionIndexes(SimFiles(disk), "/data")
            indexes.recover([0], metadata, WalkedTransactions(start=9, has_checkpoint=True))
        indexes.sync()
        path = f"/data/{file_name(0, TRANSACTION_INDEX_SUFFIX)}"
        assert all(path in disk.lose_power(random.Random(seed)).names for seed in range(9))


def test_attempts_to_write_an_index_are_apart_from_the_last_one(tmp_path: pathlib.Path) -> None:
    """A flusher that was held up does not make up for the attempts that it has missed."""
    files = FailingIndexes()
    with bench(str(tmp_path), files) as b:
        filler = RingFiller(b.regions["ring"])
        filler.data(3, A)
        settle(b)
        files.error = errno.EIO
        filler.marker(A, 0, CONTROL_ABORT)
        settle(b)
        for held_up_ns in (10 * INDEX_RETRY_NS, INDEX_RETRY_NS + 1_000_000):
            before = files.attempts
            b.now_ns += held_up_ns
            settle(b)
            assert files.attempts == before + 1
