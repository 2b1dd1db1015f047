"""Clients in JavaScript: kafkajs and @platformatic/kafka, unchanged."""

from __future__ import annotations

import pathlib

import pytest

from tests.kafka.clients.programs import Program, built

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("npm fetches the clients the first time"),
]


@pytest.mark.parametrize("client", ["kafkajs", "platformatic"])
def test_a_client_in_javascript(gateway: str, tmp_path: pathlib.Path, client: str) -> None:
    directory = built("node", "npm", ["npm", "ci", "--no-audit", "--no-fund"])
    command = ["node", f"{directory}/{client}.js", gateway, f"node-{client}"]
    with Program(command, tmp_path) as program:
        assert "OK" in program.result()
