"""Many transactional ids: what they cost in memory, and at a start. Figures in bytes and rows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from appliance.groups.store.schema import TransactionalIdRow
from shm.messages.transaction_messages import ProducerEpoch
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import World

OPEN = 10_000
BYTES_EACH_MAX = 1_100


def row(number: int, *, is_registered: int) -> TransactionalIdRow:
    return TransactionalIdRow(
        number, f"id-{number:07}", TRANSACTIONAL_PRODUCER_IDS + number, 1, number, number, 60_000,
        number, 1_700_000_000_000, is_registered, "client", "[]",
    )  # fmt: skip


def test_open_transactions_have_a_bound_of_memory_each(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.coordinator._rows.put_ids(row(number, is_registered=1) for number in range(1, OPEN + 1))
    world.store.commit()
    tracemalloc.start()
    world.kill()
    keys = [ProducerEpoch(TRANSACTIONAL_PRODUCER_IDS + n, 1) for n in range(1, OPEN + 1)]
    before = tracemalloc.get_traced_memory()[0]
    world.coordinator.opened(keys, world.now_ns)
    del keys
    loaded = tracemalloc.take_snapshot()
    tracemalloc.stop()
    of_rooms = sum(
        stat.size
        for stat in loaded.statistics("filename")
        if "appliance/groups" in stat.traceback[0].filename
        and "tests" not in stat.traceback[0].filename
    )
    print(f"bytes each: {of_rooms / OPEN:.0f}, before opened {before}")
    assert of_rooms / OPEN < BYTES_EACH_MAX
    assert world.ask(Api.LIST_TRANSACTIONS, states=["ongoing"])["totals"]["open"] == OPEN


def test_ids_used_once_are_not_loaded_at_a_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.coordinator._rows.put_ids(row(number, is_registered=0) for number in range(1, 50_001))
    world.store.commit()
    world.kill()
    assert len(world.coordinator._table) == 0
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="id-0000007")
    assert found["state"] == "empty"
