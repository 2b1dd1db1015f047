"""The module's appliance under the name that tests of schemas use, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace import Admin
from tailrace.embedded_appliance import EmbeddedAppliance


@pytest.fixture(scope="module")
def running(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    return appliance


@pytest.fixture
def admin(running: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(running.address) as client:
        yield client
