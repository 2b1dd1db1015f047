"""Settings of the appliance, each documented beside its definition.

Invariants:
- Relations between settings are checked before anything is started.
- Processes get only what they use, as plain values.
`settings_sources` merges them from file, environment and flags.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from appliance.config.core_plan import BusyPoll, CorePlan, plan_busy_poll, plan_cores
from appliance.config.ipc_access import ipc_access
from shm.layout import FLUSHERS_MAX, FRONTS_MAX, WORKERS_MAX
from tailrace.core.errors import InvalidSettingError

LOG_LEVELS = ("debug", "info", "warning", "error")
MIB = 1 << 20


def _setting(
    default: Any, doc: str, *, minimum: int = 0, maximum: int = 1 << 40, name: str = ""
) -> Any:
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum, "name": name}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the appliance; `setting_names()` has their names in the file, `--set` and the
    documentation.
    """

    listen: list[str] = _setting(
        ["tcp://127.0.0.1:7420"],
        "Where clients connect: tcp://HOST:PORT (port 0: any free one) and ipc://PATH.",
    )
    ipc_mode: str = _setting(
        "0660",
        "Access to the sockets of ipc:// addresses, octal: who may write may connect.",
        name="ipc.mode",
    )
    ipc_group: str = _setting(
        "",
        "Group of the sockets of ipc:// addresses; the appliance's user must be in it. Empty: that "
        "user's own group.",
        name="ipc.group",
    )
    http_listen: str = _setting(
        "127.0.0.1:7400",
        "HOST:PORT of the console, /metrics and /health. Port 0: any free one. Empty: no console.",
        name="http.listen",
    )
    fronts: int = _setting(
        1,
        "Number of front processes; front i listens on the ports of `listen` plus i, and on "
        "its ipc paths with .i appended.",
        minimum=1,
        maximum=FRONTS_MAX,
    )
    data_dirs: list[str] = _setting(
        ["./tailrace-data"],
        "Directories of the log. Each has a flusher and workers of its own, so give each disk "
        "one. The catalog is in the first.",
    )
    cores: str | list[int] = _setting(
        "auto",
        'Cores that workers are pinned to, one worker each: "auto" or a list such as [2, 3].',
    )
    busy_poll_us: int | str = _setting(
        "auto",
        "How long fronts and workers poll for more work before they sleep, microseconds (0 to "
        "10000; 0: not at all). Polling saves a wake-up for each step of an ack and uses the "
        'core meanwhile. "auto" polls (100) only if each front, worker and flusher can have a '
        "core; never with 1 or 2 cores.",
    )
    dedicated_workers: int = _setting(
        16,
        "Most partitions of topics with worker.dedicated; memory is taken when there are such "
        "topics.",
        maximum=64,
    )
    ring_bytes: int = _setting(
        64 * MIB,
        "Size of a worker's ring in shared memory, bytes.",
        minimum=1 * MIB,
        maximum=1 << 36,
    )
    ring_descriptors: int = _setting(
        65_536,
        "Requests that a ring can hold, whatever their size.",
        minimum=1024,
        maximum=1 << 22,
    )
    lane_bytes: int = _setting(
        4 * MIB,
        "Size of a lane between two processes in shared memory, bytes; small enough to stay in "
        "cache.",
        minimum=256 << 10,
        maximum=1 << 30,
    )
    credit_bytes: int = _setting(
        64 * MIB,
        "Bytes that all producers together may have in flight to a front.",
        minimum=1 * MIB,
    )
    connections_max: int = _setting(
        16_384,
        "Connections that a front keeps. The limit of open files, less the log's files, is the "
        "upper bound.",
        minimum=1,
        maximum=1 << 20,
        name="connections.max",
    )
    slots: int = _setting(4096, "Most partitions of the appliance.", minimum=16, maximum=1 << 20)
    stop_timeout_ms: int = _setting(
        20_000,
        "How long a clean stop may take before the remaining processes are killed, ms.",
        minimum=100,
    )
    hang_timeout_ms: int = _setting(
        30_000,
        "A process that makes no progress for this long is killed and restarted, ms.",
        minimum=1000,
    )
    zygote: bool = _setting(
        True,
        "Fork processes from one that has imported what they share. false: each is an "
        "interpreter of its own, as debuggers need it, which starts more slowly and takes more "
        "memory.",
    )
    log_level: str = _setting("info", "Lowest level that is logged: debug, info, warning or error.")
    auto_create_topics: bool = _setting(
        False,
        "Whether producers may create a missing topic by sending to it; embedded appliances "
        "allow it.",
    )
    checkpoint_bytes: int = _setting(
        64 * MIB,
        "Bytes of a data directory's log that recovery may have to read, about.",
        minimum=1 * MIB,
    )
    journal_bytes: int = _setting(
        64 * MIB,
        "Size of a data directory's journal, bytes; it makes groups that touch many partitions "
        "durable.",
        minimum=1 * MIB,
        maximum=1 << 32,
    )
    disk_reserve_bytes: int = _setting(
        64 * MIB,
        "Space kept free in each data directory beside that for its rings (at most an eighth "
        "of the disk). Below it producers are refused with DISK_FULL.",
    )
    producer_id_expiration_ms: int = _setting(
        86_400_000,
        "A partition forgets a producer that has sent nothing to it for this long, ms.",
        minimum=1,
        name="producer.id.expiration.ms",
    )
    producer_ids_max: int = _setting(
        10_000,
        "How many producers each partition remembers, to recognise repeated batches (about 250 "
        "bytes each, in worker and flusher; ten times that in all partitions of a worker). "
        "Beyond 256, producers that sent nothing for 15 minutes are forgotten; if there are "
        "none, new ones are refused with TOO_MANY_PRODUCERS.",
        minimum=256,
        maximum=1 << 24,
        name="producer.ids.max",
    )
    group_members_max: int = _setting(
        10_000,
        "Most members of a consumer group or share group.",
        minimum=1,
        maximum=1_000_000,
        name="group.members.max",
    )
    groups_max: int = _setting(
        100_000,
        "Most groups, those without members included.",
        minimum=1,
        maximum=10_000_000,
        name="groups.max",
    )
    group_session_timeout_min_ms: int = _setting(
        1_000,
        "Smallest session_timeout_ms that a consumer may ask for, ms.",
        minimum=100,
        name="group.session.timeout.min.ms",
    )
    group_session_timeout_max_ms: int = _setting(
        1_800_000,
        "Largest session_timeout_ms that a consumer may ask for, ms.",
        minimum=100,
        name="group.session.timeout.max.ms",
    )
    offsets_retention_minutes: int = _setting(
        10_080,
        "A group without members is deleted, with its committed offsets, this long after its "
        "last member left and its last commit, minutes.",
        minimum=1,
        name="offsets.retention.minutes",
    )
    transaction_max_timeout_ms: int = _setting(
        900_000,
        "Largest transaction_timeout_ms that a producer may ask for, ms. A transaction that is open "
        "for longer than its timeout is aborted.",
        minimum=1,
        name="transaction.max.timeout.ms",
    )
    transaction_prepared_max_ms: int = _setting(
        604_800_000,
        "A prepared transaction that nobody has decided for this long is aborted, ms. 0: it waits "
        "for ever.",
        minimum=0,
        name="transaction.prepared.max.ms",
    )
    transactional_id_expiration_ms: int = _setting(
        604_800_000,
        "A transactional id is forgotten when it was unused for this long, ms.",
        minimum=60_000,
        name="transactional.id.expiration.ms",
    )
    transactional_ids_max: int = _setting(
        1_000_000,
        "Most transactional ids.",
        minimum=1,
        maximum=10_000_000,
        name="transactional.ids.max",
    )
    flush_linger_ms: int = _setting(
        0,
        "How long the flusher waits for a larger group of batches, ms. 0: not at all; under "
        "load groups form without it.",
        maximum=10_000,
        name="flush.linger_ms",
    )
    flush_batch_size: int = _setting(
        1 * MIB,
        "A group of this many bytes is flushed without waiting longer.",
        minimum=1,
        name="flush.batch_size",
    )

    def reserve_bytes(self, worker_count: int) -> int:
        """Reserve of free space in each data directory, including the content of its workers'
        rings; 0: none.
        """
        return (
            self.disk_reserve_bytes + self.ring_bytes * worker_count
            if self.disk_reserve_bytes
            else 0
        )

    def check(self, available_cores: set[int]) -> CorePlan:
        """Check the relations between settings; returns the core plan. Raises
        InvalidSettingError.
        """
        paths = [os.path.realpath(path) for path in self.data_dirs]
        if not 1 <= len(paths) <= FLUSHERS_MAX or len(set(paths)) != len(paths):
            raise InvalidSettingError(
                f"data_dirs is {self.data_dirs!r}; it takes 1 to {FLUSHERS_MAX} different "
                "directories"
            )
        if not self.listen:
            raise InvalidSettingError(
                "listen is empty: give at least one address such as tcp://127.0.0.1:7420"
            )
        for address in self.listen:
            check_address(address)
            if (
                address.startswith("tcp://")
                and int(address.rpartition(":")[2]) + self.fronts - 1 > 65535
            ):
                raise InvalidSettingError(
                    f"listen is {address!r}, and fronts = {self.fronts} need as many ports from "
                    "there on; choose a lower port"
                )
        ipc_access(self.ipc_mode, self.ipc_group)
        if self.http_listen:
            split_host_port(self.http_listen)
        if self.log_level not in LOG_LEVELS:
            raise InvalidSettingError(
                f"log_level is {self.log_level!r}; it takes {', '.join(LOG_LEVELS)}"
            )
        for name, value in (("ring_bytes", self.ring_bytes), ("lane_bytes", self.lane_bytes)):
            if value % 4096:
                raise InvalidSettingError(f"{name} is {value}; it must be a multiple of 4096")
        if self.credit_bytes < self.lane_bytes // 2:
            raise InvalidSettingError(
                f"credit_bytes is {self.credit_bytes}; it must be at least half of lane_bytes "
                f"({self.lane_bytes}), so that one batch always fits"
            )
        if self.group_session_timeout_min_ms > self.group_session_timeout_max_ms:
            raise InvalidSettingError(
                f"group.session.timeout.min.ms is {self.group_session_timeout_min_ms}; it must "
                "not be above group.session.timeout.max.ms "
                f"({self.group_session_timeout_max_ms})"
            )
        plan = plan_cores(self.cores, available_cores, WORKERS_MAX - self.dedicated_workers)
        self.busy_poll(plan)
        return plan

    def busy_poll(self, plan: CorePlan) -> BusyPoll:
        """Resolve `busy_poll_us` for a core plan.

        Raises: InvalidSettingError.
        """
        workers, directories = max(len(plan.workers), len(self.data_dirs)), len(self.data_dirs)
        return plan_busy_poll(self.busy_poll_us, plan, workers, self.fronts, directories)


def check_address(address: str) -> None:
    """Raise InvalidSettingError unless this is an address to listen on."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > 100:
            raise InvalidSettingError(
                f"listen address {address!r} is too long: the path of a Unix socket has at most "
                "100 bytes"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidSettingError(
            f"listen has {address!r}; write tcp://127.0.0.1:7420 or "
            "ipc:///run/tailrace/tailrace.sock"
        )


def split_host_port(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; an IPv6 address stands in brackets. Raises
    InvalidSettingError.
    """
    host, _, port = text.rpartition(":")
    if (
        not host
        or not port.isdigit()
        or int(port) > 65535
        or (":" in host and not (host[0], host[-1]) == ("[", "]"))
    ):
        raise InvalidSettingError(
            f"http.listen is {text!r}; write HOST:PORT, such as 127.0.0.1:7400, or an empty "
            "text for no console"
        )
    return host.strip("[]"), int(port)


def setting_names() -> dict[str, Any]:
    """Every setting's name as users write it -> its dataclass field."""
    return {item.metadata["name"] or item.name: item for item in fields(Settings)}
