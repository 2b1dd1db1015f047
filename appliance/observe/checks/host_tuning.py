"""Checks of kernel settings and limits of this host, each with the commands that mend it. Reads
/proc and /sys only.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable

from appliance.observe.checks.doctor_checks import Check, Level

MIB = 1 << 20
DIRTY_MAX_BYTES = 2 << 30
MEMORY_MIN_BYTES = 512 * MIB
CONNECT_QUEUE_MIN = 1024
PROCESSES_MIN = 1024
ENTROPY_MIN = 100
STEAL_MAX = 0.05
FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")
NO_BARRIERS = ("nobarrier", "barrier=0", "data=writeback")
_UNLIMITED = 1 << 60
"""Limits above are none: version 1 of cgroups shows one as a huge number."""


class HostFiles:
    """Files of the kernel, below a root of their own in tests."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def text(self, path: str) -> str:
        """The content; "" if it cannot be read."""
        try:
            with open(f"{self._root}{path}", encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """A number; None if there is none, as in "max"."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def exists(self, path: str) -> bool:
        return os.path.exists(f"{self._root}{path}")


def tuning_checks(
    data_dirs: Iterable[str], pid: int | None = None, files: HostFiles | None = None
) -> list[Check]:
    """Findings about this host. `pid`: whose cgroup and user count, the supervisor; None: ours."""
    host = files or HostFiles()
    process = "self" if pid is None else str(pid)
    found: list[Check | None] = [
        check(host)
        for check in (
            _swap, _huge_pages, _write_back, _clock, _governor, _entropy, _connect_queue, _steal,
        )
    ]  # fmt: skip
    found += [_processes(), _removed_memory(host, process), *_cgroup(host, process)]
    found += [_barriers(host, path) for path in data_dirs]
    found += [_rotating(host, path) for path in data_dirs]
    return [check for check in found if check is not None]


def _swap(host: HostFiles) -> Check | None:
    total = re.search(r"SwapTotal:\s+(\d+)", host.text("/proc/meminfo"))
    swappiness = host.number("/proc/sys/vm/swappiness")
    if total is None or swappiness is None:
        return None
    if int(total[1]) and swappiness > 10:
        return Check(
            "swap", Level.WARNING,
            f"vm.swappiness is {swappiness}: rings in /dev/shm may be swapped out, and each batch "
            "then waits for the disk; sysctl -w vm.swappiness=10, for good in /etc/sysctl.d",
        )  # fmt: skip
    return Check("swap", Level.OK, f"{int(total[1]) >> 10} MiB, vm.swappiness {swappiness}")


def _huge_pages(host: HostFiles) -> Check | None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", host.text(path))
    if chosen is None:
        return None
    if chosen[1] == "always":
        return Check(
            "huge pages", Level.WARNING,
            "transparent huge pages are `always`: processes take more memory and may stand still "
            f"while pages are merged; echo madvise > {path}",
        )  # fmt: skip
    return Check("huge pages", Level.OK, chosen[1])


def _write_back(host: HostFiles) -> Check | None:
    dirty_bytes = host.number("/proc/sys/vm/dirty_bytes")
    ratio = host.number("/proc/sys/vm/dirty_ratio")
    memory = re.search(r"MemTotal:\s+(\d+)", host.text("/proc/meminfo"))
    if dirty_bytes is None or ratio is None or memory is None:
        return None
    limit = dirty_bytes or (int(memory[1]) << 10) * ratio // 100
    if limit > DIRTY_MAX_BYTES:
        return Check(
            "write back", Level.WARNING,
            f"the page cache may have {limit // MIB} MiB that are not written yet, and a sync then "
            "waits for those of others; sysctl -w vm.dirty_background_bytes=67108864 "
            "vm.dirty_bytes=536870912, for good in /etc/sysctl.d",
        )  # fmt: skip
    return Check("write back", Level.OK, f"at most {limit // MIB} MiB wait to be written")


def _clock(host: HostFiles) -> Check | None:
    directory = "/sys/devices/system/clocksource/clocksource0"
    clock = host.text(f"{directory}/current_clocksource")
    if not clock:
        return None
    if clock in FAST_CLOCKS:
        return Check("clock source", Level.OK, clock)
    has_tsc = "tsc" in host.text(f"{directory}/available_clocksource").split()
    remedy = (
        f"echo tsc > {directory}/current_clocksource"
        if has_tsc
        else "look at the machine's settings and the kernel's log for `tsc`"
    )
    return Check(
        "clock source", Level.WARNING,
        f"{clock}: reading the time is a system call, several times in each step; {remedy}",
    )  # fmt: skip


def _governor(host: HostFiles) -> Check | None:
    governor = host.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if not governor:
        return None
    if governor == "powersave":
        return Check(
            "CPU governor", Level.WARNING,
            "powersave: a core that slept begins slowly, which shows in each latency; cpupower "
            "frequency-set -g performance",
        )  # fmt: skip
    return Check("CPU governor", Level.OK, governor)


def _entropy(host: HostFiles) -> Check | None:
    available = host.number("/proc/sys/kernel/random/entropy_avail")
    if available is None:
        return None
    if available < ENTROPY_MIN:
        return Check(
            "entropy", Level.WARNING,
            f"{available} bits: a start may wait for random numbers; install rng-tools or haveged",
        )  # fmt: skip
    return Check("entropy", Level.OK, f"{available} bits")


def _connect_queue(host: HostFiles) -> Check | None:
    length = host.number("/proc/sys/net/core/somaxconn")
    if length is None:
        return None
    if length < CONNECT_QUEUE_MIN:
        return Check(
            "connect queue", Level.WARNING,
            f"net.core.somaxconn is {length}: many clients that connect at once wait for a retry; "
            "sysctl -w net.core.somaxconn=4096, for good in /etc/sysctl.d",
        )  # fmt: skip
    return Check("connect queue", Level.OK, f"net.core.somaxconn {length}")


def _steal(host: HostFiles) -> Check | None:
    fields = host.text("/proc/stat").partition("\n")[0].split()[1:]
    if len(fields) < 8:
        return None
    times = [int(field) for field in fields[:8]]
    busy = sum(times) - times[3] - times[4]
    share = times[7] / busy if busy else 0.0
    if share > STEAL_MAX:
        return Check(
            "stolen time", Level.WARNING,
            f"the hypervisor took {share:.0%} of the cores' time since the boot; move the machine "
            "to a host with free cores, or buy dedicated ones",
        )  # fmt: skip
    return Check("stolen time", Level.OK, f"{share:.1%}")


def _processes() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < PROCESSES_MIN:
        return Check(
            "user processes", Level.WARNING,
            f"{soft} processes and threads allowed for the user; ulimit -u 4096, or LimitNPROC in "
            "the unit",
        )  # fmt: skip
    return Check(
        "user processes", Level.OK, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}"
    )


def _removed_memory(host: HostFiles, process: str) -> Check | None:
    """systemd-logind removes the shared memory of a person's account at the last logout."""
    uid = re.search(r"^Uid:\s+(\d+)", host.text(f"/proc/{process}/status"), re.MULTILINE)
    if uid is None or int(uid[1]) < 1000 or not host.exists("/run/systemd/system"):
        return None
    if re.search(r"^\s*RemoveIPC\s*=\s*(no|false|0)", host.text("/etc/systemd/logind.conf"), re.M):
        return None
    if host.exists(f"/var/lib/systemd/linger/{_user_name(int(uid[1]))}"):
        return None
    return Check(
        "shared memory at logout", Level.PROBLEM,
        f"user {uid[1]} is a person's account: its shared memory is removed at the last logout, "
        "and the appliance ends; loginctl enable-linger, or RemoveIPC=no in "
        "/etc/systemd/logind.conf, or install the service (tailrace install)",
    )  # fmt: skip


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _cgroup(host: HostFiles, process: str) -> list[Check]:
    """Limits of the control group, of the process and of those above it."""
    paths: dict[str, str] = {}
    for line in host.text(f"/proc/{process}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if number != "0" else [""]:
            paths[name] = path
    found = []
    memory = _lowest(
        host,
        [("/sys/fs/cgroup", paths.get(""), "memory.max"),
         ("/sys/fs/cgroup", paths.get(""), "memory.high"),
         ("/sys/fs/cgroup/memory", paths.get("memory"), "memory.limit_in_bytes")],
        int,
    )  # fmt: skip
    if memory is not None and memory < MEMORY_MIN_BYTES:
        found.append(
            Check(
                "cgroup memory", Level.WARNING,
                f"{int(memory) // MIB} MiB are allowed, with shared memory and page cache; raise "
                "MemoryHigh and MemoryMax in the unit (Docker: --memory)",
            )
        )  # fmt: skip
    elif memory is not None:
        found.append(Check("cgroup memory", Level.OK, f"{int(memory) // MIB} MiB are allowed"))
    cores = _lowest(host, [("/sys/fs/cgroup", paths.get(""), "cpu.max")], _cores_of)
    if cores is not None:
        level = Level.WARNING if cores < 2 else Level.OK
        remedy = (
            "; front, worker and flusher stand still when it is used up: raise CPUQuota in the "
            "unit (Docker: --cpus)"
        )
        found.append(
            Check(
                "cgroup cores", level,
                f"{cores:.1f} cores' time is allowed{remedy if level is Level.WARNING else ''}",
            )
        )  # fmt: skip
    tasks = _lowest(
        host,
        [("/sys/fs/cgroup", paths.get(""), "pids.max"),
         ("/sys/fs/cgroup/pids", paths.get("pids"), "pids.max")],
        int,
    )  # fmt: skip
    if tasks is not None and tasks < 256:
        found.append(
            Check(
                "cgroup tasks", Level.WARNING,
                f"{int(tasks)} processes and threads are allowed; raise TasksMax in the unit "
                "(Docker: --pids-limit)",
            )
        )  # fmt: skip
    return found


def _cores_of(text: str) -> float:
    quota, period = text.split()
    return int(quota) / int(period)


def _lowest(
    host: HostFiles,
    places: list[tuple[str, str | None, str]],
    value_of: Callable[[str], float],
) -> float | None:
    """The lowest limit of a group and of those above it; None: there is none."""
    values = []
    for root, path, name in places:
        while path is not None:
            try:
                values.append(value_of(host.text(f"{root}{path.rstrip('/')}/{name}")))
            except ValueError:
                pass  # max, or there is no such file
            path = os.path.dirname(path) if path.strip("/") else None
    return min((value for value in values if value < _UNLIMITED), default=None)


def _barriers(host: HostFiles, directory: str) -> Check | None:
    mount = _mount_of(host, directory)
    if mount is None:
        return None
    used = [option for option in NO_BARRIERS if option in mount]
    if not used:
        return None
    return Check(
        f"mount of {directory}", Level.PROBLEM,
        f"mounted with {', '.join(used)}: a power failure may lose acknowledged records; take it "
        "out of /etc/fstab and mount it again",
    )  # fmt: skip


def _mount_of(host: HostFiles, directory: str) -> list[str] | None:
    """Options of the mount that a directory lies on."""
    device = _device_of(directory)
    for line in host.text("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        if device is not None and fields.split()[2] == device:
            return [*fields.split()[5].split(","), *rest.split()[-1].split(",")]
    return None


def _rotating(host: HostFiles, directory: str) -> Check | None:
    device = _device_of(directory)
    found = [host.text(f"/sys/dev/block/{device}{above}/queue/rotational") for above in ("", "/..")]
    if "1" not in found:
        return None
    return Check(
        f"disk of {directory}", Level.WARNING,
        "the kernel calls it a rotating disk: each sync takes milliseconds; use an SSD, or topics "
        "with durability=memory (a virtual disk may only be called so)",
    )  # fmt: skip


def _device_of(directory: str) -> str | None:
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return None
    return f"{os.major(device)}:{os.minor(device)}"
