"""An appliance with a second data directory, which partitions move to."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import directories


@pytest.fixture
def appliance(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start(tmp_path / "data", data_dirs=directories(tmp_path))
    yield running
    assert running.stop() == 0
