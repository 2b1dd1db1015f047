"""The bytes of a share partition's state: there and back, a golden file, and what is not whole."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.groups.share.partition import codec
from appliance.groups.share.partition.offset_ranges import (
    ACKNOWLEDGED,
    ARCHIVED,
    Kind,
    OffsetRanges,
    State,
)
from tailrace.format.crc32c import crc32c

GOLDEN = pathlib.Path(__file__).parents[4] / "golden/share_partition_v1.bin"


def specimen() -> OffsetRanges:
    spans = OffsetRanges(1_000_000)
    spans.append(3, State(Kind.ACQUIRED, 1, "0f" * 16))
    spans.append(300, ACKNOWLEDGED)
    spans.append(1, State(Kind.AVAILABLE, 2))
    spans.append(2, ARCHIVED)
    spans.append(70_000, State(Kind.ACQUIRED, 5, "a1" * 16))
    spans.append(1, State(Kind.ACQUIRED, 1, "0f" * 16))
    return spans


def test_a_state_that_an_earlier_program_wrote_is_read() -> None:
    assert codec.encode(specimen()) == GOLDEN.read_bytes()
    found = codec.decode(GOLDEN.read_bytes())
    assert list(found) == list(specimen())
    assert found.counts == specimen().counts


STATES = st.one_of(
    st.just(ACKNOWLEDGED),
    st.just(ARCHIVED),
    st.integers(1, 1 << 30).map(lambda count: State(Kind.AVAILABLE, count)),
    st.tuples(st.integers(1, 1 << 30), st.text(max_size=40)).map(
        lambda given: State(Kind.ACQUIRED, *given)
    ),
)


@given(st.integers(0, 1 << 60), st.lists(st.tuples(st.integers(1, 1 << 40), STATES), max_size=20))
def test_there_and_back(start: int, runs: list[tuple[int, State]]) -> None:
    spans = OffsetRanges(start)
    for count, state in runs:
        if len(spans) or state.kind in (Kind.AVAILABLE, Kind.ACQUIRED):
            spans.append(count, state)
    found = codec.decode(codec.encode(spans))
    assert list(found) == list(spans)
    assert (found.start, found.next, found.counts) == (spans.start, spans.next, spans.counts)


def test_bytes_that_are_not_whole_are_refused() -> None:
    data = codec.encode(specimen())
    for length in range(len(data)):
        with pytest.raises(codec.StateFormatError):
            codec.decode(data[:length])
    for bit in range(8 * len(data)):
        if bit // 8 in (1, 2, 3):
            continue  # reserved: a later version's
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(codec.StateFormatError):
            codec.decode(bytes(flipped))
    with pytest.raises(codec.StateFormatError):
        codec.decode(data + b"\0")


@given(st.binary(max_size=60))
def test_any_bytes_under_a_good_checksum_are_a_state_or_refused(body: bytes) -> None:
    data = codec._HEAD.pack(codec.VERSION, 0, 0, crc32c(body)) + body
    try:
        spans = codec.decode(data)
    except codec.StateFormatError:
        return
    spans._check_invariants()
