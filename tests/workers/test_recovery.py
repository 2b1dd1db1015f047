"""Recovery: the table row by row; torn tails cut and counted; corruption told from a torn tail; indexes made again."""

from __future__ import annotations

import pathlib
import random

import pytest

from tailrace.segment import Ending
from tests.kit.batches import SEED, make_batch
from tests.kit.logs import bench
from workers.files import DiskFiles
from workers.producer_state import ProducerTable
from workers.recovery import Action, decide, decode_producers, encode_producers, recover_log


@pytest.mark.parametrize(
    ("ending", "durable_behind", "action"),
    [
        (Ending.SEALED, False, Action.BEGIN_NEW_SEGMENT),
        (Ending.CLEAN, False, Action.APPEND),
        (Ending.TORN, False, Action.CUT),
        (Ending.TORN, True, Action.REFUSE_WRITES),
    ],
)
def test_the_table(ending: Ending, durable_behind: bool, action: Action) -> None:
    assert decide(ending, durable_behind) is action


def segment(tmp_path: pathlib.Path, counts: tuple[int, ...] = (3, 4, 5), *, settle_each: bool = True) -> pathlib.Path:
    """A live segment with batches of these many records."""
    with bench(str(tmp_path)) as b:
        sequence = 0
        for count in counts:
            b.send(make_batch(count, producer_id=1, sequence=sequence))
            sequence += count
            if settle_each:
                b.settle()
        b.settle()
        b.flusher.close()
    return tmp_path / "t-0" / ("0" * 20 + ".arrow")


def recover(path: pathlib.Path) -> tuple[int, int, Action]:
    result = recover_log(DiskFiles(), str(path.parent), SEED)
    return result.next_offset, result.cut_bytes, result.action


def test_an_intact_live_segment_is_appended_to(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    assert recover(path) == (12, 0, Action.APPEND)


def test_a_tail_torn_at_every_byte_of_the_last_batch_is_cut_and_counted(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path, settle_each=False)
    whole = path.read_bytes()
    batch = len(make_batch(5))
    for length in range(len(whole) - batch + 1, len(whole), 7):
        path.write_bytes(whole[:length])
        assert recover(path) == (7, length - (len(whole) - batch), Action.CUT)
        assert path.stat().st_size == len(whole) - batch


def test_zeroes_and_garbage_behind_the_last_batch_are_cut(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    whole = path.read_bytes()
    for junk in (bytes(4096), random.Random(1).randbytes(5000), whole[500:900]):
        path.write_bytes(whole + junk)
        assert recover(path) == (12, len(junk), Action.CUT)
        assert path.read_bytes() == whole


def test_a_damaged_middle_is_corruption_where_a_later_batch_knows_it_was_durable(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(b"value-0value-1")
    data[at] ^= 1
    path.write_bytes(data)
    next_offset, cut, action = recover(path)
    assert (next_offset, cut, action) == (0, 0, Action.REFUSE_WRITES)
    assert path.read_bytes() == data, "a corrupt file is kept as it is"


def test_a_segment_killed_before_its_schema_is_removed(tmp_path: pathlib.Path) -> None:
    path = segment(tmp_path)
    path.with_name("0" * 18 + "12.arrow").write_bytes(b"\xff\xff\xff\xff\x10")
    assert recover(path)[:2] == (12, 5)
    assert not path.with_name("0" * 18 + "12.arrow").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "wrong", "empty"])
def test_an_index_that_is_not_right_is_made_again(tmp_path: pathlib.Path, damage: str) -> None:
    path = segment(tmp_path)
    index = path.with_suffix(".index")
    good = index.read_bytes()
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes({"short": good[:-5], "wrong": good[:-8] + b"\xff" * 8, "empty": b""}[damage])
    recover(path)
    assert index.read_bytes() == good


def test_a_damaged_producer_snapshot_is_recognised() -> None:
    table = ProducerTable()
    table.record(1, 0, 0, 4, 0, 5, 7)
    data = encode_producers(table)
    again = decode_producers(data)
    assert again is not None
    assert again.to_snapshot() == table.to_snapshot()
    for index in range(len(data)):
        bent = bytearray(data)
        bent[index] ^= 1
        assert decode_producers(bytes(bent)) is None
