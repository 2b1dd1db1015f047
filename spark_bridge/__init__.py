"""Topics as Spark DataFrames: `spark.read.format("tailrace")` in the sessions of
`spark_bridge.session()`, and `spark_bridge.scan` for the highest throughput.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.source.arrow_scan import scan as scan

_LATER = {
    "session": "spark_bridge.session",
    "register": "spark_bridge.session:register",
    "local_session": "spark_bridge.session:local_session",
    "prepare": "spark_bridge.session_cache:prepare",
    "scan": "spark_bridge.source.arrow_scan:scan",
}
"""Names that are imported on first use: executors import this package and need none of them.
`session` is a module that can be called.
"""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
