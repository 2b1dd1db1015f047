"""Clients in Go: franz-go, sarama and kafka-go, unchanged."""

from __future__ import annotations

import pathlib

import pytest

from tests.kafka.clients.programs import Program, built

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Go compiles the clients the first time"),
]


@pytest.mark.parametrize("client", ["franz", "sarama", "kafkago"])
def test_a_client_in_go(gateway: str, tmp_path: pathlib.Path, client: str) -> None:
    directory = built("go", "go", ["go", "build", "-o", "bin/", "./..."])
    with Program([f"{directory}/bin/{client}", gateway, f"go-{client}"], tmp_path) as program:
        assert "OK" in program.result()
