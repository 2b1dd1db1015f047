from __future__ import annotations

import pytest

from tests.kit.stepped.front_peers import FakeSockets, FrontPeers


@pytest.fixture
def sockets() -> FakeSockets:
    return FakeSockets()


@pytest.fixture
def peers(sockets: FakeSockets) -> FrontPeers:
    return FrontPeers(sockets)
