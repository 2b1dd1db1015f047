"""The partition table: whatever is read of a slot was true at one time, wherever its writer is, or
was killed.
"""

from __future__ import annotations

from typing import Any

import pytest

from shm.memory.layout import RegionKind, SlotState, TableLayout
from shm.tables.invariants import InvariantError
from shm.tables.partition_table import PartitionState, PartitionTable
from tests.kit import memory


class Interrupted:
    """Words of shared memory; before store or load number `at`, something happens."""

    def __init__(self, words: Any, at: int, what: Any) -> None:
        self._words = words
        self._left = at
        self._what = what

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._what()

    def __getitem__(self, index: Any) -> Any:
        self._count()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._count()
        self._words[index] = value


def state(number: int) -> PartitionState:
    """Every field says which."""
    made = PartitionState(
        number.to_bytes(16, "big"), *[number] * 2,  # type: ignore[arg-type]
        *[10 * number + n for n in range(27)]
    )  # fmt: skip
    return made._replace(state=SlotState.ONLINE, last_stable_offset=made.high_watermark)


def table() -> tuple[PartitionTable, PartitionTable]:
    region = memory.simulated(RegionKind.TABLE, TableLayout(2).size, 2)
    return PartitionTable(region), PartitionTable(region)


def die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", range(25))
def test_a_writer_killed_at_any_store_leaves_the_old_state_or_the_new(at: int) -> None:
    writer, reader = table()
    for number in (1, 2, 3):
        writer.write(1, state(number))
        assert reader.read(1) == state(number)
    words = writer._words
    writer._words = Interrupted(words, at, die)  # type: ignore[assignment]
    try:
        writer.write(1, state(4))
    except KeyboardInterrupt:
        assert reader.read(1) == state(3)
    else:
        assert reader.read(1) == state(4)
    writer._words = words
    writer.write(1, state(5))  # its successor
    assert reader.read(1) == state(5)
    shown = state(5)
    assert reader.delivered(1) == (shown.delivered_ordinal, shown.delivered_position)
    assert reader.stable(1) == (shown.last_stable_offset, shown.aborted_version)


@pytest.mark.parametrize("at", range(25))
def test_a_reader_between_any_two_stores_sees_one_state(at: int) -> None:
    writer, reader = table()
    writer.write(1, state(3))
    seen = []
    writer._words = Interrupted(
        writer._words, at, lambda: seen.extend([reader.read(1), reader.append_state(1)])
    )  # type: ignore[assignment]
    writer.write(1, state(4))
    for number in (3, 4):
        if state(number) in seen:
            assert seen[1] == state(number)[2:7]
            return
    assert not seen


@pytest.mark.parametrize("writes", range(1, 5))
@pytest.mark.parametrize("at", range(4))
def test_a_reader_that_is_overtaken_while_it_reads_sees_one_state(at: int, writes: int) -> None:
    writer, reader = table()
    writer.write(0, state(1))

    def overtake() -> None:
        for number in range(2, 2 + writes):
            writer.write(0, state(number))

    reader._words = Interrupted(reader._words, at, overtake)  # type: ignore[assignment]
    assert reader.read(0) in [state(1), state(1 + writes)]


def test_only_slots_that_were_written_are_listed() -> None:
    writer, reader = table()
    assert reader.all() == []
    assert reader.read(0).state is SlotState.FREE
    writer.write(1, state(1))
    assert reader.all() == [state(1)]


@pytest.mark.parametrize(
    ("change", "broken"),
    [({"high_watermark": 1}, "start 11, high"), ({"log_end_offset": 5}, "end 5")],
)
def test_a_state_that_contradicts_itself_is_found_where_it_is_published(
    change: dict[str, int], broken: str
) -> None:
    writer, _ = table()
    with pytest.raises(InvariantError, match=broken):
        writer.write(0, state(1)._replace(**change))  # type: ignore[arg-type]


def test_a_high_watermark_that_goes_back_is_found_where_it_is_published() -> None:
    writer, _ = table()
    writer.write(0, state(1))
    with pytest.raises(InvariantError, match="from 12 to 11"):
        writer.write(0, state(1)._replace(high_watermark=11, last_stable_offset=11))


def test_a_last_stable_offset_that_goes_back_is_found_where_it_is_published() -> None:
    writer, _ = table()
    writer.write(0, state(1))
    with pytest.raises(InvariantError, match="last stable offset from 12 to 11"):
        writer.write(0, state(1)._replace(last_stable_offset=11))
