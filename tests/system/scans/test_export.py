"""`tailrace.export`: every record once in the lake, whatever ends an export, and a sentence for
what cannot be exported.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import pathlib
import subprocess
import sys
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSettingError,
    NotSupportedError,
    StorageError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.export.export import Export
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.lakes.exports import DAY_MS, HOUR_MS, entries, rows, run, send, sent, values, visible
from tests.kit.lakes.killed_exports import killed_exports

ROWS = 600
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    """orders: 2 partitions, small segments, an hour between two records."""
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("orders", 2, {"segment.bytes": 64 << 10}), NewTopic("empty")])
    send(appliance, "orders", range(ROWS))
    return appliance


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("by", [None, "date", "hour", "key", "partition"])
def test_every_record_is_there_once_with_what_it_was_sent_with(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, form: str, by: str | None
) -> None:
    commits = run(filled, "orders", tmp_path, format=form, partition_by=by, rows_max=250)
    assert [commit.rows for commit in commits] == [250, 250, 100]
    made = {None: None, "date": "date", "hour": "hour"}.get(by, f"by_{by}")
    table = rows(tmp_path, form).sort_by([("partition", "ascending"), ("offset", "ascending")])
    found = table.drop_columns([made] if made else [])
    scanned = tailrace.scan("orders", filled.address).read_all()
    assert found.equals(scanned.cast(found.schema))
    assert visible(tmp_path, form) == {name for commit in commits for name in commit.files}
    assert sum(commit.bytes for commit in commits) == sum(
        (tmp_path / name).stat().st_size for name in visible(tmp_path, form)
    )
    if by == "date":
        days = table.column("timestamp").cast(pa.date32()).cast(pa.utf8()).to_pylist()
        assert [str(day) for day in table.column("date").to_pylist()] == days
    if by == "key":
        assert {name.split("/")[0] for name in visible(tmp_path, form)} == {
            "by_key=__HIVE_DEFAULT_PARTITION__", "by_key=%5Cxff", "by_key=a%2Fb 3",
            "by_key=a%2Fb 4",
        }  # fmt: skip


def test_an_export_goes_on_where_it_was_and_what_was_since_is_said_once(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    send(filled, topic, range(40))
    since = dt.datetime.fromtimestamp((DAY_MS + 10 * HOUR_MS) / 1000, dt.UTC)
    assert sum(commit.rows for commit in run(filled, topic, tmp_path, since=since)) == 30
    assert run(filled, topic, tmp_path, since=since) == []
    send(filled, topic, range(40, 50))
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_partitions({topic: 3})
        producer.send(topic, b"v50", partition=2).result(60)
    export = Export(topic, str(tmp_path), filled.address)
    assert sum(commit.rows for commit in export.run()) == 11
    assert export.resumed
    assert values(tmp_path) == sorted(b"v%d" % n for n in range(10, 51))


def test_an_empty_topic_leaves_a_beginning_that_later_records_go_behind(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    assert run(filled, topic, tmp_path) == []
    send(filled, topic, range(6))
    assert [commit.rows for commit in run(filled, topic, tmp_path)] == [6]


def test_a_typed_topic_has_its_own_columns_and_where_its_rows_came_from(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    frame = pa.table({"carrier": ["AA", None, "UA", ""], "delay": [1, 2, 3, 4]})
    with Producer(filled.address) as producer, Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic, schema=frame)])
        producer.send_arrow(topic, frame).result(60)
    run(filled, topic, tmp_path / "all", partition_by="carrier")
    table = rows(tmp_path / "all").sort_by("delay")
    assert table.select(["carrier", "delay"]).equals(frame)
    assert table.column("_offset").to_pylist() == [0, 1, 2, 3]
    assert table.column("by_carrier").to_pylist() == ["AA", None, "UA", None]
    run(
        filled, topic, tmp_path / "some", columns=["delay"], partition_by="date", compression="none"
    )
    assert rows(tmp_path / "some").schema.names == ["delay", "date"]


def test_a_commit_ends_when_it_has_read_enough_bytes_and_no_partition_waits_for_another(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic, 2)])
        for n in range(12):
            producer.send(topic, os.urandom(300_000), partition=n % 2).result(60)
    commits = run(
        filled, topic, tmp_path, commit_bytes=500_000, columns=["value", "offset", "partition"]
    )
    assert [commit.rows for commit in commits] == [2] * 6
    assert {commit.ranges[0][0] for commit in commits[:2]} == {0, 1}
    assert rows(tmp_path).num_rows == 12


# ---- kills ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_after_a_kill_at_any_step_a_reader_sees_whole_commits_and_the_next_run_brings_the_rest_once(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    settings: dict[str, Any] = {"rows_max": 400, "partition_by": "partition"}
    left = killed_exports(tmp_path, "orders", filled.address, **settings)
    assert len(left) > 20
    *killed, ended = left
    assert values(ended) == sent(ROWS)
    seen = set()
    for directory in killed:
        before = visible(directory)
        seen.add(len(before))
        if before:
            assert len(set(values(directory))) == len(values(directory))
        run(filled, "orders", directory, **settings)
        assert before <= visible(directory), "a file that a reader saw went away"
        assert values(directory) == sent(ROWS), directory.name
        assert {item["path"] for entry in entries(directory) for item in entry["files"]} == visible(
            directory
        )
        assert not list((directory / "_tailrace/pending").iterdir())
        assert not list((directory / "_tailrace/commits").glob("*.tmp"))
    assert len(seen) > 3, "no kill came between two files"


# ---- what cannot be exported ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"format": "parket"}, "did you mean parquet"),
    ({"partition_by": "keys"}, "no column 'keys'; did you mean 'key'"),
     ({"columns": ["valu"]}, "no column 'valu'; did you mean 'value'"),
     ({"partition_by": "headers"}, ("give a column of text, bytes, whole numbers or "
                                                                                                      "dates")),
     ({"on_data_loss": "ignore"}, "give one of fail, skip"), ({"rows_max": 0}, "rows_max"),
     ({"row_max": 1}, "did you mean rows_max"),
     ({"since": "yesterday"}, "give a datetime"),
     ({"format": "arrow", "compression": "snappy"}, "zstd, lz4 or none")],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_written(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        run(filled, "orders", tmp_path / "lake", **settings)
    assert not (tmp_path / "lake").exists()


def test_too_many_values_for_directories_are_refused_and_nothing_is_left(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.export.hive_partitioning.VALUES_MAX", 3)
    with pytest.raises(InvalidSettingError, match="25 values in one commit"):
        run(filled, "orders", tmp_path, partition_by="date")
    assert not visible(tmp_path)


def test_a_directory_of_other_files_or_of_another_export_is_refused(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/mine.parquet").write_bytes(b"mine")
    with pytest.raises(InvalidRequestError, match="is not empty and has no export"):
        run(filled, "orders", tmp_path / "foreign")
    assert (tmp_path / "foreign/mine.parquet").read_bytes() == b"mine"
    lake = tmp_path / "lake"
    run(filled, "orders", lake)
    for other, settings, sentence in (
        ("empty", {}, "has an export of topic 'orders'"),
        ("orders", {"format": "arrow"}, "use the same format"),
        ("orders", {"partition_by": "date"}, "is partitioned by nothing"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=sentence):
            run(filled, other, lake, **settings)
    with pytest.raises(UnknownTopicError, match="did you mean 'orders'"):
        run(filled, "order", tmp_path / "new")
    assert values(lake) == sent(ROWS)


def test_a_topic_that_was_made_again_is_another_one(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
        send(filled, topic, range(4))
        run(filled, topic, tmp_path)
        admin.delete_topics([topic])
        admin.create_topics([NewTopic(topic, 2)])
        send(filled, topic, range(8))
    with pytest.raises(InvalidRequestError, match="was deleted and created again"):
        run(filled, topic, tmp_path)
    assert values(tmp_path) == sent(4)


def test_a_second_export_to_the_same_directory_is_refused_while_the_first_runs(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    with closing(Export("orders", str(tmp_path), filled.address, rows_max=100).run()) as first:
        next(first)
        with pytest.raises(InvalidRequestError, match=r"another export to .* is running"):
            run(filled, "orders", tmp_path)
    run(filled, "orders", tmp_path)
    assert values(tmp_path) == sent(ROWS)


def test_a_damaged_commit_is_not_guessed(filled: EmbeddedAppliance, tmp_path: pathlib.Path) -> None:
    run(filled, "orders", tmp_path)
    last = sorted((tmp_path / "_tailrace/commits").iterdir())[-1]
    last.write_bytes(last.read_bytes().replace(b"next_offsets", b"next_offzets"))
    with pytest.raises(StorageError, match="is damaged or of a later version"):
        run(filled, "orders", tmp_path)


def test_a_log_that_was_restored_and_gives_offsets_again_is_refused(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    from tailrace.export.checkpoint import ExportCheckpoint
    from tailrace.export.file_sink import FileSink

    with Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic)])
        topic_id = admin.topic_info([topic])[topic].topic_id.hex()
    with closing(FileSink(str(tmp_path), "parquet", "zstd", "")) as target:
        assert target.open() is None
        target.begin(ExportCheckpoint(topic, topic_id, {0: 5}))
    with pytest.raises(InvalidRequestError, match="up to offset 4, but the log ends at -1"):
        run(filled, topic, tmp_path)


@pytest.mark.parametrize(
    ("form", "extra"), [("delta", "tailrace\\[delta\\]"), ("iceberg", "tailrace\\[iceberg\\]")]
)
def test_without_the_extra_its_name_is_said(
    filled: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    extra: str,
) -> None:
    for name in ("deltalake", "pyiceberg", "pyiceberg.catalog.sql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotSupportedError, match=extra):
        run(filled, "orders", tmp_path, format=form)


def offsets_in_files(directory: pathlib.Path) -> list[int]:
    """With every file closed when it returns: a dataset's threads close them a moment later, and a
    file system with an open file cannot be unmounted.
    """
    found: list[int] = []
    for name in sorted(visible(directory)):
        with (directory / name).open("rb") as file, pq.ParquetFile(file) as parquet:
            found += parquet.read(["offset"]).column(0).to_pylist()
    return found


@needs_root
@pytest.mark.root
def test_a_full_disk_ends_it_with_the_file_and_room_lets_it_go_on(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for _ in range(8):
            producer.send(topic, os.urandom(500_000)).result(60)
    with small_file_system(tmp_path, 8) as disk:
        ballast = disk / ".ballast"
        ballast.write_bytes(bytes(5 << 20))
        with pytest.raises(OSError, match=r"No space left on device: .*part-0") as caught:
            run(filled, topic, disk / "lake", commit_bytes=900_000)
        assert caught.value.filename is not None
        assert not list((disk / "lake/_tailrace/pending").iterdir())
        exported = offsets_in_files(disk / "lake")
        assert 0 < len(exported) < 8
        assert exported == list(range(len(exported)))
        ballast.unlink()
        run(filled, topic, disk / "lake", commit_bytes=900_000)
        assert offsets_in_files(disk / "lake") == list(range(8))


@needs_root
@pytest.mark.root
def test_a_target_that_cannot_be_written_is_named(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    with small_file_system(tmp_path, 1) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match=f"Read-only file system: '{disk}/lake'"):
            run(filled, "orders", disk / "lake")


def test_readers_that_know_the_commits_can_take_whole_ones(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    run(filled, "orders", tmp_path, rows_max=200)
    first, *others = entries(tmp_path)
    assert first["files"] == []
    for number, entry in enumerate(others, 1):
        assert entry["state"]["number"] == number
        for item in entry["files"]:
            assert pq.read_metadata(tmp_path / item["path"]).num_rows == item["rows"]
    assert (
        json.dumps(others[-1]["state"]["next_offsets"]) == f"[[0, {ROWS // 2}], [1, {ROWS // 2}]]"
    )


def test_a_commit_whose_end_is_not_known_keeps_its_files_for_the_next_run(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is there, and making it durable fails: nobody may remove what it names."""
    made = os.fsync
    seen = []

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("_tailrace/commits"):
            seen.append(fd)
            if len(seen) == 2:  # behind the first commit of rows
                raise OSError(5, "Input/output error")
        made(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        run(filled, "orders", tmp_path, rows_max=200)
    assert not visible(tmp_path)
    assert list((tmp_path / "_tailrace/pending").iterdir())
    run(filled, "orders", tmp_path, rows_max=200)
    assert values(tmp_path) == sent(ROWS)


def test_duckdb_and_polars_read_the_directory_with_its_partitions(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    import duckdb
    import polars

    run(filled, "orders", tmp_path, partition_by="key", rows_max=250)
    run(filled, "orders", tmp_path / "days", partition_by="date")
    found = duckdb.sql(
        'select by_key, count(*), count(distinct (partition, "offset")) from '
        f"read_parquet('{tmp_path}/by_key*/*.parquet', hive_partitioning=true) "
        "group by 1 order by 1 nulls first"
    ).fetchall()
    assert found == [
        (None, 240, 240),
        ("\\xff", 120, 120),
        ("a/b 3", 120, 120),
        ("a/b 4", 120, 120),
    ]
    frame = polars.scan_parquet(
        f"{tmp_path}/days/date=*/*.parquet", hive_partitioning=True
    ).collect()
    assert frame.height == ROWS
    assert (frame["timestamp"].dt.date() == frame["date"].cast(polars.Date)).all()
