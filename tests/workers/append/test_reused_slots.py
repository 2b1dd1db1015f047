"""A slot of a deleted topic is given to another one, and its worker is killed: what the ring still
has of the deleted topic is not the new one's.
"""

from __future__ import annotations

import dataclasses

from shm.messages.transaction_messages import Outcome
from tailrace.format.record_batch.batch_header import checksum_seed
from tests.kit.batches import TOPIC_ID, make_batch
from tests.kit.log_files.logs import Bench, assignment
from tests.kit.stepped.coordinator import PID, Coordinator, make_bench, results, transactional

OTHER_ID = bytes(16)


def _batch(topic_id: bytes, producer_id: int, *, sequence: int = 0) -> bytearray:
    return make_batch(
        2, producer_id=producer_id, sequence=sequence, seed=checksum_seed(topic_id, 0)
    )


def _give_slot_to_another_topic(it: Bench) -> None:
    it.assign(dataclasses.replace(it.assignments[0], version=2, dropped=True))
    it.settle()
    other = assignment(0, topic="u", topic_id=OTHER_ID)
    it.assign(other)
    it.assignments = [other]
    it.settle()


def test_a_producer_of_both_topics_is_not_taken_for_its_own_duplicate() -> None:
    it = make_bench()
    assert results(it, _batch(TOPIC_ID, 7)) == [0]
    _give_slot_to_another_topic(it)
    assert results(it, _batch(OTHER_ID, 8)) == [0]
    it.kill_worker()
    assert results(it, _batch(OTHER_ID, 7)) == [0]
    assert it.table.read(0).log_end_offset == 4
    it.kill_worker()
    assert results(it, _batch(OTHER_ID, 7), _batch(OTHER_ID, 7, sequence=2)) == [0, 0]
    assert it.table.read(0).log_end_offset == 6, "its own duplicate is none of the log's"


def test_a_transaction_of_the_deleted_topic_has_no_marker_in_the_other() -> None:
    it = make_bench()
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)], is_sent=False)
    coordinator.feed()
    coordinator.settle()
    assert results(it, transactional()) == [0]
    _give_slot_to_another_topic(it)
    assert results(it, _batch(OTHER_ID, 8)) == [0]
    coordinator.decide(1, [(PID, 0, Outcome.ABORT)], [(PID, 1)])
    coordinator.settle()
    it.kill_worker()
    coordinator.settle()
    coordinator.feed()
    coordinator.settle()
    assert it.table.read(0).log_end_offset == 2
    assert not coordinator.settled.unfinished
