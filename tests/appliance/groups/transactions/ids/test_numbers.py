"""Producer ids and ordinals are given once."""

from __future__ import annotations

import pytest

from appliance.groups.transactions.ids.numbers import EPOCH_MAX, Numbers
from shm.messages.transaction_messages import PRODUCER_IDS_IN_BLOCK
from tailrace.core.errors import TailraceError
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

FIRST = TRANSACTIONAL_PRODUCER_IDS + 7 * PRODUCER_IDS_IN_BLOCK


def test_a_block_gives_its_own_ids_and_no_others() -> None:
    numbers = Numbers()
    with pytest.raises(TailraceError):
        numbers.new_producer_id()
    numbers.add_block(FIRST)
    assert numbers.new_producer_id() == FIRST
    numbers.add_block(FIRST)
    assert numbers.new_producer_id() == FIRST + 1, "a block that comes twice begins once"
    numbers._next_producer_id = FIRST + PRODUCER_IDS_IN_BLOCK - 1
    assert numbers.new_producer_id() == FIRST + PRODUCER_IDS_IN_BLOCK - 1
    with pytest.raises(TailraceError):
        numbers.new_producer_id()


def test_an_epoch_goes_up_to_its_last_one_and_then_to_another_producer_id() -> None:
    numbers = Numbers()
    numbers.add_block(FIRST)
    assert numbers.following(5, EPOCH_MAX - 1) == (5, EPOCH_MAX)
    assert numbers.following(5, EPOCH_MAX) == (FIRST, 0)


def test_ordinals_grow_behind_the_database_and_behind_the_block() -> None:
    numbers = Numbers()
    numbers.continue_behind(9)
    assert numbers.new_ordinal() == 10
    numbers.add_block(FIRST)
    assert numbers.new_ordinal() == 7 * PRODUCER_IDS_IN_BLOCK + 1
    numbers.continue_behind(3)
    assert numbers.new_ordinal() == 7 * PRODUCER_IDS_IN_BLOCK + 2
