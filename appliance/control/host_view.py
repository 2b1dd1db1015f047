"""The controller's view of its host, for descriptions: processes, data directories, the console.

Owner: the controller; reads only: process slots in shared memory, the file systems of the data
directories.
"""

from __future__ import annotations

import os
from typing import Any

from appliance.control.placement.dedicated_workers import DedicatedWorkers
from shm.memory.layout import FLUSHERS_MAX, DirectoryState, ProcessWord, Role
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control
from tailrace.format.directory.data_dir import (
    ARRIVAL_FILE,
    BACKUP_RESULTS_DIRECTORY,
    BIN_DIRECTORY,
    arrival_content,
)
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata


class Host:
    """Access to the host's file systems."""

    def free_and_total_bytes(self, path: str) -> tuple[int, int]:
        """Free and total bytes of the file system of `path`.

        Raises: OSError.
        """
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def names(self, path: str) -> list[str]:
        """The names in a directory; none if there is no directory. Raises OSError."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []

    def size_of(self, path: str) -> int:
        """Bytes that the files of a directory take on the disk; what cannot be read counts 0."""
        try:
            with os.scandir(path) as entries:
                return sum(entry.stat(follow_symlinks=False).st_blocks for entry in entries) * 512
        except OSError:
            return 0

    def read_small(self, path: str) -> bytes | None:
        """The content of a small file; None if it cannot be read."""
        try:
            with open(path, "rb") as file:
                return file.read(1 << 16)
        except OSError:
            return None

    def read_partition_file(self, directory: str) -> PartitionMetadata | None:
        """The metadata of a partition's directory; None if it cannot be read."""
        try:
            with open(f"{directory}/{PARTITION_FILE}", "rb") as file:
                return PartitionMetadata.decode(file.read())
        except (OSError, ValueError, TypeError, KeyError):  # the flusher says what is wrong with it
            return None


class HostView:
    """See the module's docstring."""

    def __init__(
        self,
        machine: Host,
        control: Control,
        data_dirs: list[str],
        roles: list[tuple[Role, int]],
        dedicated: DedicatedWorkers,
        *,
        reserve_bytes: int,
        http_listen: str,
    ) -> None:
        """`roles`: (role, index) of every permanent process except supervisor, controller and
        console.
        """
        self._machine = machine
        self._control = control
        self._data_dirs = data_dirs
        self._roles = roles
        self._dedicated = dedicated
        self.reserve_bytes = reserve_bytes
        self._http_listen = http_listen
        self.memory: dict[str, Any] = {}
        """State of memory, as the supervisor publishes it (`use_settings`)."""
        self._drained: set[str] = set()
        """Real paths of `drained_dirs`."""

    def use_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self.reserve_bytes = int(settings["reserve_bytes"])
        self._drained = {os.path.realpath(path) for path in settings.get("drained_dirs", [])}
        self.memory = {
            "is_short": bool(settings.get("memory.is_short")),
            "stalled_percent": float(settings.get("memory.stalled_percent", 0.0)),
        }

    def processes(self) -> list[dict[str, Any]]:
        """One row a process, for JSON."""
        used = [
            w
            for w in self._dedicated.existing()
            if self._control.process(Role.WORKER, w).load(ProcessWord.DEDICATED_TO)
        ]
        console = [(Role.CONSOLE, 0)] if self._http_listen else []
        started = [
            (role, 0)
            for role in (Role.SCHEDULER, Role.GROUPS)
            if self._control.process(role, 0).load(ProcessWord.GENERATION)
        ]
        started += [
            (Role.CLEANER, d)
            for d in range(FLUSHERS_MAX)
            if self._control.process(Role.CLEANER, d).is_live()
        ]
        listed = [
            (Role.SUPERVISOR, 0),
            (Role.CONTROLLER, 0),
            *self._roles,
            *((Role.WORKER, w) for w in used),
            *started,
            *console,
        ]
        return [self._process(role, index) for role, index in listed]

    def _process(self, role: Role, index: int) -> dict[str, Any]:
        slot = self._control.process(role, index)
        return {
            "name": process_name(role, index),
            "pid": slot.load(ProcessWord.PID),
            "live": slot.is_live()
            and (role is not Role.CONSOLE or bool(slot.load(ProcessWord.HTTP_PORT))),
            "restarts": slot.load(ProcessWord.RESTARTS),
            "internal_errors": slot.load(ProcessWord.INTERNAL_ERRORS),
        }

    def console(self) -> str | None:
        """The console's address; None if there is none."""
        port = (
            self._control.process(Role.CONSOLE, 0).load(ProcessWord.HTTP_PORT)
            if self._http_listen
            else 0
        )
        return f"http://{self._http_listen.rpartition(':')[0]}:{port}" if port else None

    def data_dirs(self) -> list[dict[str, Any]]:
        """One row a data directory, for JSON."""
        return [self._data_dir(index, path) for index, path in enumerate(self._data_dirs)]

    def bin_names(self, index: int) -> list[str]:
        """The names in the bin of a data directory. Raises OSError."""
        return self._machine.names(f"{self._data_dirs[index]}/{BIN_DIRECTORY}")

    def bin_bytes(self, index: int, name: str) -> int:
        """The space of a partition in the bin."""
        return self._machine.size_of(f"{self._data_dirs[index]}/{BIN_DIRECTORY}/{name}")

    def is_short_of_space(self, index: int) -> bool:
        """True if a data directory refuses batches for lack of space, or soon will. Without a
        reserve only its flusher knows.
        """
        if not self.reserve_bytes:
            return bool(self._control.process(Role.FLUSHER, index).load(ProcessWord.DISK_FULL))
        try:
            free, total = self._machine.free_and_total_bytes(self._data_dirs[index])
        except OSError:
            return False
        reserve = min(self.reserve_bytes, total // 8)
        return free < reserve + reserve // 4

    def _data_dir(self, index: int, path: str) -> dict[str, Any]:
        word = self._control.process(Role.FLUSHER, index).load(ProcessWord.DISK_FULL)
        state = DirectoryState(word).name
        try:
            free, total = self._machine.free_and_total_bytes(path)
        except OSError:
            free, total, state = 0, 0, "UNREADABLE"
        return {
            "path": path,
            "free_bytes": free,
            "total_bytes": total,
            "reserve_bytes": self.reserve_bytes,
            "state": state,
            "drained": os.path.realpath(path) in self._drained,
        }

    def takes_writes(self, index: int) -> bool:
        """False if a data directory is full or lost."""
        return not self._control.process(Role.FLUSHER, index).load(ProcessWord.DISK_FULL)

    def is_drained(self, index: int) -> bool:
        """True if a data directory is to get no new partitions."""
        return os.path.realpath(self._data_dirs[index]) in self._drained

    def dir_paths(self) -> list[str]:
        """The data directories of this run, in its order."""
        return list(self._data_dirs)

    def has_arrived(self, index: int, name: str, move: str) -> bool:
        """True if the bin of a data directory has the complete copy of this move."""
        path = f"{self._data_dirs[index]}/{BIN_DIRECTORY}/{name}/{ARRIVAL_FILE}"
        return self._machine.read_small(path) == arrival_content(move)

    def names_in(self, index: int) -> list[str]:
        """The names in a data directory. Raises OSError."""
        return self._machine.names(self._data_dirs[index])

    def backups(self) -> list[dict[str, Any]]:
        """The last result of the backups to each target, for JSON."""
        directory = self._data_dirs[0]
        if not self._machine.names(f"{directory}/{BACKUP_RESULTS_DIRECTORY}"):
            return []
        from appliance.data.backup_results import read_results  # without backups it costs nothing

        return [result._asdict() for result in read_results(directory)]

    def partition_file(self, data_dir: int, directory: str) -> PartitionMetadata | None:
        """Metadata of a partition's directory in a data directory; None if it cannot be read."""
        return self._machine.read_partition_file(f"{self._data_dirs[data_dir]}/{directory}")
