"""Figures that `bench.members.rebalance` reads from the notes of members."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys

from bench.members.member_notes import History, Notes, read_notes
from tests.kit.processes import HANG_LIMIT_S

MS = 1_000_000


def history(*lines: str) -> History:
    """Notes with times in ms."""
    fields = [line.split(" ", 1) for line in lines]
    return History(["".join(f"{int(ms) * MS} {rest}\n" for ms, rest in fields)])


TWO_OF_THREE = ("10 a 0 +", "11 a 1 +", "12 b 2 +")


def test_a_group_is_settled_when_each_partition_has_one_owner_and_each_member_a_partition() -> None:
    assert history(*TWO_OF_THREE).settled_ns(3, 2) == 12 * MS
    assert history(*TWO_OF_THREE).settled_ns(4, 2) is None  # a partition that nobody has
    assert history(*TWO_OF_THREE).settled_ns(3, 3) is None  # a member that has nothing
    assert history(*TWO_OF_THREE, "13 b 1 +").settled_ns(3, 2) is None  # a partition that two have
    assert history(*TWO_OF_THREE, "13 b 1 +", "14 a 1 -").settled_ns(3, 2) == 14 * MS
    assert history(*TWO_OF_THREE, "13 b 2 -").settled_ns(3, 2) is None


def test_a_dead_members_partitions_are_owned_and_read_again_when_the_last_of_them_is() -> None:
    notes = history(
        *TWO_OF_THREE, "13 a 0 r", "19 a 1 r", "25 b 0 +", "27 b 1 +", "28 b 0 r", "40 b 1 r"
    )
    assert notes.owners(20 * MS) == {0: {"a"}, 1: {"a"}, 2: {"b"}}
    assert notes.until_reassigned_ms({0, 1}, "a", 18 * MS, 50 * MS) == 9
    assert (
        notes.until_resumed_ms({0, 1}, "a", 18 * MS, 50 * MS) == 22
    )  # the read at 19 was the dead member's last
    assert notes.until_reassigned_ms({0, 1}, "a", 18 * MS, 26 * MS) == math.inf
    assert notes.until_resumed_ms({0, 1}, "a", 18 * MS, 30 * MS) == math.inf
    assert notes.changed(18 * MS, 26 * MS) == {0}


def test_partitions_are_read_when_each_has_been_since_it_was_given() -> None:
    notes = history(*TWO_OF_THREE, "13 a 0 r", "14 a 1 r", "20 a 1 -", "21 b 1 +", "24 b 1 r")
    assert notes.read_since_given_ns({0, 1}) == 24 * MS
    assert notes.read_since_given_ns({0, 1, 2}) is None
    assert (
        history(*TWO_OF_THREE, "14 a 1 r", "20 a 1 -", "21 b 1 +").read_since_given_ns({1}) is None
    )


def test_the_longest_gap_is_one_that_touches_the_time_and_a_silent_partition_has_the_longest() -> (
    None
):
    notes = history(
        "10 a 0 r", "90 a 0 r", "100 a 0 r", "130 a 0 r", "140 a 0 r", "900 a 0 r", "100 a 1 r"
    )
    assert notes.longest_gap_ms({0}, 95 * MS, 145 * MS) == 30
    assert notes.longest_gap_ms({0}, 20 * MS, 145 * MS) == 80  # begun before, taken whole
    assert (
        notes.longest_gap_ms({0}, 95 * MS, 200 * MS) == 60
    )  # not over at the end; what comes later is of another time
    assert notes.longest_gap_ms({0, 1}, 95 * MS, 200 * MS) == 100
    assert notes.longest_gap_ms({2}, 95 * MS, 200 * MS) == 105  # never read
    assert notes.longest_gap_ms(set(), 95 * MS, 200 * MS) == 0


def test_notes_come_back_as_they_were_written_and_half_a_line_is_left(
    tmp_path: pathlib.Path,
) -> None:
    with open(tmp_path / "one", "wb", buffering=0) as file:
        Notes(file.fileno(), "one.0").given([0, 1])
        Notes(file.fileno(), "one.1").given([2])
        Notes(file.fileno(), "one.0").taken([1])
        os.write(file.fileno(), b"123 one.1 1")
    assert read_notes(tmp_path).owners() == {0: {"one.0"}, 1: set(), 2: {"one.1"}}


def test_a_member_that_fails_ends_its_process(tmp_path: pathlib.Path) -> None:
    code = (
        "from bench.members.member_notes import run_members\n"
        f"run_members(3, {str(tmp_path / 'm')!r}, "
        "lambda notes: notes.given([1 / 0]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr
