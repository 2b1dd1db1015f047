"""Imports of each process of the appliance: start and memory are paid with it, seven times where
there is no zygote.

`python -m bench.at_rest.imports` has the milliseconds and megabytes; here are the modules, which
are the same on every machine.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from appliance.supervise.processes.child_processes import KAFKA_GATEWAY, MODULES
from appliance.supervise.processes.zygote import SHARED
from shm.memory.layout import Role

ROOT = pathlib.Path(__file__).resolve().parents[2]
OWN = ("appliance", "netfront", "shm", "tailrace", "workers")
HEAVY = frozenset(
    {
        "argparse", "asyncio", "click", "concurrent", "cronsim", "deltalake", "difflib", "email",
        "hashlib", "http",
        "importlib.metadata", "multiprocessing", "numpy", "pandas", "pathlib", "prometheus_client",
        "psutil", "pyarrow",
        "pyspark", "rich", "sqlite3", "ssl", "subprocess", "tempfile", "tomllib", "unittest",
        "urllib", "xml", "zmq",
    }
)  # fmt: skip
"""Each costs a millisecond or more, or a megabyte."""
SUPERVISOR, ZYGOTE = "appliance.supervise.supervisor", "the zygote"
HTTP_SERVICE = "appliance.observe.http_service"
"""The console imports it with the first connection."""
MAY_LOAD = {
    SUPERVISOR: {"argparse"},
    MODULES[Role.CONTROLLER]: {"sqlite3"},
    MODULES[Role.FLUSHER]: set(),
    MODULES[Role.WORKER]: set(),
    MODULES[Role.SCHEDULER]: set(),
    MODULES[Role.CLEANER]: set(),
    MODULES[Role.FRONT]: {"zmq"},
    KAFKA_GATEWAY: {"zmq"},
    MODULES[Role.GROUPS]: {
        "email",
        "importlib.metadata",
        "pathlib",
        "sqlite3",
        "tempfile",
        "urllib",
    },
    MODULES[Role.CONSOLE]: set(),
    HTTP_SERVICE: {
        "email",
        "hashlib",
        "http",
        "prometheus_client",
        "ssl",
        "tempfile",
        "urllib",
        "zmq",
    },
    ZYGOTE: {"argparse", "sqlite3", "zmq"},
}
OWN_MODULES_MAX = {
    SUPERVISOR: 94,
    MODULES[Role.CONTROLLER]: 124,
    MODULES[Role.FLUSHER]: 113,
    MODULES[Role.WORKER]: 86,
    MODULES[Role.SCHEDULER]: 70,
    MODULES[Role.CLEANER]: 54,
    MODULES[Role.FRONT]: 133,
    KAFKA_GATEWAY: 220,
    MODULES[Role.GROUPS]: 152,
    MODULES[Role.CONSOLE]: 54,
    HTTP_SERVICE: 108,
    ZYGOTE: 316,
}
"""Ceilings with room for a few more, packages counted too. Raise one when a process has grown for a
reason that is worth its memory.
"""
PROGRAM = """
import json, sys
import _frozen_importlib as machinery
sys.path.insert(0, sys.argv[1])
importers, load = {}, machinery._load_unlocked

def noting(spec):
    frame, chain = sys._getframe(), []
    while frame:
        name = frame.f_globals.get("__name__", "")
        if "importlib" not in name and name != "__main__" and name not in chain:
            chain.append(name)
        frame = frame.f_back
    importers[spec.name] = chain
    return load(spec)

machinery._load_unlocked = noting
for name in sys.argv[2:]:
    __import__(name)
print(json.dumps(importers))
"""


def imported(*modules: str) -> dict[str, list[str]]:
    """Module -> who imported it, that one's importer, and so on, of an interpreter that imports
    `modules`.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(ROOT), *modules],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("process", MAY_LOAD)
def test_a_process_imports_only_what_it_needs(process: str) -> None:
    """Fails with the module that is too much, and the chain of modules that brought it."""
    found = imported(*([SUPERVISOR, *SHARED] if process == ZYGOTE else [process]))
    assert {"shm.runtime.agent_runner", "orjson"} <= found.keys()
    unwanted = {
        name: " <- ".join(chain)
        for name, chain in found.items()
        if name in HEAVY - MAY_LOAD[process]
    }
    assert unwanted == {}, f"{process} would start slower"
    own = sorted(name for name in found if name.partition(".")[0] in OWN)
    assert len(own) <= OWN_MODULES_MAX[process], (
        f"{process} has {len(own)} of our modules: {', '.join(own)}"
    )


def test_the_clients_for_asyncio_load_no_pandas() -> None:
    """Fails with the chain of modules that brought it."""
    found = imported("tailrace.aio.producer", "tailrace.aio.consumer", "tailrace.aio.table")
    assert "tailrace.aio.producer" in found
    assert " <- ".join(found.get("pandas", ())) == ""
