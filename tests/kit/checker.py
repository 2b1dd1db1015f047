"""The one checker of every breaking test: what was acknowledged against what can be read.

Values say who sent them: `<producer>:<number>:<payload>`, numbers counting up per producer and
partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_VALUE = re.compile(rb"([^:]+):(\d+):")


def value_of(producer: str, number: int, payload: bytes = b"") -> bytes:
    return b"%b:%d:%b" % (producer.encode(), number, payload)


@dataclass(slots=True)
class History:
    """History of a run, as those outside saw it."""

    sent: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """(partition, producer:number) -> the whole value."""
    acknowledged: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """(partition, producer:number) -> offset."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """partition -> the highest high watermark seen."""
    seen: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(partition, offset) -> the value that a consumer read there."""

    def send(self, partition: int, value: bytes) -> None:
        self.sent[partition, name_of(value)] = value

    def acknowledge(self, partition: int, value: bytes, offset: int) -> None:
        self.acknowledged[partition, name_of(value)] = offset

    def see_watermark(self, partition: int, offset: int) -> None:
        known = self.watermarks.get(partition, 0)
        assert offset >= known, (
            f"the high watermark of partition {partition} went back from {known} to {offset}"
        )
        self.watermarks[partition] = offset

    def read(self, partition: int, offset: int, value: bytes) -> None:
        known = self.seen.setdefault((partition, offset), value)
        assert known == value, (
            f"offset {offset} of partition {partition} was {known!r} and is {value!r}"
        )


def name_of(value: bytes) -> bytes:
    found = _VALUE.match(value)
    assert found, f"a value that nobody sent: {value!r}"
    return found.group(0)[:-1]


def check(
    history: History,
    readable: Mapping[int, Iterable[tuple[int, bytes]]],
    *,
    exactly_once: bool = True,
    lossless: bool = True,
    dense: bool = True,
    starts: Mapping[int, int] | None = None,
) -> int:
    """Assert that what can be read is what was acknowledged, and nothing that was not sent. Answers
    how many records there are.

    `readable`: partition -> (offset, value) in order of offset. `exactly_once`: producers were
    idempotent. `lossless`: nothing acknowledged may be missing. `dense`: no offset may be missing.
    `starts`: partition -> offset below which records were deleted on purpose.
    """
    total = 0
    for partition, records in readable.items():
        expected_offset: int | None = None
        last: dict[bytes, int] = {}
        found: dict[bytes, int] = {}
        for offset, value in records:
            assert not dense or expected_offset in (None, offset), (
                f"partition {partition}: offset {offset} where {expected_offset} belongs"
            )
            expected_offset = offset + 1
            name = name_of(value)
            assert history.sent.get((partition, name)) == value, (
                f"partition {partition} offset {offset}: {value!r} was not sent so"
            )
            producer, _, number = name.partition(b":")
            if exactly_once:
                assert name not in found, (
                    f"partition {partition}: {name!r} is there twice, at {found[name]} and {offset}"
                )
                assert int(number) > last.get(producer, -1), (
                    f"partition {partition}: {name!r} at {offset} behind number {last[producer]}"
                )
            last[producer] = int(number)
            found.setdefault(name, offset)
            history.read(partition, offset, value)
            total += 1
        if lossless:
            for (its_partition, name), offset in history.acknowledged.items():
                if its_partition == partition and offset >= (starts or {}).get(partition, 0):
                    assert name in found, (
                        f"partition {partition}: {name!r} was acknowledged at {offset} and is lost"
                    )
                    assert not exactly_once or found[name] == offset, (
                        f"{name!r} was acknowledged at {offset} and lies at {found[name]}"
                    )
            assert (expected_offset or 0) >= history.watermarks.get(partition, 0), (
                "the log ends below a high watermark that was seen"
            )
    return total
