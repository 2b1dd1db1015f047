"""The batch header: golden bytes, every damaged byte found, foreign headers refused."""

from __future__ import annotations

import pathlib
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.format.record_batch import batch_header as bh
from tailrace.format.record_batch import header_stamps
from tailrace.format.schema import DEFAULT_SCHEMA
from tests.kit.batches import SEED, TOPIC_ID, make_batch

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"


def golden_batch() -> bytes:
    """The batch whose bytes are kept: a change of them is a change of format and means a new
    version.
    """
    data = make_batch(3, producer_id=7, epoch=2, sequence=40)
    with memoryview(data) as view:
        header = bh.read_header(view)
        header_stamps.stamp_appended(
            view,
            bh.header_position(view),
            header,
            base_offset=1000,
            append_time_us=1_700_000_000_500_000,
            leader_epoch=4,
            durable_offset=990,
            seed=SEED,
        )
    return bytes(data)


def test_header_bytes_are_the_golden_ones() -> None:
    data = golden_batch()
    position = bh.header_position(data)
    golden = (GOLDEN / "batch_header_v1.bin").read_bytes()
    # The header alone, without what the body's bytes decide (checksums, length): those are
    # pyarrow's to lay out.
    assert data[position + 4 : position + 8] == golden[4:8]
    assert data[position + 16 : position + bh.HEADER_BYTES] == golden[16:]


def test_a_transactional_batch_has_the_golden_header_of_version_2() -> None:
    data = make_batch(3, producer_id=bh.TRANSACTIONAL_PRODUCER_IDS + 7, epoch=2, sequence=40)
    position = bh.header_position(data)
    golden = (GOLDEN / "batch_header_v2.bin").read_bytes()
    assert data[position + 4 : position + 8] == golden[4:8]
    assert data[position + 16 : position + bh.HEADER_BYTES] == golden[16:]
    header = bh.verify_batch(memoryview(data), SEED)
    assert header.is_transactional
    assert not header.is_marker


def test_version_and_attribute_must_agree() -> None:
    for producer_id, at, value in ((7, 130, 2), (1 << 62, 130, 1), (7, 4, 1), (1 << 62, 4, 0)):
        data = make_batch(3, producer_id=producer_id)
        struct.pack_into("<H", data, bh.header_position(data) + at, value)
        with pytest.raises(bh.BatchFormatError, match="contradicts"):
            bh.read_header(data)


def test_a_batch_sent_again_under_a_plain_id_is_of_version_1_again() -> None:
    data = make_batch(3, producer_id=1 << 62)
    with memoryview(data) as view:
        header_stamps.stamp_producer(
            view, producer_id=7, producer_epoch=0, base_sequence=0, seed=SEED
        )
    assert bytes(data) == bytes(make_batch(3, producer_id=7))


def test_golden_batch_is_read() -> None:
    data = (GOLDEN / "batch_v1.bin").read_bytes()
    header = bh.verify_batch(memoryview(data), SEED)
    assert (header.base_offset, header.next_offset, header.record_count) == (1000, 1003, 3)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 2, 40)
    assert (header.leader_epoch, header.durable_offset, header.append_time_us) == (
        4,
        990,
        1_700_000_000_500_000,
    )
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), DEFAULT_SCHEMA)
    assert batch.column(2).to_pylist() == [b"value-0", b"value-1", b"value-2"]


def test_a_batch_is_an_ordinary_arrow_message() -> None:
    stream = (
        DEFAULT_SCHEMA.serialize().to_pybytes()
        + bytes(make_batch(5))
        + bytes(make_batch(2, compression="zstd"))
        + bh.END_OF_STREAM
    )
    assert pa.ipc.open_stream(stream).read_all().num_rows == 7


def test_every_flipped_bit_is_detected() -> None:
    data = make_batch(2, producer_id=1)
    for index in range(len(data)):
        bent = bytearray(data)
        bent[index] ^= 1 << (index % 8)
        with pytest.raises(bh.BatchFormatError):
            bh.verify_batch(memoryview(bent), SEED)


def test_every_truncation_is_detected() -> None:
    data = make_batch(2)
    for length in range(len(data)):
        with pytest.raises(bh.BatchFormatError):
            bh.verify_batch(memoryview(data)[:length], SEED)


@pytest.mark.parametrize(
    ("offset", "form", "value"), [(132, "<I", 0x12345678), (130, "<H", 4), (128, "<H", 144)]
)
def test_another_magic_version_or_length_is_refused_with_a_sentence(
    offset: int, form: str, value: int
) -> None:
    data = make_batch()
    struct.pack_into(form, data, bh.header_position(data) + offset, value)
    with pytest.raises(bh.BatchFormatError, match=r"magic|version|header length"):
        bh.verify_batch(memoryview(data), SEED)


def test_a_batch_of_another_partition_is_refused() -> None:
    data = make_batch()
    for seed in (bh.checksum_seed(TOPIC_ID, 1), bh.checksum_seed(bytes(16), 0)):
        with pytest.raises(bh.BatchChecksumError, match="another topic or partition"):
            bh.verify_batch(memoryview(data), seed)


def test_appending_changes_nothing_but_the_header() -> None:
    data = make_batch(4)
    before = bytes(data)
    with memoryview(data) as view:
        header_stamps.stamp_appended(
            view,
            bh.header_position(view),
            bh.read_header(view),
            base_offset=5,
            append_time_us=6,
            leader_epoch=7,
            durable_offset=3,
            seed=SEED,
        )
        assert bh.verify_batch(view, SEED).base_offset == 5
    position = bh.header_position(data)
    assert data[:position] == before[:position]
    assert data[position + bh.HEADER_BYTES :] == before[position + bh.HEADER_BYTES :]


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(bh.BatchFormatError):
        bh.verify_batch(memoryview(data), SEED)


@given(
    st.integers(0, 2**62), st.integers(0, 2**31 - 2), st.integers(-(2**62), 2**62),
    st.integers(-1, 2**62), st.integers(-1, 2**31 - 1), st.integers(-1, 32767)
)  # fmt: skip
def test_header_fields_survive_a_round_trip(
    base: int, delta: int, stamp: int, producer: int, sequence: int, epoch: int
) -> None:
    header = bh.BatchHeader(
        attributes=bh.ATTRIBUTE_SPARSE if producer < 0 else 0, base_offset=base,
        last_offset_delta=delta, record_count=1 if producer < 0 else delta + 1,
        max_timestamp_us=stamp, producer_id=producer,
        base_sequence=sequence, producer_epoch=epoch, batch_length=2048, due_us=stamp,
        delay_position=base, min_tick=delta,
    )  # fmt: skip
    assert bh.header_at(header.to_bytes(), 0, 1024) == header
