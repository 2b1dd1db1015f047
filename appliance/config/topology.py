"""Topology of a host: its cores as Linux numbers them, with their physical core and NUMA node.

Owner: none. It is read from /sys and /proc, from the output of lscpu, or made for a host on paper.

Invariants:
- Cores are in the order of their numbers, each once.
- A reserved core is used only if a setting lists it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from tailrace.core.errors import InvalidSettingError

CORES_MAX = 4096
LSCPU = "lscpu -p=CPU,CORE,NODE"


class Cpu(NamedTuple):
    """A core as Linux counts them: a hardware thread where a physical core has several."""

    number: int
    core: int
    """The physical core: siblings have the same number here."""
    node: int
    is_isolated: bool = False
    """True if the kernel balances no load on it (isolcpus=): a process runs on one such core."""
    is_reserved: bool = False
    """True if it is isolated and was not given to this process."""


class Topology(NamedTuple):
    """The cores that an appliance may use."""

    cpus: tuple[Cpu, ...]
    quota_cores: float | None = None
    """Processor time that the cgroup allows, in cores; None: no limit."""


def flat(numbers: Iterable[int]) -> Topology:
    """Cores without siblings, on one node."""
    return Topology(tuple(Cpu(number, number, 0) for number in sorted(numbers)))


def on_paper(
    count: int, threads: int = 1, nodes: int = 1, isolated: Iterable[int] = ()
) -> Topology:
    """A host of `count` cores, numbered as Linux does on most servers: the first threads of all
    physical cores, node by node, then their siblings.

    Raises: InvalidSettingError.
    """
    if not 1 <= count <= CORES_MAX or threads < 1 or nodes < 1 or count % (threads * nodes):
        raise InvalidSettingError(
            f"{count} cores cannot have {threads} threads each on {nodes} nodes; give a number "
            f"from 1 to {CORES_MAX} that both divide"
        )
    physical = count // threads
    apart = set(isolated)
    return Topology(
        tuple(
            Cpu(n, n % physical, n % physical * nodes // physical, n in apart, n in apart)
            for n in range(count)
        )
    )


def parse_lscpu(text: str) -> Topology:
    """The topology that `lscpu -p=CPU,CORE,NODE` printed on a host.

    Raises: InvalidSettingError.
    """
    cpus = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        try:
            number, core, node = (int(field or 0) for field in line.split(","))
        except ValueError:
            raise InvalidSettingError(
                f"the topology has the line {line[:80]!r}; give the output of {LSCPU}"
            ) from None
        cpus.append(Cpu(number, core, node))
    if not cpus or len({cpu.number for cpu in cpus}) < len(cpus):
        raise InvalidSettingError(
            f"the topology names no core, or one twice; give the output of {LSCPU}"
        )
    return Topology(tuple(sorted(cpus)))


def parse_list(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it: "0-3,8". Raises ValueError."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def read_topology(root: str = "") -> Topology:
    """The cores of this host that this process may use, within its cgroup's cpuset. `root`: a
    directory that has /sys and /proc.

    What cannot be read counts as absent: a core without siblings, one node, no limit.
    """
    given = os.sched_getaffinity(0)
    cpu_dir, node_dir = f"{root}/sys/devices/system/cpu", f"{root}/sys/devices/system/node"
    isolated = set(_list_in(f"{cpu_dir}/isolated"))
    cgroup = cgroup_directories(root)
    allowed = next(
        (set(found) for path in cgroup if (found := _list_in(f"{path}/cpuset.cpus.effective"))),
        set(),
    )
    node_of: dict[int, int] = {}
    for name in sorted(_entries(node_dir)):
        if name.startswith("node") and name[4:].isdigit():
            node_of |= dict.fromkeys(_list_in(f"{node_dir}/{name}/cpulist"), int(name[4:]))
    numbers = sorted(given | (isolated & allowed))
    return Topology(
        tuple(
            Cpu(
                number,
                min(_list_in(f"{cpu_dir}/cpu{number}/topology/thread_siblings_list") or [number]),
                node_of.get(number, 0),
                number in isolated,
                number not in given,
            )
            for number in numbers
        ),
        min(filter(None, (_quota(f"{path}/cpu.max") for path in cgroup)), default=None),
    )


def cgroup_directories(root: str = "") -> list[str]:
    """The directory of this process's cgroup (version 2), and those above it."""
    for line in content_of(f"{root}/proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            parts = [part for part in line[4:].split("/") if part]
            top = f"{root}/sys/fs/cgroup"
            return ["/".join([top, *parts[:n]]) for n in range(len(parts), -1, -1)]
    return []


def _quota(path: str) -> float | None:
    """Cores that a cpu.max of "200000 100000" allows; None: no limit."""
    quota, _, period = content_of(path).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() else None


def _list_in(path: str) -> list[int]:
    try:
        return parse_list(content_of(path))
    except ValueError:
        return []


def content_of(path: str) -> str:
    """Content of a file of the kernel's; empty if it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
