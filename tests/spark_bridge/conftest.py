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
        yield session
    left = {
        name
        for name in set(os.listdir("/tmp")) - before
        if "spark" in name.lower() or name.startswith(("hsperf", "trspark", "blockmgr", "liblz4"))
    }
    assert not left, f"Spark left {left}"
