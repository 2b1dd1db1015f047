"""Files of rows as Arrow: .csv, .jsonl, .parquet, .arrow. Reading is pyarrow's."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
import pyarrow as pa

from tailrace.schema import canonical

SUFFIXES = (".csv", ".jsonl", ".json", ".parquet", ".arrow", ".arrows", ".feather")


def read_table(path: str) -> pa.Table:
    """All rows of a file; a column of only nulls becomes text. Usage errors name what is wrong with the file."""
    suffix = os.path.splitext(path)[1].lower()
    readers: dict[str, Callable[[str], pa.Table]] = {
        ".csv": _read_csv,
        ".jsonl": _read_json,
        ".json": _read_json,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
        ".arrows": _read_arrow,
        ".feather": _read_arrow,
    }
    if suffix not in readers:
        raise click.UsageError(f"{path} ends with {suffix or 'nothing'}; known are {', '.join(SUFFIXES)}")
    try:
        table = readers[suffix](path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise click.ClickException(f"cannot read {path} as {suffix[1:]}: {error}") from None
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(index, pa.field(field.name, pa.utf8()), table.column(index).cast(pa.utf8()))
    return table


def read_schema_of(path: str) -> pa.Schema:
    """The canonical schema of a file's rows."""
    return canonical(read_table(path).schema)


def _read_csv(path: str) -> pa.Table:
    import pyarrow.csv as csv

    return csv.read_csv(path)


def _read_json(path: str) -> pa.Table:
    import pyarrow.json as json

    return json.read_json(path)


def _read_parquet(path: str) -> pa.Table:
    import pyarrow.parquet as parquet

    return parquet.read_table(path)


def _read_arrow(path: str) -> pa.Table:
    with pa.OSFile(path, "rb") as file:
        try:
            return pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_stream(file).read_all()
