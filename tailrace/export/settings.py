"""What an export is asked for.

Invariants: pure; whatever is wrong raises InvalidSettingError that names it, before anything is opened or written.
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.errors import InvalidSettingError
from tailrace.settings import _check_kinds, _number, build, merged

FORMATS = ("parquet", "arrow", "delta", "iceberg")
COMPRESSIONS = ("zstd", "snappy", "lz4", "none")
ON_DATA_LOSS = ("fail", "skip")


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What `Export` takes beside topic, directory and address."""

    format: str = field(default="parquet", metadata={"doc": "parquet, arrow, delta or iceberg."})
    since: Any = field(
        default=None, metadata={"doc": "Begin with the first record of this time (a datetime) or later; None: with the first."}
    )
    columns: Any = field(
        default=None, metadata={"doc": "Names of columns; None: the topic's, and of a typed one _partition, _offset, _timestamp."}
    )
    partition_by: str | None = field(default=None, metadata={"doc": "date or hour of a record's time (UTC), or the name of a column."})
    compression: str = field(default="zstd", metadata={"doc": "Of parquet and arrow files: zstd, snappy (parquet), lz4 or none."})
    rows_max: int = _number(1_000_000, "Most rows of a commit.", 1, 2**30)
    commit_bytes: int = _number(128 << 20, "A commit ends when it has read this many bytes, which wait in memory.", 1024, 1 << 30)
    follow: bool = field(default=False, metadata={"doc": "Go on with what is sent later."})
    max_delay_ms: int = _number(60_000, "With follow: how long what lies in no sealed segment waits to be exported with more, ms.")
    on_data_loss: str = field(
        default="fail", metadata={"doc": "fail or skip: what to do about records that retention removed first, or that are damaged."}
    )
    request_timeout_ms: int = _number(30_000, "How long the appliance may be away, ms; with follow it is waited for.", 1)

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name, known in (("format", FORMATS), ("compression", COMPRESSIONS), ("on_data_loss", ON_DATA_LOSS)):
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, 1, 0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InvalidSettingError(f"{name} is {value!r:.100}; it takes {', '.join(known)}{hint}")
        if self.since is not None and (not isinstance(self.since, dt.datetime) or self.since != self.since):  # pandas' NaT equals nothing
            raise InvalidSettingError(f"since is {self.since!r:.100}; it takes a datetime")
        if self.format == "arrow" and self.compression == "snappy":
            raise InvalidSettingError("compression is snappy, which arrow files have not; it takes zstd, lz4 or none")
        if self.columns is not None and (isinstance(self.columns, str) or not isinstance(self.columns, Sequence) or not self.columns):
            raise InvalidSettingError(f"columns is {self.columns!r:.100}; it takes a list of names")


def build_settings(given: Mapping[str, Any]) -> ExportSettings:
    """Raises InvalidSettingError, with the nearest name for one that is none."""
    return build(ExportSettings, merged(None, given))
