"""Sealed segment files are ordinary Arrow streams: pyarrow, polars, nanoarrow and duckdb open them
as they are, compressed ones too.
"""

from __future__ import annotations

import pathlib

import duckdb
import nanoarrow
import polars as pl
import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tests.kit.processes import wait_until

ROWS = 4000


@pytest.fixture(scope="module", params=["none", "lz4", "zstd"])
def sealed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Sealed segments of a default topic and of a typed one."""
    directory = tmp_path_factory.mktemp("data")
    running = start_embedded(data_dir=str(directory))
    frame = pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()),
            "word": [f"word-{i}-{'x' * 20}" for i in range(ROWS)],
        }
    )
    with Admin(running.address) as admin:
        configs = {"segment.bytes": 65536, "compression.type": request.param}
        admin.create_topics(
            [NewTopic("plain", configs=configs), NewTopic("typed", configs=configs, schema=frame)]
        )
        with Producer(running.address, batch_size=8192) as producer:
            for number in range(ROWS):
                producer.send("plain", b"value-%d" % number + bytes(30), b"k", [("h", b"v")])
            producer.send_arrow("typed", frame).result(60)
            producer.flush()
        # So that the last one is sealed too.
        admin.alter_topics({name: {"segment.ms": 100} for name in ("plain", "typed")})

    def closed(topic: str) -> list[pathlib.Path]:
        paths = sorted((directory / f"{topic}-0").glob("*.arrows"))
        return [p for p in paths if p.read_bytes().endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")]

    wait_until(
        lambda: all(
            closed(t) == sorted((directory / f"{t}-0").glob("*.arrows")) for t in ("plain", "typed")
        ),
        "all segments are sealed by age",
    )
    assert running.stop() == 0
    plain, typed = closed("plain"), closed("typed")
    return plain, typed


def numbers(table: pa.Table) -> list[int]:
    return [int(bytes(v).rstrip(b"\0").split(b"-")[1]) for v in table.column("value").to_pylist()]


def test_pyarrow(sealed: tuple[list[pathlib.Path], list[pathlib.Path]]) -> None:
    plain, typed = sealed
    seen = [n for path in plain for n in numbers(pa.ipc.open_stream(path.read_bytes()).read_all())]
    assert seen == list(range(len(seen)))
    rows = [
        n
        for path in typed
        for n in pa.ipc.open_stream(path.read_bytes()).read_all().column("n").to_pylist()
    ]
    assert rows == list(range(len(rows)))


def test_polars(sealed: tuple[list[pathlib.Path], list[pathlib.Path]]) -> None:
    plain, typed = sealed
    frames = [pl.read_ipc_stream(path) for path in typed]
    rows = pl.concat(frames)["n"].to_list()
    assert rows == list(range(len(rows)))
    assert pl.read_ipc_stream(plain[0])["key"][0] == b"k"


def test_nanoarrow(sealed: tuple[list[pathlib.Path], list[pathlib.Path]]) -> None:
    plain, typed = sealed
    for path in (plain[0], typed[0]):
        with nanoarrow.ArrayStream.from_path(str(path)) as stream:
            table = pa.table(stream.read_all())
        assert table == pa.ipc.open_stream(path.read_bytes()).read_all()


def test_duckdb_through_pyarrow(sealed: tuple[list[pathlib.Path], list[pathlib.Path]]) -> None:
    _, typed = sealed
    table = pa.ipc.open_stream(typed[0].read_bytes()).read_all()
    with duckdb.connect() as connection:
        connection.register("segment", table)
        row = connection.execute("SELECT count(*), min(n), max(n) FROM segment").fetchone()
    assert row == (table.num_rows, 0, table.num_rows - 1)


def test_names_are_base_offsets_and_indexes_lie_beside(
    sealed: tuple[list[pathlib.Path], list[pathlib.Path]],
) -> None:
    _, typed = sealed
    position = 0
    for path in typed:
        assert path.name == f"{position:020d}.arrows"
        assert path.with_suffix(".index").exists()
        position += pa.ipc.open_stream(path.read_bytes()).read_all().num_rows
