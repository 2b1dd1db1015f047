"""The shared memory of an appliance on this host, found through its data directory: processes and
their measurements, as the console reads them. Reads only.

Invariants:
- The memory is that of the appliance that answered: it names the same supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.data import region_manifest
from appliance.observe.process_states import ProcessStates
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.memory.region import Region, RegionError
from shm.tables.control import Control


def role_of(name: str) -> tuple[Role, int]:
    """ "worker-2" -> (WORKER, 2), "controller" -> (CONTROLLER, 0)."""
    role, _, index = name.partition("-")
    return Role[role.upper()], int(index or 0)


class SharedState:
    """The process slots of an appliance. Close it at the end."""

    def __init__(self, region: Region, names: list[str]) -> None:
        """`names`: of the processes that should run; `follow` replaces them."""
        self._region = region
        self._roles = [role_of(name) for name in names]
        self.states = ProcessStates(Control(region), lambda: self._roles)

    @classmethod
    def attach(cls, cluster: Mapping[str, Any]) -> SharedState | None:
        """Attach the memory of the appliance that `Admin.describe_cluster` has described. None if
        it is another host's, or another user's.
        """
        names = [str(process["name"]) for process in cluster["processes"]]
        pids = {process["name"]: process["pid"] for process in cluster["processes"]}
        try:
            found = region_manifest.read(str(cluster["data_dirs"][0]["path"])).manifest
            if found is None:
                return None
            region = Region.attach(
                found.regions["control"], RegionKind.CONTROL, bytes.fromhex(found.shared_memory)
            )
        except (OSError, KeyError, ValueError, RegionError):
            return None
        control = Control(region)
        if control.process(Role.SUPERVISOR, 0).load(ProcessWord.PID) != pids.get("supervisor"):
            del control
            region.close()
            return None
        return cls(region, names)

    def follow(self, cluster: Mapping[str, Any]) -> None:
        """Take the processes of a newer description."""
        self._roles = [role_of(str(process["name"])) for process in cluster["processes"]]

    def close(self) -> None:
        """Detach."""
        del self.states
        self._region.close()
