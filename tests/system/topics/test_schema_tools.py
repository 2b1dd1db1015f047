"""The tools around a schema that changed: the command line, SQL, exports, stopped directories,
restarts.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.export.export import Export
from tests.kit.cli import run

FIRST = pa.schema([("id", pa.int32()), ("name", pa.utf8())])
FIRST_ROW, NEW_ROW = {"id": 1, "name": "a"}, {"id": 1 << 40, "title": "b", "price": 2.5}
AS_NEWEST = {"id": 1, "title": "a", "price": 1.5}


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    """A file with the columns of the second version."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({name: [value] for name, value in NEW_ROW.items()}), path)
    return str(path)


def altered(running: EmbeddedAppliance, name: str, file: str, partitions: int = 1) -> None:
    with Admin(running.address) as admin, Producer(running.address) as producer:
        admin.create_topics(NewTopic(name, partitions, schema=FIRST))
        producer.send(name, FIRST_ROW).result(60)
        run(running, "topic", "alter", name, "--schema", file, "--rename", "name=title",
            "--default", "price=1.5")  # fmt: skip
        producer.send(name, NEW_ROW).result(60)


def shown(running: EmbeddedAppliance, *arguments: str) -> Any:
    return json.loads(run(running, *arguments, "--json").stdout)


def test_a_topic_is_altered_by_a_file_and_its_versions_are_shown(
    running: EmbeddedAppliance, file: str
) -> None:
    altered(running, "shown", file)
    listed = shown(running, "topic", "schema", "shown")["versions"]
    first, second = (version["version"] for version in listed)
    assert [version["columns"] for version in listed] == [
        [{"name": "id", "type": "int32"}, {"name": "name", "type": "string"}],
        [
            {"name": "id", "type": "int64"},
            {"name": "title", "type": "string", "alias": "name"},
            {"name": "price", "type": "double", "default": "1.5"},
        ],
    ]
    assert shown(running, "topic", "schema", "shown", "--version", str(first)) == listed[0]
    assert shown(running, "topic", "schema", "shown", "--diff") == {
        "topic": "shown", "version": second, "before": first,
        "changes": [
            {"change": "widen a type", "column": "id", "detail": "from int32 to int64"},
            {"change": "rename a column", "column": "title", "detail": "from name"},
            {"change": "add a column", "column": "price", "detail": "float64"},
        ],
    }  # fmt: skip
    text = run(running, "topic", "schema", "shown").stdout.decode()
    assert re.search(rf"{second} .*@.* 3", text)
    assert "widen a type" in run(running, "topic", "schema", "shown", "--diff").stdout.decode()
    assert "renamed from" in run(
        running, "topic", "schema", "shown", "--version", str(second)
    ).stdout.decode()  # fmt: skip
    refused = run(running, "topic", "schema", "shown", "--version", "999", status=2)
    assert b"has no version 999 of its schema; it has" in refused.stderr
    first_one = run(running, "topic", "schema", "shown", "--version", str(first), "--diff")
    assert b"is the first one" in first_one.stderr


def test_a_file_that_does_not_fit_is_refused_with_a_sentence(
    running: EmbeddedAppliance, file: str, tmp_path: pathlib.Path
) -> None:
    altered(running, "refused", file)
    narrow = tmp_path / "narrow.jsonl"
    narrow.write_text('{"id": true}\n')
    done = run(running, "topic", "alter", "refused", "--schema", str(narrow), status=1)
    assert b"column 'id' changes its type from int64 to bool" in done.stderr
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet")
    assert b"cannot read" in run(
        running, "topic", "alter", "refused", "--schema", str(broken), status=1
    ).stderr  # fmt: skip
    done = run(running, "topic", "alter", "refused", "--rename", "a=b", status=2)
    assert b"need --schema" in done.stderr
    done = run(
        running, "topic", "alter", "refused", "--schema", file, "--rename", "a=b", status=2
    )  # fmt: skip
    assert b"the file has no column 'b'" in done.stderr
    misspelt = tmp_path / "misspelt.jsonl"
    misspelt.write_text('{"id": 1, "headline": "x", "price": 1.0}\n')
    done = run(
        running, "topic", "alter", "refused", "--schema", str(misspelt), "--rename",
        "titel=headline", status=1,
    )  # fmt: skip
    assert b"the topic has no column 'titel'; it has id, title, price" in done.stderr
    assert len(shown(running, "topic", "schema", "refused")["versions"]) == 2
    run(running, "topic", "create", "plain")
    assert b"no schema of its own" in run(running, "topic", "schema", "plain", status=2).stderr


def test_produce_adds_the_columns_that_its_file_has(
    running: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    with Admin(running.address) as admin:
        admin.create_topics(NewTopic("evolved", schema=FIRST))
    path = tmp_path / "more.jsonl"
    path.write_text('{"id": 7, "more": "m"}\n')
    done = run(running, "produce", "evolved", "--from", str(path), status=1)
    assert b"not in the topic: more" in done.stderr
    run(running, "produce", "evolved", "--from", str(path), "--evolve")
    run(running, "produce", "evolved", "--from", str(path), "--evolve")  # adds nothing
    assert len(shown(running, "topic", "schema", "evolved")["versions"]) == 2
    rows = tailrace.scan("evolved", running.address).read_all().to_pylist()
    assert rows == [{"id": 7, "name": None, "more": "m"}] * 2
    renamed = pa.schema([pa.field("extra", pa.int64(), metadata={"tailrace.alias": "elsewhere"})])
    other = tmp_path / "renamed.parquet"
    parquet.write_table(pa.table({"extra": [5]}, schema=renamed), other)
    run(running, "produce", "evolved", "--from", str(other), "--evolve")
    (newest,) = shown(running, "topic", "schema", "evolved")["versions"][2:]
    assert newest["columns"][-1] == {"name": "extra", "type": "int64"}
    assert b"--evolve is for rows" in run(
        running, "produce", "evolved", "--evolve", stdin=b"{}", status=2
    ).stderr  # fmt: skip


def test_lines_sql_and_consumed_files_have_the_newest_columns(
    running: EmbeddedAppliance, file: str, tmp_path: pathlib.Path
) -> None:
    altered(running, "lines", file)
    lines = run(running, "consume", "lines", "--from-beginning").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [AS_NEWEST, NEW_ROW]
    stream = run(running, "consume", "lines", "--from-beginning", "--format", "arrow").stdout
    assert pa.ipc.open_stream(stream).read_all().to_pylist() == [AS_NEWEST, NEW_ROW]
    table = run(running, "sql", "select id, title, price from lines order by id", "--json")
    assert json.loads(table.stdout) == [AS_NEWEST, NEW_ROW]
    run(running, "produce", "lines", stdin=b'{"id": 3, "name": "old line"}\n')
    last = tailrace.scan("lines", running.address, start=2).read_all().to_pylist()
    assert last == [{"id": 3, "title": "old line", "price": 1.5}]


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg"])
def test_an_export_goes_on_with_the_newest_columns(
    running: EmbeddedAppliance, tmp_path: pathlib.Path, form: str
) -> None:
    for package in {"delta": ["deltalake"], "iceberg": ["pyiceberg"]}.get(form, []):
        pytest.importorskip(package)
    topic, target = f"export-{form}", str(tmp_path / form)
    with Admin(running.address) as admin, Producer(running.address) as producer:
        admin.create_topics(NewTopic(topic, schema=FIRST))
        producer.send(topic, FIRST_ROW).result(60)
        assert sum(c.rows for c in Export(topic, target, running.address, format=form).run()) == 1
        second = FIRST.append(pa.field("more", pa.float64()))
        admin.alter_topics(schema={topic: second})
        producer.send(topic, {"id": 2, "name": "b", "more": 0.5}).result(60)
        producer.send(topic, FIRST_ROW).result(60)
        assert sum(c.rows for c in Export(topic, target, running.address, format=form).run()) == 2
    if form == "parquet":
        files = sorted(pathlib.Path(target).rglob("*.parquet"))
        assert ["more" in parquet.read_schema(each).names for each in files] == [False, True]


def test_a_restart_and_a_rebuilt_catalog_have_all_versions_and_a_stopped_directory_is_read(
    tmp_path: pathlib.Path, file: str
) -> None:
    data = tmp_path / "data"
    with tailrace.embedded(data_dir=str(data), auto_create_topics=False) as appliance:
        altered(appliance, "kept", file, 2)
        with Admin(appliance.address) as admin:
            versions = admin.describe_schemas("kept")
    rows = tailrace.scan(str(data / "kept")).read_all().to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [AS_NEWEST, NEW_ROW]
    with tailrace.embedded(data_dir=str(data), auto_create_topics=False) as appliance:
        with Admin(appliance.address) as admin:
            again = admin.describe_schemas("kept")
        assert [(v.schema_id, v.author) for v in again] == [
            (v.schema_id, v.author) for v in versions
        ]
    for name in ("coordinator.db", "coordinator.db-wal", "coordinator.db-shm"):
        (data / name).unlink(missing_ok=True)
    with tailrace.embedded(data_dir=str(data), auto_create_topics=False) as appliance:
        with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
            rebuilt = admin.describe_schemas("kept")
            assert [(v.schema_id, v.schema_message) for v in rebuilt] == [
                (v.schema_id, v.schema_message) for v in versions
            ]
            assert (rebuilt[1].author, rebuilt[1].created_us) == ("", 0)
            producer.send("kept", FIRST_ROW).result(60)
            newest = rebuilt[1].schema.append(pa.field("more", pa.int8()))
            admin.alter_topics(schema={"kept": newest})
            assert admin.describe_schemas("kept")[-1].schema_id > versions[-1].schema_id
        found = tailrace.scan("kept", appliance.address, columns=["id"]).read_all()
        assert sorted(found.column("id").to_pylist()) == [1, 1, 1 << 40]
        run(appliance, "log", "verify", str(data))
