"""Core dumps: a process that crashes leaves none, also where its host allows them."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys

import pytest

from tailrace.embedded_appliance import start_embedded
from tests.kit.processes import children

CRASH = """
import os, resource
from shm.runtime.core_dumps import limit_core_dumps
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
limit_core_dumps(are_allowed={allowed})
secret = "planted" * 1000
os.abort()
"""
MAY_DUMP = (
    pathlib.Path("/proc/sys/kernel/core_pattern").read_text().strip() == "core"
    and resource.getrlimit(resource.RLIMIT_CORE)[1] == resource.RLIM_INFINITY
)


@pytest.mark.skipif(not MAY_DUMP, reason="this host writes no core files")
@pytest.mark.parametrize("allowed", [False, True])
def test_a_crash_leaves_a_core_file_only_where_they_are_allowed(
    tmp_path: pathlib.Path, allowed: bool
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(allowed=allowed)], cwd=tmp_path, env=environment,
        stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode < 0
    assert bool(list(tmp_path.glob("core*"))) is allowed


@pytest.mark.parametrize("allowed", ["false", "true"])
def test_no_process_of_an_appliance_leaves_a_core_file(allowed: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    none = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    appliance = start_embedded(settings={"security.core_dumps": allowed})
    try:
        limits = {
            resource.prlimit(pid, resource.RLIMIT_CORE)
            for pid in [appliance.pid, *children(appliance).values()]
        }
    finally:
        appliance.stop()
    assert limits == {(hard if allowed == "true" else none, hard)}
