"""Topics with Spark: `spark.read.format("tailrace")` in sessions that `spark_bridge.session()` gives, and `spark_bridge.scan` where throughput is all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.arrow_scan import scan as scan

_LATER = {
    "session": "spark_bridge.session",
    "register": "spark_bridge.session:register",
    "local_session": "spark_bridge.session:local_session",
    "prepare": "spark_bridge.spark_home:prepare",
    "scan": "spark_bridge.arrow_scan:scan",
}
"""Loaded when they are asked for: executors import this package, and need none of them. `session` is a module that can be called."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
