"""One Spark session for all tests of the bridge in a process: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A local session, which leaves nothing behind."""
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
