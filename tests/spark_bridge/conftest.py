"""One Spark session for all tests of a process: starting one takes many seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from spark_bridge.session import local_session

    before = set(os.listdir("/tmp"))
    with local_session() as session:
        own = os.path.basename(session.conf.get("spark.local.dir"))
        yield session
    # Sessions of other processes have directories of their own, and nothing beside them.
    left = {
        name
        for name in set(os.listdir("/tmp")) - before
        if name == own
        or name.startswith(("hsperf", "blockmgr", "liblz4"))
        or ("spark" in name.lower() and not name.startswith(("trspark", "tailrace-spark-")))
    }
    assert not left, f"Spark left {left}"
