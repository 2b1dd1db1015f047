"""Stream processors in Python, unchanged: Quix Streams and Faust. Both keep their state in
compacted changelog topics that they create, and Faust assigns partitions by a protocol of its own.
"""

from __future__ import annotations

import pathlib
import sys

import pytest

from tailrace import Admin
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import Program, built
from tests.kit.processes import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("the packages are fetched the first time, and import for seconds"),
]


def packages() -> str:
    """The directory with the programs and their packages."""
    return built(
        "streams", sys.executable,
        [sys.executable, "-m", "pip", "install", "-q", "--target", "packages", "-r",
         "requirements.txt"],
    )  # fmt: skip


def test_quix_counts_exactly_once(gateway: str, tmp_path: pathlib.Path) -> None:
    directory = packages()
    with Program(
        [sys.executable, f"{directory}/quix_count.py", gateway, f"{tmp_path}/state"],
        tmp_path, {"PYTHONPATH": f"{directory}/packages"},
    ) as program:  # fmt: skip
        program.result()
        assert program.lines("NUMBERS") == ["300"]


def test_faust_groups_and_counts_in_a_table(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    directory = packages()
    environment = {
        "PYTHONPATH": f"{directory}/packages", "GATEWAY": gateway,
        "FAUST_DATA": f"{tmp_path}/faust",
    }  # fmt: skip
    with Program(
        [sys.executable, f"{directory}/faust_count.py", "worker", "-l", "info"],
        tmp_path, environment,
    ) as program:  # fmt: skip
        program.wait_for("COUNTS [(0, 20), (1, 20), (2, 20), (3, 20), (4, 20)]")
        with Admin(appliance.address) as admin:

            def changes() -> int:
                found = admin.describe_topics("faust-count-counts-changelog")
                (topic,) = found.values()
                return sum(each["end_offset"] for each in topic["partitions"])

            wait_until(lambda: changes() == 100, "the changelog has every change")
