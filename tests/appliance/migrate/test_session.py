"""Sessions of a copy: each record once and at its place in the map, whatever the source deletes."""

from __future__ import annotations

import pytest

from appliance.migrate.groups import translate
from appliance.migrate.journal import Journal
from appliance.migrate.session import Session
from tests.appliance.migrate.kit import PARTITION, Source, Target, copy, session_of


def check(source: Source, target: Target, session: Session) -> None:
    """Raise unless each record is there once, and each offset has the place that it maps to."""
    records = [each for each in target.log if each is not None]
    assert records == sorted(set(records))
    for journal in (session.journal, copy(source, target).journal, Journal(target.journal)):
        if journal.map_of(PARTITION).target_next < len(target.log):
            journal.map_of(PARTITION).grow(len(target.log))
        for offset in range(source.end):
            place = translate({PARTITION: (offset, "")}, journal, {PARTITION: source.end})
            left = [each for each in records if each >= offset]
            behind = [each for each in target.log[place[PARTITION][0] :] if each is not None]
            assert behind == left, offset


@pytest.mark.parametrize(
    ("copied", "first", "then", "at_last"),
    [
        (100, 200, 250, 300),  # deleted before they were copied
        (100, 200, 200, 300),  # all that there was
        (0, 40, 40, 90),  # before the first record was copied
        (100, 100, 150, 300),  # no record is missing
        (100, 60, 150, 300),
    ],
)
def test_records_that_the_source_deletes_between_sessions_shift_no_other_record(
    copied: int, first: int, then: int, at_last: int
) -> None:
    source, target = Source(), Target()
    source.end = copied
    copy(source, target)
    source.first, source.end = first, then
    check(source, target, copy(source, target))
    source.end = at_last
    session = copy(source, target)
    check(source, target, session)
    missing = range(copied, first)
    assert session.record_count == at_last - len(missing)
    assert [each for each in target.log if each is not None] == [
        each for each in range(at_last) if each not in missing
    ]


def test_records_are_deleted_several_times() -> None:
    source, target = Source(), Target()
    for first, end in ((10, 60), (80, 120), (121, 121), (130, 200), (200, 200), (220, 230)):
        source.first, source.end = first, end
        check(source, target, copy(source, target))


def test_plain_records_of_a_dead_session_that_come_late_are_those_before_the_deleted_ones() -> None:
    source, target = Source(), Target()
    source.end = 100
    copy(source, target)
    source.first, source.end = 200, 250
    session_of(source, target)  # killed behind its first entry
    target.log += range(100, 130)  # plain records of the first one
    source.end = 300
    session = copy(source, target)
    check(source, target, session)
    assert session.record_count == 230
