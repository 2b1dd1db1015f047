"""LatestStore against a dictionary: any order of partitions, tombstones, repeated fetches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.consumer.table import latest_store
from tailrace.consumer.table.latest_store import LatestStore, Rows
from tailrace.format.schema import HEADER_TYPE


class Sent(NamedTuple):
    key: bytes | None
    value: bytes | None
    time_us: int


RECORDS = st.lists(
    st.builds(
        Sent,
        st.none() | st.sampled_from([b"", b"a", b"b", b"c", b"d"]),
        st.none() | st.binary(max_size=3),
        st.integers(0, 5),
    ),
    max_size=25,
)
LOGS = st.lists(RECORDS, min_size=1, max_size=3)


def rows_of(partition: int, records: list[Sent], first: int, *, headers: bool = False) -> Rows:
    values = pa.array([record.value for record in records], pa.binary())
    columns = {"value": values}
    if headers:
        columns["headers"] = pa.array([[("h", b"1")]] * len(records), HEADER_TYPE)
    return Rows(
        partition,
        pa.array([record.key for record in records], pa.binary()),
        pa.RecordBatch.from_pydict(columns),
        np.arange(first, first + len(records)),
        np.array([record.time_us for record in records], np.int64),
        np.array([record.value is not None for record in records], bool),
    )


def model(logs: list[list[Sent]]) -> dict[bytes, bytes]:
    """Key -> value, by the rule of docs/table.md."""
    best: dict[bytes, tuple[int, int, bytes | None]] = {}
    for partition, records in enumerate(logs):
        here: dict[bytes, tuple[int, int, bytes | None]] = {}
        for record in records:
            if record.key is not None:
                claim = max(record.time_us, here.get(record.key, (0, 0, None))[0])
                here[record.key] = claim, partition, record.value
        for key, found in here.items():
            best[key] = max(best.get(key, found), found, key=lambda item: item[:2])
    return {key: value for key, (_, _, value) in best.items() if value is not None}


@given(LOGS, st.data())
def test_any_order_of_partitions_gives_the_latest(
    logs: list[list[Sent]], data: st.DataObject
) -> None:
    store = LatestStore(typed=False)
    at = [0] * len(logs)
    while any(begin < len(records) for begin, records in zip(at, logs, strict=True)):
        partition = data.draw(
            st.sampled_from([n for n, records in enumerate(logs) if at[n] < len(records)])
        )
        end = data.draw(st.integers(at[partition] + 1, len(logs[partition])))
        begin = data.draw(st.integers(0, at[partition]))  # a fetch may be repeated
        store.apply(rows_of(partition, logs[partition][begin:end], begin, headers=end % 2 == 0))
        store.tidy(len(logs))
        at[partition] = end
    expected = model(logs)
    assert dict(store.snapshot()) == expected
    assert set(store.key_snapshot()) == set(expected)
    assert store.record_count == len(expected)
    for key in (b"", b"a", b"b", b"c", b"d", b"no"):
        row = store.row_of(key)
        assert (None if row is None else row.value) == expected.get(key)


def test_outdated_values_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest_store, "SLACK_ROWS", 0)
    store = LatestStore(typed=False)
    sizes = []
    for turn in range(60):
        records = [Sent(b"k%d" % n, b"%4d" % turn * 25, turn) for n in range(500)]
        store.apply(rows_of(0, records, turn * 500))
        store.tidy(1)
        sizes.append(store.byte_count)
    assert max(sizes[10:]) < 2.5 * sizes[0]
    assert len(store._chunks) <= latest_store.SMALL_CHUNKS_MAX
    assert dict(store.snapshot()) == {b"k%d" % n: b"%4d" % 59 * 25 for n in range(500)}


def test_small_chunks_are_united() -> None:
    store = LatestStore(typed=False)
    for n in range(500):
        store.apply(rows_of(0, [Sent(b"k%d" % n, b"%d" % n, n)], n, headers=n % 3 == 0))
        store.tidy(1)
    assert len(store._chunks) <= latest_store.SMALL_CHUNKS_MAX + 1
    assert dict(store.snapshot()) == {b"k%d" % n: b"%d" % n for n in range(500)}
    row = store.row_of(b"k3")
    assert row is not None
    assert (row.offset, row.headers) == (3, [("h", b"1")])


@pytest.mark.parametrize(("partition_count", "day_later"), [(1, False), (2, False), (2, True)])
def test_deleted_keys_are_forgotten_when_nothing_can_bring_them_back(
    partition_count: int, day_later: bool
) -> None:
    store = LatestStore(typed=False)
    keys = [b"k%d" % n for n in range(latest_store.TOMBSTONES_MIN + 10)]
    store.apply(rows_of(0, [Sent(key, b"v", 1) for key in keys], 0))
    store.apply(rows_of(0, [Sent(key, None, 2) for key in keys], len(keys)))
    if day_later:
        late = latest_store.TOMBSTONE_KEPT_US + 3
        store.apply(rows_of(1, [Sent(b"late", b"v", late)], 0))
    store.tidy(partition_count)
    is_kept = partition_count > 1 and not day_later
    assert store.tombstone_count == (len(keys) if is_kept else 0)
    assert len(store._keys) == (len(keys) if is_kept else int(day_later))
    store.apply(rows_of(1, [Sent(keys[0], b"older", 1)], 1))
    assert (keys[0] in store) is not is_kept


def test_keys_below_the_logs_beginning_are_removed() -> None:
    store = LatestStore(typed=False)
    store.apply(rows_of(0, [Sent(b"a", b"1", 1), Sent(b"b", b"1", 1), Sent(b"c", None, 1)], 0))
    store.apply(rows_of(1, [Sent(b"d", b"1", 1)], 0))
    assert store.remove_below(0, 1) == [b"a"]
    assert sorted(store.key_snapshot()) == [b"b", b"d"]
    store.apply(rows_of(0, [Sent(b"a", b"2", 0)], 9))
    assert store.record_count == 3
    assert sorted(store.remove_below(0, 9)) == [b"b"]


def test_typed_rows_are_dicts() -> None:
    store = LatestStore(typed=True)
    frame: Any = pa.RecordBatch.from_pydict({"id": [1, 2], "n": ["x", None]})
    store.apply(
        Rows(0, frame.column(0), frame, np.arange(2), np.zeros(2, np.int64), np.ones(2, bool))
    )
    assert [value for _, value in store.snapshot()] == [{"id": 1, "n": "x"}, {"id": 2, "n": None}]
