"""Rules of schema evolution: the changes that each mode allows, and the origin of columns."""

from __future__ import annotations

import datetime
import pathlib
import re
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.errors import InvalidSchemaError, UnsupportedBatchError
from tailrace.format.evolution.schema_history import FILLING_ROWS, SchemaHistory
from tailrace.format.evolution.schema_rules import MODES, RULES, Step, check, fields_of, sources
from tailrace.format.schema import canonical, to_message

TIME = pa.timestamp("us", "UTC")


def message(*fields: pa.Field | tuple[str, pa.DataType]) -> bytes:
    return to_message(
        canonical(pa.schema([f if isinstance(f, pa.Field) else pa.field(*f) for f in fields]))
    )


def field(name: str, kind: pa.DataType, **metadata: str) -> pa.Field:
    return pa.field(
        name, kind, metadata={f"tailrace.{key}": value for key, value in metadata.items()}
    )


A, B = ("a", pa.int32()), ("b", pa.utf8())
CHANGES = {
    Step.ADD: (message(A), message(A, B)),
    Step.DROP: (message(A, B), message(A)),
    Step.REORDER: (message(A, B), message(B, A)),
    Step.RENAME: (message(A, B), message(A, field("c", pa.utf8(), alias="b"))),
    Step.WIDEN: (message(A), message(("a", pa.int64()))),
    Step.RETYPE: (message(A), message(("a", pa.utf8()))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", Step)
def test_each_mode_allows_the_changes_of_its_row_and_names_the_column_of_others(
    step: Step, mode: str
) -> None:
    old, new = CHANGES[step]
    if mode in RULES[step]:
        assert [found for found, _, _ in check(old, new, mode)] == [step]
        return
    with pytest.raises(InvalidSchemaError, match=r"column '[ac]'"):
        check(old, new, mode)


def test_the_table_in_the_docs_is_that_of_the_rules() -> None:
    page = pathlib.Path("docs/schemas.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: tuple(mode for mode, cell in zip(MODES, cells[1:], strict=False) if cell == "yes")
        for line in page.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) >= 5
    }
    assert {step.value: rows.get(step.value) for step in Step} == {
        step.value: modes for step, modes in RULES.items()
    }


@pytest.mark.parametrize(
    ("old", "new", "is_wider"),
    [
        (pa.int8(), pa.int64(), True),
        (pa.uint8(), pa.int16(), True),
        (pa.uint8(), pa.uint32(), True),
        (pa.int8(), pa.uint16(), False),
        (pa.uint64(), pa.int64(), False),
        (pa.int64(), pa.int32(), False),
        (pa.float32(), pa.float64(), True),
        (pa.float64(), pa.float32(), False),
        (pa.int32(), pa.float64(), False),
        (pa.date32(), TIME, True),
        (pa.date64(), TIME, True),
        (TIME, pa.date32(), False),
        (pa.utf8(), pa.binary(), False),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), False),
        (pa.struct([A]), pa.struct([A, B]), False),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), False),
    ],
    ids=str,
)
def test_a_type_widens_only_where_every_value_stays(
    old: pa.DataType, new: pa.DataType, is_wider: bool
) -> None:
    if is_wider:
        ((step, _, _),) = check(message(("x", old)), message(("x", new)), "backward")
        assert step is Step.WIDEN
        return
    with pytest.raises(InvalidSchemaError, match="column 'x' changes its type"):
        check(message(("x", old)), message(("x", new)), "backward")


def test_large_types_are_the_plain_ones() -> None:
    assert message(("x", pa.large_utf8())) == message(("x", pa.utf8()))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ((field("c", pa.int32(), alias="a"), A, B), "'c' has the alias 'a', and the schema still"),
        (
            (field("c", pa.int32(), alias="a"), field("d", pa.int32(), alias="a"), B),
            "'c' and 'd' both have the alias 'a'",
        ),
        (
            (A, field("c", pa.utf8(), alias="d")),
            "has the alias 'd', and the topic has no column 'd'; it has a, b",
        ),
        ((A, B, field("c", pa.utf8(), alias="d")), "the topic has no column 'd'; it has a, b"),
        ((field("a", pa.int32(), alias="b"),), "'a' has the alias 'b', and exists already"),
        ((A, B, field("c", pa.int8(), default="300")), "'c' has the default '300'"),
        ((A, B, field("c", pa.int8(), default="{")), "'c' has the default '{'"),
        ((A, B, field("c", pa.int8(), default="true")), "'c' has the default 'true'"),
        ((A, B, field("c", pa.date32(), default="1")), "can have a default"),
        ((A, B, field("c", pa.utf8(), default=f'"{"x" * 5000}"')), "of more than 4096 bytes"),
        ((A, B, ("timestamp", TIME)), "'timestamp' has the time of each row"),
    ],
)
def test_an_alias_or_a_default_that_says_nothing_is_refused(
    new: tuple[pa.Field, ...], said: str
) -> None:
    with pytest.raises(InvalidSchemaError, match=re.escape(said)):
        check(message(A, B), message(*new), "none")


def test_an_alias_of_an_earlier_version_stays_in_later_ones() -> None:
    renamed = message(A, field("c", pa.utf8(), alias="b"))
    check(message(A, B), renamed, "backward")
    later = message(A, field("c", pa.utf8(), alias="b"), field("d", pa.int8()))
    assert [step for step, _, _ in check(renamed, later, "backward")] == [Step.ADD]


def test_the_time_column_stays() -> None:
    with_time = message(A, ("timestamp", TIME))
    with pytest.raises(InvalidSchemaError, match="neither dropped nor renamed"):
        check(with_time, message(A), "none")
    with pytest.raises(InvalidSchemaError, match="neither dropped nor renamed"):
        check(with_time, message(A, field("at", TIME, alias="timestamp")), "none")
    check(with_time, message(("timestamp", TIME), A, B), "backward")


def test_rows_of_each_version_become_rows_of_the_newest() -> None:
    versions = [
        (3, message(A, ("day", pa.date32()), ("gone", pa.utf8()))),
        (4, message(("day", pa.date32()), A, field("price", pa.int8(), default="7"))),
        (9, message(field("id", pa.int64(), alias="a"), ("day", TIME), ("price", pa.int32()))),
        (
            12,
            message(("price", pa.int64()), ("id", pa.int64()), ("day", TIME), ("gone", pa.utf8())),
        ),
    ]
    for (_, old), (_, new) in pairwise(versions):
        check(old, new, "backward")
    history = SchemaHistory(versions)
    day = datetime.date(2026, 11, 26)
    at = datetime.datetime(2026, 11, 26, tzinfo=datetime.UTC)
    rows = pa.RecordBatch.from_pylist(
        [{"a": 1, "day": day, "gone": "x"}, {"a": None, "day": None, "gone": "y"}],
        schema=history.schema(3),
    )
    converted = history.convert(rows, 3)
    converted.validate(full=True)
    assert converted.schema == history.target
    assert converted.to_pylist() == [
        {"price": 7, "id": 1, "day": at, "gone": None},  # a name that came back is a new column
        {"price": 7, "id": None, "day": None, "gone": None},
    ]
    late = pa.RecordBatch.from_pylist([{"id": 5, "day": at, "price": 2}], schema=history.schema(9))
    assert history.convert(late, 9).to_pylist() == [{"price": 2, "id": 5, "day": at, "gone": None}]
    with pytest.raises(UnsupportedBatchError, match="has schema 5, which is none"):
        history.convert(rows, 5)


def test_a_date_that_no_timestamp_has_is_an_error_that_names_the_column() -> None:
    history = SchemaHistory([(1, message(("d", pa.date32()))), (2, message(("d", TIME)))])
    rows = pa.RecordBatch.from_arrays(
        [pa.array([2**31 - 1], pa.int32()).cast(pa.date32())], schema=history.schema(1)
    )
    with pytest.raises(UnsupportedBatchError, match="column 'd'"):
        history.convert(rows, 1)


def test_a_retyped_column_is_a_new_one_where_the_mode_is_none() -> None:
    versions = [(1, message(A)), (2, message(("a", pa.utf8())))]
    check(versions[0][1], versions[1][1], "none")
    history = SchemaHistory(versions)
    rows = pa.RecordBatch.from_pylist([{"a": 1}], schema=history.schema(1))
    assert history.convert(rows, 1).to_pylist() == [{"a": None}]


KINDS = (pa.int8(), pa.int16(), pa.int64(), pa.uint8(), pa.float32(), pa.float64(), pa.utf8(),
         pa.bool_(), pa.date32(), TIME, pa.binary(), pa.list_(pa.int32()),
         pa.struct([("x", pa.int8()), ("y", pa.utf8())]))  # fmt: skip


@st.composite
def schemas(draw: st.DrawFn) -> bytes:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    fields = []
    for name in names:
        kind = draw(st.sampled_from(KINDS))
        alias = draw(st.none() | st.sampled_from("abcdef"))
        fields.append(field(name, kind, **({} if alias is None else {"alias": alias})))
    return message(*fields)


@given(st.lists(schemas(), min_size=2, max_size=6))
def test_accepted_versions_convert_with_all_values_of_continued_columns(
    candidates: list[bytes],
) -> None:
    accepted = [candidates[0]]
    for candidate in candidates[1:]:
        try:
            check(accepted[-1], candidate, "none")
        except InvalidSchemaError:
            continue
        accepted.append(candidate)
    history = SchemaHistory(list(enumerate(accepted)))
    for number in history.ids:
        found = sources(history.messages, number)
        used = [source.column for source in found if source.column >= 0]
        assert len(used) == len(set(used)), "one column has two continuations"
        rows = pa.RecordBatch.from_arrays(
            [pa.nulls(3, each.type) for each in history.schema(number)],
            schema=history.schema(number),
        )
        converted = history.convert(rows, number)
        converted.validate(full=True)
        assert converted.schema == history.target
        assert converted.num_rows == 3


@given(schemas())
def test_a_schema_is_compatible_with_itself(same: bytes) -> None:
    assert check(same, same, "full") == []
    assert [field.name for field in fields_of(same)]


def test_rows_of_a_newer_version_become_rows_of_an_older_one_or_say_what_does_not_fit() -> None:
    first = message(("a", pa.int32()), ("b", pa.utf8()), ("gone", pa.int8()), ("f", pa.float32()))
    second = message(
        ("f", pa.float64()),
        ("a", pa.int64()),
        field("c", pa.utf8(), alias="b"),
        ("new", pa.bool_()),
    )
    history = SchemaHistory([(3, first), (5, second)], 3)
    assert (history.target_id, history.target.names) == (3, ["a", "b", "gone", "f"])

    def converted(a: int, f: float | None) -> list[dict[str, object]]:
        rows = pa.RecordBatch.from_pylist(
            [{"a": a, "f": f, "c": "x", "new": True}], schema=history.schema(5)
        )
        return history.convert(rows, 5).to_pylist()  # type: ignore[no-any-return]

    assert converted(7, 0.5) == [{"a": 7, "b": "x", "gone": None, "f": 0.5}]
    assert converted(7, None)[0]["f"] is None
    assert str(converted(7, float("nan"))[0]["f"]) == "nan"
    with pytest.raises(UnsupportedBatchError, match="column 'a' has a value of type int64"):
        converted(1 << 40, 0.5)
    with pytest.raises(UnsupportedBatchError, match="a float would be rounded"):
        converted(7, 0.1)
    with pytest.raises(UnsupportedBatchError, match="none of the topic's versions"):
        SchemaHistory([(3, first)], 4)


def test_a_row_is_one_of_the_newest_version_that_has_its_columns() -> None:
    history = SchemaHistory(
        [
            (1, message(A, B)),
            (2, message(A, field("c", pa.utf8(), alias="b"), field("d", pa.int8(), default="4"))),
            (3, message(field("c", pa.utf8()), ("d", pa.int16()))),
        ]
    )
    assert history.row_of({"a": 1, "b": "x"}) == {"c": "x", "d": 4}
    assert history.row_of({"b": "x"}) == {"c": "x", "d": 4}
    assert history.row_of({"a": 1, "d": 5}) == {"d": 5}
    assert history.row_of({"a": 1, "e": 5}) is None
    assert history.version_with(["b", "a"]) == 1
    assert history.version_with(["a"]) is None
    assert (history.renamed("b", 1), history.renamed("a", 1)) == ("c", None)


def test_a_pending_value_of_a_type_that_became_another_one_is_not_made_null() -> None:
    history = SchemaHistory([(1, message(A, B)), (2, message(("a", pa.utf8()), B))])
    lost = pa.RecordBatch.from_pylist([{"a": 1, "b": "x"}], schema=history.schema(1))
    with pytest.raises(
        UnsupportedBatchError, match="column 'a' is int32, and the topic has string"
    ):
        history.check_kept(lost, 1)
    empty = pa.RecordBatch.from_pylist([{"a": None, "b": "x"}], schema=history.schema(1))
    history.check_kept(empty, 1)
    assert history.row_of({"a": 1, "b": "x"}) == {"a": 1, "b": "x"}


def test_the_key_of_a_compacted_topic_stays_as_it_is() -> None:
    for changed in (
        message(A),
        message(A, field("c", pa.utf8(), alias="b")),
        message(A, ("b", pa.binary())),
    ):
        with pytest.raises(InvalidSchemaError, match="'b' has the keys of the topic"):
            check(message(A, B), changed, "none", "b")
    check(message(A, B), message(B), "backward", "b")


def test_columns_of_one_value_are_shared_and_have_their_own_value() -> None:
    """Batches get parts of one column; 0.0 and -0.0 are two values."""
    added = [
        pa.field("none", pa.float64()),
        *(
            pa.field(name, kind, metadata={"tailrace.default": default})
            for name, kind, default in (
                ("zero", pa.float64(), "0.0"), ("minus", pa.float64(), "-0.0"),
                ("no", pa.bool_(), "false"), ("text", pa.utf8(), '""'),
                ("long", pa.utf8(), f'"{"x" * 100}"'),
            )
        ),
    ]  # fmt: skip
    first = pa.schema([("id", pa.int64())])
    history = SchemaHistory([(1, to_message(first)), (2, to_message(pa.schema([*first, *added])))])
    for count in (2, 5, 3, 0, FILLING_ROWS + 1):
        rows = history.convert(pa.RecordBatch.from_pydict({"id": range(count)}, schema=first), 1)
        rows.validate(full=True)
        made = rows.slice(0, 3).to_pylist()
        assert [repr(row["minus"]) for row in made] == ["-0.0"] * min(count, 3)
        assert [repr(row["zero"]) for row in made] == ["0.0"] * min(count, 3)
        assert all(
            (row["none"], row["no"], row["text"], row["long"]) == (None, False, "", "x" * 100)
            for row in made
        )
