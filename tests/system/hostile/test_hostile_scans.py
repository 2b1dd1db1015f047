"""`tailrace.scan` where files are not what they seem, and bounds that no other test names: the rows
that are there, or a sentence; never a wait without end.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, StorageError
from tailrace.embedded_appliance import EmbeddedAppliance

ROWS = 1_500


@pytest.fixture(scope="module")
def segmented(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    """segmented: 1 partition of several segments, each of many batches."""
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=2048) as producer,
    ):
        admin.create_topics([NewTopic("segmented", 1, {"segment.bytes": 64 << 10})])
        for n in range(ROWS):
            producer.send("segmented", b"v%d" % n * 20)
    return appliance


@pytest.fixture
def log(segmented: EmbeddedAppliance, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of its partition's directory."""
    return pathlib.Path(
        shutil.copytree(f"{segmented.data_dir}/segmented-0", tmp_path / "segmented-0")
    )


def values(log: pathlib.Path, **asked: Any) -> list[bytes]:
    found: list[bytes] = (
        tailrace.scan(log, columns=["value"], **asked).read_all().column(0).to_pylist()
    )
    return found


def sent(start: int) -> list[bytes]:
    return [b"v%d" % n * 20 for n in range(start, ROWS)]


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_a_segment_that_is_a_link_to_nothing_is_named_and_not_looked_for_without_end(
    log: pathlib.Path, skip_damaged: bool
) -> None:
    _, segment, *_ = sorted(log.glob("*.arrows"))
    segment.unlink()
    segment.symlink_to("/nonexistent/disk/segment")
    with pytest.raises(
        StorageError,
        match=f"segmented-0 has no readable segment file at offset {int(segment.stem)}",
    ):
        values(log, skip_damaged=skip_damaged)


def of_another(index: pathlib.Path, others: bytes) -> None:
    index.write_bytes(index.read_bytes()[:16] + others[16:])


def a_pipe(index: pathlib.Path, _others: bytes) -> None:
    index.unlink()
    os.mkfifo(index)


@pytest.mark.parametrize("make", [of_another, a_pipe])
@pytest.mark.parametrize("columns", [["value"], ["offset"]])
def test_an_index_that_is_not_its_segments_costs_no_row(
    log: pathlib.Path, make: Callable[[pathlib.Path, bytes], None], columns: list[str]
) -> None:
    """Its entries prove themselves, and say nothing of the segment beside which they lie."""
    other, index, following = sorted(log.glob("*.index"))[1:4]
    make(index, other.read_bytes())
    for start in range(int(index.stem) + 1, int(following.stem), 9):
        found = tailrace.scan(log, columns=columns, start=start).read_all().column(0).to_pylist()
        assert found == (sent(start) if columns == ["value"] else list(range(start, ROWS)))


@pytest.mark.parametrize("bound", [pd.NaT, np.array([1, 2]), float("nan"), np.datetime64("NaT")])
def test_what_is_no_bound_is_named(segmented: EmbeddedAppliance, bound: Any) -> None:
    for asked in ({"start": bound}, {"end": {0: bound}}):
        with pytest.raises(
            InvalidSettingError, match='give "earliest", "latest", an offset, a datetime'
        ):
            tailrace.scan("segmented", segmented.address, **asked)


def test_a_name_that_no_topic_can_have_is_refused_before_anything_is_asked() -> None:
    for name in ("\ud800", "a\0b"):
        with pytest.raises(InvalidRequestError, match="scan takes a topic's name"):
            tailrace.scan(name, "tcp://127.0.0.1:9")
