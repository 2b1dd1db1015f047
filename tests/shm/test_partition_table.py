"""The partition table: a writer that is killed between two stores leaves no reader waiting, and no pair that does not belong together."""

from __future__ import annotations

from typing import Any

import pytest

from shm.layout import RegionKind, SlotState, TableLayout
from shm.partition_table import PartitionState, PartitionTable
from tests.kit import memory


class Dying:
    """Words of shared memory whose writer dies after some stores."""

    def __init__(self, words: Any, stores: int) -> None:
        self._words = words
        self._left = stores

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        self._words[index] = value


def state(number: int) -> PartitionState:
    return PartitionState.empty(bytes(16), 0, SlotState.ONLINE, 1)._replace(delivered_ordinal=number, delivered_position=10 * number)


@pytest.mark.parametrize("stores", range(25))
def test_a_writer_killed_at_any_store_leaves_the_old_delivered_pair_or_the_new(stores: int) -> None:
    region = memory.simulated(RegionKind.TABLE, TableLayout(2).size, 2)
    table, reader = PartitionTable(region), PartitionTable(region)
    for number in (1, 2, 3):
        table.write(1, state(number))
        assert reader.delivered(1) == (number, 10 * number)
    table._words = Dying(table._words, stores)  # type: ignore[assignment]
    try:
        table.write(1, state(4))
    except KeyboardInterrupt:
        assert reader.delivered(1) in ((3, 30), (4, 40))
    else:
        assert reader.delivered(1) == (4, 40)
    PartitionTable(region).write(1, state(5))  # its successor
    assert reader.read(1).delivered_position == 50
