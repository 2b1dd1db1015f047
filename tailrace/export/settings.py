"""Settings of an export.

Invariants:
- All functions are pure.
- An invalid setting raises InvalidSettingError that names it, before anything is opened or written.
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.client.config.setting_fields import build, check_kinds, merged, number_field
from tailrace.core.errors import InvalidSettingError

FORMATS = ("parquet", "arrow", "delta", "iceberg")
COMPRESSIONS = ("zstd", "snappy", "lz4", "none")
ON_DATA_LOSS = ("fail", "skip")


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """The settings of `Export`."""

    format: str = field(default="parquet", metadata={"doc": "parquet, arrow, delta or iceberg."})
    since: Any = field(
        default=None,
        metadata={
            "doc": "Begin at the first record at or after this time (a datetime); None: at the "
            "first record."
        },
    )
    columns: Any = field(
        default=None,
        metadata={
            "doc": "Names of columns; None: the topic's own, and in a typed topic also _partition, "
            "_offset and _timestamp."
        },
    )
    partition_by: str | None = field(
        default=None,
        metadata={"doc": "date or hour of a record's time (UTC), or the name of a column."},
    )
    compression: str = field(
        default="zstd",
        metadata={"doc": "For parquet and arrow files: zstd, snappy (parquet), lz4 or none."},
    )
    rows_max: int = number_field(1_000_000, "Most rows in a commit.", 1, 2**30)
    commit_bytes: int = number_field(
        128 << 20,
        "A commit ends when this many bytes are read; they are kept in memory.",
        1024,
        1 << 30,
    )
    follow: bool = field(default=False, metadata={"doc": "Continue with records sent later."})
    max_delay_ms: int = number_field(
        60_000,
        "With follow: longest wait of records outside sealed segments for a larger commit, ms.",
    )
    on_data_loss: str = field(
        default="fail",
        metadata={
            "doc": "fail or skip, for records that are damaged, or that retention removed before "
            "the export."
        },
    )
    request_timeout_ms: int = number_field(
        30_000, "Longest wait for an appliance that is away, ms; with follow it retries.", 1
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        for name, known in (
            ("format", FORMATS),
            ("compression", COMPRESSIONS),
            ("on_data_loss", ON_DATA_LOSS),
        ):
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, 1, 0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InvalidSettingError(
                    f"{name} is {value!r:.100}; give one of {', '.join(known)}{hint}"
                )
        if self.since is not None and (
            not isinstance(self.since, dt.datetime) or self.since != self.since
        ):  # pandas' NaT equals nothing
            raise InvalidSettingError(f"since is {self.since!r:.100}; give a datetime")
        if self.format == "arrow" and self.compression == "snappy":
            raise InvalidSettingError(
                "compression is snappy, which arrow files do not support; use zstd, lz4 or none"
            )
        if self.columns is not None and (
            isinstance(self.columns, str)
            or not isinstance(self.columns, Sequence)
            or not self.columns
        ):
            raise InvalidSettingError(f"columns is {self.columns!r:.100}; give a list of names")


def build_settings(given: Mapping[str, Any]) -> ExportSettings:
    """Build the settings. Raises InvalidSettingError, with the
    nearest known name for an unknown one.
    """
    return build(ExportSettings, merged(None, given))
