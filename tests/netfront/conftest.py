"""A front over fakes, and a client of it."""

from __future__ import annotations

import pytest

from tests.kit.stepped.fronts import FakeClient, FakeFront


@pytest.fixture
def world() -> FakeFront:
    return FakeFront()


@pytest.fixture
def client(world: FakeFront) -> FakeClient:
    return world.connect(b"client")
