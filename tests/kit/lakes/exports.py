"""Material of the tests of exports: records to send, and the lake as its readers see it."""

from __future__ import annotations

import pathlib
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.dataset as ds

from tailrace import Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.export.checkpoint import Commit
from tailrace.export.export import Export

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def send(appliance: EmbeddedAppliance, topic: str, numbers: range, partitions: int = 2) -> None:
    with Producer(appliance.address, batch_size=4096) as producer:
        for n in numbers:
            key = (
                None
                if n % 5 == 0
                else b"\xff"
                if n % 5 == 1
                else b""
                if n % 5 == 2
                else b"a/b %d" % (n % 5)
            )
            producer.send(
                topic,
                b"v%d" % n,
                key,
                [("h", b"%d" % n)],
                partition=n % partitions,
                timestamp=DAY_MS + n * HOUR_MS,
            )


def run(
    appliance: EmbeddedAppliance, topic: str, directory: pathlib.Path, **settings: Any
) -> list[Commit]:
    return list(Export(topic, str(directory), appliance.address, **settings).run())


def entries(directory: pathlib.Path) -> list[Any]:
    """Entries of the commits, in order."""
    return [
        orjson.loads(path.read_bytes())["content"]
        for path in sorted((directory / "_tailrace/commits").iterdir())
    ]


def visible(directory: pathlib.Path, form: str = "parquet") -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob(f"*.{form}")}


def rows(directory: pathlib.Path, form: str = "parquet") -> pa.Table:
    """As a reader of the directory sees them, who knows nothing of commits."""
    return ds.dataset(directory, format=form, partitioning="hive").to_table()


def values(directory: pathlib.Path, form: str = "parquet") -> list[bytes]:
    return sorted(rows(directory, form).column("value").to_pylist())


def sent(count: int) -> list[bytes]:
    return sorted(b"v%d" % n for n in range(count))
