"""Schemas of many shapes, by name.

Owner: pure.
"""

from __future__ import annotations

import pyarrow as pa

from tailrace.format.schema import DEFAULT_SCHEMA

SCHEMAS = {
    "default": DEFAULT_SCHEMA,
    "one column": pa.schema([("a", pa.int8())]),
    "nulls alone": pa.schema([("a", pa.null())]),
    "flat": pa.schema(
        [
            ("a", pa.bool_()),
            ("b", pa.decimal128(20, 3)),
            ("c", pa.timestamp("us", "UTC")),
            ("d", pa.binary(7)),
            ("e", pa.utf8()),
            ("f", pa.null()),
            ("g", pa.month_day_nano_interval()),
        ]
    ),
    "nested": pa.schema(
        [
            ("a", pa.list_(pa.struct([("x", pa.int32()), ("y", pa.list_(pa.utf8()))]))),
            ("b", pa.list_(pa.float64(), 3)),
            ("c", pa.map_(pa.utf8(), pa.struct([("k", pa.date32()), ("l", pa.null())]))),
            ("d", pa.struct([("deep", pa.struct([("er", pa.list_(pa.bool_()))]))])),
        ]
    ),
    "wide": pa.schema([(f"column-{n}", pa.utf8()) for n in range(500)]),
}
