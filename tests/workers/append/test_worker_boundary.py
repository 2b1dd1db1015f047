"""The worker under messages that it cannot handle, logs that it cannot open, and a table that
changes while it looks.
"""

from __future__ import annotations

import errno
import os
import pathlib
from dataclasses import replace
from typing import Any

import pytest

from shm.memory.layout import ProcessWord, Role, SlotState, Verdict
from shm.queues.ring import Ring, RingWriter
from shm.tables.control import Control
from shm.tables.invariants import CheckedBuffer
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import checksum_seed
from tests.kit.batches import TOPIC_ID, make_batch
from tests.kit.log_files.logs import Bench, assignment, bench, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.matrices import short
from workers.append import batch_appender, partitions
from workers.append import batch_validation as batch_checks
from workers.append.descriptor_index import DescriptorIndex
from workers.append.partitions import OPEN_RETRY_NS
from workers.append.worker import EXPIRY_INTERVAL_NS, Worker
from workers.flush.flusher_settings import FlusherSettings
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog
from workers.log.producers import producer_snapshots, producer_state
from workers.log.producers.producer_state import ProducerTable


def failures(it: Bench) -> int:
    return Control(it.regions["control"]).process(Role.WORKER, 0).load(ProcessWord.INTERNAL_ERRORS)


def known(it: Bench) -> tuple[Any, ...]:
    partition = it.worker._partitions[0]
    return partition.next_offset, partition.last_append_us, partition.producers.to_snapshot()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (batch_checks, "verify_batch"), (batch_checks, "validate_batch"), (ProducerTable, "decide"),
        (batch_appender, "header_position"),
        (batch_appender, "stamp_appended"), (RingWriter, "write"),
    ],
)  # fmt: skip
def test_a_batch_that_fails_anywhere_is_refused_leaves_nothing_and_is_not_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    with bench(str(tmp_path)) as it:
        it.send(make_batch(2, producer_id=9, sequence=0))
        it.settle()
        before, tail, original, calls = (
            known(it),
            it.worker._ring.next_position,
            getattr(owner, name),
            [],
        )

        def fail(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("nobody expected this")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, fail)
        it.send(make_batch(3, producer_id=9, sequence=2))
        it.step_worker()
        assert it.answers()[-1] == (ErrorCode.INTERNAL_ERROR, 2)
        assert (known(it), failures(it)) == (before, 1)
        assert it.worker._ring.next_position == tail
        assert not it.step_worker(), "it is read again"
        it.send(make_batch(3, producer_id=9, sequence=2))
        it.settle()
        assert it.answers()[-1] == (0, 2)
        monkeypatch.undo()
        it.kill_worker()
        it.settle()
        assert known(it)[2] == [[9, 0, [[0, 1, 0, 2, before[1]], [2, 4, 2, 5, before[1]]]]]
        assert failures(it) == 1


def test_a_failure_behind_the_descriptor_ends_the_process_and_its_successor_appends_the_batch_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(str(tmp_path)) as it:
        it.settle()
        with monkeypatch.context() as patched:
            patched.setattr(ProducerTable, "record", lambda *_: 1 / 0)
            it.send(make_batch(2, producer_id=9))
            with pytest.raises(ZeroDivisionError):
                it.step_worker()
        it.kill_worker()
        it.settle()
        assert it.answers() == [(0, 0)]


def test_an_assignment_with_a_schema_that_cannot_be_read_takes_no_other_partition_with_it(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as it:
        it.settle()
        for number, payload in enumerate((b"no schema at all", b"\xff\xff\xff\xff" + bytes(60))):
            it.assign(replace(assignment(partition=1 + number, slot=1 + number), schema=payload))
        it.settle()
        it.send(make_batch(2), slot=1)
        it.send(make_batch(2))
        it.settle()
        results = [result for result, _ in it.answers()]
        assert results[-2:] == [ErrorCode.INTERNAL_ERROR, 0]
        assert failures(it) == 2
        it.assignments = [
            *it.assignments,
            replace(assignment(partition=1, slot=1), schema=b"no schema at all"),
        ]
        it.kill_worker()
        it.send(make_batch(2))
        it.settle()
        assert it.answers()[-1] == (0, 2), "a successor that is fed the same goes on"
        it.assign(
            replace(
                assignment(partition=1, slot=1, version=2), schema=b"no schema at all", dropped=True
            )
        )
        it.settle()
        it.send(make_batch(2), slot=1)
        it.settle()
        assert it.answers()[-1][0] == ErrorCode.UNKNOWN_TOPIC


@pytest.mark.parametrize("fed", [True, False])
def test_a_log_that_the_flusher_cannot_open_takes_no_other_with_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fed: bool
) -> None:
    with bench(str(tmp_path)) as it:
        it.settle()
        original = LogSet.apply

        def fail(logs: LogSet, item: Any, **kwargs: Any) -> Any:
            if item.slot == 1:
                raise ValueError("nobody expected this")
            return original(logs, item, **kwargs)

        monkeypatch.setattr(LogSet, "apply", fail)
        bad = assignment(partition=1, slot=1, version=7)
        if fed:
            it.assignments = [bad, *it.assignments]
            it.kill_flusher()
        else:
            it.assign(bad)
        it.send(make_batch(2))
        it.settle()
        assert it.answers()[-1] == (0, 0)
        shown = it.table.read(1)
        assert (shown.state, shown.applied_version, shown.reason) == (
            SlotState.UNREADABLE,
            7,
            ErrorCode.INTERNAL_ERROR,
        )
        assert it.flusher_slot.load(ProcessWord.INTERNAL_ERRORS) == 1
        it.send(make_batch(2, seed=checksum_seed(TOPIC_ID, 1)), slot=1)
        it.settle()
        assert it.answers()[-1][0] in (ErrorCode.PARTITION_OFFLINE, ErrorCode.UNKNOWN_TOPIC)


def test_files_that_cannot_be_read_now_make_a_partition_wait_and_not_the_worker_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(str(tmp_path)) as it:
        it.send(make_batch(2, producer_id=9))
        it.settle()
        is_short = True

        def load(item: Any, end: int) -> ProducerTable:
            if is_short:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return producer_snapshots.load_producers(
                it.files, it.directory, item, end, lambda stamp_us: stamp_us
            )

        it.kill_worker()
        it.worker._opened._load_producers = load
        it.send(make_batch(2, producer_id=9))
        it.settle()
        assert it.answers()[-1][0] == ErrorCode.NOT_READY
        is_short = False
        it.now_ns += OPEN_RETRY_NS
        for _ in range(2):
            it.send(make_batch(2, producer_id=9))
            it.settle()
        assert it.answers()[-1] == (0, 0), "a duplicate of what was sent first"
        assert failures(it) == 0


@pytest.mark.parametrize("at", short(range(25), *range(0, 25, 3)))
def test_a_log_that_is_brought_online_under_load_is_taken_up_at_its_end(at: int) -> None:
    """The worker looks between any two stores by which the flusher shows the new epoch: it must not
    take up the old one's end.
    """
    regions = simulated_regions()
    it = Bench(
        "/disk",
        regions,
        SimFiles(SimDisk(["/disk"])),
        FlusherSettings(journal_bytes=1 << 16),
        assignments=[assignment()],
    )
    it.send(make_batch(12))
    it.settle()
    state = it.table.read(0)
    anew = state._replace(
        leader_epoch=1,
        log_end_offset=10,
        high_watermark=10,
        last_append_us=state.last_append_us + 1,
    )
    words = regions["table"].words
    assert isinstance(words, CheckedBuffer)
    words._check = None  # its watermark goes back: a reader's view of a log whose memory was lost
    left = at

    def look() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            it.send(make_batch(2))
            it.step_worker()

    words.before = look
    it.table.write(0, anew)
    words.before = None
    it.send(make_batch(2))
    it.step_worker()
    found = [
        d
        for d in map(it.ring.descriptor, range(it.ring.producer_position.load()))
        if d.leader_epoch == 1
    ]
    assert [d.base_offset for d in found] == list(range(10, 10 + 2 * len(found), 2))
    assert found


def test_opening_many_partitions_reads_each_descriptor_once_and_not_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partitions, descriptors = 16, 1024
    topics = [
        assignment(partition, slot=partition, topic_id=TOPIC_ID) for partition in range(partitions)
    ]
    it = Bench(
        "/disk",
        simulated_regions(1 << 22, descriptors),
        SimFiles(SimDisk(["/disk"])),
        FlusherSettings(journal_bytes=1 << 16),
        assignments=topics,
    )
    for number in range(descriptors + 100):
        slot = number % partitions
        it.send(
            make_batch(
                1,
                producer_id=slot,
                sequence=number // partitions,
                seed=checksum_seed(TOPIC_ID, slot),
            ),
            slot=slot,
        )
        if number % 64 == 0:
            it.settle()
    it.settle()
    assert it.ring.producer_position.load() == descriptors + 100
    snapshots = [it.worker._partitions[slot].producers.to_snapshot() for slot in range(partitions)]
    reads, original = 0, Ring.descriptor

    def count(ring: Ring, number: int) -> Any:
        nonlocal reads
        reads += 1
        return original(ring, number)

    it.generation += 1
    monkeypatch.setattr(Ring, "descriptor", count)
    it.kill_worker()
    it.step_worker()
    assert len(it.worker._partitions) == partitions
    assert reads <= 3 * descriptors + 100, (
        "one pass for the lanes, one for the index, one over what the index tells"
    )
    assert [
        it.worker._partitions[slot].producers.to_snapshot() for slot in range(partitions)
    ] == snapshots


def test_the_index_holds_no_more_than_twice_the_ring_and_what_the_ring_has(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as it:
        it.settle()
        ring = it.worker._ring
        index = DescriptorIndex(ring)
        for number in range(1000):
            it.send(make_batch(1))
            it.settle()
            if number % 100 == 50:
                found = [descriptor.base_offset for descriptor in index.batches_of(0)]
                assert found == list(
                    range(max(0, ring.next_number - ring.capacity), ring.next_number)
                )
                assert sum(map(len, index._numbers.values())) <= 2 * ring.capacity
        assert list(index.batches_of(1)) == []


def test_producers_beyond_what_a_partition_or_its_worker_remembers_are_refused_and_known_ones_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (producer_state, partitions):
        monkeypatch.setattr(module, "KEPT", 2)
    monkeypatch.setattr(partitions, "WORKER_PRODUCERS", 2)
    with bench(str(tmp_path)) as it:
        it.producer_ids_max = 4
        it.assignments = [assignment(partition, slot=partition) for partition in range(3)]
        it.kill_worker()
        it.kill_flusher()

        def results(slot: int, producers: range, sequence: int) -> list[int]:
            seen = it.ring.producer_position.load()
            for number in producers:
                it.send(
                    make_batch(
                        1, producer_id=number, sequence=sequence, seed=checksum_seed(TOPIC_ID, slot)
                    ),
                    slot=slot,
                )
            it.settle()
            return [result for result, _ in it.answers()[seen:]]

        refused = int(ErrorCode.TOO_MANY_PRODUCERS)
        assert results(0, range(6), 0) == [0] * 4 + [refused] * 2, "a partition's"
        assert results(1, range(6), 0) == [0] * 4 + [refused] * 2
        assert results(2, range(6), 0) == [0] * 2 + [refused] * 4, (
            "the worker's; so many each partition may have"
        )
        assert results(0, range(4), 1) == [0] * 4, "who is known goes on"
        it.kill_worker()
        assert results(0, range(6), 2) == [0] * 4 + [ErrorCode.UNKNOWN_SEQUENCE] * 2
        assert results(0, range(4, 6), 0) == [refused] * 2, "a successor knows as many"
        it.now_us += producer_state.IDLE_US + 1
        it.now_ns += (producer_state.IDLE_US + 1) * 1_000
        assert results(0, range(4, 8), 0) == [0] * 4, "others have sent nothing for long enough"
        assert it.worker._partitions[0].producers.producer_count == 4
        log = it.flusher._logs.get(0)
        assert log is not None
        assert log.producers.producer_count == 4


def test_the_state_of_a_slot_is_what_a_worker_looks_at(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as it:
        it.send(make_batch(3))
        it.settle()
        assert it.table.append_state(0) == (SlotState.ONLINE, 0, 0, 3, 3)
        assert Worker.resume_positions(it.worker._ring)[0] > 0


def test_a_batch_that_a_second_flusher_cannot_place_either_takes_only_its_log_offline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends: what is wrong only in its memory is mended by the start of another, and
    nothing is refused.
    """
    with bench(str(tmp_path)) as it:
        it.assignments = [assignment(partition, slot=partition) for partition in range(2)]
        it.kill_worker()
        it.kill_flusher()
        it.settle()
        rolls = PartitionLog.needs_roll
        failures = 0

        def fail(log: PartitionLog, length: int, append_time_us: int) -> bool:
            nonlocal failures
            if log.assignment.slot == 0:
                failures += 1
                raise KeyError("segment.bytes")
            return rolls(log, length, append_time_us)

        it.send(make_batch(3), slot=0)
        it.send(make_batch(2, seed=checksum_seed(TOPIC_ID, 1)), slot=1)
        it.step_worker()
        monkeypatch.setattr(PartitionLog, "needs_roll", fail)
        with pytest.raises(KeyError):
            it.step_flusher()
        it.kill_flusher()
        it.settle()
        assert failures == 2
        assert (it.table.read(0).state, it.table.read(0).log_end_offset) == (
            SlotState.OFFLINE_FOR_WRITES,
            0,
        )
        assert (it.table.read(1).state, it.table.read(1).high_watermark) == (SlotState.ONLINE, 2)
        verdicts = [
            it.ring.outcome(number).verdict for number in range(it.ring.producer_position.load())
        ]
        assert verdicts[-2:] == [Verdict.FAILED, Verdict.DURABLE]
        assert it.flusher_slot.load(ProcessWord.INTERNAL_ERRORS) == 1
        monkeypatch.undo()
        it.assign(replace(it.assignments[0], version=2, revive=True))
        it.settle()
        it.send(make_batch(3), slot=0)
        it.settle()
        assert (it.table.read(0).state, it.table.read(0).high_watermark) == (SlotState.ONLINE, 3)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("back_us", [0, 8 * 86_400_000_000])
def test_a_retry_behind_a_jump_of_the_wall_clock_is_a_duplicate(
    tmp_path: pathlib.Path, restarts: bool, back_us: int
) -> None:
    """By eight days forward, and back again; the worker may be a new one."""
    with bench(str(tmp_path)) as it:
        it.send(make_batch(2, producer_id=9))
        it.send(make_batch(2, producer_id=9, sequence=2))
        it.settle()
        it.now_us += 8 * 86_400_000_000
        it.send(make_batch(2, producer_id=8))
        it.settle()
        it.now_us -= back_us
        it.now_ns += EXPIRY_INTERVAL_NS + 1
        it.now_us += EXPIRY_INTERVAL_NS // 1_000
        if restarts:
            it.kill_worker()
        it.send(make_batch(2, producer_id=9, sequence=2))
        it.send(make_batch(2, producer_id=9, sequence=4))
        it.settle()
        assert it.answers()[-2:] == [(0, 2), (0, 6)]


def test_a_retry_behind_a_jump_of_the_wall_clock_is_a_duplicate_in_a_topic_made_meanwhile(
    tmp_path: pathlib.Path,
) -> None:
    """Its table of producers did not know of jumps before the worker was started again."""
    seed = checksum_seed(TOPIC_ID, 1)
    with bench(str(tmp_path)) as it:
        it.settle()
        it.assign(assignment(partition=1, slot=1))
        it.settle()
        it.send(make_batch(2, producer_id=9, seed=seed), slot=1)
        it.settle()
        it.now_us += 8 * 86_400_000_000
        it.send(make_batch(2, producer_id=9, seed=seed), slot=1)
        it.settle()
        assert it.answers()[-2:] == [(0, 0), (0, 0)]


def test_a_producer_that_appends_nothing_for_a_day_is_forgotten(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as it:
        it.send(make_batch(2, producer_id=9))
        it.settle()
        it.now_us += 2 * 86_400_000_000
        it.now_ns += 2 * 86_400_000_000_000
        it.send(make_batch(2, producer_id=9, sequence=2))
        it.settle()
        assert it.answers()[-1][0] == ErrorCode.UNKNOWN_SEQUENCE
