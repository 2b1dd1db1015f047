"""An appliance with a Kafka gateway for the clients of these tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():  # kafka-python reads its files in a way that 3.11 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.admin  # noqa: F401

from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

SETTINGS = {"kafka.listen": "127.0.0.1:0", "kafka.num.partitions": 4}


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings=SETTINGS)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def gateway(appliance: EmbeddedAppliance) -> str:
    """HOST:PORT for Kafka clients."""
    return appliance.kafka_addresses[0]
