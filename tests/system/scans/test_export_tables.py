"""Exports to Delta and Iceberg tables: rows and offsets in one commit of the table.

With the packages where they are installed (`make test-all` does it), else with stand-ins that have
the same calls (`tests/kit/lakes/`): those prove what is called when, not what the packages make of
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from typing import Any

import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidRequestError, NotSupportedError, StorageError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.export.export import Export
from tests.kit.lakes import numbered_commits
from tests.kit.lakes.delta_stand_in import deltalake
from tests.kit.lakes.iceberg_stand_in import pyiceberg

IS_INSTALLED = {
    "delta": importlib.util.find_spec("deltalake") is not None,
    "iceberg": importlib.util.find_spec("pyiceberg") is not None,
}


@pytest.fixture(params=["delta", "iceberg"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if not IS_INSTALLED[request.param]:
        modules = deltalake() if request.param == "delta" else pyiceberg()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    return str(request.param)


def end_at_the_commit(form: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit is the last thing that the export does: before it is made, or behind it."""
    if not IS_INSTALLED[form]:
        numbered_commits.fail_at = where
        return
    holder, name = (
        (sys.modules["deltalake"], "write_deltalake")
        if form == "delta"
        else (sql_catalog(), "commit_table")
    )
    real = getattr(holder, name)

    def end(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(holder, name, real)
        if where == "behind":
            real(*arguments, **named)
        raise numbered_commits.Interrupted

    monkeypatch.setattr(holder, name, end)


def sql_catalog() -> Any:
    return importlib.import_module("pyiceberg.catalog.sql").SqlCatalog


@pytest.fixture
def orders(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    send(appliance, topic, range(40))
    return topic


def send(appliance: EmbeddedAppliance, topic: str, numbers: range) -> None:
    with Producer(appliance.address) as producer:
        for n in numbers:
            producer.send(
                topic, b"v%d" % n, b"k%d" % (n % 3), partition=n % 2, timestamp=n * 86_400_000
            )


def run(
    appliance: EmbeddedAppliance, topic: str, directory: pathlib.Path, form: str, **settings: Any
) -> int:
    return sum(
        commit.rows
        for commit in Export(
            topic, str(directory), appliance.address, format=form, **settings
        ).run()
    )


def table(directory: pathlib.Path, form: str) -> pa.Table:
    if form == "delta":
        return sys.modules["deltalake"].DeltaTable(str(directory)).to_pyarrow_table()
    catalog = sql_catalog()(
        "tailrace", uri=f"sqlite:///{directory}/catalog.db", warehouse=f"file://{directory}"
    )
    return catalog.load_table("tailrace.export").scan().to_arrow()


def values(directory: pathlib.Path, form: str) -> list[bytes]:
    return sorted(table(directory, form).column("value").to_pylist())


def sent(count: int) -> list[bytes]:
    return sorted(b"v%d" % n for n in range(count))


def test_every_record_is_in_the_table_once_and_a_second_run_brings_what_came_since(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, orders: str, form: str
) -> None:
    assert run(appliance, orders, tmp_path, form, rows_max=15, partition_by="key") == 40
    assert run(appliance, orders, tmp_path, form, partition_by="key") == 0
    send(appliance, orders, range(40, 50))
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_partitions({orders: 3})
        producer.send(orders, b"v50", partition=2).result(60)
    assert run(appliance, orders, tmp_path, form, partition_by="key") == 11
    assert values(tmp_path, form) == sent(51)
    assert set(table(tmp_path, form).column("by_key").to_pylist()) == {"k0", "k1", "k2", None}


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_end_at_the_commit_leaves_all_of_it_or_nothing(
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    orders: str,
    form: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(appliance, orders, tmp_path, form, rows_max=40)
    send(appliance, orders, range(40, 60))
    end_at_the_commit(form, where, monkeypatch)
    with pytest.raises(numbered_commits.Interrupted):
        run(appliance, orders, tmp_path, form, rows_max=10)
    assert len(values(tmp_path, form)) == (40 if where == "before" else 50)
    run(appliance, orders, tmp_path, form)
    assert values(tmp_path, form) == sent(60)


def test_the_first_commit_makes_the_table_so_that_nothing_is_there_before(
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    orders: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end_at_the_commit(form, "before", monkeypatch)
    with pytest.raises(numbered_commits.Interrupted):
        run(appliance, orders, tmp_path, form)
    assert run(appliance, orders, tmp_path, form, partition_by="date") == 40
    assert values(tmp_path, form) == sent(40)


def test_tables_of_others_and_of_other_topics_are_refused(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, orders: str, form: str
) -> None:
    run(appliance, orders, tmp_path / "a", form)
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(f"{orders}-b")])
    with pytest.raises(InvalidRequestError, match=f"has an export of topic '{orders}'"):
        run(appliance, f"{orders}-b", tmp_path / "a", form)
    with pytest.raises(InvalidRequestError, match="is partitioned by nothing"):
        run(appliance, orders, tmp_path / "a", form, partition_by="key")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/other.csv").write_text("a\n")
    with pytest.raises(InvalidRequestError, match="export to an empty directory"):
        run(appliance, orders, tmp_path / "b", form)
    if form == "delta":
        write = sys.modules["deltalake"].write_deltalake
        write(str(tmp_path / "c"), pa.table({"value": [b"x"]}), mode="append")
        with pytest.raises(InvalidRequestError, match="is a Delta table but not an export"):
            run(appliance, orders, tmp_path / "c", form)


@pytest.mark.parametrize(
    "form", ["delta"], indirect=True
)  # how far it is, is in Delta's transaction identifiers
def test_commits_of_others_to_a_delta_table_do_not_hide_how_far_it_is(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, orders: str, form: str
) -> None:
    run(appliance, orders, tmp_path, form)
    sys.modules["deltalake"].write_deltalake(
        str(tmp_path), table(tmp_path, form).slice(0, 0), mode="append"
    )
    assert run(appliance, orders, tmp_path, form) == 0


def test_what_the_package_refuses_is_said_with_the_directory(
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    orders: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise ValueError("no such type")

    if not IS_INSTALLED[form]:
        monkeypatch.setattr(numbered_commits, "add", refuse)
    elif form == "delta":
        monkeypatch.setattr(sys.modules["deltalake"], "write_deltalake", refuse)
    else:
        monkeypatch.setattr(sql_catalog(), "commit_table", refuse)
    with pytest.raises(
        StorageError, match=f"{tmp_path}: (deltalake|pyiceberg) rejected the commit: no such type"
    ):
        run(appliance, orders, tmp_path, form)


def test_a_column_that_the_format_has_no_type_for_is_named_and_no_disk_is_suspected(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str, form: str
) -> None:
    rows = pa.table({"id": pa.array([1]), "took": pa.array([5], pa.duration("us"))})
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, 1, schema=rows.schema)])
        producer.send_arrow(topic, rows).result(60)
    said = r"has no type for column 'took', which is duration\[us\]; export the other columns \(--columns\), or to format parquet"  # noqa: E501
    with pytest.raises(NotSupportedError, match=said) as error:
        run(appliance, topic, tmp_path, form)
    assert "\n" not in str(error.value)
    assert run(appliance, topic, tmp_path, form, columns=("id", "_offset")) == 1


FIRST = pa.schema([("id", pa.int32()), ("name", pa.utf8()), ("old", pa.utf8())])
SECOND = pa.schema(
    [
        pa.field("more", pa.float32()),
        pa.field("title", pa.utf8(), metadata={"tailrace.alias": "name"}),
        pa.field("id", pa.int32()),
    ]
)


def altered(appliance: EmbeddedAppliance, topic: str, directory: pathlib.Path, form: str) -> None:
    """A row of the first version is in the table, one of the second in the topic."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        configs = {"schema.compatibility": "none"}
        admin.create_topics([NewTopic(topic, 1, configs, schema=FIRST)])
        producer.send(topic, {"id": 1, "name": "a", "old": "x"}).result(60)
        assert run(appliance, topic, directory, form) == 1
        admin.alter_topics(schema={topic: SECOND})
        producer.send(topic, {"id": 2, "title": "b", "more": 0.5}).result(60)


def retyped(
    appliance: EmbeddedAppliance, topic: str, row: dict[str, Any], **types: pa.DataType
) -> None:
    """Columns of the second version get other types, and the topic a row of them."""
    schema = pa.schema([(field.name, types.get(field.name, field.type)) for field in SECOND])
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.alter_topics(schema={topic: schema})
        producer.send(topic, {"id": 3, "title": "c", "more": 1.5, **row}).result(60)


def test_a_table_gets_the_columns_that_its_topic_gets(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str, form: str
) -> None:
    altered(appliance, topic, tmp_path, form)
    assert run(appliance, topic, tmp_path, form) == 1
    retyped(appliance, topic, {}, id=pa.int64(), more=pa.float64())
    if form == "delta" or IS_INSTALLED[form]:
        assert run(appliance, topic, tmp_path, form) == 1, "its values fit"
    rows = sorted(table(tmp_path, form).to_pylist(), key=lambda row: row["id"])
    columns = ("id", "name", "old", "title", "more")
    assert [tuple(row[name] for name in columns) for row in rows][:3] == [
        (1, "a", "x", None, None), (2, None, None, "b", 0.5), (3, None, None, "c", 1.5),
    ][: len(rows)]  # fmt: skip


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("id", pa.int64(), 1 << 40),
        ("id", pa.float64(), 1.5),
        ("id", pa.utf8(), "7"),
        ("more", pa.float64(), 0.1),
    ],
)
def test_no_value_is_rounded_for_a_table_whose_column_has_another_type(
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    topic: str,
    form: str,
    column: str,
    kind: pa.DataType,
    value: object,
) -> None:
    if form == "iceberg" and not IS_INSTALLED[form]:
        pytest.skip("the stand-in has no types")
    altered(appliance, topic, tmp_path / "table", form)
    assert run(appliance, topic, tmp_path / "table", form) == 1
    retyped(appliance, topic, {column: value}, **{column: kind})
    is_widened = form == "iceberg" and (column, kind) != ("id", pa.float64()) and value != "7"
    if is_widened:
        assert run(appliance, topic, tmp_path / "table", form) == 1
    else:
        with pytest.raises(NotSupportedError, match=f"column '{column}' is .* in the table"):
            run(appliance, topic, tmp_path / "table", form)
        assert table(tmp_path / "table", form).num_rows == 2, "as it was"
        assert run(appliance, topic, tmp_path / "other", form) == 3
    found = table(tmp_path / ("table" if is_widened else "other"), form).column(column)
    assert value in found.to_pylist()
