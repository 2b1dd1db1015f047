"""Writers of `tailrace consume` to standard output: lines, kcat's templates, CSV, JSON; one file of
Arrow or Parquet.

Each writer reads until the Reader is finished, and writes only complete lines, also when it is
interrupted.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import click
import orjson
import pyarrow as pa

from tailrace.core.errors import SchemaMismatchError
from tailrace.core.records import Record

TEMPLATE_HELP = (
    "%t topic, %p partition, %o offset, %T timestamp (ms), %k key, %v (or %s) value, %K and %S "
    "how many bytes these have (-1: null), %h headers, "
    "%% a percent sign; \\n, \\t, \\\\"
)
FORMATS = ("value", "json", "csv", "arrow", "parquet")
_RECORD_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
_ESCAPES = {"\\n": b"\n", "\\t": b"\t", "\\r": b"\r", "\\0": b"\0", "\\\\": b"\\"}


class Reader(Protocol):
    """A source of records or batches for the writers."""

    def is_finished(self) -> bool:
        """True if the end offsets are reached or --max records were printed."""
        ...

    def records(self) -> Iterable[Record]:
        """The next records."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The next records as Arrow batches."""
        ...


def text_of(value: Any) -> Any:
    """Bytes as text where they are text, else as {"base64": ...}."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    return value


def _default(value: Any) -> Any:
    return text_of(value) if isinstance(value, bytes) else str(value)


def _bytes(value: Any) -> bytes:
    """A key or value as it is; a typed topic's row as JSON; nothing for null."""
    if isinstance(value, dict):
        return orjson.dumps(value, default=_default)
    return value or b""


def json_line(record: Record) -> bytes:
    """A record as one line of JSON."""
    return orjson.dumps(
        {
            "topic": record.topic, "partition": record.partition, "offset": record.offset,
            "timestamp": record.timestamp, "key": text_of(record.key),
            "value": text_of(record.value),
            "headers": [[name, text_of(value)] for name, value in record.headers],
        },
        default=_default,
        option=orjson.OPT_APPEND_NEWLINE,
    )  # fmt: skip


def value_line(record: Record) -> bytes:
    """A record's value alone."""
    return _bytes(record.value) + b"\n"


def _size(value: Any) -> bytes:
    return b"-1" if value is None else b"%d" % len(_bytes(value))


def _headers(record: Record) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers)


LineFormat = Callable[[Record], bytes]
"""The bytes that a record is printed as."""
_TOKENS: dict[str, LineFormat] = {
    "t": lambda r: r.topic.encode(), "p": lambda r: b"%d" % r.partition,
    "o": lambda r: b"%d" % r.offset, "T": lambda r: b"%d" % r.timestamp,
    "k": lambda r: _bytes(r.key), "v": lambda r: _bytes(r.value), "s": lambda r: _bytes(r.value),
    "K": lambda r: _size(r.key),
    "S": lambda r: _size(r.value), "h": _headers, "%": lambda _: b"%",
}  # fmt: skip


def template(text: str) -> LineFormat:
    """Compile kcat's template to a function from a record to bytes.

    Raises: UsageError.
    """
    pieces: list[bytes | LineFormat] = []
    for piece in re.split(r"(%.?|\\.)", text, flags=re.DOTALL):
        if piece.startswith("%"):
            token = _TOKENS.get(piece[1:])
            if token is None:
                raise click.UsageError(f"--template has {piece!r}; known are {TEMPLATE_HELP}")
            pieces.append(token)
        elif piece:
            pieces.append(_ESCAPES.get(piece, piece.encode()))
    return lambda record: b"".join(
        piece if isinstance(piece, bytes) else piece(record) for piece in pieces
    )


def write_lines(reader: Reader, line: LineFormat) -> None:
    """Write each record as bytes."""
    out = sys.stdout.buffer
    while not reader.is_finished():
        for record in reader.records():
            out.write(line(record))
        out.flush()


def write_csv(reader: Reader, columns: list[str] | None) -> None:
    """Write CSV: a line of names, then a row for each record. Columns are `columns` of typed
    topics, else the record's position, key and value.
    """
    out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="", write_through=True)
    try:
        rows = csv.writer(out)
        rows.writerow(columns or _RECORD_COLUMNS)
        while not reader.is_finished():
            for record in reader.records():
                values = (
                    [record.value.get(name) for name in columns]
                    if columns
                    else [*record[:4], record.key, record.value]
                )
                rows.writerow([_cell(value) for value in values])
            out.flush()
    finally:
        out.detach()  # closing the writer would close standard output


def _cell(value: Any) -> Any:
    text = text_of(value)
    return orjson.dumps(text, default=_default).decode() if isinstance(text, (dict, list)) else text


def _of_file(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch. Raises SchemaMismatchError if it does not have the schema of the file."""
    if not batch.schema.equals(schema):
        raise SchemaMismatchError(
            "the schema of the topic was altered while its records were written, and a file has "
            "one schema: the file has the records before; consume the rest to another one"
        )
    return batch


def write_arrow(reader: Reader, schema: pa.Schema) -> None:
    """Write one Arrow stream."""
    with pa.ipc.new_stream(sys.stdout.buffer, schema) as writer:
        while not reader.is_finished():
            for batch in reader.batches():
                writer.write_batch(_of_file(batch, schema))


def write_parquet(reader: Reader, schema: pa.Schema) -> None:
    """Write one Parquet file, with a row group for each batch."""
    import pyarrow.parquet as parquet

    with parquet.ParquetWriter(sys.stdout.buffer, schema) as writer:
        while not reader.is_finished():
            for batch in reader.batches():
                writer.write_batch(_of_file(batch, schema))


BINARY_FORMATS: dict[str, Callable[[Reader, pa.Schema], None]] = {
    "arrow": write_arrow,
    "parquet": write_parquet,
}
"""Formats that are refused on a terminal."""
