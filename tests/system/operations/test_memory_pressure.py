"""Memory pressure, from a file in the kernel's format, against a real appliance."""

from __future__ import annotations

import pathlib
import urllib.request

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.console import console_of
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S, wait_until


@pytest.mark.slow_because("the pressure is read every 2 s")
def test_memory_pressure_slows_producers_and_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pressure"

    def stall(percent: float) -> None:
        text = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=0\n"
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(file)

    stall(0)
    running = start_embedded(
        data_dir=str(tmp_path / "data"),
        settings={"memory.pressure.file": str(file), "http.listen": "127.0.0.1:0"},
    )
    try:
        with Admin(running.address) as admin, Producer(running.address, acks="all") as producer:
            admin.create_topics(NewTopic("orders"))

            def is_short() -> bool:
                return bool(admin.describe_cluster()["memory"]["is_short"])

            assert not is_short()
            stall(37.5)
            wait_until(is_short, "memory is short")
            status = run(running, "status").stdout.decode()
            assert "memory is short: processes waited for it 38 % of the time" in status
            with urllib.request.urlopen(
                console_of(running) + "/metrics", timeout=HANG_LIMIT_S
            ) as answer:
                assert "\ntailrace_memory_short 1.0\n" in answer.read().decode()
            # Far more than one batch: it goes on, a batch at a time
            handles = [producer.send("orders", bytes(500_000)) for _ in range(40)]
            assert [handle.result(HANG_LIMIT_S).offset for handle in handles] == list(range(40))
            stall(0)
            wait_until(lambda: not is_short(), "memory has room")
        said = pathlib.Path(running.log_path).read_text()
        assert said.count("memory_short stalled_percent=37.5 limit_percent=10") == 1
        assert said.count("memory_has_room") == 1
    finally:
        assert running.stop() == 0
