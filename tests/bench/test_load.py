"""`make load`: locust's users over the SDK under gevent."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S


def test_users_of_every_kind_get_through_and_the_generator_is_measured_beside_them(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    environment = {**os.environ, "TAILRACE_BOOTSTRAP": appliance.address, "LOAD_TOPIC": topic}
    command = [sys.executable, "-P", "-m", "bench.load", "5", "6"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, timeout=HANG_LIMIT_S, check=False
    )
    text = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, text
    for kind in ("produce", "consume"):
        found = re.search(rf"^{kind} +{topic} +(\d+) +(\d+)\(", text, re.MULTILINE)
        assert found, text
        assert int(found[1]) > 0
        assert int(found[2]) == 0
    assert "generator lag: p50" in text
