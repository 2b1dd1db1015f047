"""Compaction against a dictionary of the latest: random appends, transactions, tombstones,
cleanings, rolls, kills at every step of a swap, and restarts. Flusher and cleaner are stepped by
hand.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from shm.crash_points import armed
from shm.memory.layout import ProcessWord, Role
from shm.tables.control import Control
from shm.tables.partition_table import CleaningState
from tailrace.core.error_codes import ErrorCode
from tailrace.format.segments.segment import file_name, segment_bases
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.compacted_logs import (
    CLEANER_POINTS,
    SWAP_POINTS,
    Killed,
    World,
    batches,
    compacted,
    die,
    encoded,
)
from tests.kit.log_files.logs import Bench, bench, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.flush.cleaning.chores import Chores
from workers.flush.flusher_settings import FlusherSettings
from workers.segment import segment_swap
from workers.segment.files import DiskFiles
from workers.segment.segment_swap import (
    CLEANED_INDEX_SUFFIX,
    CLEANED_SUFFIX,
    SWAP_FILE,
    CleanedRun,
)


def test_a_compacted_log_keeps_the_latest_of_each_key(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1))
        for _ in range(3):
            batches(world, 40)
            world.settle()
            world.check()
            world.clean()
            world.check(cleaned=True)
        state = b.table.read(0)
        assert state.files_version > 0
        assert state.clean_bytes > 0
        found, _ = world.stored()
        assert len(found) < len(world.records) / 4


def test_an_empty_log_is_looked_at_and_left_alone(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1))
        world.clean()
        state = b.table.read(0)
        assert (state.files_version, state.cleaning_state) == (0, CleaningState.NONE)
        batches(world, 40)
        world.settle()
        world.clean()
        world.check(cleaned=True)


@pytest.mark.parametrize("point", SWAP_POINTS + CLEANER_POINTS)
@pytest.mark.parametrize("visit", [1, 2])
def test_a_kill_at_any_point_leaves_the_old_segments_or_the_new(
    tmp_path: pathlib.Path, point: str, visit: int
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(visit))
        batches(world, 60)
        world.settle()
        with armed(point, die, visit), pytest.raises(Killed):
            world.work_on()
        if point.startswith("flusher"):
            b.kill_flusher()
            world.settle()
        else:
            world.cleaner = world.new_cleaner()
        world.check()
        world.clean()
        world.check(cleaned=True)
        names = b.files.list(f"{b.directory}/t-0")
        assert not [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]
        assert SWAP_FILE not in names
        b.kill_flusher()
        world.settle()
        world.check()
        assert not b.flusher._logs.all()[0].file.damage


@pytest.mark.parametrize("second", ["flusher.in_swap", "flusher.before_swap_end"])
@pytest.mark.parametrize("first", ["flusher.after_swap_intent", "flusher.in_swap"])
def test_a_start_that_is_killed_while_it_finishes_a_swap_is_followed_by_one_that_does(
    tmp_path: pathlib.Path, first: str, second: str
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(3))
        batches(world, 60)
        world.settle()
        with armed(first, die), pytest.raises(Killed):
            world.work_on()
        visit = 0
        while True:  # each visit of the start is the last one in turn
            visit += 1
            b.kill_flusher()
            try:
                with armed(second, die, visit):
                    world.settle()
            except Killed:
                continue
            break
        assert visit > 1, "no start was killed"
        world.check()
        assert not b.flusher._logs.all()[0].file.damage
        world.cleaner = world.new_cleaner()
        world.clean()
        world.check(cleaned=True)
        names = b.files.list(f"{b.directory}/t-0")
        assert SWAP_FILE not in names
        assert not [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]


def test_records_of_a_key_too_many_for_the_table_are_found_in_ranges(
    tmp_path: pathlib.Path,
) -> None:
    """A table with room for few keys reads them several times."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(5))
        batches(world, 60, keys=200)
        world.settle()
        compaction = b.flusher._log_cleaner.compaction
        assert compaction is not None
        compaction.settings = compaction.settings._replace(dedupe_bytes=24 * 40)
        world.clean()
        world.check(cleaned=True)


def open_segments(directory: str) -> list[str]:
    """The segments in a directory that this process has open, removed ones included."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in targets if each.startswith(f"{directory}/") and ".arrows" in each]


def test_replaced_segments_are_open_in_the_cleaner_until_the_flusher_has_removed_their_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes the last descriptor frees the blocks, which takes long: it is the cleaner."""
    carry_out = segment_swap.carry_out
    swapped: list[set[str]] = []

    def observed(files: DiskFiles, directory: str, run: CleanedRun) -> None:
        replaced = {f"{directory}/{file_name(base)}" for base, _ in run.replaced}
        swapped.append(replaced - set(open_segments(directory)))
        carry_out(files, directory, run)

    monkeypatch.setattr(segment_swap, "carry_out", observed)
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(3))
        batches(world, 120)
        slot = Control(b.regions["control"]).process(Role.FLUSHER, 0)
        b.now_ns += 70_000_000_000
        world.settle()
        while slot.load(ProcessWord.CLEANING):
            world.cleaner.step(b.now_ns)
            b.now_ns += 1_000
            world.settle()
        world.cleaner.step(b.now_ns)
        assert swapped
        assert not any(swapped), "a segment was removed that nobody holds"
        assert not [each for each in open_segments(f"{b.directory}/t-0") if "(deleted)" in each]
        world.check(cleaned=True)


def test_a_lease_keeps_the_segments_until_it_ends(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(6))
        batches(world, 60)
        world.settle()
        leases = b.flusher._log_cleaner.leases
        lease = {
            "topic_id": TOPIC_ID.hex(), "partition": 0, "lease": "scan", "offset": 0,
            "ttl_ms": 3_600_000,
        }  # fmt: skip
        leases.apply(lease, b.now_ns)
        world.clean()
        state = b.table.read(0)
        assert (state.files_version, state.cleaning_state) == (0, CleaningState.WAITS_FOR_READERS)
        leases.apply({**lease, "ttl_ms": 0}, b.now_ns)
        world.clean()
        world.check(cleaned=True)


def test_tombstones_go_after_their_time_and_not_before(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(7))
        for number in range(200):
            batch = encoded([b"gone-%d" % number] * 2, [b"x" * 300, None], "none")
            base = world.filler.batch(batch, 2)
            world.records[base + 1] = (b"gone-%d" % number, None)
            world.records[base] = (b"gone-%d" % number, b"x" * 300)
            world.settle()
        world.clean()
        world.check(cleaned=True)
        assert len(world.stored()[0]) >= 200
        forward_us = 2 * 86_400_000_000
        b.now_us += forward_us  # the clock is set forward: no time has passed
        world.clean()
        assert len(world.stored()[0]) >= 200
        b.now_us += forward_us
        b.now_ns += forward_us * 1_000
        world.clean()
        assert len(world.stored()[0]) < 60
        assert b.table.read(0).log_end_offset == 400


def test_a_clock_that_is_set_forward_during_a_pass_makes_no_tombstone_old(
    tmp_path: pathlib.Path,
) -> None:
    """The pass has the jumps of the clock up to its beginning."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(7))
        slot = Control(b.regions["control"]).process(Role.FLUSHER, 0)
        for number in range(100):
            base = world.filler.batch(encoded([b"gone-%d" % number], [None], "none"), 1)
            world.records[base] = (b"gone-%d" % number, None)
        batches(world, 40)
        world.settle()
        world.clean()
        batches(world, 40)
        b.now_ns += 70_000_000_000
        world.settle()
        assert slot.load(ProcessWord.CLEANING), "the second pass begins"
        b.now_us += 2 * 86_400_000_000
        world.clean()
        kept = {key for key, value in world.stored()[0].values() if value is None}
        assert len([key for key in kept if key and key.startswith(b"gone")]) == 100


def test_a_damaged_batch_stops_compaction_there_and_is_shown(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(8))
        batches(world, 60)
        world.settle()
        directory = f"{b.directory}/t-0"
        bases = segment_bases(b.files.list(directory))
        with open(f"{directory}/{file_name(bases[4])}", "r+b") as file:
            file.seek(3_000)
            file.write(b"damage")
        before = b.files.list(directory)
        world.clean()
        state = b.table.read(0)
        assert state.cleaning_state == CleaningState.STOPPED
        assert state.cleaned_below == bases[4]
        after = b.files.list(directory)
        assert {n for n in before if n >= file_name(bases[4])} <= set(after)


def test_compaction_goes_on_when_the_damaged_segment_is_removed(tmp_path: pathlib.Path) -> None:
    """By retention of compact,delete, or by delete-records."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(8))
        batches(world, 60)
        world.settle()
        bases = segments_of(b)
        with open(tmp_path / "t-0" / file_name(bases[2]), "r+b") as file:
            file.seek(3_000)
            file.write(b"damage")
        world.clean()
        assert b.table.read(0).cleaning_state == CleaningState.STOPPED
        changed = replace(compacted(), version=2, delete_before=bases[3])
        b.flusher._feed.apply_from_ring(changed.encode())
        world.clean()
        state = b.table.read(0)
        assert (state.log_start_offset, state.cleaning_state) == (bases[3], CleaningState.NONE)
        assert state.cleaned_below > bases[3]


def test_damage_that_a_start_has_found_stops_compaction_visibly(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log knows the damage, so no job meets it."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(8))
        batches(world, 60)
        world.settle()
        b.kill_flusher()
        directory = tmp_path / "t-0"
        for path in directory.glob("checkpoint*"):
            path.unlink()
        base = segment_bases(b.files.list(str(directory)))[-1]
        with open(directory / file_name(base), "r+b") as file:
            file.seek(1_000)
            file.write(b"damage")
        world.settle()
        assert b.flusher._logs.all()[0].file.damage
        batches(world, 60)
        world.settle()
        world.clean()
        world.clean()
        state = b.table.read(0)
        assert (state.cleaning_state, state.cleaned_below) == (CleaningState.STOPPED, base)
        said = [each for each in caplog.messages if each.startswith("cleaning_stopped")]
        (line,) = said
        assert f"base={base} reason='the segment has damage that a start has found'" in line


def test_a_full_disk_ends_a_job_and_the_next_one_cleans() -> None:
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(9))
        batches(world, 60)
        world.settle()

        def fails(operation: str, path: str) -> None:
            if operation == "write" and path.endswith(CLEANED_SUFFIX):
                raise OSError(errno.ENOSPC, "no space", path)

        disk.hook = fails
        world.clean()
        assert b.table.read(0).files_version == 0
        names = b.files.list("/data/t-0")
        assert not [n for n in names if n.endswith((CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX))]
        disk.hook = None
        world.clean()
        world.check(cleaned=True)


def test_a_job_that_fails_is_tried_again_after_a_second_then_two_then_four() -> None:
    disk = SimDisk()
    with bench("/data", SimFiles(disk)) as b:
        world = World(b, random.Random(9))
        batches(world, 60)
        world.settle()
        slot = Control(b.regions["control"]).process(Role.FLUSHER, 0)
        begun: list[int] = []

        def fails(operation: str, path: str) -> None:
            if operation == "write" and path.endswith(CLEANED_SUFFIX):
                raise OSError(errno.ENOSPC, "no space", path)

        disk.hook = fails
        b.now_ns += 70_000_000_000
        while len(begun) < 5:
            number = slot.load(ProcessWord.CLEANING_JOBS)
            if number > len(begun):
                begun.append(b.now_ns)
            while world.cleaner.step(b.now_ns):
                pass
            b.now_ns += 10_000_000
            world.settle()
        waits = [round((b - a) / 1e9) for a, b in pairwise(begun)]
        assert waits == [1, 2, 4, 8]
        disk.hook = None
        world.clean()
        world.check(cleaned=True)


@pytest.mark.parametrize(
    ("policy", "visit"), [("compact", 1), ("compact,delete", 2)], ids=["united", "second run"]
)
def test_power_lost_at_any_step_of_a_swap_leaves_a_log_that_is_whole(
    policy: str, visit: int
) -> None:
    of = compacted(**{"cleanup.policy": policy})
    for point in SWAP_POINTS:
        disk = SimDisk()
        with bench("/data", SimFiles(disk)) as b:
            world = World(b, random.Random(10), of)
            batches(world, 60)
            world.settle()
            with armed(point, die, visit), pytest.raises(Killed):
                world.clean()
            after = SimFiles(disk.lose_power(random.Random(11)))
        again = Bench(
            "/data", simulated_regions(), after, FlusherSettings(journal_bytes=1 << 20),
            assignments=[of], run="second", lost_memory=True,
        )  # fmt: skip
        while not again.is_running:
            again.step_flusher()
        world.b = again
        world.check()
        assert not again.flusher._logs.all()[0].file.damage
        again.release()


def test_a_topic_that_is_deleted_or_no_longer_compacted_ends_its_job(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(12))
        batches(world, 60)
        b.now_ns += 70_000_000_000
        world.settle()
        b.now_ns += 70_000_000_000
        world.settle()
        slot = Control(b.regions["control"]).process(Role.FLUSHER, 0)
        assert slot.load(ProcessWord.CLEANING)
        world.cleaner.step(b.now_ns)
        changed = replace(compacted(), version=2)
        changed.settings["cleanup.policy"] = "delete"
        b.flusher._feed.apply_from_ring(changed.encode())
        assert not slot.load(ProcessWord.CLEANING)
        while world.cleaner.step(b.now_ns):
            pass
        world.settle()
        assert b.table.read(0).files_version == 0
        world.check()


def test_the_worker_refuses_a_record_without_a_key(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        b.assignments = [compacted()]
        b.worker, b.flusher = b._new_worker(), b._new_flusher()
        b.settle()
        b.send(encoded([b"k", None], [b"1", b"2"], "none"))
        b.send(encoded([b"k", b""], [b"1", b"2"], "none"))
        b.settle()
        assert [result for result, _ in b.answers()] == [int(ErrorCode.INVALID_RECORD), 0]


def test_compaction_waits_until_missing_transaction_indexes_are_made_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted records would supersede committed ones."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1))
        batches(world, 120, 400)
        for who in list(world.pending):
            world.end(who, commits=True)
        world.settle()
        b.kill_flusher()
        directory = tmp_path / "t-0"
        for path in sorted(directory.glob(f"*{TRANSACTION_INDEX_SUFFIX}"))[:-1]:
            path.unlink()
        for path in directory.glob("checkpoint*"):
            path.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(Chores, "run_idle_work", lambda _: 0)  # the flusher is never idle
            world.settle()
            compaction = b.flusher._log_cleaner.compaction
            assert compaction is not None
            compaction.request((TOPIC_ID, 0), 1, b.now_ns)
            world.clean()
            assert b.table.read(0).files_version == 0
            assert b.table.read(0).compaction_done == 0, "the request waits, too"
        world.clean()
        assert b.table.read(0).compaction_done == 1
        world.check(cleaned=True)


def segments_of(b: Bench) -> list[int]:
    return segment_bases(b.files.list(f"{b.directory}/t-0"))


@pytest.mark.parametrize(
    ("settings", "are_united"),
    [({}, True), ({"cleanup.policy": "compact,delete"}, False)],
    ids=["compact", "compact,delete"],
)
def test_segments_of_which_little_stays_become_one_unless_they_expire(
    tmp_path: pathlib.Path, settings: dict[str, str], are_united: bool
) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1), compacted(**settings))
        batches(world, 120, keys=4)
        world.settle()
        before = len(segments_of(b))
        assert before > 8
        world.clean()
        world.check(cleaned=True)
        after, swaps = len(segments_of(b)), b.table.read(0).files_version
        # The newest sealed one waits for transactions, perhaps, and one is active.
        assert (swaps == 1 and after <= 3) if are_united else (swaps > 2 and after > 4)


def test_segments_are_united_only_as_far_as_they_have_room_in_one(tmp_path: pathlib.Path) -> None:
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1))
        for number in range(120):  # every key once: all of it stays
            keys: list[bytes | None] = [b"k%d-%d" % (number, row) for row in range(8)]
            world.filler.batch(encoded(keys, [bytes(40)] * 8, "none"), 8)
        world.settle()
        before = segments_of(b)
        world.clean()
        assert segments_of(b)[:-2] == before[:-2]


def test_segments_are_not_united_on_a_disk_that_is_almost_full(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each swap frees some room for the next one."""
    with bench(str(tmp_path)) as b:
        world = World(b, random.Random(1))
        batches(world, 120, keys=4)
        world.settle()
        monkeypatch.setattr(DiskFiles, "free_bytes", lambda *_: 0)
        world.clean()
        world.check(cleaned=True)
        assert b.table.read(0).files_version > 2
