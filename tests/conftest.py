"""Fixtures: a real appliance per test module, names that nobody else uses. A test that fails shows what its appliances have logged."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tailrace import kernel
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit import appliance_logs

settings.register_profile("deterministic", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("deterministic")
appliance_logs.install()


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
