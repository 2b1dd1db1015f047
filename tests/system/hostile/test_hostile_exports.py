"""Exports under other hands: directories that are moved, commits that are put back, columns with
the log's names. Each row once, or a sentence.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from contextlib import closing
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, StorageError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.export.export import Export
from tests.kit.lakes.exports import rows, run, send, sent, values, visible

ROWS = 60


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("lines", 2)])
    send(appliance, "lines", range(ROWS))
    return appliance


def move(directory: pathlib.Path) -> None:
    os.rename(directory, directory.with_name("moved"))


def unlock(directory: pathlib.Path) -> None:
    os.unlink(directory / ".tailrace-export.lock")


@pytest.mark.parametrize("ended", [move, shutil.rmtree, unlock])
def test_an_export_whose_directory_is_taken_away_writes_nothing_into_the_one_that_comes_there(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, ended: Any
) -> None:
    """It wrote its commits behind those of the other: who went on with them went on behind rows
    that were never there.
    """
    lake = tmp_path / "the lake ü"
    with closing(Export("lines", str(lake), filled.address, rows_max=10).run()) as first:
        for _ in range(3):
            next(first)
        ended(lake)
        with closing(Export("lines", str(lake), filled.address, rows_max=7).run()) as second:
            next(second)
            with pytest.raises(
                InvalidRequestError,
                match="was moved, removed or replaced during the export",
            ):
                next(first)
            next(second)
    run(filled, "lines", lake)
    assert values(lake) == sent(ROWS)


@pytest.mark.parametrize("by", [None, "key", "date"])
def test_commits_that_are_put_back_to_an_earlier_state_bring_no_row_twice(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, by: str | None
) -> None:
    run(filled, "lines", tmp_path, rows_max=10, partition_by=by)
    before = visible(tmp_path)
    for commit in sorted((tmp_path / "_tailrace/commits").iterdir())[-3:]:
        commit.unlink()
    with pytest.raises(
        StorageError,
        match="exists, but no commit lists it; _tailrace/commits may have been restored",
    ):
        run(filled, "lines", tmp_path, rows_max=40, partition_by=by)
    assert visible(tmp_path) == before
    assert values(tmp_path) == sent(ROWS)


def test_other_files_between_the_commits_are_no_commits(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    run(filled, "lines", tmp_path)
    for name in ("99.json", "00000000000000000009 (copy).json", "9.json.bak"):
        (tmp_path / "_tailrace/commits" / name).write_text("{}")
    assert run(filled, "lines", tmp_path) == []


@pytest.mark.parametrize("kind", [pa.int64(), pa.utf8()])
@pytest.mark.parametrize("by", [None, "date", "_timestamp"])
def test_columns_that_have_the_names_of_the_logs_are_rows_and_say_nothing_of_offsets(
    filled: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str, kind: pa.DataType, by: str | None
) -> None:
    texts = pa.array([str(10_000 - n) for n in range(40)]).cast(kind)
    frame = pa.table(
        {"_offset": texts, "_timestamp": texts, "filling": ["x" * 20_000] * 40}
    )  # batches too large to be united
    with Producer(filled.address) as producer, Admin(filled.address) as admin:
        admin.create_topics([NewTopic(topic, schema=frame)])
        for start in range(0, 40, 10):
            producer.send_arrow(topic, frame.slice(start, 10)).result(60)
    assert [
        commit.rows for commit in run(filled, topic, tmp_path, commit_bytes=1024, partition_by=by)
    ] == [10] * 4
    found = rows(tmp_path).sort_by([("_offset", "descending")])
    assert found.select(frame.schema.names).equals(frame.sort_by([("_offset", "descending")]))


@pytest.mark.parametrize("path", ["", "a\0b", b"lake", 7, "\udcff"])
def test_what_is_no_path_is_refused_at_once(path: Any) -> None:
    with pytest.raises(InvalidSettingError, match="the directory to export to is"):
        Export("lines", path)


def test_a_time_that_is_none_is_refused_before_anything_is_written() -> None:
    with pytest.raises(InvalidSettingError, match="since is NaT"):
        Export("lines", "/nonexistent/lake", since=pd.NaT)
