"""Programs of their own, and what they have written."""

from __future__ import annotations

import os
import subprocess
import sys

from tailrace import Consumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S


def run_program(
    text: str, *arguments: str, timeout_s: float = HANG_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """A program of its own, ended as Python ends one."""
    command = [sys.executable, "-P", "-X", "dev", "-c", text, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def read_values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes | None]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[bytes | None] = []
        while len(found) < count:
            records = consumer.poll(60_000)
            assert records, f"only {len(found)} of {count} records came"
            found += [record.value for record in records]
        return found
