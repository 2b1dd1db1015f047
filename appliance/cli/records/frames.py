"""Reads files of rows as Arrow, with pyarrow: csv, tsv, JSON lines, Parquet, Arrow; compressed or
not; from a path or standard input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click
import pyarrow as pa

from tailrace.format.schema import canonical

FORMATS = ("csv", "tsv", "jsonl", "parquet", "arrow")
_BY_SUFFIX = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow",
    ".arrows": "arrow", ".feather": "arrow",
}  # fmt: skip
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
STDIN = "-"


def read_table(path: str, format_name: str | None = None) -> pa.Table:
    """All rows of a file, or of standard input (`-`); a column of only nulls becomes text. Usage
    errors name what is wrong with the file.
    """
    stem, suffix = os.path.splitext(path)
    compression = _COMPRESSED.get(suffix.lower())
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    kind = format_name or _BY_SUFFIX.get(suffix.lower())
    if kind is None:
        context = (
            "standard input has no file name that tells its format"
            if path == STDIN
            else f"the ending of {path} tells no format"
        )
        raise click.UsageError(f"{context}; add --format with one of {', '.join(FORMATS)}")
    shown = "standard input" if path == STDIN else path
    try:
        source = (
            pa.BufferReader(sys.stdin.buffer.read()) if path == STDIN else pa.OSFile(path, "rb")
        )
        if compression is not None:
            source = pa.BufferReader(pa.CompressedInputStream(source, compression).read())
        table = _READERS[kind](source)
    except OSError as error:
        if error.errno is not None:
            raise  # an error of the file system; pyarrow raises OSError for damaged bytes too
        how = f"{compression} with {kind} in it" if compression is not None else kind
        raise click.ClickException(
            f"cannot read {shown} as {how}: {_sentence(error)}. It is damaged, truncated, or in "
            "another format"
        ) from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise click.ClickException(f"cannot read {shown} as {kind}: {_sentence(error)}") from None
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(
                index, pa.field(field.name, pa.utf8()), table.column(index).cast(pa.utf8())
            )
    return table


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".")


def read_schema_of(path: str) -> pa.Schema:
    """The canonical schema of a file's rows."""
    return canonical(read_table(path).schema)


def _read_csv(source: pa.NativeFile) -> pa.Table:
    import pyarrow.csv as csv

    return csv.read_csv(source)


def _read_tsv(source: pa.NativeFile) -> pa.Table:
    import pyarrow.csv as csv

    return csv.read_csv(source, parse_options=csv.ParseOptions(delimiter="\t"))


def _read_json(source: pa.NativeFile) -> pa.Table:
    import pyarrow.json as json

    return json.read_json(source)


def _read_parquet(source: pa.NativeFile) -> pa.Table:
    import pyarrow.parquet as parquet

    return parquet.read_table(source)


def _read_arrow(source: pa.NativeFile) -> pa.Table:
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


_READERS: dict[str, Callable[[pa.NativeFile], pa.Table]] = {
    "csv": _read_csv, "tsv": _read_tsv, "jsonl": _read_json, "parquet": _read_parquet,
    "arrow": _read_arrow,
}  # fmt: skip
