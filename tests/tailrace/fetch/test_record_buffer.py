"""The record buffer delivers its list itself where all of it is asked for: no record is touched
once more, and none is kept behind the program's back.
"""

from __future__ import annotations

import weakref
from typing import Any

from tailrace.core.records import Record
from tailrace.fetch.record_buffer import RecordBuffer


class Named:
    """Stands for a topic's name, and can be referred to weakly."""


def record(offset: int, topic: Any = "t") -> Record:
    return Record(topic, 0, offset, 0, 0, None, b"", [], 0)


def filled(buffer: RecordBuffer, *records: Record) -> list[Record]:
    """Result of the buffer's records, with these in it."""
    made = buffer._made[0]
    made += records
    return made


def test_all_that_is_buffered_is_delivered_without_a_copy() -> None:
    buffer = RecordBuffer()
    made = filled(buffer, record(0), record(1))
    assert buffer.deliver(2) is made
    assert [one.offset for one in made] == [0, 1]
    assert len(buffer) == 0


def test_what_is_delivered_is_the_programs_and_what_comes_next_is_not_in_it() -> None:
    buffer = RecordBuffer()
    filled(buffer, record(0))
    first = buffer.deliver(5)
    filled(buffer, record(1), record(2))
    first.clear()
    assert [one.offset for one in buffer.deliver(5)] == [1, 2]
    assert buffer.deliver(5) == []


def test_a_part_of_what_is_buffered_leaves_the_rest() -> None:
    buffer = RecordBuffer()
    filled(buffer, record(0), record(1), record(2))
    assert [one.offset for one in buffer.deliver(2)] == [0, 1]
    assert [one.offset for one in buffer.deliver(2)] == [2]


def test_records_that_a_loop_has_passed_are_not_delivered_with_the_rest() -> None:
    buffer = RecordBuffer()
    filled(buffer, record(0), record(1))
    loop = buffer.iterator
    assert next(loop).offset == 0
    assert [one.offset for one in buffer.deliver(5)] == [1]
    assert next(loop, None) is None


def test_all_of_the_last_delivery_is_known_for_a_commit() -> None:
    buffer = RecordBuffer()
    filled(buffer, record(0), record(1))
    assert list(buffer.last_delivered()) == []
    found = buffer.deliver(5)
    assert list(buffer.last_delivered()) == found
    buffer.all_processed()
    assert list(buffer.last_delivered()) == []


def test_without_a_group_nothing_keeps_the_records_that_the_program_has_dropped() -> None:
    buffer = RecordBuffer(notes_last=False)
    name = Named()
    dropped = weakref.ref(name)
    for limit in (1, 5):
        filled(buffer, record(0, name), record(1, name))
        buffer.deliver(limit)
        buffer.deliver(5)
    del name
    assert dropped() is None
