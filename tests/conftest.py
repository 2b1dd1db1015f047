"""Fixtures: a real appliance per test module, names that nobody else uses. A test that fails shows what its appliances have logged."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tailrace import kernel
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit import appliance_logs

settings.register_profile("deterministic", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("deterministic")
appliance_logs.install()
# A Spark session of a test lives for seconds: Java's second compiler would take more time than its code saves (a start and two queries: 10 s of processor
# time in place of 17).
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
LONG_FIRST = (
    "crash/test_torture.py", "spark_bridge/test_sink.py", "workers/delays/test_delay_partition.py", "spark_bridge/test_sessions.py",
    "fuzz/test_file_fuzz.py", "sim/test_simulation.py", "system/test_package.py", "spark_bridge/test_flights_example.py",
    "spark_bridge/test_other_hosts.py", "system/test_export.py", "system/test_group_process.py", "system/test_processes.py",
)  # fmt: skip
"""Files that take longest, which would otherwise be begun last when they have few tests, and end alone. Begun in this order, then by their number of tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` gives files to its processes in this order (`--no-loadscope-reorder`)."""
    counts = Counter(item.path for item in items)
    ranks = {f"{pathlib.Path(__file__).parent}/{name}": rank for rank, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: (ranks.get(str(item.path), len(ranks)), -counts[item.path], str(item.path)))


def pytest_report_header() -> str:
    return f"kernel: {kernel.KIND}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    appliance_logs.forget_ended()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += appliance_logs.sections()
    return report


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    """A running appliance that makes no topics by itself, as a served one."""
    running = start_embedded(auto_create_topics=False)
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


@pytest.fixture
def topic() -> str:
    """A name of this test's own."""
    return f"t-{os.urandom(5).hex()}"
