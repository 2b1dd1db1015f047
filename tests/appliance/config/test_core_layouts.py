"""Layouts of cores for hosts of 1 to 256 cores, with siblings, NUMA nodes and isolated cores."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.core_plan import OTHER_PROCESSES, CorePlan, plan_cores
from appliance.config.topology import (
    Cpu,
    Topology,
    flat,
    on_paper,
    parse_lscpu,
    read_topology,
)
from tailrace.core.errors import InvalidSettingError

WORKERS_MAX = 112


@st.composite
def hosts(draw: st.DrawFn) -> Topology:
    """Hosts of 1 to 256 cores, numbered in either usual way, parts of which may be used."""
    threads, nodes = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    per_node = draw(st.integers(1, max(1, 256 // (threads * nodes))))
    host = on_paper(threads * nodes * per_node, threads, nodes)
    if draw(st.booleans()):  # siblings have neighbouring numbers
        physical = len(host.cpus) // threads
        host = Topology(
            tuple(
                Cpu(n, n // threads, n // threads * nodes // physical)
                for n in range(len(host.cpus))
            )
        )
    if draw(st.booleans()):
        kept = draw(st.sets(st.sampled_from(host.cpus), min_size=1))
        host = Topology(tuple(sorted(kept)))
    return host


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))


def masks(plan: CorePlan, every: frozenset[int]) -> dict[str, frozenset[int]]:
    """The cores of each process."""
    others = frozenset(plan.others or every)
    workers = (others if c is None else frozenset((c,)) for c in plan.workers)
    found = {f"worker-{w}": cores for w, cores in enumerate(workers)}
    found |= {f"front-{f}": frozenset(c or every) for f, c in enumerate(plan.fronts)}
    found |= {f"flusher-{d}": frozenset(c or every) for d, c in enumerate(plan.flushers)}
    return found | {f"other-{n}": others for n in range(OTHER_PROCESSES)}


def most_apart(cores_of: dict[str, frozenset[int]]) -> dict[int, str]:
    """The largest set of processes with a core of their own each: core -> process (Kuhn)."""
    taken: dict[int, str] = {}

    def place(name: str, seen: set[int]) -> bool:
        for core in sorted(cores_of[name] - seen):
            seen.add(core)
            if core not in taken or place(taken[core], seen):
                taken[core] = name
                return True
        return False

    for name in cores_of:
        place(name, set())
    return taken


@given(hosts(), shapes)
def test_every_process_has_a_core_and_none_is_shared_before_all_are_used(
    host: Topology, shape: tuple[int, int]
) -> None:
    plan = plan_cores("auto", host, *shape, WORKERS_MAX)
    every = frozenset(cpu.number for cpu in host.cpus)
    cores_of = masks(plan, every)
    assert all(cores and cores <= every for cores in cores_of.values())
    assert len(most_apart(cores_of)) == min(len(cores_of), len(every))


@given(hosts(), shapes)
def test_each_directory_has_as_many_workers_and_a_worker_has_its_core_alone(
    host: Topology, shape: tuple[int, int]
) -> None:
    fronts, directories = shape
    plan = plan_cores("auto", host, fronts, directories, WORKERS_MAX)
    assert (len(plan.fronts), len(plan.flushers)) == shape
    assert len(plan.workers) % directories == 0
    assert directories <= len(plan.workers) <= WORKERS_MAX
    pinned = [core for core in plan.workers if core is not None]
    assert len(pinned) in (0, len(plan.workers))
    assert len(set(pinned)) == len(pinned)
    for cores in (*plan.fronts, *plan.flushers, plan.others):
        assert not set(pinned) & set(cores or ())


@given(hosts(), shapes)
def test_siblings_come_last(host: Topology, shape: tuple[int, int]) -> None:
    plan = plan_cores("auto", host, *shape, WORKERS_MAX)
    by_number = {cpu.number: cpu for cpu in host.cpus}
    physical = {cpu.core for cpu in host.cpus}
    workers = [by_number[core].core for core in plan.workers if core is not None]
    if workers and len(physical) >= sum(shape) + shape[1]:
        assert len(set(workers)) == len(workers), "two workers on one physical core"
        for cores in (*plan.fronts, *plan.flushers):
            assert not {by_number[core].core for core in cores or ()} & set(workers)


@given(hosts(), shapes)
def test_a_worker_and_its_flusher_are_on_one_node_where_one_has_room(
    host: Topology, shape: tuple[int, int]
) -> None:
    fronts, directories = shape
    plan = plan_cores("auto", host, fronts, directories, WORKERS_MAX)
    node_of = {cpu.number: cpu.node for cpu in host.cpus}
    rooms: dict[int, set[int]] = {}
    for cpu in host.cpus:
        rooms.setdefault(cpu.node, set()).add(cpu.core)
    # Pairs that fit whole nodes, beside the fronts
    if sum((len(cores) - fronts) // 2 for cores in rooms.values() if len(cores) > fronts) < (
        directories
    ):
        return
    for worker, core in enumerate(plan.workers):
        if core is not None:
            flusher = plan.flushers[worker % directories]
            assert {node_of[number] for number in flusher or ()} == {node_of[core]}


@given(hosts(), shapes)
def test_each_process_has_one_core_where_the_kernel_balances_none(
    host: Topology, shape: tuple[int, int]
) -> None:
    apart = Topology(tuple(cpu._replace(is_isolated=True) for cpu in host.cpus))
    plan = plan_cores("auto", apart, *shape, WORKERS_MAX)
    assert None not in plan.workers
    assert all(cores and len(cores) == 1 for cores in (*plan.fronts, *plan.flushers, plan.others))
    needed = shape[0] + 2 * shape[1]
    used = [*plan.workers, *(c for cores in (*plan.fronts, *plan.flushers) for c in cores or ())]
    if len(host.cpus) >= needed and len(plan.fronts) + len(plan.flushers) == 2:
        assert len(set(plan.workers)) == len(plan.workers)
    assert len(set(used)) >= min(len(host.cpus), 1)


def test_isolated_cores_are_used_only_when_they_are_listed() -> None:
    host = on_paper(8, isolated=range(4, 8))
    assert plan_cores("auto", host, 1, 1, 128) == plan_cores("auto", flat(range(4)), 1, 1, 128)
    plan = plan_cores([4, 5], host, 1, 1, 128)
    assert plan == CorePlan((4, 5), ((0, 1, 2, 3),), ((0, 1, 2, 3),), (0, 1, 2, 3))


def test_a_flusher_is_near_the_workers_that_are_listed() -> None:
    plan = plan_cores([1, 2, 9, 10], on_paper(16, nodes=2), 1, 1, 128)
    assert plan.flushers == ((0, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15),)
    plan = plan_cores([9, 10], on_paper(16, nodes=2), 1, 1, 128)
    assert plan.flushers == plan.fronts == ((8, 11, 12, 13, 14, 15),)


@pytest.mark.parametrize(("quota", "workers"), [(0.5, 1), (2.0, 1), (6.5, 4), (64.0, 62)])
def test_a_quota_counts_as_cores_and_pins_nothing(quota: float, workers: int) -> None:
    """Containers beside this one would choose the same cores."""
    plan = plan_cores("auto", flat(range(64))._replace(quota_cores=quota), 1, 1, 128)
    assert len(plan.workers) == workers
    assert (plan.others is None) is (quota < 64)


def test_a_host_is_read_from_its_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "sys/devices/system/cpu/isolated": "6-7\n",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
        "sys/fs/cgroup/a/cpuset.cpus.effective": "0-6\n",
        "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    }
    for number in range(8):
        name = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        files[name] = f"{number % 4},{number % 4 + 4}\n"
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 4})
    host = read_topology(str(tmp_path))
    assert host.quota_cores == 1.5
    assert host.cpus == (
        Cpu(0, 0, 0), Cpu(2, 2, 1), Cpu(4, 0, 0), Cpu(6, 2, 1, is_isolated=True, is_reserved=True),
    )  # fmt: skip
    assert read_topology(str(tmp_path / "absent")) == flat({0, 2, 4})


def test_the_output_of_lscpu_is_a_topology_and_other_text_is_refused() -> None:
    text = "# CPU,Core,Node\n0,0,0\n1,1,\n2,0,0\n"
    assert parse_lscpu(text).cpus == (Cpu(0, 0, 0), Cpu(1, 1, 0), Cpu(2, 0, 0))
    for wrong in ("", "# none\n", "0,0\n", "0,0,0\n0,1,0\n", "x,y,z\n"):
        with pytest.raises(InvalidSettingError, match="lscpu -p=CPU,CORE,NODE"):
            parse_lscpu(wrong)


@pytest.mark.parametrize("shape", [(0, 1, 1), (5000, 1, 1), (7, 2, 1), (8, 1, 3), (8, 0, 1)])
def test_a_host_that_cannot_be_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidSettingError, match="cores cannot have"):
        on_paper(*shape)
