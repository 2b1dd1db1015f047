"""Places of backups: a directory, and a URL where fsspec is installed."""

from __future__ import annotations

import pathlib
import uuid

import pytest


@pytest.fixture(params=["directory", "url"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "target")
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4().hex}/target"
