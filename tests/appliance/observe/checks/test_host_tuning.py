"""Settings of a host that hurt, each with the command that mends it."""

from __future__ import annotations

import os
import pathlib

import pytest

from appliance.observe.checks.doctor_checks import Level
from appliance.observe.checks.host_tuning import HostFiles, tuning_checks

HEALTHY = {
    "/proc/meminfo": "MemTotal:  4194304 kB\nSwapTotal:  1024 kB\n",
    "/proc/sys/vm/swappiness": "10",
    "/proc/sys/vm/dirty_bytes": "536870912",
    "/proc/sys/vm/dirty_ratio": "0",
    "/proc/sys/net/core/somaxconn": "4096",
    "/proc/sys/kernel/random/entropy_avail": "256",
    "/proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1",
    "/proc/self/status": "Name:\tx\nUid:\t999\t999\t999\t999\n",
    "/proc/self/cgroup": "0::/system.slice/tailrace.service",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc acpi_pm",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "/sys/fs/cgroup/system.slice/memory.max": "max",
    "/sys/fs/cgroup/system.slice/tailrace.service/memory.high": "8589934592",
    "/sys/fs/cgroup/system.slice/tailrace.service/cpu.max": "max 100000",
}


def write(root: pathlib.Path, files: dict[str, str]) -> HostFiles:
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return HostFiles(str(root))


def findings(files: HostFiles, *data_dirs: str) -> dict[str, tuple[Level, str]]:
    checks = tuning_checks(data_dirs, files=files)
    return {check.name: (check.level, check.detail) for check in checks}


def test_a_healthy_host_has_no_finding_and_unknown_ones_are_left_out(
    tmp_path: pathlib.Path,
) -> None:
    found = findings(write(tmp_path, HEALTHY))
    assert {level for level, _ in found.values()} == {Level.OK}
    assert {"swap", "huge pages", "write back", "clock source", "cgroup memory"} <= set(found)
    assert set(findings(HostFiles(str(tmp_path / "nothing")))) == {"user processes"}


@pytest.mark.parametrize(
    ("path", "text", "name", "remedy"),
    [
        ("/proc/sys/vm/swappiness", "60", "swap", "sysctl -w vm.swappiness=10"),
        (
            "/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never", "huge pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        ("/proc/sys/vm/dirty_bytes", str(4 << 30), "write back", "vm.dirty_bytes=536870912"),
        (
            "/sys/devices/system/clocksource/clocksource0/current_clocksource", "acpi_pm",
            "clock source", "echo tsc > ",
        ),
        (
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "CPU governor",
            "cpupower frequency-set -g performance",
        ),
        ("/proc/sys/kernel/random/entropy_avail", "12", "entropy", "rng-tools"),
        ("/proc/sys/net/core/somaxconn", "128", "connect queue", "net.core.somaxconn=4096"),
        ("/proc/stat", "cpu  100 0 100 800 0 0 0 50", "stolen time", "dedicated"),
        ("/sys/fs/cgroup/system.slice/memory.max", str(100 << 20), "cgroup memory", "MemoryMax"),
        ("/sys/fs/cgroup/system.slice/cpu.max", "50000 100000", "cgroup cores", "CPUQuota"),
        ("/sys/fs/cgroup/system.slice/tailrace.service/pids.max", "64", "cgroup tasks",
         "TasksMax"),
    ],
)  # fmt: skip
def test_each_setting_that_hurts_is_named_with_the_command(
    tmp_path: pathlib.Path, path: str, text: str, name: str, remedy: str
) -> None:
    found = findings(write(tmp_path, {**HEALTHY, path: text}))
    level, detail = found.pop(name)
    assert level is Level.WARNING
    assert remedy in detail
    assert {level for level, _ in found.values()} == {Level.OK}, "and nothing else is"


def test_limits_of_the_first_version_of_cgroups_count(tmp_path: pathlib.Path) -> None:
    files = {
        **HEALTHY,
        "/proc/self/cgroup": "4:memory:/docker/1\n1:cpu:/docker/1",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 63),
        "/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": str(64 << 20),
    }
    assert findings(write(tmp_path, files))["cgroup memory"][1].startswith("64 MiB are allowed")


def test_a_persons_account_is_told_that_its_memory_goes_with_the_logout(
    tmp_path: pathlib.Path,
) -> None:
    person = {**HEALTHY, "/proc/self/status": "Uid:\t54321\t54321\n", "/run/systemd/system/x": ""}
    level, detail = findings(write(tmp_path, person))["shared memory at logout"]
    assert level is Level.PROBLEM
    assert "loginctl enable-linger" in detail
    lingering = {**person, "/var/lib/systemd/linger/54321": ""}
    assert "shared memory at logout" not in findings(write(tmp_path, lingering))


def test_a_mount_without_barriers_is_a_problem(tmp_path: pathlib.Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = f"1 2 {number} / /x rw,relatime shared:1 - ext4 /dev/x rw,nobarrier\n"
    files = {**HEALTHY, "/proc/self/mountinfo": mounts,
             f"/sys/dev/block/{number}/queue/rotational": "1"}  # fmt: skip
    found = findings(write(tmp_path, files), str(tmp_path))
    assert found[f"mount of {tmp_path}"][0] is Level.PROBLEM
    assert "nobarrier" in found[f"mount of {tmp_path}"][1]
    assert found[f"disk of {tmp_path}"][0] is Level.WARNING
