"""Reading topics with Spark: `spark.read.format("tailrace")`, in sessions that `spark_bridge.session()` gives."""

from __future__ import annotations

from typing import Any

_FROM_SESSION = ("register", "local_session")


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: executors import this package, and need no session."""
    import importlib

    if name == "session":
        return importlib.import_module("spark_bridge.session")
    if name in _FROM_SESSION:
        return getattr(importlib.import_module("spark_bridge.session"), name)
    if name == "prepare":
        return importlib.import_module("spark_bridge.spark_home").prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
