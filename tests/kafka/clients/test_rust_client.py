"""The client in Rust, rdkafka, unchanged."""

from __future__ import annotations

import pathlib

import pytest

from tests.kafka.clients.programs import Program, built

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("Cargo compiles the client the first time"),
]


def test_the_client_in_rust(gateway: str, tmp_path: pathlib.Path) -> None:
    directory = built("rust", "cargo", ["cargo", "build", "--release", "--locked"])
    command = [f"{directory}/target/release/kafka_clients", gateway, "rust"]
    with Program(command, tmp_path) as program:
        assert "OK" in program.result()
