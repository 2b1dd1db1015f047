"""A few seeds of bent Kafka requests: no end of the gateway, no internal error."""

from __future__ import annotations

import pytest

from tailrace.embedded_appliance import start_embedded
from tests.fuzz.gateway.kafka_fuzzer import internal_errors, script
from tests.kit.processes import children


@pytest.mark.slow_because("answers that a bent request does not get are waited for")
def test_bent_requests_end_nothing_but_their_connection() -> None:
    appliance = start_embedded(settings={"kafka.listen": "127.0.0.1:0"})
    try:
        pid = children(appliance)["tr-kafka-0"]
        for seed in range(12):
            script(appliance.kafka_addresses[0], seed)
        assert internal_errors(appliance) == []
        assert children(appliance)["tr-kafka-0"] == pid
    finally:
        appliance.stop()
