"""Reading topics with Spark: `spark.read.format("tailrace")`, and `spark_bridge.scan` where throughput is all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.arrow_scan import scan as scan

_LATER = {"scan": "spark_bridge.arrow_scan"}
"""Loaded when they are asked for: a task of the data source needs none of it."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
