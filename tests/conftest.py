"""Fixtures: a real appliance per test module, names that nobody else uses. A test that fails shows
what its appliances have logged.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tailrace import kernel
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit import seeds
from tests.kit.appliances import appliance_logs
from tests.kit.runs import first_imports, run_order
from tests.kit.starts import forked_starts

settings.register_profile("deterministic", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("short", settings.get_profile("deterministic"), max_examples=40)
settings.load_profile("deterministic")
appliance_logs.install()
# A Spark session of a test lives for seconds: Java's second compiler would take more time than its
# code saves (a start and two queries: 10 s of processor time in place of 17).
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


LONG_HANG_LIMIT_S = 7_200
"""In place of the ten minutes (`--timeout`) after which a test that is not long has hung."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose this run's base seed before xdist starts its workers, which inherit it. A run without
    long tests takes the first 40 examples of hypothesis in place of a hundred.

    A shell starts background jobs with SIGINT ignored, and their children inherit that: what a test
    starts must hear of Ctrl-C.
    """
    seeds.base()
    is_pure = os.environ.get("TAILRACE_PURE") == "1"  # which make test-all runs without long tests
    if config.option.markexpr.startswith("not long") and not is_pure:
        settings.load_profile("short")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Any
) -> run_order.GroupScheduling | None:
    """With `--dist loadgroup`, tests that share a fixture of a module or of the session stay in one
    process; every other test goes to the process that is free.
    """
    return (
        run_order.GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests stay to the end: the garbage collector looks at them neither while there
    are more and more of them, which takes a third of a collection's CPU, nor later.
    """
    gc.disable()
    try:
        first_imports.import_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # what an extension module finds alive then, it calls leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that are known to take long (`--no-loadscope-reorder`), so that nothing
    long ends alone.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_HANG_LIMIT_S))
    items.sort(key=run_order.order(items))


@pytest.hookimpl(tryfirst=True)  # before the one of xdist, which ends the hook
def pytest_runtestloop() -> None:
    """Here, as collected modules may set variables that appliances inherit."""
    forked_starts.install()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slow = run_order.slow_without_a_reason(terminalreporter)
    if slow:
        terminalreporter.section(f"tests over {run_order.SLOW_S:g} s without slow_because(...)")
        terminalreporter.write_line("\n".join(f"{seconds:6.1f} s {name}" for seconds, name in slow))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A slow test fails the run only where the machine is known to be idle
    (`TAILRACE_DURATIONS=1`).
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_judged = os.environ.get("TAILRACE_DURATIONS") == "1"
    if (
        is_judged
        and reporter is not None
        and session.exitstatus == 0
        and run_order.slow_without_a_reason(reporter)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header() -> list[str]:
    return [
        f"kernel: {kernel.KIND}",
        f"seed: {seeds.base()} ({seeds.VARIABLE}={seeds.base()} runs the same new seeds again)",
    ]


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
