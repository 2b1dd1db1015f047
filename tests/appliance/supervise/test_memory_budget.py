"""Memory that a start plans, and the refusal with its sum where it does not fit."""

from __future__ import annotations

import pathlib

import pytest

from appliance.config.settings import Settings
from appliance.supervise.memory.memory_budget import (
    MIB,
    Room,
    mib,
    needs,
    read_rooms,
    shortage,
    table,
)
from appliance.supervise.memory.memory_plan import plan_regions

PLENTY = 1 << 40


@pytest.mark.parametrize(("workers", "fronts", "directories"), [(1, 1, 1), (7, 3, 2)])
def test_the_lines_of_a_start_are_the_regions_that_it_makes(
    workers: int, fronts: int, directories: int
) -> None:
    settings = Settings(fronts=fronts, data_dirs=[f"/{n}" for n in range(directories)])
    planned = sum(plan.size for plan in plan_regions(settings, workers, fronts, directories))
    lines = needs(settings, workers)
    assert sum(line.byte_count for line in lines if line.is_at_start) == planned
    assert {line.name for line in lines} >= {"rings", "lanes", "partition tables"}


@pytest.mark.parametrize(
    ("settings", "lower"),
    [
        (Settings(ring_bytes=8 << 30), "Lower ring_bytes (rings are the largest part)"),
        (Settings(lane_bytes=1 << 30, credit_bytes=1 << 30), "Lower lane_bytes (lanes are"),
        (Settings(slots=1 << 20, ring_bytes=1 << 20), "Lower slots (partition tables are"),
    ],
)
def test_what_does_not_fit_dev_shm_is_refused_with_the_sum_and_the_setting_to_lower(
    settings: Settings, lower: str
) -> None:
    lines = needs(settings, 1)
    total = sum(line.byte_count for line in lines if line.is_at_start)
    room = Room("/dev/shm", total - 1, "enlarge it", is_shared_only=True)
    said = shortage(lines, [room])
    assert said.startswith("/dev/shm has no room for this appliance: it needs ")
    assert lower in said
    assert table([line for line in lines if line.is_at_start]) in said
    assert not shortage(lines, [room._replace(free_bytes=total)])


def test_memory_must_also_have_what_is_made_later_and_what_clients_have_in_flight() -> None:
    lines = needs(Settings(credit_bytes=4 << 30), 1)
    total = sum(line.byte_count for line in lines)
    at_start = sum(line.byte_count for line in lines if line.is_at_start)
    room = Room("memory", at_start, "add memory")
    assert not shortage(lines, [room._replace(is_shared_only=True)])
    said = shortage(lines, [room])
    assert "Lower credit_bytes (batches in flight are the largest part), or add memory." in said
    assert f"together           {mib(total):>7,} MiB" in said
    assert "group coordinator" in said
    assert not shortage(lines, [room._replace(free_bytes=total)])


def test_the_rooms_of_a_host_are_read_from_its_files(tmp_path: pathlib.Path) -> None:
    """A cgroup's cached files give way; those above it bound it too."""
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2048 kB\nSwapFree: 1024 kB\n",
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        "sys/fs/cgroup/outer/memory.max": f"{300 * MIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{200 * MIB}\n",
        "sys/fs/cgroup/outer/memory.stat": (
            f"anon 5\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory, cgroup = read_rooms(str(tmp_path))
    assert (memory.name, memory.free_bytes) == ("memory", 3 * MIB)
    assert (cgroup.name, cgroup.free_bytes) == ("the cgroup /outer", 150 * MIB)
    assert "memory.max" in cgroup.remedy
    assert not read_rooms(str(tmp_path / "absent"))
    assert not shortage(needs(Settings(), 1), [])
    assert shortage(needs(Settings(), 1), [cgroup]).startswith("the cgroup /outer has no room")


def test_this_host_has_room_for_the_default_settings() -> None:
    rooms = read_rooms()
    assert {"/dev/shm", "memory"} <= {room.name for room in rooms}
    assert not shortage(needs(Settings(), 1), [room for room in rooms if room.free_bytes > PLENTY])
