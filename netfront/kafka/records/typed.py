"""Rows of a typed topic as the values of Kafka's records, and these as rows.

With `kafka.value.format=json` a value is a JSON object, one for each row (`json_columns` has the
types). With `arrow` it is an Arrow IPC stream with the topic's schema and one row. A value may also
be the envelope of Kafka Connect's JsonConverter: {"schema": ..., "payload": the object}.

With `key.column` a record's key is that column: text as UTF-8, bytes as they are, other types as
JSON has them. A row whose object lacks the column takes it from the record's key. Without
`key.column` a record's key chooses its partition and is not stored. Typed topics have no headers:
those of a record are not stored.

A row without a value in its column `timestamp` (timestamp[us, UTC]) takes the record's time. One
that leaves out a column has its default, and one of an earlier version of the schema becomes one of
the newest, as by our own producers (docs/schemas.md).

Owner: pure. pyarrow is imported with this module, which only a typed topic's conversion imports.

Invariants:
- A row becomes the same row again, but for floats that JSON does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa

from netfront.kafka.records.batch_layout import KafkaHeader
from netfront.kafka.records.errors import MisfitError
from netfront.kafka.records.json_columns import JsonColumn, key_text, to_json_cells
from netfront.kafka.records.plain_rows import PlainRows
from tailrace.batch.arrow_codec import (
    cut_out,
    decode_with_offsets,
    encode,
    numbers_in,
    timestamp_range,
    timestamps_of,
)
from tailrace.core.errors import SchemaMismatchError, UnsupportedBatchError
from tailrace.format.crc32c import Readable
from tailrace.format.evolution.schema_history import SchemaHistory
from tailrace.format.evolution.schema_rules import defaults_of
from tailrace.format.record_batch.arrow_metadata import read_record_batch
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    PREFIX_BYTES,
    SEQUENCE_MODULUS,
    read_header,
)
from tailrace.format.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE, conform, from_message
from tailrace.kernel import stamp_batch
from tailrace.kernel.reference_arrow import null_headers

VALUE_FORMATS = ("json", "arrow")
_ENVELOPE = {"schema", "payload"}


class TypedRows:
    """Converts the rows of one schema of a topic."""

    def __init__(
        self,
        schema_message: Readable,
        *,
        value_format: str = "json",
        key_column: str = "",
        versions: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """`value_format`, `key_column`: the topic's settings `kafka.value.format` and `key.column`.
        `versions`: id and schema message of all versions, this one last, for what comes in.

        Raises pyarrow.ArrowInvalid.
        """
        self.schema = from_message(bytes(schema_message))
        self._history = SchemaHistory(versions) if len(versions) > 1 else None
        self._defaults = defaults_of(bytes(schema_message))
        self._key_default = self._defaults.pop(key_column, None)
        self._is_json = value_format != "arrow"
        self._key = self.schema.get_field_index(key_column) if key_column else -1
        self._columns = [JsonColumn(field) for field in self.schema]
        self._names = frozenset(self.schema.names)
        time = self.schema.get_field_index("timestamp")
        self._time = time if time >= 0 and self.schema.field(time).type == TIMESTAMP_TYPE else -1

    # ---- out -------------------------------------------------------------------------------------

    def decode(self, batch: memoryview, seed: int) -> PlainRows:
        """The rows of a whole batch as those of the default schema. Each has its time.

        Raises TailraceError.
        """
        header, rows, offsets = decode_with_offsets(batch, self.schema, seed)
        count = rows.num_rows
        times = timestamps_of(rows, header, is_typed=True)
        if times is None:
            is_appended = header.attributes & ATTRIBUTE_LOG_APPEND_TIME
            time_us = header.append_time_us if is_appended else header.max_timestamp_us
            times = pa.repeat(pa.scalar(time_us, pa.int64()), count)
        keys = pa.nulls(count, pa.binary())
        if self._key >= 0:
            keys = self._keys(rows.column(self._key))
        values = pa.array(self._values(rows), pa.binary())
        columns = [times.view(TIMESTAMP_TYPE), keys, values, null_headers(count)]
        return _plain_rows(columns, None if offsets is None else numbers_in(offsets))

    def _keys(self, column: pa.Array) -> pa.Array:
        if pa.types.is_binary(column.type):
            return column
        if pa.types.is_string(column.type):
            return column.cast(pa.binary())
        cells = column.to_pylist() if _is_bytes(column.type) else to_json_cells(column)
        return pa.array([key_text(cell) for cell in cells], pa.binary())

    def _values(self, rows: pa.RecordBatch) -> list[bytes]:
        if not self._is_json:
            return [_stream_of(rows.slice(row, 1)) for row in range(rows.num_rows)]
        names = self.schema.names
        columns = [to_json_cells(column) for column in rows.columns]
        return [
            orjson.dumps(dict(zip(names, row, strict=True)), option=orjson.OPT_NON_STR_KEYS)
            for row in zip(*columns, strict=True)
        ]

    # ---- in --------------------------------------------------------------------------------------

    def rows_of(self, message: Readable) -> pa.RecordBatch:
        """The rows of records, given as a batch of the default schema. Raises MisfitError."""
        records = pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(message)), DEFAULT_SCHEMA
        )
        values = records.column(2).to_pylist()
        for row, value in enumerate(values):
            if value is None:
                raise MisfitError(
                    row, "has a null value; rows of a typed topic cannot be deleted by tombstones"
                )
        if not self._is_json:
            rows = self._rows_of_streams(values)
        else:
            rows = self._rows_of_objects(values, records.column(1).to_pylist())
        if self._time >= 0 and rows.column(self._time).null_count:
            times = rows.column(self._time).fill_null(records.column(0))
            rows = rows.set_column(self._time, self.schema.field(self._time), times)
        return rows

    def _rows_of_objects(self, values: list[bytes], keys: list[bytes | None]) -> pa.RecordBatch:
        objects = [self._object(row, value) for row, value in enumerate(values)]
        if self._key_default is not None:
            name = self.schema.field(self._key).name
            for each, key in zip(objects, keys, strict=True):
                if key is None:
                    each.setdefault(name, self._key_default)
        columns = [
            column.cells([each.get(column.name) for each in objects]) for column in self._columns
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return self._with_keys(rows, keys) if self._key >= 0 else rows

    def _object(self, row: int, value: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise MisfitError(row, f"has a value that is not JSON: {error}") from None
        if isinstance(found, dict) and found.keys() == _ENVELOPE and "payload" not in self._names:
            found = found["payload"]
        if not isinstance(found, dict):
            raise MisfitError(
                row,
                f"has a value that is JSON of type {type(found).__name__}; a row of a typed topic "
                "is an object of column and value",
            )
        if not self._names.issuperset(found) and self._history is not None:
            older = self._history.row_of(found)
            found = found if older is None else older
        if not self._names.issuperset(found):
            unknown = min(name for name in found if name not in self._names)
            raise MisfitError(
                row,
                f"has {unknown!r}, which is no column of the topic; its columns are "
                f"{', '.join(self.schema.names):.300}",
            )
        return {**self._defaults, **found} if self._defaults else found

    def _with_keys(self, rows: pa.RecordBatch, keys: list[bytes | None]) -> pa.RecordBatch:
        """Rows without a key take their record's; others must agree with it."""
        column = rows.column(self._key)
        own = self._keys(column).to_pylist()
        if own == keys:
            return rows
        missing = [row for row, key in enumerate(own) if key is None and keys[row] is not None]
        for row, key in enumerate(own):
            if key is not None and keys[row] is not None and key != keys[row]:
                raise MisfitError(
                    row,
                    f"has the key {keys[row]!r}, but column "
                    f"{self.schema.field(self._key).name!r}, which is the topic's key.column, says "
                    f"{key!r}; send them equal, or one of them",
                )
        if not missing:
            return rows
        cells = column.to_pylist()
        for row in missing:
            cells[row] = self._key_cell(row, keys[row])
        return rows.set_column(
            self._key, self.schema.field(self._key), pa.array(cells, column.type)
        )

    def _key_cell(self, row: int, key: bytes | None) -> Any:
        kind = self.schema.field(self._key).type
        if key is None or _is_bytes(kind):
            return key
        try:
            text: Any = key.decode()
            if pa.types.is_integer(kind):
                text = int(text)
            return self._columns[self._key].cells([text])[0].as_py()
        except (ValueError, UnicodeDecodeError):
            raise MisfitError(
                row,
                f"has the key {key!r}, which is not a value of column "
                f"{self.schema.field(self._key).name!r}: {kind}",
            ) from None

    def _rows_of_streams(self, values: list[bytes]) -> pa.RecordBatch:
        tables = []
        for row, value in enumerate(values):
            try:
                table = pa.ipc.open_stream(value).read_all()
                table.validate(full=True)
                table = self._fitting(table)
            except (
                pa.ArrowException, OSError, ValueError, SchemaMismatchError, UnsupportedBatchError,
            ) as error:  # fmt: skip
                raise MisfitError(
                    row, f"has a value that is no Arrow stream of the topic's schema: {error}"
                ) from None
            if table.num_rows != 1:
                raise MisfitError(
                    row, f"has an Arrow stream of {table.num_rows} rows; a record is one row"
                )
            tables.append(table)
        return pa.concat_tables(tables).combine_chunks().to_batches()[0]

    def _fitting(self, table: pa.Table) -> pa.Table:
        """A table with the columns of the schema, or of an earlier version. Raises
        SchemaMismatchError, UnsupportedBatchError.
        """
        history, names = self._history, table.column_names
        if history is None or self._names == set(names):
            return conform(table, self.schema)
        version = history.version_with(names)
        if version is None:
            return conform(table, self.schema)
        converted = []
        for rows in conform(table, history.schema(version)).to_batches():
            history.check_kept(rows, version)
            converted.append(history.convert(rows, version))
        return pa.Table.from_batches(converted, self.schema)

    def _check_keys(self, rows: pa.RecordBatch) -> None:
        if self._key >= 0 and rows.column(self._key).null_count:
            valid = rows.column(self._key).is_valid().to_pylist()
            raise MisfitError(
                valid.index(False),
                f"has no value in column {self.schema.field(self._key).name!r}, the key.column of "
                "a topic with cleanup.policy=compact",
            )

    def batches_of(
        self,
        message: Readable,
        kafka: KafkaHeader,
        schema_id: int,
        seed: int,
        bytes_max: int,
        requires_key: bool,
    ) -> list[bytearray]:
        """The records of one of Kafka's batches, given as a batch of the default schema, as batches
        of rows, halved until each has at most `bytes_max` bytes. Raises MisfitError.
        """
        rows = self.rows_of(message)
        if requires_key:
            self._check_keys(rows)
        latest_us = read_header(message).max_timestamp_us
        made, parts = [], [(0, rows.num_rows)]
        while parts:
            first, end = parts.pop()
            part = rows if end - first == rows.num_rows else cut_out(rows, first, end - first)
            first_us, max_us = timestamp_range(part, latest_us)
            data = encode(
                part, schema_id=schema_id, seed=seed, compression="none",
                first_timestamp_us=first_us, max_timestamp_us=max_us,
            )  # fmt: skip
            if len(data) > bytes_max:
                if end - first == 1:
                    raise MisfitError(
                        first, "is too large for max.message.bytes of the topic", is_too_large=True
                    )
                middle = (first + end) // 2
                parts += [(middle, end), (first, middle)]
                continue
            if kafka.producer_id >= 0:
                sequence = (kafka.base_sequence + first) % SEQUENCE_MODULUS
                stamp_batch(data, kafka.producer_id, kafka.producer_epoch, sequence, seed)
            made.append(data)
        return made


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _stream_of(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return bytes(sink.getvalue())


def _plain_rows(columns: list[pa.Array], offsets: Any) -> PlainRows:
    """The buffers as Arrow's own writer lays them out: from the first row on."""
    message = memoryview(pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA).serialize())
    metadata = read_record_batch(message)
    body = message[PREFIX_BYTES + int.from_bytes(message[4:8], "little") :]
    places = metadata.buffers
    views = [body[a : a + n] for a, n in zip(places[::2], places[1::2], strict=True)]
    return PlainRows(views, metadata.nodes, offsets)
