"""Two appliances for the tests of a module."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from tailrace.embedded_appliance import start_embedded
from tests.system.migrate.houses import Houses


@pytest.fixture(scope="module")
def pair() -> Iterator[Houses]:
    source = start_embedded(settings={"kafka.listen": "127.0.0.1:0"}, auto_create_topics=False)
    try:
        target = start_embedded(auto_create_topics=False)
        try:
            yield Houses(source, target, "")
        finally:
            target.stop()
    finally:
        source.stop()


@pytest.fixture
def houses(pair: Houses, request: pytest.FixtureRequest) -> Houses:
    """With a migration of the test's own."""
    return Houses(pair.source, pair.target, topic_of(request))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return topic_of(request)


def topic_of(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", str(request.node.name).removeprefix("test_"))[:90]
