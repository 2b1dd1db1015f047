"""Requests with one field at a boundary: each is answered, and its connection may end, no more."""

from __future__ import annotations

import pytest

from tests.fuzz.gateway.kafka_fields import newest_versions, sweep
from tests.fuzz.gateway.kafka_fuzzer import plain_gateway
from tests.kit.processes import HANG_LIMIT_S


@pytest.mark.long
@pytest.mark.slow_because("three thousand requests, some of which create topics and groups")
def test_every_field_of_every_api_may_have_any_value() -> None:
    with plain_gateway() as (appliance, _):
        count, findings = sweep(appliance, newest_versions(), seconds=20 * HANG_LIMIT_S)
    assert findings == []
    assert count > 1_000
