"""Batches in a delay log that nobody expects, between good ones: the good ones all come, the others
are counted, and nobody dies or waits for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.schedule.recurrence import Recurrence, RecurrenceError
from tailrace.format.record_batch.batch_header import (
    OFFSET_VERSION,
    SPARSE_BATCH_VERSION,
    BatchHeader,
    header_position,
    verify_batch,
)
from tailrace.format.schema import delay_schema, to_message
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.batches import reseal
from tests.kit.stepped.delays import LOG_SEED, SCHEMA, DelayWorld
from tests.kit.stepped.foreign_rows import FOREIGN, encoded, foreign, put
from workers.append import batch_validation as batch_checks
from workers.delays import dead_delays as set_aside
from workers.delays.delay_log.batches import LogBatches, RefusedBatchError
from workers.delays.delivery import delivered_batches
from workers.delays.store import recurring_rows
from workers.delays.store.log_versions import LogVersions, UnusableSchemaError

MS, SECOND, DAY = 1_000, 1_000_000, 86_400_000_000
"""Begins the values of records that a test puts in beside the world's own."""
I64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.fixture
def careless_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an older worker had let everything through."""
    monkeypatch.setattr(batch_checks, "validate_batch", lambda *_, **__: None)


def delivered_foreign(world: DelayWorld) -> int:
    """Their names may be changed, too."""
    return sum(
        name not in world.rows and name not in world.recurring for name, _ in world.delivered()
    )


# ---- mutations -----------------------------------------------------------------------------------


def _odd_columns(rows: pa.RecordBatch, draw: Callable[[Any], Any]) -> pa.RecordBatch:
    """Types, names and the number of columns are not the log's."""
    fields = list(rows.schema)
    columns = list(rows.columns)
    place = draw(st.integers(0, len(columns) - 1))
    what = draw(st.sampled_from(["drop", "twice", "rename", "retype", "swap"]))
    if what == "drop":
        del columns[place], fields[place]
    elif what == "twice":
        columns.insert(place, columns[place])
        fields.insert(place, fields[place])
    elif what == "rename":
        fields[place] = fields[place].with_name(
            draw(st.sampled_from(["@due_us", "value", "", "x" * 300]))
        )
    elif what == "swap":
        columns[0], columns[place], fields[0], fields[place] = (
            columns[place],
            columns[0],
            fields[place],
            fields[0],
        )
    else:
        kind = draw(
            st.sampled_from(
                [
                    pa.float64(),
                    pa.utf8(),
                    pa.int8(),
                    pa.bool_(),
                    pa.list_(pa.int64()),
                    pa.timestamp("us", "5"),
                ]
            )
        )
        columns[place], fields[place] = pa.nulls(rows.num_rows, kind), pa.field("c", kind)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _flip(data: bytearray, draw: Callable[[Any], Any], start: int, end: int) -> bytearray:
    for at, mask in draw(
        st.lists(
            st.tuples(st.integers(start, end - 1), st.integers(1, 255)), min_size=1, max_size=6
        )
    ):
        data[at] ^= mask
    return reseal(data, LOG_SEED)


@st.composite
def hostile(draw: Callable[[Any], Any]) -> tuple[bytearray, bool]:
    """(a batch, whether its row count can be believed)."""
    count = draw(st.integers(1, 6))
    dues = draw(st.lists(I64 | st.none(), min_size=count, max_size=count))
    origins = draw(st.lists(st.integers(-2, 12) | st.none(), min_size=count, max_size=count))
    repeats = draw(
        st.lists(
            st.none()
            | st.sampled_from(["", "{", "[" * 500, '{"every_us": []}', "{}", "x" * 5_000]),
            min_size=count,
            max_size=count,
        )
    )
    rows = pa.RecordBatch.from_arrays(
        [
            *foreign(count).columns,
            pa.array(dues, pa.int64()),
            pa.array(origins, pa.int64()),
            pa.array(repeats, pa.utf8()),
        ],
        schema=SCHEMA,
    )
    what = draw(st.sampled_from(["values", "columns", "metadata", "body", "sparse"]))
    codec = draw(st.sampled_from(["none", "zstd", "lz4"]))
    if what == "columns":
        rows = _odd_columns(rows, draw)
    data = encoded(rows, codec)
    position = header_position(data)
    if what == "metadata":
        data = _flip(data, draw, 8, position)
    elif what == "body" and position + 136 < len(data):
        data = _flip(data, draw, position + 136, len(data))
    elif what == "sparse":
        struct.pack_into(
            "<I", data, position + 4, 8 | struct.unpack_from("<I", data, position + 4)[0]
        )
        struct.pack_into("<I", data, position + 24, count + 3)
        struct.pack_into("<H", data, position + OFFSET_VERSION, SPARSE_BATCH_VERSION)
        data = reseal(data, LOG_SEED)
    return data, what != "sparse"


@pytest.mark.usefixtures("careless_worker")
@settings(max_examples=60)
@given(st.lists(hostile(), min_size=1, max_size=5), st.integers(0, 3))
def test_whatever_lies_between_them_good_rows_come_and_the_rest_is_counted(
    batches: list[tuple[bytearray, bool]], seed: int
) -> None:
    world = DelayWorld(seed)
    taken = 0
    for data, is_dense in batches:
        world.schedule([20 * MS, 0, 3 * SECOND])
        accepted = put(world, data)
        taken += accepted if is_dense else min(accepted, 6)
        world.step()
    lost_sparse = sum(not is_dense for _, is_dense in batches)
    world.schedule([50 * MS])
    world.finish()
    assert not world.restarts, "nothing was worth a partition's ending"
    if not lost_sparse:
        assert world.partition.describe()["lost_rows"] + delivered_foreign(world) == taken
    else:
        assert world.partition.describe()["lost_rows"], "what is sparse is counted too"


@pytest.mark.usefixtures("careless_worker")
def test_a_successor_does_not_meet_for_ever_what_its_predecessor_set_aside() -> None:
    world = DelayWorld(2)
    world.schedule([SECOND] * 3)
    rows = arrow_batch.with_delays(foreign(2), SCHEMA, [0, 0], None)
    assert put(world, encoded(rows.select(list(range(6))))) == 2
    world.schedule([SECOND] * 3)
    for _ in range(3):
        world.finish()
        world.pass_time(60 * SECOND)
        while world.step():
            pass
        world.restart_scheduler()
    assert world.partition.describe()["saved_cursor"] >= 8
    while world.step():
        pass
    assert world.partition.describe()["lost_rows"] == 0, "the successor began behind it"
    (kept,) = [name for name in world.disk.names if name.endswith(set_aside.REFUSED_SUFFIX)]
    assert kept == f"/data/t@delay-0/{3:020d}.refused"


@pytest.mark.usefixtures("careless_worker")
def test_what_is_kept_of_refused_batches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_aside, "FILES_MAX", 3)
    world = DelayWorld(2)
    for _ in range(8):
        put(
            world,
            encoded(arrow_batch.with_delays(foreign(1), SCHEMA, [0], None).select(list(range(6)))),
        )
    world.schedule([SECOND])
    world.finish()
    assert world.partition.describe()["lost_rows"] == 8
    assert sum(name.endswith(set_aside.REFUSED_SUFFIX) for name in world.disk.names) == 3


# ---- sizes ---------------------------------------------------------------------------------------


def test_a_record_that_unpacked_fits_no_lane_is_set_aside_and_what_is_due_with_it_comes() -> None:
    world = DelayWorld(7)
    world.schedule([SECOND] * 3)
    due = world.wall_us + SECOND
    large = arrow_batch.with_delays(foreign(1, b"x" * 200_000), SCHEMA, [due], None)
    assert put(world, encoded(large, "zstd")) == 1, "compressed it passes"
    world.schedule([SECOND] * 3)
    world.finish()
    assert (world.partition.describe()["lost_rows"], delivered_foreign(world)) == (1, 0)
    (path,) = [name for name in world.disk.names if name.endswith(set_aside.REFUSED_SUFFIX)]
    inode = world.disk.names[path]
    assert inode is not None
    (kept,) = pa.ipc.open_stream(pa.BufferReader(bytes(inode.data))).read_all().to_pylist()
    assert kept["value"] == FOREIGN + b"x" * 200_000, "an operator can read it"


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_records_that_were_taken_under_a_larger_limit_are_delivered_when_it_is_lowered(
    codec: str,
) -> None:
    world = DelayWorld(8)
    rows = [foreign(1, np.random.default_rng(n).bytes(20_000)) for n in range(5)]
    for each in rows:
        assert put(
            world, encoded(arrow_batch.with_delays(each, SCHEMA, [world.wall_us + SECOND], None))
        )
    for known in (world.topic, world.log):
        lower = replace(
            known,
            version=2,
            settings={**known.settings, "max.message.bytes": 2_048, "compression.type": codec},
        )
        world.bench.assign(lower)
        if known is world.topic:
            world.partition.topic = lower
        else:
            world.partition.log = lower
    world.settle()
    world.schedule([SECOND] * 3)
    world.finish()
    assert (world.partition.describe()["lost_rows"], delivered_foreign(world)) == (0, 5)


def test_deliveries_are_cut_by_what_they_take_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivered_batches, "DELIVERY_BYTES", 1 << 20)
    world = DelayWorld(8)
    rows = pa.concat_batches([foreign(1, b"%d" % n * (12_000 if n % 3 else 1)) for n in range(30)])
    for start in range(0, 30, 3):
        put(
            world,
            encoded(
                arrow_batch.with_delays(
                    rows.slice(start, 3), SCHEMA, [world.wall_us + SECOND] * 3, None
                )
            ),
        )
    world.finish()
    assert (world.partition.describe()["lost_rows"], delivered_foreign(world)) == (0, 30)


def bomb(rows: int, letters: int) -> tuple[BatchHeader, memoryview]:
    plain = default_rows(
        np.zeros(rows, np.int64), [None] * rows, [b"x" * (letters // rows)] * rows, None
    )
    data = memoryview(
        encoded(arrow_batch.with_delays(plain, SCHEMA, np.zeros(rows, np.int64), None), "zstd")
    )
    return verify_batch(data, LOG_SEED), data


@pytest.mark.parametrize(("rows", "letters"), [(1, 80 << 20), (700_000, 0)])
def test_bombs_are_refused_before_anything_is_unpacked(rows: int, letters: int) -> None:
    header, data = bomb(rows, letters)
    batches = LogBatches(LogVersions(DelayWorld(1).log))
    before = pa.total_allocated_bytes()
    with pytest.raises(RefusedBatchError, match=r"unpacks|decompress"):
        batches.decode(header, data, 1 << 20)
    assert pa.total_allocated_bytes() <= before  # less: other tests' garbage has gone meanwhile


@pytest.mark.usefixtures("careless_worker")
def test_many_batches_that_unpack_to_much_are_taken_in_a_few_at_a_time() -> None:
    world = DelayWorld(5)
    rows = arrow_batch.with_delays(
        foreign(1, b"x" * (4 << 20)), SCHEMA, [world.wall_us + DAY], None
    )
    data = encoded(rows, "zstd")
    for _ in range(40):
        assert put(world, data) == 1
    before, peak = pa.total_allocated_bytes(), 0
    for _ in range(200):
        world.partition.step(world.now_ns, world.wall_us)
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 40 * (4 << 20) > 2 * peak > 0


# ---- others' records -----------------------------------------------------------------------------


@pytest.mark.parametrize("with_due", [True, False])
def test_a_client_cannot_cancel_or_replace_by_rows_that_name_an_origin(with_due: bool) -> None:
    world = DelayWorld(4)
    world.schedule([SECOND] * 3)
    dues = pa.array([world.wall_us if with_due else None] * 3, pa.int64())
    rows = [*foreign(3).columns, dues, pa.array([0, 1, 2], pa.int64()), pa.nulls(3, pa.utf8())]
    assert put(world, encoded(pa.RecordBatch.from_arrays(rows, schema=SCHEMA))) == 3
    world.finish()
    assert delivered_foreign(world) == (3 if with_due else 0), (
        "rows with a due time are new records, the others nothing"
    )
    assert world.partition.describe()["lost_rows"] == (0 if with_due else 3)
    assert world.partition.describe()["cancelled"] == 0


# ---- schemas -------------------------------------------------------------------------------------


def test_a_delay_log_whose_schema_is_not_its_topics_is_not_opened() -> None:
    topic = pa.schema([("n", pa.int64()), ("n", pa.int64())])
    world = DelayWorld(1)

    def check(log: bytes) -> None:
        versions = LogVersions(replace(world.log, schema=log))
        versions.check(replace(world.topic, schema=to_message(topic)))

    check(to_message(delay_schema(topic)))  # names need not be different
    for other in (
        pa.schema(
            [*topic, ("@due_us", pa.float64()), ("@origin", pa.int64()), ("@repeat", pa.utf8())]
        ),
        pa.schema([("n", pa.float64()), *delay_schema(topic)][:1] + list(delay_schema(topic))[1:]),
        topic,
    ):
        with pytest.raises(UnusableSchemaError):
            check(to_message(other))
    with pytest.raises(UnusableSchemaError):
        check(b"nonsense")


# ---- recurrences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", "null", '"x"', "{}", '{"every_us": 10000, "zone": []}',
        '{"every_us": true}', '{"every_us": 1e9}', '{"every_us": 9}',
        '{"every_us": 99999999999999999999}', '{"every_us": "10000"}', '{"every_us": -10000}',
        '{"expression": 5}', '{"expression": ["* * * * *"]}',
        '{"expression": "* * * * *", "zone": "../../etc/passwd"}',
        '{"expression": "* * * * *", "zone": ""}', '{"expression": "* * * * *", "zone": 5}',
        '{"expression": "* * * * *", "missed": []}', '{"expression": "* * * * *", "missed": {}}',
        '{"expression": "\\u00b2 * * * *"}',
        '{"expression": "* * * * *", "other": 1}', '{"expression": "' + "0," * 200 + '0 * * * *"}',
        "[" * 900 + "]" * 900, " " * 2_000,
        '{"expression": "* * * * *", "zone": "\\u0000"}', '{"expression": "0 0 30 2 *"}',
        '{"expression": "' + "a" * 900 + '"}',
    ],
)  # fmt: skip
def test_what_is_no_recurrence_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(RecurrenceError):
        Recurrence.from_json(text)


@given(st.text(st.sampled_from("*/,-#LW0123456789 ²"), max_size=40), I64)
def test_any_expression_is_one_or_is_refused(text: str, due_us: int) -> None:
    try:
        found = Recurrence.cron(text)
    except RecurrenceError:
        return
    following = found.after(due_us)
    assert following is None or following > due_us


@pytest.mark.parametrize("missed", ["all", "last", "none"])
@pytest.mark.parametrize("how", [{"every_us": 10_000}, {"expression": "* * * * * *"}])
def test_a_recurrence_since_ever_is_caught_up_in_bounded_steps_and_others_are_not_kept_from_coming(
    how: dict[str, Any], missed: str
) -> None:
    world = DelayWorld(3)
    text = Recurrence(**how, missed=missed).to_json()
    assert (
        put(world, encoded(arrow_batch.with_delays(foreign(1), SCHEMA, [-(1 << 62)], [text]))) == 1
    )
    world.schedule([0, 20 * MS])
    world.pass_time(SECOND)
    largest = 0
    names: set[str] = set()
    for number in range(1_500):
        world.step()
        largest = max(largest, len(world.partition._due.ready))
        if number % 25 == 0 and {"r0", "r1"} <= (names := {name for name, _ in world.delivered()}):
            break
    assert largest <= 1_100, "no more than so many occurrences are handed out at a time"
    if "every_us" in how or missed != "all":  # a day of seconds takes longer
        assert {"r0", "r1"} <= names, "others came"


def test_more_recurring_rows_than_are_allowed_are_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurring_rows, "ROWS_MAX", 5)
    world = DelayWorld(3)
    text = Recurrence(every_us=86_400_000_000).to_json()
    dues = [world.wall_us + DAY] * 9
    assert put(world, encoded(arrow_batch.with_delays(foreign(9), SCHEMA, dues, [text] * 9))) == 9
    world.schedule([SECOND])
    for _ in range(50):
        world.pass_time(SECOND)
        world.step()
    described = world.partition.describe()
    assert (described["recurring"], described["lost_rows"]) == (5, 4)
    assert "r0" in {name for name, _ in world.delivered()}
